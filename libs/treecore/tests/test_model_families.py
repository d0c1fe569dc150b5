"""Every family against transformers, whole and cut over tensor-parallel ranks and pipeline stages.

Contexts of 20 and more with windows of 4; three layers, three KV heads (or one) and 61 tokens, which nothing divides.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from treecore.testing.families import CASES, load_reference, write_family
from treecore.testing.ranks import ThreadGroup
from treecore.testing.runner import Runner
from treecore.testing.trees import random_parents

GROUPS = ((1, 1), (2, 1), (1, 2), (2, 2))


@dataclass(frozen=True, slots=True)
class Pair:
    """The same checkpoint here, cut or whole, and in transformers."""

    group: ThreadGroup
    model: PreTrainedModel

    def last_logits(self, texts: list[list[int]]) -> torch.Tensor:
        """Of transformers, behind the last token of each text: plain causal forwards, padded where none sees it."""
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        with torch.inference_mode():
            logits = self.model(padded).logits
        return torch.stack([row[len(text) - 1] for row, text in zip(logits, texts, strict=True)])


def runner_of(group: ThreadGroup) -> Runner:
    """Over caches full of NaN: whatever reads a slot that was not written shows."""
    pools = group.new_pool(256)
    for stage in pools.stages:
        for pool in stage:
            pool.kv.fill_(float("nan"))
    return Runner(lambda batch: group.forward(batch, pools), pools)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    """A family's checkpoint, and transformers' reading of it."""
    path = write_family(tmp_path_factory.mktemp(request.param), request.param)
    return path, load_reference(path)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def pair(request: pytest.FixtureRequest, checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[Pair]:
    """Each family on each number of ranks and stages."""
    path, model = checkpoint
    group = ThreadGroup(path, *request.param, dtype="float32")
    yield Pair(group, model)
    group.close()


def random_tokens(seed: int, length: int) -> list[int]:
    """Tokens of the tiny vocabulary, none of them the padding's."""
    return np.random.default_rng(seed).integers(1, 61, length).tolist()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every entry within 1e-4, of logits that differ by units."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_prefill_equals_transformers_at_every_position(pair: Pair) -> None:
    """One segment with every row's logits, far beyond the window."""
    run, tokens = runner_of(pair.group), random_tokens(0, 100)
    run.cache.advance("a", 0, tokens)
    segment = replace(run.cache.next_segment("a"), logit_rows=np.arange(len(tokens)))
    with torch.inference_mode():
        expected = pair.model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3
    assert_close(run.forward(segment)[0], expected)


def test_chunks_and_single_steps_equal_one_prefill(pair: Pair) -> None:
    """Prefill in chunks of 7, then five tokens one by one."""
    run, tokens = runner_of(pair.group), random_tokens(1, 30)
    run.cache.advance("a", 0, tokens[:25])
    logits = [run.pending("a", max_rows=7)]
    for length in range(25, 30):
        run.cache.advance("a", length, [tokens[length]])
        logits.append(run.pending("a"))
    assert_close(torch.cat(logits), pair.last_logits([tokens[:length] for length in range(25, 31)]))


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**20), num_nodes=st.integers(2, 14), max_rows=st.sampled_from([None, 3]))
def test_every_node_of_a_tree_equals_a_plain_forward_over_its_path(
    pair: Pair, seed: int, num_nodes: int, max_rows: int | None
) -> None:
    """Definition 4.1: trees behind contexts of 20, cached or in the same pass, grown at once or by levels."""
    rng = np.random.default_rng(seed)
    prompt, tokens = random_tokens(seed, 20), random_tokens(seed + 1, num_nodes - 1)
    parents = random_parents(rng, num_nodes)
    run = runner_of(pair.group)
    run.cache.advance("a", 0, prompt)
    if seed % 2:
        run.pending("a")
        run.cache.advance("a", 0, prompt)
    run.cache.extend("a", tokens, parents[1:])
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents[1:], strict=True):
        paths.append([*paths[parent], token])
    assert_close(run.pending("a", max_rows), pair.last_logits([prompt + path for path in paths]))


def test_requests_in_one_batch_do_not_see_each_other(pair: Pair) -> None:
    """Contexts of 1 to 40, within a window and beyond it, each with a tree, in one forward."""
    run = runner_of(pair.group)
    prompts = {f"r{length}": random_tokens(length, length) for length in (1, 3, 5, 9, 33, 40)}
    for request_id, prompt in prompts.items():
        run.cache.advance(request_id, 0, prompt)
        run.cache.extend(request_id, [7, 8, 9], [0, 0, 2])
    logits = run.forward(*(run.cache.next_segment(request_id) for request_id in prompts))
    for prompt, own in zip(prompts.values(), logits, strict=True):
        assert_close(own, pair.last_logits([prompt + path for path in ([], [7], [8], [8, 9])]))


def test_an_accepted_path_is_kept_and_the_rest_leaves_no_trace(pair: Pair) -> None:
    """Rows move in all pools alike."""
    run, prompt = runner_of(pair.group), random_tokens(3, 18)
    run.cache.advance("a", 0, prompt)
    run.cache.extend("a", [7, 8, 9, 10], [0, 0, 2, 3])
    run.pending("a")
    assert run.cache.advance("a", len(prompt), [8, 9, 11]) == len(prompt) + 2
    assert_close(run.pending("a"), pair.last_logits([[*prompt, 8, 9, 11]]))
