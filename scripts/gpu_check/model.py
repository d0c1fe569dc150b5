"""A random Llama of any size, made on the device. No checkpoint is read or written."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treecore.model.assemble import Assembler, Vocabulary
from treecore.model.backend import AttentionName, Hardware, choose_backend
from treecore.model.decoder import Decoder, Stage
from treecore.model.families import parse_spec
from treecore.model.linear import Precision
from treecore.model.parallel import Alone, Place
from treecore.model.spec import ModelSpec
from treecore.testing.segments import BLOCK_LEN


@dataclass(frozen=True, slots=True)
class Size:
    """Llama's shape."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 11008
    heads: int = 32
    kv_heads: int = 32
    vocab: int = 32000


LLAMA_7B = Size()
TINY = Size(layers=2, hidden=64, inner=96, heads=4, kv_heads=2, vocab=96)


class RandomCheckpoint:
    """Tensors drawn where they are needed, on the device; a name always gives the same ones."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self._spec = spec
        self._device = device

    def names(self) -> set[str]:
        """None that anyone asks for."""
        return set()

    def shape(self, name: str) -> Sequence[int]:
        """As Llama has it."""
        spec, part = self._spec, name.removesuffix(".weight")
        for layer_part, path in spec.tensors.parts.items():
            if part.endswith(f".{path}"):
                return spec.part_shapes()[layer_part]
        return (spec.hidden_size,) if name == spec.tensors.norm else (spec.vocab_size, spec.hidden_size)

    def tensor(self, name: str) -> Tensor:
        """All of it."""
        shape = tuple(self.shape(name))
        generator = torch.Generator(self._device).manual_seed(sum(map(ord, name)))
        drawn = torch.empty(shape, device=self._device).normal_(generator=generator)
        return 1 + 0.1 * drawn if len(shape) == 1 else drawn * shape[1] ** -0.5

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Some of it."""
        whole = self.tensor(name)[rows.start : rows.stop]
        return whole if columns is None else whole[:, columns.start : columns.stop]


def make_decoder(size: Size, device: str, dtype: torch.dtype, attention: AttentionName) -> Decoder:
    """A whole decoder with random weights."""
    spec = _spec(size)
    precision = Precision(dtype, dtype, torch.device(device))
    checkpoint = RandomCheckpoint(spec, device)
    assembler = Assembler(spec, checkpoint, precision, Place(), Alone())
    vocabulary = Vocabulary(spec, checkpoint)
    kinds = tuple(dict.fromkeys(spec.layers))
    layers = tuple(assembler.layer(idx, kinds.index(kind)) for idx, kind in enumerate(spec.layers))
    stage = Stage(
        place=Place(),
        heads=assembler.heads,
        kinds=kinds,
        embedding=assembler.embedding(vocabulary),
        layers=layers,
        norm=assembler.last_norm(),
        head=assembler.head(vocabulary, None),
        output_token_ids=None,
        weight_bytes=0,  # nobody asks
    )
    backend = choose_backend(Hardware(device, attention, BLOCK_LEN), spec, assembler.heads, precision)
    return Decoder(spec, stage, precision, backend.attention, backend.move_rows)


def _spec(size: Size) -> ModelSpec:
    config = {
        "model_type": "llama",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return parse_spec(config, "random")
