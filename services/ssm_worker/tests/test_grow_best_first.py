"""Trees that the grower grows best first, against plain forwards of the same checkpoint over whole texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from ssm_worker.grow import Grower
from treecore.expand import NO_DRAFT, Expansion, Growth
from treecore.messages import DraftItem, DraftReply, RequestId, WorkerId
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.kv_pool import KvPool
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.best_first import BestFirstOracle, Text, told_paths
from treecore.testing.checkpoints import TINY
from treecore.testing.draft_steps import GREEDY, draft_step

VOCAB_SIZE = int(TINY["vocab_size"])
CONTEXT_LEN = int(TINY["max_position_embeddings"])
SAMPLED = SamplingParams(0.8, 0, 1.0, Seed(2**63 + 11))
NAIVE = replace(SAMPLED, rule="naive")

LogitsOf = Callable[[Text], NDArray[np.float32]]


@pytest.fixture(scope="module")
def logits(checkpoint: Path) -> LogitsOf:
    """Theirs: behind a whole text, with transformers."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @cache
    @torch.inference_mode()
    def behind(text: Text) -> NDArray[np.float32]:
        found: NDArray[np.float32] = model(torch.tensor([text])).logits[0, -1].numpy()
        return found

    return behind


def grower(decoder: Decoder, num_blocks: int = 64, block_len: int = 4) -> Grower:
    """A grower that holds nothing."""
    return Grower(WorkerId("s"), HeldRequests(decoder, num_blocks, block_len), VOCAB_SIZE, decoder.output_token_ids)


def item(
    committed: Sequence[int],
    growth: Growth | None,
    start: int = 0,
    params: SamplingParams | None = None,
    request_id: str = "r",
) -> DraftItem:
    """Committed tokens from `start` on, and a growth behind them."""
    sent = np.array(committed[start:], np.int32)
    return DraftItem(RequestId(request_id), 0, start, sent, params, NO_DRAFT, growth)


def step(grower: Grower, *items: DraftItem, released: tuple[str, ...] = ()) -> DraftReply:
    """One step."""
    return draft_step(grower.step, *items, released=released)


def told(reply: DraftReply, request_id: str = "r") -> dict[Text, float]:
    """The tree of one item."""
    (found,) = [entry for entry in reply.items if entry.request_id == request_id]
    return told_paths(found)


class RowCounter:
    """A decoder that remembers how many rows each forward had."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.spec = decoder.spec
        self.rows: list[int] = []

    def new_pool(self, num_slots: int) -> KvPool:
        """See Decoder."""
        return self._decoder.new_pool(num_slots)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """See Decoder."""
        self.rows.append(len(batch.tokens))
        return self._decoder.forward(batch, pool)


def assert_same(found: dict[Text, float], expected: dict[Text, float]) -> None:
    """The same nodes, and the same scores but for rounding."""
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_batch_of_growths_and_expansions_equals_solo_runs(decoder: Decoder, logits: LogitsOf) -> None:
    """In one message, under all laws that grow; a static tree and a prefill among them."""
    rng = np.random.default_rng(8)
    laws, growths = [GREEDY, SAMPLED, NAIVE], [Growth(3, 2, 3, 9), Growth(1, 4, 4, 2), Growth(5, 1, 2, 40)]
    prompts = [rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 50))).tolist() for _ in range(9)]
    items = [item(prompts[idx], growths[idx % 3], 0, laws[idx // 3], f"r{idx}") for idx in range(9)]
    static = replace(item([1, 2], None, 0, GREEDY, "static"), expansion=Expansion((2, 2)))
    reply = step(grower(decoder, 400), static, *items, item([3, 4], None, 0, GREEDY, "prefill"))
    for idx, prompt in enumerate(prompts):
        expected = BestFirstOracle(logits, laws[idx // 3], CONTEXT_LEN).answer(prompt, growths[idx % 3])
        assert_same(told(reply, f"r{idx}"), expected)
    trees = {entry.request_id: entry for entry in reply.items}
    assert (len(trees[RequestId("static")].tokens), len(trees[RequestId("prefill")].tokens)) == (6, 0)
    assert trees[RequestId("static")].scores is None


growths = st.builds(Growth, st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, NAIVE], ids=["greedy", "sampled", "naive"])
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_what_stays_and_grows_on_equals_plain_forwards(
    decoder: Decoder, logits: LogitsOf, params: SamplingParams, data: st.DataObject, seed: int
) -> None:
    """Steps down the tree, beside it or nowhere, messages that come twice: all nodes and scores as if computed anew."""
    ssm, oracle = grower(decoder), BestFirstOracle(logits, params, CONTEXT_LEN)
    committed, start = np.random.default_rng(seed).integers(0, VOCAB_SIZE, seed % 9 + 1).tolist(), 0
    for _ in range(data.draw(st.integers(1, 4))):
        growth = data.draw(growths)
        found = told(step(ssm, item(committed, growth, start, None if start else params)))
        assert_same(found, oracle.answer(committed, growth))
        held_len, moves = len(committed), [(), *found, (data.draw(st.integers(0, VOCAB_SIZE - 1)),)]
        committed = [*committed, *data.draw(st.sampled_from(moves))]
        start = data.draw(st.integers(0, min(held_len, len(committed) - 1)))


def test_nothing_that_stays_is_computed_again(decoder: Decoder) -> None:
    """The root was expanded and its subtree stays: one forward of one row, whatever is committed down the tree."""
    held = RowCounter(decoder)
    ssm = Grower(WorkerId("s"), HeldRequests(held, 64, 4), VOCAB_SIZE, None)
    committed = [3, 1, 4, 1, 5]
    found = told(step(ssm, item(committed, Growth(6, 1, 2, 12), 0, GREEDY)))
    assert held.rows == [5, 1, 1, 1, 1, 1]
    deepest = max((path for path in found if any(other[:-1] == path for other in found)), key=len)
    stays = {path[len(deepest) :] for path in found if path[: len(deepest)] == deepest != path}
    held.rows.clear()
    later = told(step(ssm, item([*committed, *deepest], Growth(1, 1, 2, 12), len(committed))))
    assert held.rows == [1]
    assert stays < later.keys()
    held.rows.clear()
    assert told(step(ssm, item([*committed, *deepest], Growth(0, 1, 2, 12), len(committed)))) == later
    assert held.rows == []


def test_a_static_tree_in_between_drops_the_tree(decoder: Decoder, logits: LogitsOf) -> None:
    """And so do a refusal and other parameters; what grows next starts from the root."""
    ssm, growth = grower(decoder), Growth(2, 2, 2, 9)
    expected = BestFirstOracle(logits, GREEDY, CONTEXT_LEN).answer([1, 2], growth)
    step(ssm, item([1, 2], growth, 0, GREEDY))
    step(ssm, replace(item([1, 2], None, 1), expansion=Expansion((2, 1))))
    assert_same(told(step(ssm, item([1, 2], growth, 1))), expected)
    assert len(step(ssm, item([1, 2, VOCAB_SIZE], growth, 1)).refused) == 1
    assert_same(told(step(ssm, item([1, 2], growth, 1))), expected)
    assert told(step(ssm, item([1, 2], Growth(0, 1, 1, 9), 0, SAMPLED))) == {}
    assert step(ssm, item([1, 2], growth, 1), released=("r",)).refused[0].reason == "state_missing"
    assert step(ssm).blocks.used == 0


def test_a_growth_ends_where_the_context_does(decoder: Decoder) -> None:
    """The last position grows children; no node beyond it does, and nothing is refused."""
    full = [5] * CONTEXT_LEN
    assert set(map(len, told(step(grower(decoder, 100), item(full, Growth(9, 2, 2, 60), 0, GREEDY))))) == {1}
    assert set(map(len, told(step(grower(decoder, 100), item(full[2:], Growth(9, 2, 2, 60), 0, GREEDY))))) == {1, 2, 3}


def test_a_growth_ends_where_blocks_run_out(decoder: Decoder) -> None:
    """What there is by then is told; the other request is not harmed."""
    small = grower(decoder, num_blocks=4)
    other = item([4, 5], Growth(1, 1, 2, 4), 0, GREEDY, "other")
    reply = step(small, item([1] * 11, Growth(8, 2, 2, 60), 0, GREEDY), other)
    assert reply.refused == ()
    assert 0 < len(told(reply)) < 16
    assert len(told(reply, "other")) == 2
    assert step(small, released=("r", "other")).blocks.used == 0


def test_a_growth_without_end_stays_small(decoder: Decoder) -> None:
    """Nodes that would not be told are not expanded, so that forwards end by themselves."""
    reply = step(grower(decoder), item([1, 2], Growth(10**6, 3, 4, 8), 0, GREEDY))
    assert len(told(reply)) == 8


@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
def test_draws_never_grow_by_their_scores(decoder: Decoder, rule: str) -> None:
    """Refused, and nothing else is."""
    drawn = replace(SAMPLED, rule=rule)
    reply = step(grower(decoder), item([1], Growth(1, 1, 2, 4), 0, drawn), item([1], Growth(1, 1, 2, 4), 0, NAIVE, "x"))
    assert [(refused.request_id, refused.reason) for refused in reply.refused] == [("r", "malformed_message")]
    assert len(told(reply, "x")) == 2
