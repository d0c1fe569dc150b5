"""From a checkpoint to a Decoder: checks, fuses and packs its tensors. Knows the Llama names; nothing of a forward."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treecore.errors import ConfigError
from treecore.model.checkpoint import Checkpoint, SafetensorsCheckpoint
from treecore.model.decoder import Decoder, Layer, Weights
from treecore.model.gguf import read_gguf
from treecore.model.linear import DType, Linear, Precision, choose_precision, pack_linear
from treecore.model.norm import RmsNorm
from treecore.model.parallel import Alone, Place, TensorLinks, stage_layers
from treecore.model.rope import interleave_pairs
from treecore.model.spec import ModelSpec, read_spec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
HEAD_TOKEN_IDS = "espalier.head_token_ids"

WHOLE, ALONE = Place(), Alone()

Shape = tuple[int, ...]


def resolve_model(name_or_path: str) -> Path:
    """A local checkpoint directory or .gguf file as it is; else a hub name, downloaded.

    Downloads safetensors and JSON only, and honours HF_TOKEN. Raises ConfigError, in one line, where there is neither.
    """
    path = Path(name_or_path).expanduser()
    if (name_or_path and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name_or_path):
        raise ConfigError(
            f"model {name_or_path!r} is neither a checkpoint directory, nor a .gguf file, nor a hub name (owner/name)"
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(name_or_path, allow_patterns=["*.safetensors", "*.json", "*.jinja"])
        )
    except Exception as error:  # the hub client raises its own, httpx's and OSErrors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"model {name_or_path!r} is no local path and cannot be downloaded: {reason}") from error


def load_decoder(
    path: Path,
    *,
    dtype: DType,
    embedding_from: Path | None = None,
    device: str = "cpu",
    place: Place = WHOLE,
    links: TensorLinks = ALONE,
) -> Decoder:
    """What rank `place` has of the decoder in checkpoint directory (or .gguf file) `path`, in precision `dtype`.

    `links` lead to the other tensor-parallel ranks of its stage. An SSM artefact that leaves its embedding to the
    teacher needs `embedding_from`, the teacher's checkpoint. Raises ConfigError naming the file, field or tensor that
    is missing, unknown, misshapen or unreadable.
    """
    spec, checkpoint = open_checkpoint(path)
    precision = choose_precision(dtype, torch.device(device))
    _check_tensors(path, checkpoint, expected_shapes(spec))
    if place.tp_size != 1:
        raise ConfigError("tensor parallel is not supported")
    teacher = _open_teacher(path, spec, embedding_from) if spec.draft and spec.draft.teacher_embedding else None
    token_ids = _head_token_ids(path, spec, checkpoint)
    vocabulary = teacher or (spec, checkpoint)
    layers = stage_layers(
        spec.num_layers, head_cost(spec, spec.vocab_size if token_ids is None else len(token_ids)), place
    )
    weights = Weights(
        embedding=_embedding(vocabulary, precision) if place.is_first else None,
        layers=tuple(_layer(spec, checkpoint, layer_idx, precision) for layer_idx in layers),
        norm=_norm(checkpoint.tensor(NORM), spec, precision) if place.is_last else None,
        head=_head(vocabulary, token_ids, precision) if place.is_last else None,
        output_token_ids=token_ids,
    )
    return Decoder(spec, weights, precision, place, links)


def open_checkpoint(path: Path) -> tuple[ModelSpec, Checkpoint]:
    """The spec and the tensors of a checkpoint directory or a .gguf file."""
    if path.suffix == ".gguf":
        return read_gguf(path)
    return read_spec(path), SafetensorsCheckpoint(path)


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this spec has, and no other; a -1 matches any size."""
    shapes: dict[str, Shape] = {NORM: (spec.hidden_size,)}
    for layer_idx in range(spec.num_layers):
        shapes |= {f"model.layers.{layer_idx}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    if spec.draft and spec.draft.trimmed_head:
        shapes[HEAD_TOKEN_IDS] = (-1,)
    if not (spec.draft and spec.draft.teacher_embedding):
        shapes[EMBEDDING] = (spec.vocab_size, spec.hidden_size)
        shapes |= {} if spec.tie_embeddings else {HEAD: (spec.vocab_size, spec.hidden_size)}
    return shapes


def head_cost(spec: ModelSpec, num_rows: int) -> float:
    """What a head of `num_rows` costs, in layers: both are bound by reading their weights."""
    layer = sum(math.prod(shape) for shape in _layer_shapes(spec).values())
    return num_rows * spec.hidden_size / layer


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _check_tensors(path: Path, checkpoint: Checkpoint, expected: Mapping[str, Shape]) -> None:
    names = checkpoint.names()
    if missing := sorted(expected.keys() - names):
        raise ConfigError(f"{path}: tensor {missing[0]} is missing{_and_more(missing)}")
    if extra := sorted(name for name in names - expected.keys() if not _is_redundant(name)):
        raise ConfigError(f"{path}: tensor {extra[0]} is not part of this architecture{_and_more(extra)}")
    for name, shape in expected.items():
        found = tuple(checkpoint.shape(name))
        if len(found) != len(shape) or any(want not in (size, -1) for size, want in zip(found, shape, strict=True)):
            raise ConfigError(f"{path}: tensor {name} has shape {found}, expected {shape}")


def _is_redundant(name: str) -> bool:
    """Old exporters store rotary frequencies, and the head of a tied model a second time."""
    return name == HEAD or name.endswith(".rotary_emb.inv_freq")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _open_teacher(path: Path, spec: ModelSpec, embedding_from: Path | None) -> tuple[ModelSpec, Checkpoint]:
    if embedding_from is None:
        raise ConfigError(f"{path}: takes its embedding from its teacher; say which checkpoint that is")
    teacher, checkpoint = open_checkpoint(embedding_from)
    wanted, found = (spec.vocab_size, spec.hidden_size), (teacher.vocab_size, teacher.hidden_size)
    if wanted != found:
        raise ConfigError(
            f"{path}: needs a teacher with (vocab_size, hidden_size)={wanted}, {embedding_from} has {found}"
        )
    shapes = expected_shapes(teacher)
    _check_tensors(embedding_from, checkpoint, shapes)
    return teacher, checkpoint


def _embedding(source: tuple[ModelSpec, Checkpoint], precision: Precision) -> Tensor:
    """Left in its stored dtype where that loses nothing: the file's own pages then serve every process that maps it."""
    stored = source[1].tensor(EMBEDDING)
    rounded = stored if precision.weight is torch.float32 else stored.to(precision.weight)
    return rounded.to(precision.device)


def _head(source: tuple[ModelSpec, Checkpoint], token_ids: NDArray[np.int32] | None, precision: Precision) -> Linear:
    spec, checkpoint = source
    head = checkpoint.tensor(EMBEDDING if spec.tie_embeddings else HEAD)
    return pack_linear(head if token_ids is None else head[torch.from_numpy(token_ids).long()], precision)


def _head_token_ids(path: Path, spec: ModelSpec, checkpoint: Checkpoint) -> NDArray[np.int32] | None:
    if not (spec.draft and spec.draft.trimmed_head):
        return None
    ids = checkpoint.tensor(HEAD_TOKEN_IDS)
    if ids.is_floating_point() or len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
        raise ConfigError(f"{path}: tensor {HEAD_TOKEN_IDS} holds no valid token ids")
    return ids.numpy().astype(np.int32)


def _layer(spec: ModelSpec, checkpoint: Checkpoint, layer_idx: int, precision: Precision) -> Layer:
    def read(name: str) -> Tensor:
        return checkpoint.tensor(f"model.layers.{layer_idx}.{name}.weight")

    def pack(*tensors: Tensor) -> Linear:
        return pack_linear(torch.cat(tensors), precision)

    q, k = (interleave_pairs(read(f"self_attn.{name}_proj"), spec.head_dim) for name in "qk")
    return Layer(
        input_norm=_norm(read("input_layernorm"), spec, precision),
        qkv=pack(q, k, read("self_attn.v_proj")),
        attention_out=pack(read("self_attn.o_proj")),
        mlp_norm=_norm(read("post_attention_layernorm"), spec, precision),
        gate_up=pack(read("mlp.gate_proj"), read("mlp.up_proj")),
        down=pack(read("mlp.down_proj")),
    )


def _norm(weight: Tensor, spec: ModelSpec, precision: Precision) -> RmsNorm:
    return RmsNorm.of(weight.to(precision.device, precision.weight), spec.rms_eps)
