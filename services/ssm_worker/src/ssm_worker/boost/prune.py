"""From a teacher's checkpoint to a student, and from a student to the artefact that an SSM worker loads. Knows files.

The artefact: config.json with "espalier": {"teacher_embedding": true}, and model.safetensors in bf16 with the layers
0..n-1, the last norm, and int32 `espalier.head_token_ids`; the embedding and the head stay in the teacher's checkpoint.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.student import Student, Vocabulary
from treecore.errors import ConfigError
from treecore.model.checkpoint import Checkpoint
from treecore.model.config import read_json
from treecore.model.load import HEAD_TOKEN_IDS, expected_shapes, open_checkpoint
from treecore.model.spec import ModelSpec

NUM_COUNTED = 5  # of a position's top tokens, for the head: what a tree may propose


def outer_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that a student keeps by default: the first two, which read, and the last two, which write."""
    return tuple(sorted({*range(min(2, num_layers)), *range(max(0, num_layers - 2), num_layers)}))


def choose_head_tokens(
    sequences: Sequence[TeacherSequence], vocab_size: int, num_rows: int, always: Collection[int]
) -> NDArray[np.int64]:
    """The `num_rows` tokens that the teacher expects most often, ascending; `always` among them, low ids break ties.

    A token counts with the probability that it has among a position's best, and once where it is written.
    """
    counts = np.linspace(1e-3, 0, vocab_size)
    for sequence in sequences:
        ids, logp = sequence.top_ids[:, :NUM_COUNTED], sequence.top_logp[:, :NUM_COUNTED]
        np.add.at(counts, ids.ravel(), np.exp(logp.astype(np.float32)).ravel())
        np.add.at(counts, sequence.tokens, 1)
    counts[np.array(list(always), np.intp)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:num_rows])


def prune(teacher: Path, layers: Sequence[int], head_token_ids: NDArray[np.int64]) -> Student:
    """A student of the teacher's `layers`, in their order. Raises ConfigError naming what the checkpoint lacks."""
    spec, checkpoint = _open_teacher(teacher)
    if not layers or not all(0 <= layer_idx < spec.num_layers for layer_idx in layers):
        raise ConfigError(f"layers {','.join(map(str, layers))}: {teacher} has layers 0 to {spec.num_layers - 1}")
    student_spec = replace(spec, layers=tuple(spec.layers[layer_idx] for layer_idx in layers))
    weights = {
        name.replace("model.layers.*.", f"model.layers.{new}."): checkpoint.tensor(name.replace("*", str(old)))
        for name in _layer_names(spec)
        for new, old in enumerate(layers)
    }
    weights[spec.tensors.norm] = checkpoint.tensor(spec.tensors.norm)
    return Student(student_spec, weights, _vocabulary(spec, checkpoint, torch.from_numpy(head_token_ids)))


def read_artefact(artefact: Path, teacher: Path) -> Student:
    """The student that an artefact holds, with its bf16 weights as they are served. Raises ConfigError."""
    spec, checkpoint = open_checkpoint(artefact)
    if spec.draft is None or checkpoint.names() != expected_shapes(spec).keys():
        raise ConfigError(f"{artefact}: no SSM artefact")
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names() - {HEAD_TOKEN_IDS}}
    head_token_ids = checkpoint.tensor(HEAD_TOKEN_IDS).long()
    return Student(replace(spec, draft=None), weights, _vocabulary(*_open_teacher(teacher), head_token_ids))


def export_artefact(student: Student, teacher: Path, artefact: Path) -> None:
    """Write the artefact's two files, each whole or not at all. All other fields of config.json are the teacher's."""
    artefact.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in student.state_dict().items()}
    tensors[HEAD_TOKEN_IDS] = student.vocabulary.head_token_ids.int()
    config = json.dumps(_artefact_config(student.spec, teacher), indent=1) + "\n"
    _write(artefact / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    _write(artefact / "config.json", config.encode())


def _artefact_config(spec: ModelSpec, teacher: Path) -> dict[str, object]:
    """The end-of-sequence ids come from the spec, because generation_config.json may override the teacher's config."""
    return {
        **read_json(teacher / "config.json"),
        "num_hidden_layers": spec.num_layers,
        "dtype": "bfloat16",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
        "espalier": {"teacher_embedding": True},
    }


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _open_teacher(teacher: Path) -> tuple[ModelSpec, Checkpoint]:
    spec, checkpoint = open_checkpoint(teacher)
    if spec.draft is not None:
        raise ConfigError(f"{teacher}: is an SSM artefact itself; a teacher has an embedding of its own")
    if spec.family != "llama":
        raise ConfigError(f"{teacher}: model_type={spec.family!r}; only llama models are made smaller")
    for name, shape in expected_shapes(spec).items():
        if name not in checkpoint.names() or tuple(checkpoint.shape(name)) != shape:
            raise ConfigError(f"{teacher}: tensor {name} is missing or not of shape {shape}")
    return spec, checkpoint


def _layer_names(spec: ModelSpec) -> list[str]:
    """The tensors of a layer, with `*` for its index."""
    prefix = "model.layers.0."
    return [name.replace(prefix, "model.layers.*.") for name in expected_shapes(spec) if name.startswith(prefix)]


def _vocabulary(spec: ModelSpec, checkpoint: Checkpoint, head_token_ids: Tensor) -> Vocabulary:
    embedding = checkpoint.tensor(spec.tensors.embedding)
    head = embedding if spec.tie_embeddings else checkpoint.tensor(spec.tensors.head)
    return Vocabulary(embedding, head[head_token_ids].float(), head_token_ids)
