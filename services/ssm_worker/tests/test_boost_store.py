"""Shards of teacher text: whole or not there, in order, whatever is killed when."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from ssm_worker.boost.archive import read_archive
from ssm_worker.boost.corpus import read_shard, shard_path, write_shard
from ssm_worker.boost.dialogue import Answers, Plan, plan_answer
from ssm_worker.boost.generate import ShardStore, fill, missing_shards, shards_until
from ssm_worker.boost.teacher import Written
from ssm_worker.boost.testing import VOCAB_SIZE, random_sequences
from ssm_worker.boost.turns import Turns
from treecore.errors import ConfigError

TURNS = Turns(opening=(1, 9, 2, 1, 8), bare_opening=(1, 8), close=(2, 1, 7), end=2, special=frozenset({0, 1, 2}))


class Killed(Exception):
    """The process died."""


class ScriptedWriter:
    """Gives sequences out of order, and dies behind the n-th."""

    def __init__(self, dies_behind: int | None = None) -> None:
        self._dies_behind = dies_behind
        self.num_written = 0

    def write(self, plans: Iterable[Plan]) -> Iterator[Written]:
        """Blocks of four plans, each in reverse: a later shard can be complete before an earlier one."""
        series = iter(plans)
        while block := list(itertools.islice(series, 4)):
            for plan in reversed(block):
                if self.num_written == self._dies_behind:
                    raise Killed
                self.num_written += 1
                yield Written(plan.index, random_sequences(1, VOCAB_SIZE, seed=plan.index)[0])


def scripted_plan(index: int) -> Plan:
    """A short answer."""
    return plan_answer(index, (9,), 0, TURNS, Answers(max_len=3))


def fill_store(directory: Path, writer: ScriptedWriter, target: int = 100) -> None:
    """Generate with shards of three."""
    store = ShardStore(directory, 5, VOCAB_SIZE, shard_len=3)
    fill(store, writer, shards_until(store, scripted_plan, target), lambda _: None, clock=lambda: 0.0)


def complete_store(directory: Path, writer: ScriptedWriter) -> None:
    """Complete eleven prompts, with shards of three."""
    store = ShardStore(directory, 5, VOCAB_SIZE, shard_len=3)
    plans = [scripted_plan(index) for index in range(11)]
    fill(store, writer, missing_shards(store, plans), lambda _: None, clock=lambda: 0.0)


def contents(directory: Path) -> dict[str, bytes]:
    """All files."""
    return {
        path.name: b"".join(array.tobytes() for array in read_archive(path).values()) for path in directory.iterdir()
    }


@pytest.mark.parametrize("writes", [fill_store, complete_store])
def test_killed_anywhere_writing_goes_on_to_the_same_shards(
    tmp_path: Path, writes: Callable[[Path, ScriptedWriter], None]
) -> None:
    """The n-th sequence kills the process, for each n until all is written; then a second process goes on."""
    whole = ScriptedWriter()
    writes(tmp_path / "whole", whole)
    assert len(contents(tmp_path / "whole")) > 2
    for num in range(whole.num_written):
        directory = tmp_path / str(num)
        with pytest.raises(Killed):
            writes(directory, ScriptedWriter(dies_behind=num))
        writes(directory, ScriptedWriter())
        assert contents(directory) == contents(tmp_path / "whole")


def test_shards_go_on_with_the_series(tmp_path: Path) -> None:
    """Each has the next three of it."""
    fill_store(tmp_path, ScriptedWriter())
    store = ShardStore(tmp_path, 5, VOCAB_SIZE, shard_len=3)
    shards = [read_shard(shard_path(tmp_path, 5, idx), VOCAB_SIZE) for idx in range(store.num_shards)]
    written = [sequence.tokens.tolist() for shard in shards for sequence in shard.sequences]
    series = [random_sequences(1, VOCAB_SIZE, seed=index)[0].tokens.tolist() for index in range(store.num_sequences)]
    assert written == series


def test_every_prompt_is_completed_once(tmp_path: Path) -> None:
    """In order; the last shard is short."""
    complete_store(tmp_path, ScriptedWriter())
    shards = [read_shard(shard_path(tmp_path, 5, idx), VOCAB_SIZE) for idx in range(4)]
    assert [len(shard.sequences) for shard in shards] == [3, 3, 3, 2]
    written = [sequence.tokens.tolist() for shard in shards for sequence in shard.sequences]
    assert written == [random_sequences(1, VOCAB_SIZE, seed=index)[0].tokens.tolist() for index in range(11)]
    write_shard(shard_path(tmp_path, 5, 4), shards[0])
    with pytest.raises(ConfigError, match=r"seed5-00004\.npz: there are not 3"):
        ShardStore(tmp_path, 5, VOCAB_SIZE, shard_len=3)


def test_enough_text_is_left_as_it_is(tmp_path: Path) -> None:
    """The same command again writes nothing; a higher target appends."""
    fill_store(tmp_path, ScriptedWriter())
    before = contents(tmp_path)
    again = ScriptedWriter()
    fill_store(tmp_path, again)
    assert again.num_written == 0
    fill_store(tmp_path, ScriptedWriter(), target=150)
    after = contents(tmp_path)
    assert before.items() < after.items()


def test_a_corrupt_shard_stops_generation(tmp_path: Path) -> None:
    """By name, before anything is written behind it."""
    fill_store(tmp_path, ScriptedWriter())
    path = tmp_path / "seed5-00001.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="seed5-00001"):
        fill_store(tmp_path, ScriptedWriter(), target=150)
