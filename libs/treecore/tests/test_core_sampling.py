"""The token that sampling chooses: against a brute-force oracle over the whole vocabulary, and against softmax."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from treecore.law import processed
from treecore.noise import Seed, gumbel
from treecore.params import SamplingParams
from treecore.sampling import best_tokens, best_tokens_of_nodes

Logits = NDArray[np.float32]
Positions = NDArray[np.int64]
Chooser = Callable[[Logits, SamplingParams, Positions], NDArray[np.int32]]

temperatures = st.sampled_from([0.0, 0.01, 0.3, 0.8, 1.0, 1.7, 2.0])
seeds = st.integers(0, 2**64 - 1).map(Seed)
params_of_all_kinds = st.builds(
    SamplingParams,
    temperature=temperatures,
    top_k=st.sampled_from([0, 1, 2, 3, 7, 64, 65, 10_000]),
    top_p=st.sampled_from([1.0, 0.999999, 0.9, 0.5, 0.1, 1e-9]),
    seed=seeds,
)
ordinary = st.floats(-12, 12, width=32)
extreme = st.one_of(ordinary, st.sampled_from([-math.inf, -3e38, -1e9, 1e9, 3e38, 0.0, -0.0]).map(np.float32))
tied = st.integers(-2, 2).map(float)


def oracle_law(logits: Sequence[float], params: SamplingParams) -> dict[int, np.float32]:
    """Token -> log p of what truncation leaves, by sorting everything."""
    if params.temperature == 0:
        return {token: np.float32(logit) for token, logit in enumerate(logits)}
    with np.errstate(over="ignore"):
        top = np.float32(max(logits))
        divisor = max(np.float32(params.temperature), np.finfo(np.float32).tiny)
        law = {token: (np.float32(logit) - top) / divisor for token, logit in enumerate(logits)}
    order = sorted(law, key=lambda token: (-law[token], token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = [math.exp(float(law[token])) for token in order]
        wanted = params.top_p * math.fsum(mass)
        reached = list(accumulate(mass))
        assume(all(abs(total - wanted) > 1e-9 * wanted for total in reached[:-1]))
        order = order[: next((idx for idx, total in enumerate(reached) if total >= wanted), len(order)) + 1]
    return {token: law[token] for token in order}


def oracle_best(logits: Sequence[float], params: SamplingParams, position: int, num_tokens: int) -> list[int]:
    """All scores over the whole law, sorted; ties to the lowest id; tokens of probability 0 never."""
    law = oracle_law(logits, params)
    noise = gumbel(params.seed, position, np.arange(len(logits), dtype=np.int32))
    scores = {token: logp + (noise[token] if params.temperature else np.float32(0)) for token, logp in law.items()}
    order = sorted(scores, key=lambda token: (-scores[token], token))[:num_tokens]
    return [token for token in order if scores[token] > -math.inf]


@given(
    st.lists(st.one_of(ordinary, tied), min_size=1, max_size=150),
    params_of_all_kinds,
    st.integers(0, 2**20),
    st.integers(1, 12),
)
def test_best_tokens_equal_brute_force(
    logits: list[float], params: SamplingParams, position: int, num_tokens: int
) -> None:
    """Pruning by the noise's bounds, partial sorts and early cuts never show: tiny vocabularies, ties, k > V."""
    found = best_tokens(np.array(logits, np.float32), None, params, position, num_tokens)
    assert found.dtype == np.int32
    assert found.tolist() == oracle_best(logits, params, position, num_tokens)


@given(st.lists(extreme, min_size=1, max_size=90), params_of_all_kinds, st.integers(0, 99), st.integers(1, 5))
def test_extreme_logits_choose_the_same_as_brute_force(
    logits: list[float], params: SamplingParams, position: int, num_tokens: int
) -> None:
    """Masked (-inf) and huge logits: no warning, no NaN, the same choice."""
    assume(max(logits) > -math.inf)
    found = best_tokens(np.array(logits, np.float32), None, params, position, num_tokens)
    assert found.tolist() == oracle_best(logits, params, position, num_tokens)


@given(st.integers(0, 10**6), params_of_all_kinds, st.integers(1, 6), st.sampled_from([0.1, 1.0, 8.0]))
def test_large_vocabularies_equal_brute_force(
    seed: int, params: SamplingParams, num_tokens: int, spread: float
) -> None:
    """2,000 tokens, flat to peaked: the second look at contenders is exercised."""
    logits = (np.random.default_rng(seed).normal(size=2000) * spread).astype(np.float32)
    found = best_tokens(logits, None, params, 5, num_tokens)
    assert found.tolist() == oracle_best(logits.tolist(), params, 5, num_tokens)


@given(
    st.integers(0, 10**6),
    params_of_all_kinds,
    st.lists(st.integers(0, 2**20), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_the_nodes_of_a_tree_at_once_equal_one_after_another(
    seed: int, params: SamplingParams, positions: list[int], num_tokens: int
) -> None:
    """Noise drawn for all nodes in one go, at equal and different positions, gives each node its own tokens."""
    logits = (np.random.default_rng(seed).normal(size=(len(positions), 200)) * 4).astype(np.float32)
    found = best_tokens_of_nodes(logits, None, params, positions, num_tokens)
    for row, position, tokens in zip(logits, positions, found, strict=True):
        assert tokens.tolist() == oracle_best(row.tolist(), params, position, num_tokens)


@given(st.integers(0, 10**6), params_of_all_kinds, st.integers(1, 6))
def test_a_trimmed_head_is_a_masked_vocabulary(seed: int, params: SamplingParams, num_tokens: int) -> None:
    """Logits over some ids choose as logits over all ids with the others at -inf."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(300, 80, replace=False)).astype(np.int32)
    logits = rng.normal(size=80).astype(np.float32) * 3
    whole = np.full(300, -np.inf, np.float32)
    whole[ids] = logits
    trimmed = best_tokens(logits, ids, params, 9, num_tokens)
    assert trimmed.tolist() == best_tokens(whole, None, params, 9, num_tokens).tolist()


@given(st.lists(ordinary, min_size=1, max_size=80), params_of_all_kinds, st.integers(1, 8))
def test_children_are_a_prefix_of_more_children(logits: list[float], params: SamplingParams, num_tokens: int) -> None:
    """The first of k children is the token the LLM itself would take from these logits: coupling rests on it."""
    row = np.array(logits, np.float32)
    many = best_tokens(row, None, params, 3, num_tokens).tolist()
    assert len(set(many)) == len(many)
    assert best_tokens(row, None, params, 3).tolist() == many[:1]


@given(st.lists(st.one_of(ordinary, tied), min_size=1, max_size=80), params_of_all_kinds)
def test_sampling_changes_nothing_that_it_is_given(logits: list[float], params: SamplingParams) -> None:
    """Logits are the caller's."""
    row = np.array(logits, np.float32)
    kept = row.copy()
    best_tokens(row, None, params, 0, 3)
    np.testing.assert_array_equal(row, kept)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """Architecture section 4."""
    params = SamplingParams(0.0, 0, 1.0, Seed(1))
    row = np.array([1, 5, 5, 5, 0], np.float32)
    assert best_tokens(row, None, params, 0).tolist() == [1]
    assert best_tokens(row, None, params, 0, 4).tolist() == [1, 2, 3, 0]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    """One candidate leaves noise nothing to choose."""
    row = np.random.default_rng(3).normal(size=100).astype(np.float32)
    params = SamplingParams(2.0, 1, 1.0, Seed(5))
    assert {int(best_tokens(row, None, params, position)[0]) for position in range(50)} == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-45, 1e-38, 1e-6])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    """A temperature that fp32 rounds to nothing, or that overflows the quotient, still chooses the best token."""
    row = np.array([3.0, 40.0, 39.5, -np.inf, -7.0], np.float32)
    for position in range(20):
        assert best_tokens(row, None, SamplingParams(temperature, 0, 1.0, Seed(9)), position).tolist() == [1]


@given(st.lists(ordinary, min_size=1, max_size=150), params_of_all_kinds)
def test_processed_keeps_what_the_oracle_keeps(logits: list[float], params: SamplingParams) -> None:
    """top_k and top_p: the surviving ids, ascending; at least one."""
    law = processed(np.array(logits, np.float32), None, params)
    assert law.token_ids.tolist() == sorted(oracle_law(logits, params))
    assert len(law.token_ids) >= 1


# -- the law of what is sampled ---------------------------------------------------------------------------------------

NUM_DRAWS = 6_000
LAW_LOGITS = np.array([2.0, 1.5, 0.5, 0.0, -0.5, -1.5, 1.0, -3.0], np.float32)
CHI_SQUARE_7_AT_1E_5 = 35.3  # P(chi-square with 7 degrees of freedom > 35.26) = 1e-5


def softmax(logits: Logits, temperature: float) -> NDArray[np.float64]:
    """In float64."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    return weights / weights.sum()


@cache
def drawn(choose: Chooser, params: SamplingParams) -> NDArray[np.int32]:
    """NUM_DRAWS tokens, one a position."""
    return choose(np.tile(LAW_LOGITS, (NUM_DRAWS, 1)), params, np.arange(NUM_DRAWS))


def statistic(choose: Chooser, params: SamplingParams) -> float:
    """Pearson's chi-square of NUM_DRAWS tokens, one a position, against the softmax."""
    counts = np.bincount(drawn(choose, params), minlength=len(LAW_LOGITS))
    expected = softmax(LAW_LOGITS, params.temperature) * NUM_DRAWS
    return float(((counts - expected) ** 2 / expected).sum())


def ours(logits: Logits, params: SamplingParams, positions: Positions) -> NDArray[np.int32]:
    """What is tested."""
    return np.concatenate(best_tokens_of_nodes(logits, None, params, positions.tolist()))


def temperature_ignored(logits: Logits, params: SamplingParams, positions: Positions) -> NDArray[np.int32]:
    """Mutant: always temperature 1."""
    return ours(logits, SamplingParams(1.0, 0, 1.0, params.seed), positions)


def noise_of_uniform_law(logits: Logits, params: SamplingParams, positions: Positions) -> NDArray[np.int32]:
    """Mutant: uniform noise in place of Gumbel noise."""
    tokens = np.tile(np.arange(logits.shape[1], dtype=np.int32), len(logits))
    noise = gumbel(params.seed, np.repeat(positions, logits.shape[1]), tokens).reshape(logits.shape)
    return (logits / np.float32(params.temperature) + np.exp(-np.exp(-noise))).argmax(axis=1).astype(np.int32)


def one_position_for_all(logits: Logits, params: SamplingParams, positions: Positions) -> NDArray[np.int32]:
    """Mutant: two positions share their noise."""
    return ours(logits, params, positions // 2)


@pytest.mark.parametrize("seed", [11, 2**63 + 5])
def test_sampled_tokens_have_the_softmax_law(seed: int) -> None:
    """Chi-square of 6,000 tokens, 7 degrees of freedom; false alarms 1e-5 a seed (the draws are fixed)."""
    assert statistic(ours, SamplingParams(0.8, 0, 1.0, Seed(seed))) < CHI_SQUARE_7_AT_1E_5


@pytest.mark.parametrize("mutant", [temperature_ignored, noise_of_uniform_law])
def test_the_law_test_catches_planted_mutants(mutant: Chooser) -> None:
    """A wrong temperature or noise of another law is far outside."""
    assert statistic(mutant, SamplingParams(0.8, 0, 1.0, Seed(11))) > 2 * CHI_SQUARE_7_AT_1E_5


def pair_statistic(choose: Chooser, params: SamplingParams) -> float:
    """Chi-square of (token at t, token at t + 1) against the product law: 63 degrees of freedom."""
    tokens = drawn(choose, params)
    counts = np.bincount(tokens[::2] * len(LAW_LOGITS) + tokens[1::2], minlength=len(LAW_LOGITS) ** 2)
    law = softmax(LAW_LOGITS, params.temperature)
    expected = np.outer(law, law).ravel() * (NUM_DRAWS // 2)
    likely = expected >= 5
    rest = np.array([expected[~likely].sum()])
    expected, counts = np.append(expected[likely], rest), np.append(counts[likely], counts[~likely].sum())
    return float(((counts - expected) ** 2 / expected).sum())


CHI_SQUARE_63_AT_1E_5 = 121.0  # P(chi-square with 63 degrees of freedom > 120.6) = 1e-5; fewer cells only lower it


def test_neighbouring_positions_are_independent() -> None:
    """Pairs of positions follow the product law; noise shared by two positions is caught."""
    params = SamplingParams(0.8, 0, 1.0, Seed(11))
    assert pair_statistic(ours, params) < CHI_SQUARE_63_AT_1E_5
    assert pair_statistic(one_position_for_all, params) > 2 * CHI_SQUARE_63_AT_1E_5
