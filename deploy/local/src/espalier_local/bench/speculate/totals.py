"""What the manager's steps did between two moments, from its /metrics. Must not know what was asked of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from treecore.errors import Unavailable

_STEPS = "espalier_steps_total"
_NODES = "espalier_draft_tokens_total"
_PART_S = 'espalier_step_part_seconds_sum{{part="{}"}}'
_DRAFT = ("wait", "draft_forward", "draft_sample", "draft_wire", "merge")
_VERIFY = ("verify_forward", "verify_sample", "verify_wire")
_AHEAD = 'espalier_trees_total{drafted="ahead"}'
_IN_STEP = 'espalier_trees_total{drafted="in_step"}'
_PROPOSED = 'espalier_ssm_draft_tokens_total{{ssm="{}"}}'
_ACCEPTED = 'espalier_ssm_accepted_tokens_total{{ssm="{}"}}'
_KEPT = tuple(name.partition("{")[0] for name in (_STEPS, _NODES, _PART_S, _AHEAD, _IN_STEP, _PROPOSED, _ACCEPTED))


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over LLM steps: the manager's counters by their names in /metrics. One that is not there is 0."""

    counters: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "StepTotals") -> "StepTotals":
        names = {**self.counters, **other.counters}
        return StepTotals({name: self._of(name) + other._of(name) for name in names})

    def since(self, earlier: "StepTotals") -> "StepTotals":
        """What came in between."""
        return StepTotals({name: self._of(name) - earlier._of(name) for name in self.counters})

    @property
    def nodes_per_step(self) -> float:
        """Nodes below the roots, over all requests of a step."""
        return self._per_step(_NODES)

    @property
    def draft_ms(self) -> float:
        """How long a step takes until its trees are there: waiting for SSMs, merging, choosing."""
        return 1e3 * (self._per_step(_PART_S.format("draft")) or self._per_step_in(_DRAFT))

    @property
    def verify_ms(self) -> float:
        """How long a step waits for the LLM."""
        return 1e3 * (self._per_step(_PART_S.format("verify")) or self._per_step_in(_VERIFY))

    @property
    def hidden_share(self) -> float | None:
        """Of the trees, those whose draft was asked for while the LLM verified others; None without trees."""
        num_trees = self._of(_AHEAD) + self._of(_IN_STEP)
        return self._of(_AHEAD) / num_trees if num_trees else None

    def nodes_per_step_of(self, ssm_name: str) -> float:
        """Verified nodes that this SSM proposed."""
        return self._per_step(_PROPOSED.format(ssm_name))

    def accepted_share_of(self, ssm_name: str) -> float | None:
        """Of the nodes that this SSM proposed, those that became tokens; None without any."""
        proposed = self._of(_PROPOSED.format(ssm_name))
        return self._of(_ACCEPTED.format(ssm_name)) / proposed if proposed else None

    def _per_step_in(self, parts: Sequence[str]) -> float:
        """Seconds. Journals of November 2026 have one part for all of these, which may hold more of them."""
        return sum(self._per_step(_PART_S.format(part)) for part in parts)

    def _per_step(self, name: str) -> float:
        return self._of(name) / max(1.0, self._of(_STEPS))

    def _of(self, name: str) -> float:
        return self.counters.get(name, 0.0)


async def read_totals(client: httpx.AsyncClient) -> StepTotals:
    """The sums since the manager's start; raises Unavailable."""
    try:
        response = await client.get("/metrics")
        return totals(response.raise_for_status().text)
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise Unavailable(f"no metrics of the manager's steps: {error or type(error).__name__}") from error


def totals(text: str) -> StepTotals:
    """The sums in a page of Prometheus' text format. Raises LookupError if it has none, ValueError."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(_KEPT)]
    found = {name: float(value) for name, value in lines}
    if _STEPS not in found:
        raise LookupError(_STEPS)
    return StepTotals(found)
