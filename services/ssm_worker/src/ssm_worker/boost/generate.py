"""Teacher text into shards, resumable: the unit of progress is a whole shard. Knows files and plans; nothing of models.

Shard n of a seed holds dialogues [n * SHARD_LEN, (n + 1) * SHARD_LEN) in order, so that what ends up on disk does not
depend on which dialogue ended first, nor on how often the process was killed.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np

from ssm_worker.boost.corpus import Shard, TeacherSequence, read_shard, shard_path, write_shard
from ssm_worker.boost.dialogue import Plan, plan_answer
from ssm_worker.boost.teacher import Written
from ssm_worker.boost.turns import TokenIds, Turns
from treecore.errors import ConfigError

SHARD_LEN = 64  # sequences: some 10,000 tokens, half a minute of a kill's cost on a CPU core

Clock = Callable[[], float]
Report = Callable[[int], None]
"""Takes the number of teacher tokens that were just finished."""


class Writer(Protocol):
    """What writes dialogues: a Teacher, or a fake of one."""

    def write(self, plans: Iterable[Plan]) -> Iterator[Written]:
        """See Teacher.write."""
        ...


class ShardStore:
    """The shards of one seed. Owns their files; counts what is there already."""

    def __init__(self, directory: Path, seed: int, vocab_size: int, shard_len: int = SHARD_LEN) -> None:
        self._directory = directory
        self._seed = seed
        self.shard_len = shard_len
        self.num_shards, self.num_tokens = 0, 0
        while (path := shard_path(directory, seed, self.num_shards)).exists():
            self._count(self._checked(path, read_shard(path, vocab_size)))

    def append(self, shard: Shard) -> None:
        """Write the next shard."""
        write_shard(shard_path(self._directory, self._seed, self.num_shards), shard)
        self._count(shard)

    def _checked(self, path: Path, shard: Shard) -> Shard:
        if len(shard.sequences) != self.shard_len:
            raise ConfigError(f"{path}: has {len(shard.sequences)} sequences instead of {self.shard_len}")
        return shard

    def _count(self, shard: Shard) -> None:
        self.num_shards += 1
        self.num_tokens += shard.num_tokens


class _InOrder:
    """Puts finished sequences into the order of their plans, a shard at a time."""

    def __init__(self, first: int, shard_len: int) -> None:
        self._next = first
        self._shard_len = shard_len
        self._waiting: dict[int, TeacherSequence] = {}

    def add(self, written: Written) -> Iterator[tuple[TeacherSequence, ...]]:
        """Take one sequence in; give the shards that it completes."""
        self._waiting[written.index] = written.sequence
        while all(index in self._waiting for index in self._indices()):
            yield tuple(self._waiting.pop(index) for index in self._indices())
            self._next += self._shard_len

    def _indices(self) -> range:
        return range(self._next, self._next + self._shard_len)


def fill(
    store: ShardStore,
    writer: Writer,
    plan: Callable[[int], Plan],
    target_tokens: int,
    report: Report,
    clock: Clock = time.monotonic,
) -> None:
    """Append shards until the store has `target_tokens`; sequences of an incomplete shard are dropped at the end."""
    if store.num_tokens >= target_tokens:
        return
    first = store.num_shards * store.shard_len
    in_order = _InOrder(first, store.shard_len)
    started = clock()
    with closing(iter_written(writer, plan, first)) as written:
        for entry in written:
            report(entry.sequence.num_tokens)
            for sequences in in_order.add(entry):
                store.append(Shard(sequences, clock() - started))
                started = clock()
                if store.num_tokens >= target_tokens:
                    return


def iter_written(writer: Writer, plan: Callable[[int], Plan], first: int) -> Generator[Written, None, None]:
    """The endless series of dialogues from number `first` on."""
    yield from writer.write(map(plan, itertools.count(first)))


def choose_prompts(prompts: Sequence[TokenIds], count: int, max_len: int, seed: int) -> list[TokenIds]:
    """`count` of the prompts that have fewer than `max_len` tokens, by lot. Raises ConfigError if there are too few."""
    short = [prompt for prompt in prompts if 0 < len(prompt) < max_len]
    if len(short) < count:
        raise ConfigError(f"{count} held-out prompts are wanted; {len(short)} have fewer than {max_len} tokens")
    order = np.random.default_rng(seed).permutation(len(short))
    return [short[idx] for idx in order[:count]]


def answer_plans(prompts: Sequence[TokenIds], turns: Turns, max_answer_len: int) -> list[Plan]:
    """Greedy answers to the prompts."""
    return [plan_answer(index, prompt, turns, max_answer_len) for index, prompt in enumerate(prompts)]


def write_held_out(path: Path, writer: Writer, plans: Sequence[Plan], report: Report) -> None:
    """Answer all plans, and write them to `path` in their order."""
    started = time.monotonic()
    answers: dict[int, TeacherSequence] = {}
    for written in writer.write(plans):
        answers[written.index] = written.sequence
        report(1)
    sequences = tuple(answers[plan.index] for plan in plans)
    write_shard(path, Shard(sequences, time.monotonic() - started))
