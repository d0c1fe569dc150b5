"""Waiting for drafts: only where they bring more than their time, as deep as that holds, and never for ever unasked."""

from dataclasses import replace

import numpy as np
import pytest

from treecore.choice import StepPrice
from treecore.costs import ForwardCosts
from treecore.draft_depth import DraftDepth, DraftOffer, forwards_within
from treecore.forest import Forest, ScoredDraft, merge_drafts
from treecore.messages import ForwardCost


def costs(*points: tuple[int, float]) -> ForwardCosts:
    """Announced ones."""
    return ForwardCosts([ForwardCost(*point) for point in points])


FLAT = costs((1, 20.0), (64, 20.0))
STEEP = costs((1, 20.0), (2, 40.0))  # a row costs as much alone as among others: a loaded machine
FAST, SLOW = costs((1, 1.0), (64, 1.0)), costs((1, 30.0), (64, 30.0))
OFFER = DraftOffer(StepPrice(FLAT, 5.0), FAST, 1, 0.5, num_requests=1, num_waiting=1, num_unread=1, max_depth=8)


def drafted(
    share: float, depth: int = 8, num_requests: int = 1, num_idle: int = 0
) -> tuple[Forest, np.ndarray, np.ndarray]:
    """Chains that were waited for, every node taken with `share` behind its parent; idle requests have none."""
    chain = np.arange(depth, dtype=np.int32)
    batch = [[ScoredDraft(0, chain, chain)]] * num_requests + [[]] * num_idle
    forest = merge_drafts([0] * len(batch), batch)
    return forest, share ** forest.depths.astype(np.float64), np.arange(len(batch)) < num_requests


def after(share: float, count: int = 60, **kwargs: int) -> DraftDepth:
    """Having seen drafts of that worth."""
    depth = DraftDepth()
    for _ in range(count):
        depth.observe(*drafted(share, **kwargs))
    return depth


def by_hand(share: float, draft_ms: float) -> int:
    """The depth with the most tokens - rate * ms, rate that of roots alone, for OFFER with drafts as in `drafted`.

    Of a chance that was seen in 10 drafts a standard error more is hoped for.
    """
    rate, hope = 1 / 25.0, 1.0 + 0.5 * 0.1**0.5
    gains = [
        1.0
        + hope * sum(share**level for level in range(1, depth + 1))
        - rate * (25 + (0.5 + draft_ms * depth if depth else 0))
        for depth in range(9)
    ]
    return int(np.argmax(gains))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft_ms", [1.0, 5.0, 12.0])
def test_the_depth_is_that_of_the_most_tokens_for_the_time(share: float, draft_ms: float) -> None:
    """Against the sum by hand: likely drafts are grown deep, unlikely or dear ones not at all."""
    offer = replace(OFFER, draft=costs((1, draft_ms), (64, draft_ms)))
    assert after(share).best(offer) == by_hand(share, draft_ms)


def test_a_loaded_verifier_is_not_sent_trees() -> None:
    """Where each row costs its full price, a draft that is right half the time is not waited for."""
    offer = replace(OFFER, price=StepPrice(STEEP, 5.0), num_requests=8, num_waiting=8)
    assert after(0.5).best(offer) == 0
    assert after(0.5).best(replace(OFFER, num_requests=8, num_waiting=8)) > 0


def test_the_first_step_waits_for_a_cheap_draft() -> None:
    """Before any draft was seen, a usual one is expected."""
    assert DraftDepth().best(OFFER) > 0
    assert DraftDepth().best(replace(OFFER, draft=SLOW)) == 0


def test_nobody_waits_where_nobody_would_get_anything() -> None:
    """All have candidates, or no tree may grow."""
    assert after(0.9).best(replace(OFFER, num_waiting=0)) == 0
    assert after(0.9).best(replace(OFFER, max_depth=0)) == 0


def test_a_fast_going_rate_makes_time_dear() -> None:
    """Where steps bring much more than roots alone (drafted ahead), a slow draft is not waited for any more."""
    offer, depth = replace(OFFER, draft=costs((1, 12.0), (64, 12.0))), after(0.9)
    assert depth.best(offer) > 0
    for _ in range(15):  # not long enough for an exploration
        depth.on_step(1, 6, 25.0, OFFER.price)
    assert depth.best(offer) == 0


def test_depths_that_were_not_drafted_keep_their_worth() -> None:
    """A shallow draft says nothing of what a deeper one would have found, nor a request without draft of any."""
    dear = replace(OFFER, draft=costs((1, 5.0), (64, 5.0)))
    assert after(0.9, num_idle=9).best(dear) == by_hand(0.9, 5.0) > 0
    deep = after(0.9).best(OFFER)
    depth = after(0.9)
    for _ in range(60):
        depth.observe(*drafted(0.9, depth=1, num_requests=2, num_idle=3))
    assert depth.best(OFFER) == deep


def test_drafts_that_come_to_nothing_are_not_waited_for() -> None:
    """An SSM of repeats has nothing to say where nothing repeats: that is worth nothing, and soon known."""
    depth = after(0.9)
    for _ in range(30):
        depth.observe(merge_drafts([0], [[]]), np.ones(1), np.array([True]))
    assert after(0.9).best(OFFER) > 0 == depth.best(OFFER)


def test_exploring_takes_little_time_and_finds_a_better_ssm() -> None:
    """Useless drafts are tried for 3 % of the time at most; when they turn good, drafting starts again by itself."""
    depth, offer = after(0.01), replace(OFFER, draft=costs((1, 6.0), (64, 6.0)))
    drafting_ms, total_ms = 0.0, 0.0
    for _ in range(2000):
        found = depth.best(offer)
        ms = 25.0 + (0.5 + 6.0 * found if found else 0.0)
        drafting_ms, total_ms = drafting_ms + ms - 25.0, total_ms + ms
        if found:
            depth.observe(*drafted(0.01, found))
        depth.on_step(1, 1, ms, offer.price)
    assert 0.01 < drafting_ms / total_ms < 0.035
    num_drafted = 0
    for _ in range(600):
        found = depth.best(offer)
        num_drafted += found > 0
        if found:
            depth.observe(*drafted(0.9, found))
        depth.on_step(1, 1 + 2 * (found > 0), 25.0 + 6.5 * (found > 0), offer.price)
    assert num_drafted > 100


def test_what_the_ssm_must_read_first_is_part_of_the_wait() -> None:
    """A draft behind hundreds of tokens that it has not seen is as dear as those are."""
    offer = replace(OFFER, draft=costs((1, 1.0), (64, 32.5)))
    assert after(0.6).best(offer) > 0
    assert after(0.6).best(replace(offer, num_unread=200)) == 0
    assert after(0.6).would_wait(offer)
    assert not after(0.6).would_wait(replace(offer, num_unread=200))


def test_the_prompts_of_others_make_no_draft_cheaper() -> None:
    """A step that reads a long prompt is slow for once; a wait costs what it costs in any other step."""
    offer = replace(OFFER, draft=costs((1, 9.0), (64, 9.0)), price=StepPrice(costs((1, 20.0), (100, 40.0)), 5.0))
    assert after(0.3).best(offer) == 0
    assert after(0.3).best(replace(offer, price=replace(offer.price, num_other_rows=800, num_other_tokens=1.0))) == 0


def test_forwards_that_fit_into_a_verification() -> None:
    """Whole ones only, and no more than asked for."""
    assert forwards_within(20.0, costs((1, 3.0)), 4, 99) == 6
    assert forwards_within(20.0, costs((1, 3.0)), 4, 2) == 2
    assert forwards_within(2.0, costs((1, 3.0)), 4, 2) == 0
