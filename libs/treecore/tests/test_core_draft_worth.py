"""What drafts are worth: as many likely nodes as they had, at any price; and hope where little was seen lately."""

import numpy as np
import pytest

from treecore.choice import StepPrice
from treecore.costs import ForwardCosts
from treecore.draft_worth import DraftWorth
from treecore.forest import ScoredDraft, merge_drafts
from treecore.messages import ForwardCost

ALL = np.array([True])


def price(row_ms: float) -> StepPrice:
    """Of steps of 20 ms and so much more a row."""
    return StepPrice(ForwardCosts([ForwardCost(1, 20.0), ForwardCost(101, 20.0 + 100 * row_ms)]), 0.0)


def seen(*drafts: list[float], count: int = 200) -> DraftWorth:
    """So many drafts, in turns, of one level of nodes as likely as that."""
    worth = DraftWorth()
    for idx in range(count):
        path_p = drafts[idx % len(drafts)]
        tokens = np.arange(len(path_p), dtype=np.int32)
        forest = merge_drafts([0], [[ScoredDraft(0, tokens, np.zeros(len(path_p), np.int32))]])
        worth.observe(forest, np.array([1.0, *path_p]), ALL, 1, 16)
    return worth


@pytest.mark.parametrize("row_ms", [0.0, 2.0, 5.0, 9.0])
def test_nodes_are_verified_where_they_bring_more_than_their_row(row_ms: float) -> None:
    """Drafts of one sure node or one unlikely one: of half of them the node is verified, where rows are dear."""
    rate, hope = 1 / 20.0, 1.0 + 0.5 * 0.1**0.5
    by_hand = sum(max(0.0, hope * p - rate * row_ms) for p in (0.95, 0.15)) / 2
    worth = seen([0.95], [0.15])
    found = [worth.gains(price(row_ms), rate, 1, 1, depth) for depth in (0, 1, 16)]
    assert found[0].tolist() == [0.0]
    assert found[1][1] == pytest.approx(by_hand, rel=0.15)
    assert found[2].max() == pytest.approx(found[1][1], abs=0.01), "nothing lies deeper"


def test_a_batch_gains_what_its_requests_do() -> None:
    """Ten requests with drafts, ten times one's; those without have no part in it."""
    worth = seen([0.5, 0.2])
    one = worth.gains(price(1.0), 1 / 20.0, 1, 1, 1)
    assert worth.gains(price(1.0), 1 / 20.0, 10, 10, 1) == pytest.approx(10 * one)
    assert worth.gains(price(1.0), 1 / 20.0, 10, 1, 1) == pytest.approx(one)


def test_hope_grows_while_nothing_is_seen() -> None:
    """A few poor drafts are not the end: the longer ago, the less they count."""
    worth = seen([0.3])
    before = worth.gains(price(0.0), 1 / 20.0, 1, 1, 1)[1]
    nothing = merge_drafts([0], [[]])
    for _ in range(1000):
        worth.observe(nothing, np.ones(1), ~ALL, 0, 16)
    after = worth.gains(price(0.0), 1 / 20.0, 1, 1, 1)[1]
    assert 1.2 * before < after < 2.5 * before
