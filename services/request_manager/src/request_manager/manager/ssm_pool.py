"""All SSM workers together: where each request drafts, and the trees that arrive by the deadline.

One SSM (a name) has one or more replicas (workers); a request keeps its replica while that lives, because the draft
cache is there. Every SSM contributes one tree a request.
"""

import asyncio
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from request_manager.manager.drafting import NOTHING, Drafter, DraftLink, Drafts, DraftWish, Grown
from request_manager.manager.registry import Registry, Worker
from request_manager.manager.step_record import ModelTimes, Observer
from treecore.messages import Announcement, ForwardCost, RequestId, WorkerId
from treecore.service.bus import Bus
from treecore.sessions import session_of
from treecore.tree import TokenTree

DraftCosts = tuple[tuple[str, ForwardCost, float], ...]
"""(SSM, its forward, ms of the exchange beside forwards and sampling)."""


@dataclass(frozen=True, slots=True)
class DraftRound:
    """What one round of drafting brought. times: of the SSM that took longest."""

    trees: dict[RequestId, list[TokenTree]]
    grown: dict[RequestId, list[Grown]]
    times: ModelTimes
    costs: DraftCosts

    @classmethod
    def of(cls, drafters: Sequence[Drafter], answers: Sequence[Drafts]) -> "DraftRound":
        """All SSMs' answers together."""
        trees: dict[RequestId, list[TokenTree]] = defaultdict(list)
        grown: dict[RequestId, list[Grown]] = defaultdict(list)
        for answer in answers:
            for request_id, tree in answer.trees.items():
                trees[request_id].append(tree)
            for request_id, draft in answer.grown.items():
                grown[request_id].append(draft)
        slowest = max(answers, key=lambda answer: answer.forward_ms, default=NOTHING)
        costs = [
            (drafter.worker.announcement.name, answer.cost, answer.other_ms)
            for drafter, answer in zip(drafters, answers, strict=True)
            if answer.cost is not None
        ]
        times = ModelTimes(slowest.forward_ms, slowest.sample_ms, slowest.other_ms)
        return cls(trees, grown, times, tuple(costs))


NO_DRAFTS = DraftRound({}, {}, ModelTimes(), ())


class SsmPool:
    """Owns the drafters and the placement of requests on them."""

    def __init__(self, bus: Bus, registry: Registry, observer: Observer) -> None:
        self._bus = bus
        self._registry = registry
        self._observer = observer
        self._drafters: dict[WorkerId, Drafter] = {}
        self._num_drafters = 0
        self._placed: dict[tuple[RequestId, str], WorkerId] = {}

    async def draft(self, wishes: Sequence[DraftWish], deadline_s: float) -> DraftRound:
        """The trees of all SSMs that answered within `deadline_s`.

        No step waits for an SSM to read prompts before it grows trees best first; it reads after `begin`.
        """
        due = [
            (drafter, [wish for wish in share if wish.growth is None or drafter.could_draft(wish)])
            for drafter, share in self._lanes(wishes)
        ]
        lanes = [(drafter, share) for drafter, share in due if share]
        answers = await asyncio.gather(*[drafter.draft(share, deadline_s) for drafter, share in lanes])
        return DraftRound.of([drafter for drafter, _ in lanes], answers)

    @property
    def is_drafting(self) -> bool:
        """Whether an SSM is at work on what `collect` would wait for."""
        return any(drafter.is_drafting for drafter in self._drafters.values())

    async def collect(self, deadline_s: float) -> DraftRound:
        """What the SSMs drafted ahead, as far as it is there within `deadline_s`."""
        self._follow_registry()
        drafters = [drafter for drafter in self._drafters.values() if drafter.owes_answer]
        if not drafters:  # and nobody else has his turn now, but while the LLM is at work
            return NO_DRAFTS
        return DraftRound.of(drafters, await asyncio.gather(*[drafter.collect(deadline_s) for drafter in drafters]))

    def unread(self, wishes: Sequence[DraftWish]) -> dict[RequestId, int]:
        """The requests for which an SSM could draft at once, and how many tokens it would read first."""
        found: dict[RequestId, int] = {}
        for drafter, share in self._lanes(wishes):
            for wish in filter(drafter.could_draft, share):
                request_id = wish.request.request_id
                found[request_id] = max(drafter.num_unread(wish), found.get(request_id, 0))
        return found

    def begin(
        self, trees: Sequence[DraftWish], prompts: Sequence[DraftWish], behind: Sequence[DraftWish]
    ) -> frozenset[RequestId]:
        """Have the SSMs grow trees, and read, while the LLM is at work; returns for whom one drafts.

        An SSM that has yet to read the tokens of a tree cannot grow it; of `behind` it reads those that it has not.
        """
        asked: set[RequestId] = set()
        due = {wish.request.request_id for wish in prompts}
        for drafter, share in self._lanes([*trees, *prompts, *behind]):
            growing = [wish for wish in share if wish.growth is not None and drafter.has_read(wish)]
            reading = [
                wish
                for wish in share
                if wish.growth is None and (wish.request.request_id in due or not drafter.has_read(wish))
            ]
            if drafter.begin([*growing, *reading]):
                asked.update(wish.request.request_id for wish in growing)
        return frozenset(asked)

    def release(self, request_id: RequestId) -> None:
        """The request is over: forget its placement, and have the workers free its cache with the next message."""
        for key in [key for key in self._placed if key[0] == request_id]:
            del self._placed[key]
        for drafter in self._drafters.values():
            drafter.release(request_id)

    def flush(self) -> None:
        """Send what is released now, because no step will carry it."""
        for drafter in self._drafters.values():
            drafter.begin(())

    @property
    def owes_release(self) -> bool:
        """Whether a live worker may still hold requests that are over."""
        self._follow_registry()
        return any(drafter.owes_release for drafter in self._drafters.values())

    def name_of(self, ssm_idx: int) -> str:
        """The SSM of that number in a tree; empty if it is gone."""
        names = (worker.announcement.name for worker in self._registry.live("ssm"))
        return next((name for name in names if ssm_index(name) == ssm_idx), "")

    def live(self) -> list[Announcement]:
        """An announcement of each SSM that can draft now."""
        return [replicas[0].announcement for replicas in self._replicas().values()]

    def _lanes(self, wishes: Sequence[DraftWish]) -> list[tuple[Drafter, list[DraftWish]]]:
        self._follow_registry()
        shares: dict[WorkerId, list[DraftWish]] = defaultdict(list)
        for name, replicas in self._replicas().items():
            for wish in wishes:
                if not wish.request.generation.may_draft(name):
                    continue
                worker = self._place(wish.request.request_id, replicas)
                if wish.last_position < worker.announcement.context_len:
                    shares[worker.worker_id].append(wish)
        return [(self._drafters[worker_id], share) for worker_id, share in shares.items()]

    def _replicas(self) -> dict[str, list[Worker]]:
        """Live workers of each SSM. One with another vocabulary than the LLM's cannot draft for it.

        The LLM is the first verifier's; others, which may have another model, take over when it is gone.
        """
        found: dict[str, list[Worker]] = defaultdict(list)
        vocab_sizes = {worker.announcement.vocab_size for worker in self._registry.verifiers()[:1]}
        for worker in self._registry.live("ssm"):
            if worker.announcement.vocab_size in vocab_sizes:
                found[worker.announcement.name].append(worker)
        return found

    def _place(self, request_id: RequestId, replicas: list[Worker]) -> Worker:
        key = (request_id, replicas[0].announcement.name)
        for worker in replicas:
            if self._placed.get(key) == worker.worker_id:
                return worker
        load = Counter(self._placed.values())
        chosen = min(replicas, key=lambda worker: load[worker.worker_id])
        self._placed[key] = chosen.worker_id
        return chosen

    def _follow_registry(self) -> None:
        live = {worker.worker_id: worker for worker in self._registry.live("ssm")}
        for worker_id, drafter in list(self._drafters.items()):
            if live.get(worker_id) is not drafter.worker:
                self._drafters.pop(worker_id).close()
        for worker_id in live.keys() - self._drafters.keys():
            ssm_idx = ssm_index(live[worker_id].announcement.name)
            self._num_drafters += 1
            session = session_of(self._registry.me, self._num_drafters)  # who was lost and is back forgets what it held
            self._drafters[worker_id] = Drafter(DraftLink(self._bus, session, live[worker_id], ssm_idx, self._observer))


def ssm_index(name: str) -> int:
    """An SSM's number in trees: the same wherever and whenever it runs."""
    return zlib.crc32(name.encode())
