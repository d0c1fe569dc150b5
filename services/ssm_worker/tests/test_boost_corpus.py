"""Shards on disk: a round trip loses nothing, and a damaged file is refused by name."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssm_worker.boost.archive import read_archive, write_archive
from ssm_worker.boost.corpus import Shard, TeacherSequence, read_corpus, read_shard, shard_path, write_shard
from ssm_worker.boost.lessons import even_lessons
from ssm_worker.boost.testing import random_sequences
from treecore.errors import ConfigError

VOCAB = 40


def equal(left: TeacherSequence, right: TeacherSequence) -> bool:
    """Whether all fields are, dtypes included."""
    arrays = [(getattr(left, name), getattr(right, name)) for name in ("tokens", "top_ids", "top_logp")]
    same = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays)
    return same and (left.start, left.temperature) == (right.start, right.temperature)


@pytest.fixture(scope="module")
def shard_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good shard's file."""
    path = tmp_path_factory.mktemp("good") / "shard.npz"
    write_shard(path, Shard(random_sequences(3, VOCAB), 1.5))
    return path.read_bytes()


@given(count=st.integers(1, 6), seed=st.integers(0, 99), num_top=st.integers(2, 5))
@settings(max_examples=20, deadline=None)
def test_a_round_trip_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int, num_top: int
) -> None:
    """Every array, bit for bit, in its dtype."""
    shard = Shard(random_sequences(count, VOCAB, seed=seed, num_top=num_top), 2.5)
    path = tmp_path_factory.mktemp("shard") / "one.npz"
    write_shard(path, shard)
    found = read_shard(path, VOCAB)
    assert found.wall_s == 2.5
    assert all(map(equal, found.sequences, shard.sequences))
    assert len(found.sequences) == count


def test_a_corpus_is_all_shards_in_order(tmp_path: Path) -> None:
    """Of all seeds; times and tokens add up."""
    parts = {(seed, idx): random_sequences(2, VOCAB, seed=10 * seed + idx) for seed in (0, 1) for idx in (0, 1)}
    for (seed, idx), sequences in parts.items():
        write_shard(shard_path(tmp_path, seed, idx), Shard(sequences, 1.0))
    corpus = read_corpus(tmp_path, VOCAB)
    assert corpus.wall_s == 4.0
    assert all(map(equal, corpus.sequences, [sequence for key in sorted(parts) for sequence in parts[key]]))
    assert corpus.num_tokens == sum(len(sequence.tokens) - sequence.start for sequence in corpus.sequences)


def test_the_digest_tells_lessons_apart() -> None:
    """Equal text, equal digest; one log-prob or one weight changed, another one."""
    lessons, same, other = (even_lessons(random_sequences(3, VOCAB)) for _ in range(3))
    assert lessons.digest() == same.digest()
    same.sequences[1].top_logp[0, 0] += 1
    other.weights[1][0] = 0.5
    assert len({each.digest() for each in (lessons, same, other)}) == 3


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_refused(
    tmp_path_factory: pytest.TempPathFactory, shard_bytes: bytes, data: st.DataObject
) -> None:
    """Or it hit a byte that holds nothing (a time stamp): then what is read is what was written."""
    broken = bytearray(shard_bytes)
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / "shard.npz"
    path.write_bytes(broken)
    outcome = read_or_error(path)
    if isinstance(outcome, ConfigError):
        assert str(path) in str(outcome)
    else:
        assert all(map(equal, outcome.sequences, random_sequences(3, VOCAB)))


def read_or_error(path: Path) -> Shard | ConfigError:
    """The shard, or why it was refused; any other error fails the test."""
    try:
        return read_shard(path, VOCAB)
    except ConfigError as error:
        return error


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, shard_bytes: bytes, share: float) -> None:
    """Wherever it was cut."""
    path = tmp_path / "shard.npz"
    path.write_bytes(shard_bytes[: int(share * len(shard_bytes))])
    with pytest.raises(ConfigError, match=r"shard\.npz"):
        read_shard(path, VOCAB)


@pytest.mark.parametrize("name", ["tokens", "lengths", "starts", "top_logp"])
def test_arrays_that_contradict_each_other_are_refused(tmp_path: Path, shard_bytes: bytes, name: str) -> None:
    """A file may be intact and still no shard."""
    path = tmp_path / "shard.npz"
    path.write_bytes(shard_bytes)
    arrays = read_archive(path)
    write_archive(path, {**arrays, name: arrays[name][:-1]})
    with pytest.raises(ConfigError, match=r"shard\.npz.*contradict"):
        read_shard(path, VOCAB)
    del arrays[name]
    write_archive(path, arrays)
    with pytest.raises(ConfigError, match=rf"shard\.npz.*{name} is missing"):
        read_shard(path, VOCAB)


def test_text_of_another_teacher_is_refused(tmp_path: Path, shard_bytes: bytes) -> None:
    """Its ids may not even exist here."""
    path = tmp_path / "shard.npz"
    path.write_bytes(shard_bytes)
    with pytest.raises(ConfigError, match=r"shard\.npz.*vocabulary of 5"):
        read_shard(path, 5)


def test_no_text_at_all_is_said(tmp_path: Path) -> None:
    """With the command that mends it."""
    with pytest.raises(ConfigError, match="generate"):
        read_corpus(tmp_path / "corpus", VOCAB)
    with pytest.raises(ConfigError, match="no such file"):
        read_shard(tmp_path / "absent.npz", VOCAB)


def test_shards_of_different_widths_do_not_mix(tmp_path: Path) -> None:
    """They cannot be one batch."""
    for idx, num_top in enumerate((3, 4)):
        write_shard(shard_path(tmp_path, 0, idx), Shard(random_sequences(2, VOCAB, num_top=num_top), 0.0))
    with pytest.raises(ConfigError, match="log-probs"):
        read_corpus(tmp_path, VOCAB)
