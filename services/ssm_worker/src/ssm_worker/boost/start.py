"""What a student is before its first step: layers of the LLM, a small checkpoint, or noise. Knows checkpoints."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssm_worker.boost.artefact import fingerprint, open_llm, own_vocabulary, read_student
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.student import Student
from treecore.errors import ConfigError
from treecore.model.checkpoint import Checkpoint
from treecore.model.config import read_json
from treecore.model.load import expected_shapes
from treecore.model.spec import ModelSpec, Shape

NUM_COUNTED = 5  # of a position's top tokens, for the head: what a tree may propose
_RANDOM_STD = 0.02


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """These layers of the LLM, in their order; none: the outer ones."""

    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenCheckpoint:
    """An SSM artefact, or any small Llama checkpoint of the LLM's vocabulary."""

    directory: Path


@dataclass(frozen=True, slots=True)
class RandomLayers:
    """Layers of noise, as wide as the LLM's embedding, which they borrow."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


Start = KeptLayers | GivenCheckpoint | RandomLayers


def start_name(start: Start) -> str:
    """What a checkpoint says of its start: equal names, equal students before the first step."""
    match start:
        case KeptLayers(layers):
            return f"layers {','.join(map(str, layers)) or 'outer'}"
        case GivenCheckpoint(directory):
            return f"checkpoint {fingerprint(directory)}"
        case RandomLayers():
            return f"random {start.num_layers},{start.num_heads},{start.num_kv_heads},{start.intermediate_size}"
        case _:
            assert_never(start)


def new_student(llm: Path, start: Start, head_token_ids: NDArray[np.int64], seed: int) -> Student:
    """The student before its first step; a given checkpoint has its own head, the others those rows of the LLM's.

    Raises ConfigError naming what the LLM's or the given checkpoint lacks.
    """
    if isinstance(start, GivenCheckpoint):
        return read_student(start.directory, llm)
    spec, checkpoint = open_llm(llm)
    if isinstance(start, KeptLayers):
        student_spec, weights = _pruned(llm, spec, checkpoint, start.layers or outer_layers(spec.num_layers))
    else:
        student_spec, weights = _random(spec, start, seed)
    vocabulary = own_vocabulary(spec, checkpoint, torch.from_numpy(head_token_ids))
    return Student(student_spec, weights, vocabulary, read_json(llm / "config.json"))


def head_tokens(llm: Path, sequences: Sequence[TeacherSequence], num_rows: int) -> NDArray[np.int64]:
    """The head's rows for text like `sequences`, ascending; where an answer ends is always among them."""
    spec, _ = open_llm(llm)
    ends = {*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])}
    return choose_head_tokens(sequences, spec.vocab_size, num_rows, ends)


def outer_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that a student keeps by default: the first two, which read, and the last two, which write."""
    return tuple(sorted({*range(min(2, num_layers)), *range(max(0, num_layers - 2), num_layers)}))


def choose_head_tokens(
    sequences: Sequence[TeacherSequence], vocab_size: int, num_rows: int, always: Collection[int]
) -> NDArray[np.int64]:
    """The `num_rows` tokens that the LLM expects most often, ascending; `always` among them, low ids break ties.

    A token counts with the probability that it has among a position's best, and once where it is written.
    """
    counts = np.linspace(1e-3, 0, vocab_size)
    for sequence in sequences:
        ids, logp = sequence.top_ids[:, :NUM_COUNTED], sequence.top_logp[:, :NUM_COUNTED]
        np.add.at(counts, ids.ravel(), np.exp(logp.astype(np.float32)).ravel())
        np.add.at(counts, sequence.tokens, 1)
    counts[np.array(list(always), np.intp)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:num_rows])


def _pruned(
    llm: Path, spec: ModelSpec, checkpoint: Checkpoint, layers: Sequence[int]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    if not all(0 <= layer_idx < spec.num_layers for layer_idx in layers):
        raise ConfigError(f"layers {','.join(map(str, layers))}: {llm} has layers 0 to {spec.num_layers - 1}")
    pruned = replace(spec, layers=tuple(spec.layers[layer_idx] for layer_idx in layers))
    weights = {
        spec.tensors.of_layer(new, part): checkpoint.tensor(spec.tensors.of_layer(old, part))
        for part in spec.tensors.parts
        for new, old in enumerate(layers)
    }
    return pruned, {**weights, spec.tensors.norm: checkpoint.tensor(spec.tensors.norm)}


def _random(spec: ModelSpec, start: RandomLayers, seed: int) -> tuple[ModelSpec, dict[str, Tensor]]:
    if start.num_heads % start.num_kv_heads:
        raise ConfigError(f"--shape: {start.num_heads} heads cannot share {start.num_kv_heads} heads of K and V evenly")
    shaped = replace(
        spec,
        layers=(spec.layers[0],) * start.num_layers,
        num_heads=start.num_heads,
        num_kv_heads=start.num_kv_heads,
        intermediate_size=start.intermediate_size,
    )
    noise = torch.Generator().manual_seed(seed)
    ends = {spec.tensors.embedding, spec.tensors.head}
    names = [name for name in expected_shapes(shaped) if name not in ends]
    return shaped, {name: _noise(expected_shapes(shaped)[name], noise) for name in names}


def _noise(shape: Shape, noise: torch.Generator) -> Tensor:
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=noise) * _RANDOM_STD
