"""What one step did and where its time went: the one thing that metrics and benchmarks read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from treecore.costs import ForwardCosts
from treecore.messages import BlockUsage, WorkerId

Model = Literal["draft", "verify"]
Retry = Literal["unreachable", "lost"]
"""Why a step comes again: the verifier was not asked; it did not answer, or not usably."""


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """One exchange with a worker, in ms: inside its forwards, choosing tokens from logits, and all else (`wire`)."""

    forward: float = 0.0
    sample: float = 0.0
    wire: float = 0.0

    @classmethod
    def within(cls, total: float, forward: float, sample: float) -> "ModelTimes":
        """Of an exchange that took `total`; a worker may say of itself what it likes."""
        return cls(forward, sample, max(0.0, total - forward - sample))

    @property
    def total(self) -> float:
        """The whole exchange."""
        return self.forward + self.sample + self.wire


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a step's time went, in ms. The parts do not overlap, and together they are the step.

    wait: for SSMs, beyond the drafts that the step asked for: what was drafted ahead is late, a worker is busy, or does
    not answer. draft_*: of those drafts, at the SSM that took longest. merge: merging and choosing trees. verify_*:
    from the trees being there to having the answer. accept: judging and committing it. *_wire: making and reading
    messages, the bus, the worker's books.
    """

    wait: float = 0.0
    draft_forward: float = 0.0
    draft_sample: float = 0.0
    draft_wire: float = 0.0
    merge: float = 0.0
    verify_forward: float = 0.0
    verify_sample: float = 0.0
    verify_wire: float = 0.0
    accept: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        in_models = self.draft_forward + self.draft_sample + self.verify_forward + self.verify_sample
        return in_models + self.overhead

    @property
    def overhead(self) -> float:
        """Everything but forwards and the choice of tokens."""
        return self.wait + self.draft_wire + self.merge + self.verify_wire + self.accept


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    num_requests took part; num_drafted nodes below the roots were verified; accepted_per_depth[i] requests accepted one
    at depth i + 1; num_committed tokens are new. num_asked tokens of prompts were sent, num_found of them were cached.
    num_trees requests verified nodes, num_hidden of them such as were drafted before the step began. num_expected: of
    the nodes that were chosen by what they bring, so many should become tokens; num_met did. proposed, accepted: by
    SSM, its nodes that were verified, that became tokens.
    """

    num_requests: int
    num_drafted: int
    accepted_per_depth: tuple[int, ...]
    num_committed: int
    parts: StepParts
    num_asked: int = 0
    num_found: int = 0
    num_trees: int = 0
    num_hidden: int = 0
    num_expected: float = 0.0
    num_met: int = 0
    proposed: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_accepted(self) -> int:
        """Drafted nodes that became tokens."""
        return sum(self.accepted_per_depth)


class Observer(Protocol):
    """Who watches the coordinator."""

    def on_admitted(self, queued_s: float) -> None:
        """A request takes part in its first step, so long after it came."""

    def on_step(self, record: StepRecord) -> None:
        """A step has been committed."""

    def on_retried(self, reason: Retry) -> None:
        """A step could not be verified and is planned again."""

    def on_blocks(self, worker_id: WorkerId, usage: BlockUsage) -> None:
        """A worker told its cache's usage."""

    def on_no_verifier(self) -> None:
        """None is there for this manager; what the last one told of its cache no longer holds."""

    def on_llm(self, name: str) -> None:
        """The next step is with the LLM of this name."""

    def on_load(self, num_running: int, num_waiting: int) -> None:
        """So many requests take part in steps, and so many wait; told before each step, and while none is possible."""

    def on_costs(self, model: Model, name: str, costs: ForwardCosts) -> None:
        """What forwards of this model are taken to cost, from now on whenever `costs` is asked."""

    def on_preempted(self) -> None:
        """A request lost its blocks to others and waits again."""

    def on_dropped(self, reason: str) -> None:
        """An answer could not be used: late, refused, of another step."""

    def on_failed(self, code: str) -> None:
        """A request ended with an error."""
