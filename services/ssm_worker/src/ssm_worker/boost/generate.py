"""The LLM's text into shards, resumable: the unit of progress is a whole shard. Knows files and plans; no models.

Shard n of a seed holds sequences [n * SHARD_LEN, (n + 1) * SHARD_LEN) of it in order, and is written from an empty
cache: its bytes do not depend on how often the process was killed before.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ssm_worker.boost.corpus import Shard, TeacherSequence, read_shard, shard_path, write_shard
from ssm_worker.boost.dialogue import Plan
from ssm_worker.boost.teacher import Written
from ssm_worker.boost.turns import TokenIds
from treecore.errors import ConfigError

SHARD_LEN = 128  # sequences, two for a row: some 15,000 tokens, two minutes of a kill's cost on a CPU core

Clock = Callable[[], float]
Report = Callable[[TeacherSequence], None]
"""Takes a sequence that was just finished."""


class Writer(Protocol):
    """What writes dialogues: a Teacher, or a fake of one."""

    def write(self, plans: Iterable[Plan]) -> Iterator[Written]:
        """See Teacher.write."""
        ...


class ShardStore:
    """The shards of one seed. Owns their files; counts what is there already. Only the last one may be short."""

    def __init__(self, directory: Path, seed: int, vocab_size: int, shard_len: int = SHARD_LEN) -> None:
        self._directory = directory
        self._seed = seed
        self.shard_len = shard_len
        self.num_shards = self.num_sequences = self.num_tokens = 0
        while (path := shard_path(directory, seed, self.num_shards)).exists():
            shard = read_shard(path, vocab_size)
            if self.num_sequences != self.num_shards * shard_len or len(shard.sequences) > shard_len:
                raise ConfigError(f"{path}: there are not {shard_len} sequences in each shard up to this one")
            self._count(shard)

    def append(self, shard: Shard) -> None:
        """Write the next shard."""
        write_shard(shard_path(self._directory, self._seed, self.num_shards), shard)
        self._count(shard)

    def _count(self, shard: Shard) -> None:
        self.num_shards += 1
        self.num_sequences += len(shard.sequences)
        self.num_tokens += shard.num_tokens


def shards_until(store: ShardStore, plan: Callable[[int], Plan], num_tokens: int) -> Iterator[list[Plan]]:
    """Of an endless series of plans those of each next shard, as long as the store has fewer than `num_tokens`."""
    while store.num_tokens < num_tokens:
        first = store.num_sequences
        yield [plan(index) for index in range(first, first + store.shard_len)]


def missing_shards(store: ShardStore, plans: Sequence[Plan]) -> Iterator[Sequence[Plan]]:
    """Of given plans those of each shard that the store lacks."""
    for first in range(store.num_sequences, len(plans), store.shard_len):
        yield plans[first : first + store.shard_len]


def fill(
    store: ShardStore, writer: Writer, shards: Iterable[Sequence[Plan]], report: Report, clock: Clock = time.monotonic
) -> None:
    """Write shard after shard."""
    for plans in shards:
        store.append(write(writer, plans, report, clock))


def write(writer: Writer, plans: Sequence[Plan], report: Report, clock: Clock = time.monotonic) -> Shard:
    """All of the plans' sequences, in their order."""
    started = clock()
    sequences: dict[int, TeacherSequence] = {}
    for written in writer.write(plans):
        sequences[written.index] = written.sequence
        report(written.sequence)
    return Shard(tuple(sequences[plan.index] for plan in plans), clock() - started)


def choose_prompts(prompts: Sequence[TokenIds], count: int, max_len: int, seed: int) -> list[TokenIds]:
    """`count` of the prompts that have fewer than `max_len` tokens, by lot. Raises ConfigError if there are too few."""
    short = [prompt for prompt in prompts if 0 < len(prompt) < max_len]
    if len(short) < count:
        raise ConfigError(f"{count} held-out prompts are wanted; {len(short)} have fewer than {max_len} tokens")
    order = np.random.default_rng(seed).permutation(len(short))
    return [short[idx] for idx in order[:count]]
