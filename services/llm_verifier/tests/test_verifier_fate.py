"""Who is to blame, from what was noticed in whatever order."""

from itertools import permutations

import pytest

from llm_verifier.group.fate import Ending, Evidence, verdict

GONE = Evidence(3, "gone")
BROKEN = Evidence(2, "broken", "connection reset")
OVERDUE = Evidence(1, "overdue", "timed out")
FAILED = Evidence(1, "failed", "failed: RuntimeError: out of memory")
REFUSED = Evidence(2, "refused", "model.safetensors is corrupt")


@pytest.mark.parametrize(
    ("evidence", "late", "wanted"),
    [
        ([GONE], [], Ending(3, "is gone: its connection has closed")),
        ([BROKEN, GONE, OVERDUE], [0], Ending(3, "is gone: its connection has closed")),
        ([Evidence(3, "silent"), OVERDUE, BROKEN], [2], Ending(3, "has said nothing for 9 s")),
        ([FAILED, GONE], [], Ending(1, "failed: RuntimeError: out of memory")),
        ([REFUSED, GONE], [], Ending(2, "model.safetensors is corrupt", is_refusal=True)),
        ([OVERDUE, BROKEN], [3], Ending(3, "has not joined a collective within 9 s")),
        ([OVERDUE, BROKEN], [], Ending(1, "a collective failed there: timed out")),
        ([BROKEN], [3], Ending(2, "a collective failed there: connection reset")),
    ],
)
def test_the_cause_is_named_not_its_consequences(evidence: list[Evidence], late: list[int], wanted: Ending) -> None:
    """In whatever order the news came."""
    for order in permutations(evidence):
        assert verdict(order, late, 9) == wanted
