"""Trees that the grower grows best first, against plain forwards of the same checkpoint over whole texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from ssm_worker.grow import Grower
from treecore.expand import NO_DRAFT, Expansion, Growth
from treecore.messages import DraftItem, DraftReply, DraftRequest, RequestId, WorkerId
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.best_first import BestFirstOracle, Text, told_paths
from treecore.testing.checkpoints import TINY, write_tiny_llama

VOCAB_SIZE = int(TINY["vocab_size"])
CONTEXT_LEN = int(TINY["max_position_embeddings"])
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))
SAMPLED = SamplingParams(0.8, 0, 1.0, Seed(2**63 + 11))
NAIVE = replace(SAMPLED, rule="naive")

LogitsOf = Callable[[Text], NDArray[np.float32]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama; here it is the SSM."""
    return write_tiny_llama(tmp_path_factory.mktemp("ssm") / "tiny", seed=3)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    """Ours."""
    return load_decoder(checkpoint, dtype="float32")


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
    """One step; the integrity equation must hold behind it."""
    reply = grower.step(DraftRequest("me", 0, tuple(map(RequestId, released)), items))
    assert reply.blocks.room + reply.blocks.used == reply.blocks.total
    return reply


def told(reply: DraftReply, request_id: str = "r") -> dict[Text, float]:
    """The tree of one item."""
    (found,) = [entry for entry in reply.items if entry.request_id == request_id]
    return told_paths(found)


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
