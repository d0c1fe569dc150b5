"""From a checkpoint to a Decoder: finds it, checks its tensors, and has it assembled. Knows files; not the forward."""

import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
from numpy.typing import NDArray

from treecore.errors import ConfigError
from treecore.model.assemble import Assembler, Vocabulary, bias_name
from treecore.model.backend import Hardware, check_place, choose_backend
from treecore.model.checkpoint import Checkpoint, MeteredCheckpoint, SafetensorsCheckpoint
from treecore.model.decoder import Decoder, Stage
from treecore.model.families import read_spec
from treecore.model.gguf import read_gguf
from treecore.model.linear import DType, Precision, choose_precision
from treecore.model.offload import DiskSource, HostSource, Source, Streamer
from treecore.model.parallel import Alone, Place, TensorLinks, stage_layers
from treecore.model.spec import ModelSpec, Shape
from treecore.model.uncached import UncachedCheckpoint

HEAD_TOKEN_IDS = "espalier.head_token_ids"

REDUNDANT = ("lm_head.weight", ".rotary_emb.inv_freq")  # of old exporters: a tied head, frequencies
WHOLE, ALONE, CPU = Place(), Alone(), Hardware()


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
    on: Hardware = CPU,
    place: Place = WHOLE,
    links: TensorLinks = ALONE,
) -> Decoder:
    """What rank `place` has of the decoder in checkpoint directory (or .gguf file) `path`, in precision `dtype`.

    `links` lead to the other tensor-parallel ranks of its stage. An SSM artefact that leaves its embedding to the
    teacher needs `embedding_from`, the teacher's checkpoint. Raises ConfigError naming the file, field or tensor that
    is missing, unknown, misshapen or unreadable.
    """
    spec, stored = _open_uncached(path) if on.offload == "disk" else open_checkpoint(path)
    checkpoint = MeteredCheckpoint(stored)
    precision = choose_precision(dtype, torch.device(on.device), batch_invariant=on.batch_invariant)
    check_place(on, place)
    _check_tensors(path, checkpoint, expected_shapes(spec))
    taught = spec.draft is not None and spec.draft.teacher_embedding
    own = Vocabulary(spec, checkpoint, is_offloaded=on.offload == "disk")
    vocabulary = _open_teacher(path, spec, embedding_from) if taught else own
    token_ids = _head_token_ids(path, spec, checkpoint)
    assembler = Assembler(spec, checkpoint, precision, place, links)
    source = _source(on, stored, precision)
    streamer = None if source is None else Streamer(source, precision, on.offload_resident_layers)
    stage = _stage(assembler, spec, vocabulary, token_ids, meter=checkpoint, streamer=streamer)
    backend = choose_backend(on, spec, assembler.heads, precision)
    return Decoder(spec, stage, precision, backend.attention, backend.move_rows)


def _stage(
    assembler: Assembler,
    spec: ModelSpec,
    vocabulary: Vocabulary,
    token_ids: NDArray[np.int32] | None,
    *,
    meter: MeteredCheckpoint,
    streamer: Streamer | None,
) -> Stage:
    num_head_rows = spec.vocab_size if token_ids is None else len(token_ids)
    head_cost = num_head_rows * spec.hidden_size / spec.layer_size()  # both are bound by reading their weights
    place = assembler.place
    layers = stage_layers(spec.num_layers, head_cost, place)
    kinds = tuple(dict.fromkeys(spec.layers[layer_idx] for layer_idx in layers))
    wanted = [(layer_idx, kinds.index(spec.layers[layer_idx])) for layer_idx in layers]
    return Stage(
        place=place,
        heads=assembler.heads,
        kinds=kinds,
        embedding=assembler.embedding(vocabulary) if place.is_first else None,
        layers=streamer.layers(assembler, wanted) if streamer else tuple(assembler.layer(*layer) for layer in wanted),
        norm=assembler.last_norm() if place.is_last else None,
        head=assembler.head(vocabulary, token_ids) if place.is_last else None,
        output_token_ids=token_ids,
        weight_bytes=meter.read_bytes,  # the last field: all has been read by now
    )


def _source(on: Hardware, stored: Checkpoint, precision: Precision) -> Source | None:
    if on.offload == "none":
        return None
    if on.offload == "disk":
        return DiskSource(stored, precision)
    if precision.device.type == "cpu":
        raise ConfigError("offload cpu: the weights of a model on the CPU are in its memory already; use disk")
    return HostSource(stored, precision)


def _open_uncached(path: Path) -> tuple[ModelSpec, Checkpoint]:
    if path.suffix == ".gguf":
        raise ConfigError(f"{path}: offload disk streams safetensors only; convert the file first")
    return read_spec(path), UncachedCheckpoint(path)


def open_checkpoint(path: Path) -> tuple[ModelSpec, Checkpoint]:
    """The spec and the tensors of a checkpoint directory or a .gguf file."""
    if path.suffix == ".gguf":
        return read_gguf(path)
    return read_spec(path), SafetensorsCheckpoint(path)


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this spec has, and no other; a -1 matches any size."""
    tensors, hidden = spec.tensors, spec.hidden_size
    shapes: dict[str, Shape] = {}
    for layer_idx in range(spec.num_layers):
        for part, shape in spec.part_shapes().items():
            shapes[tensors.of_layer(layer_idx, part)] = shape
            if part in tensors.biased:
                shapes[tensors.of_layer(layer_idx, part, "bias")] = shape[:1]
    shapes[tensors.norm] = (hidden,)
    if spec.norm.kind == "layer":
        shapes[bias_name(tensors.norm)] = (hidden,)
    if tensors.positions is not None:
        shapes[tensors.positions] = (tensors.num_unused_positions + spec.context_len, hidden)
    if spec.draft and spec.draft.trimmed_head:
        shapes[HEAD_TOKEN_IDS] = (-1,)
    if not (spec.draft and spec.draft.teacher_embedding):
        shapes[tensors.embedding] = (spec.vocab_size, hidden)
        shapes |= {} if spec.tie_embeddings else {tensors.head: (spec.vocab_size, hidden)}
    return shapes


def _check_tensors(path: Path, checkpoint: Checkpoint, expected: Mapping[str, Shape]) -> None:
    names = checkpoint.names()
    if missing := sorted(expected.keys() - names):
        raise ConfigError(f"{path}: tensor {missing[0]} is missing{_and_more(missing)}")
    if extra := sorted(name for name in names - expected.keys() if not name.endswith(REDUNDANT)):
        raise ConfigError(f"{path}: tensor {extra[0]} is not part of this architecture{_and_more(extra)}")
    for name, shape in expected.items():
        found = tuple(checkpoint.shape(name))
        if len(found) != len(shape) or any(want not in (size, -1) for size, want in zip(found, shape, strict=True)):
            raise ConfigError(f"{path}: tensor {name} has shape {found}, expected {shape}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _open_teacher(path: Path, spec: ModelSpec, embedding_from: Path | None) -> Vocabulary:
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
    return Vocabulary(teacher, checkpoint)


def _head_token_ids(path: Path, spec: ModelSpec, checkpoint: Checkpoint) -> NDArray[np.int32] | None:
    if not (spec.draft and spec.draft.trimmed_head):
        return None
    ids = checkpoint.tensor(HEAD_TOKEN_IDS)
    if ids.is_floating_point() or len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
        raise ConfigError(f"{path}: tensor {HEAD_TOKEN_IDS} holds no valid token ids")
    return ids.numpy().astype(np.int32)
