"""Why a group ended: which rank is to blame, from what ranks have noticed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["refused", "failed", "gone", "silent", "overdue", "broken"]

_STRONG: tuple[Kind, ...] = ("refused", "failed", "gone", "silent")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was noticed.

    refused: `rank` cannot start. failed: it raised. gone: its connection has closed. silent: it sends nothing.
    overdue: it waited in a collective until its deadline. broken: it lost a connection to another rank, a consequence.
    """

    rank: int
    kind: Kind
    text: str = ""

    @property
    def is_strong(self) -> bool:
        """Whether it names its culprit; else it is worth a moment's wait for something that does."""
        return self.kind in _STRONG


@dataclass(frozen=True, slots=True)
class Ending:
    """The rank to blame and why. is_refusal: starting again as it is would end the same."""

    rank: int
    reason: str
    is_refusal: bool = False


def verdict(evidence: Sequence[Evidence], late: Sequence[int], timeout_s: float) -> Ending:
    """The ending that the evidence (at least one) speaks for.

    `late`: ranks that compute or do not answer, and have not reported that a collective of theirs failed.
    """
    first = min(evidence, key=lambda each: _STRONG.index(each.kind) if each.is_strong else len(_STRONG))
    if first.is_strong:
        return Ending(first.rank, _reason(first, timeout_s), first.kind == "refused")
    overdue = [each for each in evidence if each.kind == "overdue"]
    if overdue and late:
        return Ending(late[0], f"has not joined a collective within {timeout_s:g} s")
    worst = (overdue or [first])[0]
    return Ending(worst.rank, f"a collective failed there: {worst.text}")


def _reason(evidence: Evidence, timeout_s: float) -> str:
    if evidence.kind == "gone":
        return "is gone: its connection has closed"
    if evidence.kind == "silent":
        return f"has said nothing for {timeout_s:g} s"
    return evidence.text
