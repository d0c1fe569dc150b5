"""Fused choice of tokens: the very tokens that numpy's sampler gives, whole and over shards of the vocabulary."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.model.kernels.choose import Keys, best_pairs, choose_tokens
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens_of_nodes


def reference(logits: np.ndarray, temperature: float, seed: int, positions: list[int]) -> list[int]:
    """By treecore.sampling."""
    params = SamplingParams(temperature, 0, 1.0, Seed(seed))
    return np.concatenate(best_tokens_of_nodes(logits, None, params, positions)).tolist()


def keys(temperature: float, seed: int, positions: list[int], device: str = "cpu") -> Keys:
    """The same for each row but for its position."""
    num = len(positions)
    seeds = torch.from_numpy(np.full(num, seed, np.uint64).view(np.int64))
    temperatures = torch.full((num,), temperature, dtype=torch.float32)
    return Keys(seeds.to(device), torch.tensor(positions, dtype=torch.int32, device=device), temperatures.to(device))


@settings(max_examples=25)
@given(
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 0.8, 1.0, 5.0]),
    seed=st.integers(0, 2**64 - 1),
    positions=st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    vocab=st.integers(1, 300),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
    cuts=st.lists(st.integers(1, 299), max_size=3, unique=True),
)
def test_tokens_are_those_of_the_sampler(
    temperature: float, seed: int, positions: list[int], vocab: int, spread: float, cuts: list[int]
) -> None:
    """With ties (spread 0: greedy takes the lowest token), at any seed and position, for any cut of the vocabulary."""
    rng = np.random.default_rng(seed % 1000)
    rows = (rng.standard_normal((len(positions), vocab)) * spread).astype(np.float32)
    wanted = reference(rows, temperature, seed, positions)
    logits, key = torch.from_numpy(rows), keys(temperature, seed, positions)
    assert choose_tokens(logits, key)[1].tolist() == wanted
    edges = [0, *sorted(cut for cut in cuts if cut < vocab), vocab]
    tops = logits.amax(dim=1)
    pairs = [choose_tokens(logits[:, begin:end].contiguous(), key, tops, begin) for begin, end in pairwise(edges)]
    merged = best_pairs(torch.stack([pair[0] for pair in pairs], 1), torch.stack([pair[1] for pair in pairs], 1))
    assert merged[1].tolist() == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_real_vocabulary(temperature: float, device: str) -> None:
    """Several parts, most of them hopeless, two equal logits at the top in different parts."""
    rows = (np.random.default_rng(3).standard_normal((4, 49152)) * 6).astype(np.float32)
    rows[0, [9000, 40000]] = 60.0
    positions = [5, 6, 6, 900]
    wanted = reference(rows, temperature, 2**63 + 11, positions)
    logits = torch.from_numpy(rows).to(device)
    assert choose_tokens(logits, keys(temperature, 2**63 + 11, positions, device))[1].tolist() == wanted


def test_a_row_that_is_no_number_shows() -> None:
    """The verifier refuses such a row."""
    logits = torch.zeros(2, 50)
    logits[1, 7] = float("nan")
    scores, _ = choose_tokens(logits, keys(0.0, 1, [3, 3]))
    assert scores.isnan().tolist() == [False, True]


@pytest.mark.parametrize("name", ["logits", "keys.seeds", "keys.positions", "keys.temperatures", "tops"])
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    """Shapes and dtypes."""
    logits, key, tops = torch.zeros(2, 50), keys(0.0, 1, [3, 3]), torch.zeros(2)
    if name == "logits":
        logits = logits.double()
    elif name == "tops":
        tops = tops[:1]
    else:
        part = name.removeprefix("keys.")
        fields = {"seeds": key.seeds, "positions": key.positions, "temperatures": key.temperatures}
        key = Keys(**{**fields, part: fields[part][:1]})
    with pytest.raises(ValueError, match=name):
        choose_tokens(logits, key, tops)
