"""Which manager a verifier group serves: one at a time, until it leaves or falls silent (architecture section 7).

The group itself is the arbiter: whoever asks first while it is free has it, and what anybody else asks is not done. So
no clock but the group's own counts, and a manager that was held up cannot disturb the one that took over.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from llm_verifier.engine import Engine
from treecore.messages import VerifyReply, VerifyRequest
from treecore.model.held import HeldRequests
from treecore.sessions import LEASE_S, manager_of


class Lease:
    """Who has the group. clock: seconds, monotonic. `holder` may be read from another thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._holder = ""
        self._until_s = 0.0

    @property
    def holder(self) -> str:
        """The manager that has it; "" if nobody does."""
        return self._holder if self._clock() < self._until_s else ""

    def grant(self, manager: str) -> bool:
        """Whether the manager has it now, because it had or because it was free; for as long as its step takes."""
        if self.holder not in ("", manager):
            return False
        self._holder = manager
        self._until_s = inf
        return True

    def renew(self) -> None:
        """The holder's step has ended: its silence begins now."""
        self._until_s = self._clock() + LEASE_S

    def end(self) -> None:
        """The holder gives it up."""
        self._until_s = 0.0


class Tenancy:
    """An engine that steps for the lease's holder alone. Another holder's requests start from nothing."""

    def __init__(self, engine: Engine, held: HeldRequests, lease: Lease) -> None:
        self._engine = engine
        self._held = held
        self._lease = lease
        self._tenant = ""

    def step(self, request: VerifyRequest) -> VerifyReply:
        """Engine.step, or a reply that says who has the group."""
        manager = manager_of(request.session)
        if not self._lease.grant(manager):
            worker_id = self._engine.worker_id
            return VerifyReply(worker_id, (), (), 0.0, 0.0, self._held.usage(), self._lease.holder)
        if manager != self._tenant or request.leaves:
            self._held.forget_all()
            self._tenant = manager
        reply = self._engine.step(request)
        self._lease.end() if request.leaves else self._lease.renew()
        return replace(reply, holder=self._lease.holder)
