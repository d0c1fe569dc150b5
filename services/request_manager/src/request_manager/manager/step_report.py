"""From what a step did to the record of it. Pure; knows trees and times, must not know who reads the record."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from request_manager.manager.economy import StepTimes
from request_manager.manager.speculator import Drafted, StepTrees
from request_manager.manager.step_record import ModelTimes, StepParts, StepRecord
from request_manager.manager.trial import Trial
from treecore.accept import Accepted
from treecore.messages import RequestId, VerifyReply


@dataclass(frozen=True, slots=True)
class StepClock:
    """Readings of perf_counter: the step began, its trees were there, then the answer, and it was committed."""

    started: float
    drafted: float
    verified: float
    committed: float

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return (self.committed - self.started) * 1e3

    def parts(self, drafted: Drafted, reply: VerifyReply) -> StepParts:
        """Where the time went."""
        draft, waited_ms = drafted.round.times, drafted.waited_ms
        verify = ModelTimes.within((self.verified - self.drafted) * 1e3, reply.forward_ms, reply.sample_ms)
        return StepParts(
            wait=max(0.0, waited_ms - draft.total),
            draft_forward=draft.forward,
            draft_sample=draft.sample,
            draft_wire=draft.wire,
            merge=max(0.0, (self.drafted - self.started) * 1e3 - waited_ms),
            verify_forward=verify.forward,
            verify_sample=verify.sample,
            verify_wire=verify.wire,
            accept=(self.committed - self.verified) * 1e3,
        )


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """All that is known of a step when it is over."""

    trials: Mapping[RequestId, Trial]
    found: StepTrees
    reply: VerifyReply
    accepted: Mapping[RequestId, Accepted]
    clock: StepClock

    def times(self, *, beside_drafts: bool) -> StepTimes:
        """What trees are chosen by."""
        verify_ms, drafted = self.reply.forward_ms + self.reply.sample_ms, self.found.drafted
        return StepTimes(
            self.clock.total_ms, verify_ms, drafted.waited_ms, drafted.late_ms, self._num_found(), beside_drafts
        )

    def record(self, ssm_name: Callable[[int], str]) -> StepRecord:
        """What is told of it. ssm_name: of an SSM's number in trees."""
        trials, accepted, drafted, chosen = self.trials, self.accepted, self.found.drafted, self.found.chosen
        shaped = [accepted[turn.request_id] for turn in self.found.turns if turn.request_id in accepted]
        ahead = sum(trials[request_id].num_drafted > 0 for request_id in drafted.ahead)
        proposed = self._by_ssm({key: range(1, len(trial.tree)) for key, trial in trials.items()})
        kept = self._by_ssm({key: path.nodes for key, path in accepted.items()})
        return StepRecord(
            num_requests=len(trials),
            num_drafted=sum(trial.num_drafted for trial in trials.values()),
            accepted_per_depth=_per_depth(accepted.values()),
            num_committed=sum(len(path.tokens) for path in accepted.values()),
            parts=self.clock.parts(drafted, self.reply),
            num_asked=sum(trial.num_asked for trial in trials.values()),
            num_found=self._num_found(),
            num_trees=sum(trial.num_drafted > 0 for trial in trials.values()),
            num_hidden=ahead if drafted.is_hidden else 0,
            num_expected=0.0 if chosen is None else chosen.num_expected,
            num_met=sum(len(path.nodes) for path in shaped),
            proposed={ssm_name(ssm_idx): count for ssm_idx, count in proposed.items()},
            accepted={ssm_name(ssm_idx): count for ssm_idx, count in kept.items()},
        )

    def _num_found(self) -> int:
        answers = [item for item in self.reply.items if item.request_id in self.trials]
        return sum(self.trials[item.request_id].num_found(item) for item in answers)

    def _by_ssm(self, nodes: Mapping[RequestId, Iterable[int]]) -> Counter[int]:
        """How many of the nodes each SSM proposed."""
        return Counter(
            ssm_idx
            for request_id, chosen in nodes.items()
            for node in chosen
            for ssm_idx in {proposal.ssm_idx for proposal in self.trials[request_id].tree.tries[node]}
        )


def _per_depth(accepted: Collection[Accepted]) -> tuple[int, ...]:
    """How many requests accepted a node at depth 1, 2, ..."""
    deepest = max((len(path.nodes) for path in accepted), default=0)
    return tuple(sum(len(path.nodes) > depth for path in accepted) for depth in range(deepest))
