"""What the manager's steps did between two moments, from its /metrics. Must not know what was asked of it."""

from dataclasses import dataclass

import httpx

from treecore.errors import Unavailable


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over LLM steps. num_nodes: below the roots, over all requests. *_ms: the steps' waits for that answer."""

    num_steps: float = 0.0
    num_nodes: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(
            self.num_steps + other.num_steps,
            self.num_nodes + other.num_nodes,
            self.draft_ms + other.draft_ms,
            self.verify_ms + other.verify_ms,
        )

    def since(self, earlier: "StepTotals") -> "StepTotals":
        """What came in between."""
        return StepTotals(
            self.num_steps - earlier.num_steps,
            self.num_nodes - earlier.num_nodes,
            self.draft_ms - earlier.draft_ms,
            self.verify_ms - earlier.verify_ms,
        )


async def read_totals(client: httpx.AsyncClient) -> StepTotals:
    """The sums since the manager's start; raises Unavailable."""
    try:
        response = await client.get("/metrics")
        return totals(response.raise_for_status().text)
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise Unavailable(f"no metrics of the manager's steps: {error or type(error).__name__}") from error


def totals(text: str) -> StepTotals:
    """The sums in a page of Prometheus' text format. Raises LookupError if they are not there, ValueError."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    found = {line[0]: float(line[-1]) for line in lines}
    return StepTotals(
        num_steps=found["espalier_steps_total"],
        num_nodes=found["espalier_draft_tokens_total"],
        draft_ms=1e3 * found['espalier_step_part_seconds_sum{part="draft"}'],
        verify_ms=1e3 * found['espalier_step_part_seconds_sum{part="verify"}'],
    )
