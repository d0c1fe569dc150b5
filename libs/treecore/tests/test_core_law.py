"""The law of a node, against oracles of their own: transformers' processors, and plain arithmetic token by token."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopPLogitsWarper as TopP

from treecore.law import Paths, adjusted, logprobs, processed
from treecore.noise import Seed
from treecore.params import SamplingParams

V = 12
PLAIN = SamplingParams(1.0, 0, 1.0, Seed(0))

rows = st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V).map(lambda row: np.array(row, np.float32))
token_lists = st.lists(st.integers(0, V - 1), max_size=8)


def one_row(
    row: NDArray[np.float32], params: SamplingParams, committed: list[int], path: tuple[int, ...] = ()
) -> NDArray[np.float32]:
    """The adjusted row behind one node."""
    return adjusted(row[None], None, params, Paths(committed, (path,)))[0]


def openai_row(row: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Token by token, as the documentation words it, in Python's own floats."""
    found = []
    for token in range(V):
        value = float(row[token]) + dict(zip(params.bias_ids, params.biases, strict=True)).get(token, 0.0)
        if token in params.end_token_ids and len(output) < params.min_tokens:
            value = -math.inf
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        found.append(value)
    return found


@given(
    row=rows,
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    output=token_lists,
    path=token_lists,
    penalties=st.tuples(st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2)),
    biases=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 6),
    ends=st.sets(st.integers(0, V - 1), max_size=2),
)
def test_adjusted_is_what_the_documentation_says(  # noqa: PLR0917
    row: NDArray[np.float32],
    prompt: list[int],
    output: list[int],
    path: list[int],
    penalties: tuple[float, float, float],
    biases: dict[int, float],
    min_tokens: int,
    ends: set[int],
) -> None:
    """Bias, minimum tokens, three penalties, over the prompt, the output and the node's own path."""
    repetition, presence, frequency = penalties
    params = replace(
        PLAIN,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bias_ids=tuple(biases),
        biases=tuple(biases.values()),
        min_tokens=min_tokens,
        end_token_ids=tuple(ends),
        prompt_len=len(prompt),
    )
    before = row.copy()
    found = one_row(row, params, prompt + output, tuple(path))
    assert np.array_equal(row, before), "the model's logits are not ours to change"
    np.testing.assert_allclose(found, openai_row(row, params, prompt, output + path), rtol=1e-5, atol=1e-4)


@given(rows, st.lists(st.integers(0, V - 1), min_size=1, max_size=9), st.floats(0.5, 2.0))
def test_repetition_penalty_equals_transformers(row: NDArray[np.float32], said: list[int], penalty: float) -> None:
    """The same float32 numbers."""
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([said]), torch.from_numpy(row.copy())[None])
    params = replace(PLAIN, repetition_penalty=penalty, prompt_len=1)
    assert one_row(row, params, said).tolist() == pytest.approx(wanted[0].tolist(), rel=1e-6)


@given(
    st.permutations(range(V)),
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.integers(0, V),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
)
def test_truncation_equals_transformers(
    order: list[int], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """The same tokens survive temperature, min_p, top_k and top_p, in this order (rows without ties)."""
    row = np.array(order, np.float32) * np.float32(0.37)
    warpers = [Temperature(temperature), MinPLogitsWarper(min_p)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopP(top_p)] if top_p < 1.0 else []
    wanted = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(row)[None])
    law = processed(row, None, replace(PLAIN, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p))
    assert law.token_ids.tolist() == torch.isfinite(wanted[0]).nonzero()[:, 0].tolist()


@given(rows, st.lists(st.sampled_from([True, False]), min_size=V, max_size=V))
def test_a_grammar_forbids(row: NDArray[np.float32], allowed: list[bool]) -> None:
    """Only allowed tokens are left; a node off the grammar, where nothing is, keeps a law all the same."""
    masks = np.array([allowed])
    found = adjusted(row[None], None, PLAIN, Paths([1], ((),), masks))[0]
    assert np.isfinite(found).tolist() == (allowed if any(allowed) else [True] * V)


def test_the_grammar_wins_over_min_tokens() -> None:
    """Where the text must end by its grammar, it ends, however few tokens there are."""
    masks = np.zeros((1, V), np.bool_)
    masks[0, 3] = True
    params = replace(PLAIN, min_tokens=9, end_token_ids=(3,))
    found = adjusted(np.zeros((1, V), np.float32), None, params, Paths([1], ((),), masks))[0]
    assert np.flatnonzero(np.isfinite(found)).tolist() == [3]


@given(
    rows,
    st.sets(st.integers(0, V - 1), min_size=1).map(sorted),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=9),
    st.integers(0, 2),
)
def test_a_trimmed_head_has_the_same_law_on_its_tokens(
    row: NDArray[np.float32], kept: list[int], said: list[int], num_path: int
) -> None:
    """Column by column, whichever of the penalised, biased and forbidden tokens it has."""
    ids = np.array(kept, np.int32)
    params = replace(
        PLAIN,
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        bias_ids=(0, 5, 11),
        biases=(1.0, -2.0, 3.0),
        end_token_ids=(2, 7),
        min_tokens=20,
        prompt_len=1,
    )
    paths = Paths(said[: len(said) - num_path] or said[:1], (tuple(said[len(said) - num_path :]),))
    whole, trimmed = adjusted(row[None], None, params, paths), adjusted(row[None, ids], ids, params, paths)
    if np.isfinite(trimmed).all() == np.isfinite(whole[:, ids]).all():  # else its only tokens are ends
        assert trimmed.tolist() == whole[:, ids].tolist()


@given(rows)
def test_logprobs_are_normalised(row: NDArray[np.float32]) -> None:
    """As torch's, in float64."""
    wanted = torch.from_numpy(row).double().log_softmax(-1)
    np.testing.assert_allclose(logprobs(row), wanted.numpy(), atol=1e-12)
