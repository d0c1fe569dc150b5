"""Whether a step should wait for a draft, and how deep: what drafts have been worth against what they cost.

Knows probabilities by depth and prices; must not know requests, workers or tokens. Mutable: one owner.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities, StepPrice
from treecore.costs import ForwardCosts
from treecore.draft_worth import DEEPEST, DraftWorth
from treecore.forest import Forest

_NEW_STEP = 0.03  # weight of the latest: its tokens say little, and decide about the next
_MOST_EXPLORED, _LEAST_EXPLORED = 0.03, 0.01  # of all time goes to drafts that do not look worth it
_TIRING = 0.9  # the more of these have come to nothing, the less
_SETTLED = 8  # steps for which a draft that is not worth it is not considered again, as long as none was seen

Milliseconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """What waiting for a draft means in this step.

    price: of the step without waiting. draft: an SSM's forward, over `width` rows for each waiting request; wait_ms:
    what waiting costs beside (bus). Of num_requests, num_waiting have no candidates and would get them, up to max_depth
    deep; the SSM's first forward reads the num_unread last tokens of theirs.
    """

    price: StepPrice
    draft: ForwardCosts
    width: int
    wait_ms: float
    num_requests: int
    num_waiting: int
    num_unread: int
    max_depth: int


@dataclass(slots=True)
class _Considered:
    """An offer, and the depth of its best draft, which takes draft_ms."""

    offer: DraftOffer
    depth: int
    draft_ms: float
    is_worth_it: bool
    num_left: int = _SETTLED

    def is_like(self, offer: DraftOffer) -> bool:
        """Whether the same would be found of `offer`, but for what changes slowly."""
        mine, theirs = self.offer, offer
        return (mine.num_requests, mine.num_waiting, mine.max_depth, mine.width, mine.price.num_other_rows) == (
            theirs.num_requests, theirs.num_waiting, theirs.max_depth, theirs.width, theirs.price.num_other_rows
        )  # fmt: skip


class DraftDepth:
    """Weighs drafts against their wait.

    The depth is chosen for the most (tokens - going rate * ms): a slower step must bring more than its time brings
    elsewhere. The going rate is held as a multiple of verifying roots alone, so that it means something for a batch of
    any size.
    """

    def __init__(self) -> None:
        self._worth = DraftWorth()
        self._speedup = 1.0
        self._explored = _MOST_EXPLORED
        self._unspent_ms = 0.0
        self._declined: _Considered | None = None
        self._foreseen: _Considered | None = None

    def observe(self, forest: Forest, path_p: Probabilities, waited: NDArray[np.bool_]) -> None:
        """All candidates of a step. waited: bool [R], the requests whose drafts were waited for; none came to none."""
        num_waited = int(waited.sum())
        if num_waited:
            self._declined = self._foreseen = None
        self._worth.observe(forest, path_p, waited, num_waited, len(forest.levels) or DEEPEST)

    def on_step(self, num_requests: int, num_tokens: int, ms: float, price: StepPrice) -> None:
        """A step of `ms` committed so many tokens. price: what it would have cost without a draft."""
        if num_requests == 0 or ms <= 0.0:
            return
        speedup = num_tokens / ms / price.plain_rate(num_requests)
        self._speedup += _NEW_STEP * (min(speedup, 10.0) - self._speedup)
        self._unspent_ms += self._explored * ms

    def best(self, offer: DraftOffer) -> int:
        """How many forwards to wait for: 0 to verify what there is.

        Now and then a draft that does not seem worth it, so that a better SSM or an idle machine is noticed.
        """
        if offer.num_waiting == 0 or offer.max_depth == 0:
            return 0
        found = self._considered(offer, self._declined)
        if found.is_worth_it:
            self._declined, self._explored = None, _MOST_EXPLORED
            return found.depth
        self._declined = found
        return self._try(found, offer)

    def would_wait(self, offer: DraftOffer) -> bool:
        """Whether such a draft is worth its wait, were it offered."""
        self._foreseen = self._considered(offer, self._foreseen)
        return self._foreseen.is_worth_it

    def _considered(self, offer: DraftOffer, before: _Considered | None) -> _Considered:
        if before is not None and before.num_left and before.is_like(offer):
            before.num_left -= 1
            return before
        draft_ms = _draft_ms(offer)
        gains = self._gains(offer, draft_ms)
        depth = 1 + int(np.argmax(gains[1:]))
        return _Considered(offer, depth, float(draft_ms[depth]), is_worth_it=bool(gains[depth] > 0.0))

    def _try(self, declined: _Considered, offer: DraftOffer) -> int:
        """The depth that was declined, if there is time to spend on it, else 0."""
        if self._unspent_ms < declined.draft_ms or self._unspent_ms < _draft_ms(offer)[declined.depth]:
            return 0
        self._explored = max(_LEAST_EXPLORED, _TIRING * self._explored)
        self._unspent_ms = 0.0
        return declined.depth

    def _gains(self, offer: DraftOffer, draft_ms: Milliseconds) -> NDArray[np.float64]:
        """Tokens that drafts of 0, 1, .. forwards bring, less what their time brings elsewhere."""
        rate = max(1.0, self._speedup) * offer.price.usual_rate(offer.num_requests)
        depth = min(offer.max_depth, DEEPEST)
        return self._worth.gains(offer.price, rate, offer.num_requests, offer.num_waiting, depth) - rate * draft_ms


def forwards_within(ms: float, draft: ForwardCosts, num_rows: int, most: int) -> int:
    """How many forwards over so many rows an SSM finishes in `ms` (drafting ahead), at most `most`."""
    return int(min(most, ms / draft.ms(num_rows)))


def _draft_ms(offer: DraftOffer) -> Milliseconds:
    """Of drafts of 0, 1, .. forwards."""
    forwards: Milliseconds = np.arange(min(offer.max_depth, DEEPEST) + 1, dtype=np.float64)
    others_ms = offer.draft.ms(offer.num_waiting * offer.width)
    first_ms = offer.draft.ms(max(1, offer.num_unread))
    return np.where(forwards > 0, offer.wait_ms + first_ms + (forwards - 1) * others_ms, 0.0)
