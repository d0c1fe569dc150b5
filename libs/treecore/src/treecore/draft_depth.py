"""Whether a step should wait for a draft, and how deep: what drafts have been worth against what they cost.

Knows probabilities by depth and prices; must not know requests, workers or tokens. Mutable: one owner.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities, StepPrice
from treecore.costs import ForwardCosts
from treecore.forest import USUAL_RATES, Forest, num_equal_before

_DEEPEST, _WIDEST = 16, len(USUAL_RATES)
_NEW_DRAFT, _NEW_STEP = 0.1, 0.03  # weights of the latest; a step's tokens say little, and both decide about the next
_MOST_EXPLORED, _LEAST_EXPLORED = 0.03, 0.01  # of all time goes to drafts that do not look worth it
_TIRING = 0.9  # the more of these have come to nothing, the less
_SETTLED = 8  # steps for which a draft that is not worth it is not considered again, as long as none was seen
_FALL = 0.6  # from depth to depth, before any draft

Milliseconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """What waiting for a draft means in this step.

    price: of the step without waiting. draft: an SSM's forward, over `width` rows for each waiting request; wait_ms:
    what waiting costs beside (bus). Of num_requests, num_waiting have no candidates and would get them, up to max_depth
    deep and max_nodes large (the root included).
    """

    price: StepPrice
    draft: ForwardCosts
    width: int
    wait_ms: float
    num_requests: int
    num_waiting: int
    max_depth: int
    max_nodes: int


@dataclass(slots=True)
class _Declined:
    """An offer that was not worth it; depth: its best draft's, which takes draft_ms."""

    offer: DraftOffer
    depth: int
    draft_ms: float
    num_left: int = _SETTLED

    def is_like(self, offer: DraftOffer) -> bool:
        """Whether the same would be found of `offer`, but for what changes slowly."""
        mine, theirs = self.offer, offer
        return (mine.num_requests, mine.num_waiting, mine.max_depth, mine.width, mine.price.num_other_rows) == (
            theirs.num_requests, theirs.num_waiting, theirs.max_depth, theirs.width, theirs.price.num_other_rows
        )  # fmt: skip


class DraftDepth:
    """Remembers, by depth, how likely the best nodes of recent drafts were, and how fast steps have been.

    A draft of D forwards brings nodes of depth <= D as likely as those, and the step keeps those that are worth it. D
    is chosen for the most (tokens - going rate * ms): a slower step must bring more than its time brings elsewhere. The
    going rate is held as a multiple of verifying roots alone, so that it means something for a batch of any size.
    """

    def __init__(self) -> None:
        self._likely = np.multiply.outer(_FALL ** np.arange(_DEEPEST), USUAL_RATES)  # [depth - 1, place]: mean path_p
        self._speedup = 1.0
        self._explored = _MOST_EXPLORED
        self._unspent_ms = 0.0
        self._declined: _Declined | None = None

    def observe(self, forest: Forest, path_p: Probabilities, waited: NDArray[np.bool_]) -> None:
        """All candidates of a step. waited: bool [R], the requests whose drafts were waited for; none came to none."""
        if not waited.any():
            return
        self._declined = None
        R, num_levels = forest.num_requests, min(len(forest.levels), _DEEPEST) or _DEEPEST
        order = R + np.argsort(-path_p[R:], kind="stable")
        order = order[waited[forest.requests[order]] & (forest.depths[order] <= num_levels)]
        places = num_equal_before(forest.requests[order] * (num_levels + 1) + forest.depths[order])
        order, places = order[places < _WIDEST], places[places < _WIDEST]
        seen = np.zeros((num_levels, _WIDEST))
        np.add.at(seen, (forest.depths[order] - 1, places), path_p[order])
        seen /= waited.sum()
        self._likely[:num_levels] += _NEW_DRAFT * (seen - self._likely[:num_levels])

    def on_step(self, num_requests: int, num_tokens: int, ms: float, price: StepPrice) -> None:
        """A step of `ms` committed so many tokens. price: what it would have cost without a draft."""
        if num_requests == 0 or ms <= 0.0:
            return
        speedup = num_tokens / ms / _plain_rate(num_requests, price)
        self._speedup += _NEW_STEP * (min(speedup, 10.0) - self._speedup)
        self._unspent_ms += self._explored * ms

    def best(self, offer: DraftOffer) -> int:
        """How many forwards to wait for: 0 to verify what there is.

        Now and then a draft that does not seem worth it, so that a better SSM or an idle machine is noticed.
        """
        if offer.num_waiting == 0 or offer.max_depth == 0:
            return 0
        declined = self._declined
        if declined is None or not declined.num_left or not declined.is_like(offer):
            draft_ms = _draft_ms(offer)
            gains = self._gains(offer, draft_ms)
            if found := int(np.argmax(gains)):
                self._explored = _MOST_EXPLORED
                return found
            depth = 1 + int(np.argmax(gains[1:]))
            self._declined = declined = _Declined(offer, depth, float(draft_ms[depth]))
        declined.num_left -= 1
        return self._try(declined)

    def _try(self, declined: "_Declined") -> int:
        """The depth that was declined, if there is time to spend on it, else 0."""
        if self._unspent_ms < declined.draft_ms:
            return 0
        self._explored = max(_LEAST_EXPLORED, _TIRING * self._explored)
        self._unspent_ms = 0.0
        return declined.depth

    def _gains(self, offer: DraftOffer, draft_ms: Milliseconds) -> NDArray[np.float64]:
        """Tokens of a step with a draft of 0, 1, .. forwards, less what its time brings elsewhere."""
        rate = self._speedup * _plain_rate(offer.num_requests, offer.price)
        most = len(draft_ms) - 1
        within = np.repeat(np.tri(most + 1, most, -1), _WIDEST, axis=1)  # [forwards, node]: 1 where a draft has it
        likely = -np.sort(-within * self._likely[:most].ravel(), axis=1)[:, : offer.max_nodes - 1]
        tokens = offer.num_waiting * np.cumsum(np.pad(likely, ((0, 0), (1, 0))), axis=1)
        rows = offer.num_requests + offer.price.num_other_rows + offer.num_waiting * np.arange(tokens.shape[1])
        found: NDArray[np.float64] = (tokens - rate * offer.price.verify.ms(rows)).max(axis=1) - rate * draft_ms
        return found


def forwards_within(ms: float, draft: ForwardCosts, num_rows: int, most: int) -> int:
    """How many forwards over so many rows an SSM finishes in `ms` (drafting ahead), at most `most`."""
    return int(min(most, ms / draft.ms(num_rows)))


def _draft_ms(offer: DraftOffer) -> Milliseconds:
    """Of drafts of 0, 1, .. forwards."""
    forwards: Milliseconds = np.arange(min(offer.max_depth, _DEEPEST) + 1, dtype=np.float64)
    found = forwards * offer.draft.ms(offer.num_waiting * offer.width)
    found[1:] += offer.wait_ms
    return found


def _plain_rate(num_requests: int, price: StepPrice) -> float:
    """Tokens per ms of verifying roots alone."""
    ms = price.fixed_ms + price.verify.ms(num_requests + price.num_other_rows)
    return (num_requests + price.num_other_tokens) / ms
