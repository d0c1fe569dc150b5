"""Philox against its authors' vectors, Gumbel noise against a slow oracle and its bounds, seeds of choices."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.noise import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    GUMBEL_MAX,
    GUMBEL_MIN,
    RESIDUAL_STREAM,
    Seed,
    choice_seed,
    gumbel,
    gumbel_at,
    philox,
    philox_block,
    uniform,
)

seeds = st.integers(0, 2**64 - 1).map(Seed)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    """Random123's known-answer file for philox4x32-10."""
    block = philox(key[0] | key[1] << 32, np.array([counter], np.uint64))
    assert block.dtype == np.uint32
    assert tuple(block[0].tolist()) == wanted


def slow_philox(seed: int, counter: list[int]) -> list[int]:
    """One block with Python integers, from the paper's description."""
    c, key = list(counter), [seed & ONES, seed >> 32]
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ key[0], right & ONES, (left >> 32) ^ c[3] ^ key[1], left & ONES]
        key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
    return c


@given(seeds, st.lists(st.lists(st.integers(0, ONES), min_size=4, max_size=4), min_size=1, max_size=5))
def test_philox_equals_the_slow_one(seed: Seed, counters: list[list[int]]) -> None:
    """Vectorised uint64 arithmetic against big integers."""
    assert philox(seed, np.array(counters, np.uint64)).tolist() == [slow_philox(seed, row) for row in counters]


def slow_gumbel(seed: int, position: int, token: int) -> float:
    """The definition, one token, with Python floats."""
    bits = slow_philox(seed, [token // 4, position, 0, 0])[token % 4]
    return -math.log(-math.log(((bits >> 8) + 0.5) * 2.0**-24))


@given(seeds, st.integers(0, 2**31), st.lists(st.integers(0, 300_000), max_size=12))
def test_gumbel_equals_the_definition_for_any_tokens(seed: Seed, position: int, tokens: list[int]) -> None:
    """Architecture section 4, in any order and with repetitions; float32 of the float64 value."""
    noise = gumbel(seed, position, np.array(tokens, np.int32))
    assert noise.dtype == np.float32
    wanted = np.array([slow_gumbel(seed, position, token) for token in tokens])
    np.testing.assert_allclose(noise, wanted, rtol=2e-7, atol=1e-7)
    assert [gumbel_at(seed, position, token) for token in tokens] == wanted.tolist()


@given(seeds, st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 300_000)), min_size=1, max_size=8))
def test_many_positions_at_once_equal_one_after_another(seed: Seed, keys: list[tuple[int, int]]) -> None:
    """Near or far apart, in any order, repeated: bit-identical, and in little memory."""
    positions, tokens = (np.array(column) for column in zip(*keys, strict=True))
    noise = gumbel(seed, positions, tokens.astype(np.int32))
    alone = [gumbel(seed, position, np.array([token], np.int32))[0] for position, token in keys]
    np.testing.assert_array_equal(noise, np.array(alone))


@given(seeds, st.integers(0, 2**20), st.integers(1, 400))
def test_gumbel_of_a_token_does_not_depend_on_company(seed: Seed, position: int, num: int) -> None:
    """Bit-identical alone, in a subset and over the whole vocabulary: pruning may rely on it."""
    whole = gumbel(seed, position, np.arange(num, dtype=np.int32))
    some = np.arange(num, dtype=np.int32)[::-3]
    np.testing.assert_array_equal(gumbel(seed, position, some), whole[some])


def test_bounds_hold_at_the_extreme_bits() -> None:
    """The largest and smallest u of the grid lie within the bounds that sampling prunes by, and close to them."""
    extremes = [-math.log(-math.log(((bits >> 8) + 0.5) * 2.0**-24)) for bits in (0, ONES)]
    lowest, highest = (float(np.float32(noise)) for noise in extremes)
    assert np.float32(GUMBEL_MIN) <= lowest < GUMBEL_MIN + 1e-2
    assert GUMBEL_MAX - 1e-2 < highest <= np.float32(GUMBEL_MAX)


def test_gumbel_has_the_gumbel_law() -> None:
    """Kolmogorov-Smirnov over 40,000 draws; false alarms below 1e-6 (critical value sqrt(ln(2e6) / 2n))."""
    num = 40_000
    noise = np.sort(gumbel(Seed(2024), 17, np.arange(num, dtype=np.int32)).astype(np.float64))
    law = np.exp(-np.exp(-noise))
    ranks = np.arange(num + 1) / num
    distance = max(np.abs(ranks[1:] - law).max(), np.abs(law - ranks[:-1]).max())
    assert distance < math.sqrt(math.log(2e6) / (2 * num))


def test_positions_and_seeds_give_other_noise() -> None:
    """Neighbouring positions, neighbouring seeds and seeds that differ in the high word share nothing."""
    tokens = np.arange(64, dtype=np.int32)
    rows = [gumbel(Seed(seed), position, tokens) for seed in (0, 1, 1 << 32) for position in (0, 1)]
    assert len({row.tobytes() for row in rows}) == len(rows)


@given(seeds)
def test_choice_seeds_are_distinct_and_the_first_is_the_requests_own(seed: Seed) -> None:
    """Choice 0 can be replayed alone; the others are 64-bit values of their own."""
    derived = [choice_seed(seed, idx) for idx in range(16)]
    assert derived[0] == seed
    assert len(set(derived)) == 16
    assert all(0 <= value < 2**64 for value in derived)
    assert derived == [choice_seed(seed, idx) for idx in range(16)]


counters = st.tuples(*[st.integers(0, ONES)] * 4)


@given(seeds, counters)
def test_one_block_equals_many(seed: Seed, counter: tuple[int, int, int, int]) -> None:
    """Python's integers and numpy's give the same bits."""
    wanted = philox(seed, np.array([counter], np.uint64))[0]
    assert philox_block(seed, counter) == tuple(wanted.tolist())


@given(seeds, st.integers(0, 2**20), st.integers(0, 40))
def test_uniforms_lie_strictly_within_the_unit_interval(seed: Seed, position: int, draw_idx: int) -> None:
    """Never 0 (a token of no mass could be accepted) and never 1 (an inverse CDF would run over its end)."""
    assert 0.0 < uniform(seed, position, ACCEPT_STREAM, draw_idx) < 1.0


def test_uniforms_of_other_keys_are_others() -> None:
    """Streams, positions, draws, SSMs and seeds share no number."""
    keys = [
        (Seed(seed), position, stream, draw_idx, source)
        for seed in (0, 1)
        for position in (0, 1, 2)
        for stream in (DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM)
        for draw_idx in range(5)
        for source in (0, 1)
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov over 8,000 draws; false alarms below 1e-6."""
    num = 8_000
    drawn = np.sort([uniform(Seed(7), idx // 4, DRAFT_STREAM, idx % 4) for idx in range(num)])
    ranks = np.arange(num + 1) / num
    distance = max(np.abs(ranks[1:] - drawn).max(), np.abs(drawn - ranks[:-1]).max())
    assert distance < math.sqrt(math.log(2e6) / (2 * num))
