"""A random Llama of any size, made on the device, and batches for it. No checkpoint is read or written."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treecore.model.assemble import Assembler, Vocabulary
from treecore.model.backend import AttentionName, Hardware, choose_backend
from treecore.model.batch import ForwardBatch, Segment
from treecore.model.decoder import Decoder, Stage
from treecore.model.families import parse_spec
from treecore.model.linear import Precision
from treecore.model.parallel import Alone, Place
from treecore.model.spec import ModelSpec
from treecore.topology import ancestor_mask, depths

BLOCK_LEN = 16


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
    backend = choose_backend(Hardware(device, attention, BLOCK_LEN), spec, assembler.heads.group_size, precision)
    return Decoder(spec, stage, precision, backend.attention, backend.move_rows)


def tree_segments(parents: Sequence[int], context_len: int, batch: int, vocab: int) -> list[Segment]:
    """`batch` requests of `context_len` cached tokens, each with the tree `parents` behind them."""
    tree = np.array(parents, np.int32)
    return [
        _segment(depths(tree), ancestor_mask(tree), _Home(context_len, idx, context_len), vocab) for idx in range(batch)
    ]


def path_segments(parents: Sequence[int], context_len: int, batch: int, vocab: int) -> list[Segment]:
    """The same trees by sequences: a chain for each leaf. They share their context in memory, which flatters them."""
    tree = np.array(parents, np.int32)
    lengths = [int(depths(tree)[leaf]) + 1 for leaf in sorted(set(range(len(tree))) - set(tree.tolist()))]
    own = context_len + np.cumsum([0, *(-(-length // BLOCK_LEN) * BLOCK_LEN for length in lengths)])
    return [
        _segment(np.arange(length), np.tri(length, dtype=np.bool_), _Home(context_len, idx, int(begin)), vocab)
        for idx in range(batch)
        for length, begin in zip(lengths, own[:-1], strict=True)
    ]


def make_batch(segments: Sequence[Segment]) -> ForwardBatch:
    """One forward of all of them."""
    return ForwardBatch.from_segments(list(segments))


def region_len(context_len: int) -> int:
    """Slots of one request: its context, and a block for each of 64 leaves."""
    return context_len + 64 * BLOCK_LEN


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a segment lives: its request's region begins with the context; its own rows begin at `own` in it."""

    context_len: int
    request_idx: int
    own: int

    def column_slots(self, num_rows: int) -> np.ndarray:
        first = self.request_idx * region_len(self.context_len)
        return first + np.concatenate([np.arange(self.context_len), self.own + np.arange(num_rows)])


def _segment(depth: np.ndarray, mask: np.ndarray, home: _Home, vocab: int) -> Segment:
    num_rows, context = len(depth), np.arange(home.context_len)
    column_slots = home.column_slots(num_rows)
    positions = (home.context_len + depth).astype(np.int64)
    return Segment(
        tokens=np.random.default_rng(home.request_idx).integers(0, vocab, num_rows),
        positions=positions,
        slots=column_slots[home.context_len :],
        column_slots=column_slots,
        column_positions=np.concatenate([context, positions]),
        visible=np.concatenate([np.ones((num_rows, home.context_len), np.bool_), mask], axis=1),
        logit_rows=np.arange(num_rows),
    )


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
