"""Teacher text on disk: shards of sequences with its top log-probs. Knows arrays; nothing of models or text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssm_worker.boost.archive import Arrays, read_archive, write_archive
from treecore.errors import ConfigError

FIELDS = ("tokens", "lengths", "starts", "temperatures", "top_ids", "top_logp", "wall_s")


@dataclass(frozen=True, slots=True)
class TeacherSequence:
    """One dialogue. tokens int32 [L]; those before `start` (at least one) are the chat template's opening.

    Row i of top_ids int32 [L - start + 1, K] and top_logp float16 (same shape) is what the teacher expects after
    position start - 1 + i: its K most likely tokens, best first. temperature: that of the answer, 0 for greedy.
    """

    tokens: NDArray[np.int32]
    start: int
    temperature: float
    top_ids: NDArray[np.int32]
    top_logp: NDArray[np.float16]

    @property
    def num_tokens(self) -> int:
        """Teacher tokens: all but the template's opening."""
        return len(self.tokens) - self.start

    def without_last(self) -> "TeacherSequence":
        """The same without its last token, behind which the teacher would open a turn that nobody asks for."""
        return TeacherSequence(self.tokens[:-1], self.start, self.temperature, self.top_ids[:-1], self.top_logp[:-1])


@dataclass(frozen=True, slots=True)
class Shard:
    """Sequences of one file. wall_s: seconds that writing them took."""

    sequences: tuple[TeacherSequence, ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Teacher tokens of all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All that a student is trained on, in the order of the shards' names."""

    sequences: tuple[TeacherSequence, ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Teacher tokens of all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_positions(self) -> int:
        """Tokens that one pass feeds to the student: the template's included."""
        return sum(len(sequence.tokens) for sequence in self.sequences)


def shard_path(directory: Path, seed: int, shard_idx: int) -> Path:
    """Where shard `shard_idx` of the text written with `seed` lies."""
    return directory / f"seed{seed}-{shard_idx:05d}.npz"


def write_shard(path: Path, shard: Shard) -> None:
    """Write a shard, whole or not at all."""
    sequences = shard.sequences
    write_archive(
        path,
        {
            "tokens": np.concatenate([sequence.tokens for sequence in sequences]),
            "lengths": np.array([len(sequence.tokens) for sequence in sequences], np.int64),
            "starts": np.array([sequence.start for sequence in sequences], np.int64),
            "temperatures": np.array([sequence.temperature for sequence in sequences], np.float64),
            "top_ids": np.concatenate([sequence.top_ids for sequence in sequences]),
            "top_logp": np.concatenate([sequence.top_logp for sequence in sequences]),
            "wall_s": np.array(shard.wall_s),
        },
    )


def read_shard(path: Path, vocab_size: int) -> Shard:
    """Read a shard. Raises ConfigError naming the file if it is corrupt or not of a vocabulary of `vocab_size`."""
    arrays = read_archive(path)
    if missing := [name for name in FIELDS if name not in arrays]:
        raise ConfigError(f"{path}: no shard of teacher text ({missing[0]} is missing)")
    if not _is_consistent(arrays):
        raise ConfigError(f"{path}: no shard of teacher text (its arrays contradict each other)")
    for name in ("tokens", "top_ids"):
        if arrays[name].size and not 0 <= arrays[name].min() <= arrays[name].max() < vocab_size:
            raise ConfigError(f"{path}: {name} has ids outside of the teacher's vocabulary of {vocab_size}")
    return Shard(tuple(_split(arrays)), float(arrays["wall_s"]))


def read_corpus(directory: Path, vocab_size: int) -> Corpus:
    """All shards in `directory`. Raises ConfigError where there are none or one is corrupt."""
    paths = sorted(directory.glob("*.npz"))
    if not paths:
        raise ConfigError(
            f"{directory}: no teacher text yet; give --prompts, or write some with: espalier boost generate"
        )
    shards = [read_shard(path, vocab_size) for path in paths]
    sequences = tuple(sequence for shard in shards for sequence in shard.sequences)
    _check_widths(directory, sequences)
    return Corpus(sequences, sum(shard.wall_s for shard in shards))


def _check_widths(directory: Path, sequences: Sequence[TeacherSequence]) -> None:
    if len({sequence.top_ids.shape[1] for sequence in sequences}) > 1:
        raise ConfigError(f"{directory}: shards with different numbers of log-probs a token cannot be mixed")


def _is_consistent(arrays: Arrays) -> bool:
    lengths, starts, top_ids = arrays["lengths"], arrays["starts"], arrays["top_ids"]
    integers = all(arrays[name].dtype.kind in "iu" for name in ("tokens", "lengths", "starts", "top_ids"))
    return (
        integers
        and 0 < len(lengths) == len(starts) == len(arrays["temperatures"])
        and bool(np.all((starts >= 1) & (starts < lengths)))
        and arrays["tokens"].shape == (lengths.sum(),)
        and top_ids.ndim == 2
        and top_ids.shape == arrays["top_logp"].shape
        and len(top_ids) == (lengths - starts + 1).sum()
    )


def _split(arrays: Arrays) -> list[TeacherSequence]:
    lengths, starts = arrays["lengths"], arrays["starts"]
    token_ends, row_ends = np.cumsum(lengths), np.cumsum(lengths - starts + 1)
    return [
        TeacherSequence(
            tokens=arrays["tokens"][token_end - length : token_end].astype(np.int32, copy=False),
            start=int(start),
            temperature=float(temperature),
            top_ids=arrays["top_ids"][row_end - (length - start + 1) : row_end].astype(np.int32, copy=False),
            top_logp=arrays["top_logp"][row_end - (length - start + 1) : row_end].astype(np.float16, copy=False),
        )
        for length, start, temperature, token_end, row_end in zip(
            lengths, starts, arrays["temperatures"], token_ends, row_ends, strict=True
        )
    ]
