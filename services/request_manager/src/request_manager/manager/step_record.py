"""What one step did and where its time went: the one thing that metrics and benchmarks read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from treecore.messages import BlockUsage, WorkerId


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times in ms.

    num_requests took part; num_drafted nodes below the roots were verified; accepted_per_depth[i] requests accepted one
    at depth i + 1; num_committed tokens are new. num_asked tokens of prompts were sent, num_found of them were cached.
    draft: until the trees are there, merged and chosen; verify: from then to having the answer; *_forward: inside the
    models' forwards, of the SSMs' those that the step asked for; sample: choosing tokens from logits, in both models.
    num_trees requests verified nodes, num_hidden of them such as were drafted before the step began. proposed,
    accepted: by SSM, its nodes that were verified, that became tokens.
    """

    num_requests: int
    num_drafted: int
    accepted_per_depth: tuple[int, ...]
    num_committed: int
    total_ms: float
    draft_ms: float
    draft_forward_ms: float
    verify_ms: float
    verify_forward_ms: float
    sample_ms: float
    num_asked: int = 0
    num_found: int = 0
    num_trees: int = 0
    num_hidden: int = 0
    proposed: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_accepted(self) -> int:
        """Drafted nodes that became tokens."""
        return sum(self.accepted_per_depth)

    @property
    def overhead_ms(self) -> float:
        """Everything else: bus, codec, merge, accept, scheduling, and the wait for the end of drafts made ahead."""
        return self.total_ms - self.draft_forward_ms - self.verify_forward_ms - self.sample_ms


class Observer(Protocol):
    """Who watches the coordinator."""

    def on_step(self, record: StepRecord) -> None:
        """A step has been committed."""

    def on_blocks(self, worker_id: WorkerId, usage: BlockUsage) -> None:
        """A worker told its cache's usage."""

    def on_load(self, num_running: int, num_waiting: int) -> None:
        """Requests entered or left."""

    def on_preempted(self) -> None:
        """A request lost its blocks to others and waits again."""

    def on_dropped(self, reason: str) -> None:
        """An answer could not be used: late, refused, of another step."""
