"""The verifier as the coordinator sees it: one question a step, an answer or None.

Owns which finished requests the verifier has yet to hear of, and keeps the lease: a verifier serves one manager at a
time. A death is noticed through the registry, at once.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from request_manager.manager.registry import Registry, Worker
from treecore.codec import decode, encode
from treecore.errors import Unavailable, Unreachable, WireError
from treecore.messages import RequestId, VerifyItem, VerifyReply, VerifyRequest, WorkerId, step_subject
from treecore.service.bus import Bus
from treecore.service.telemetry import log_event
from treecore.service.tracing import current_trace
from treecore.sessions import LEASE_S, session_of

logger = logging.getLogger(__name__)

_DEADLINE_S = 300.0  # bounds what neither broker nor registry noticed
_RETRY_S = 0.1
_LEAVE_S = 1.0
KEEP_LEASE_S = LEASE_S / 3
"""How often a manager without work asks, so that the verifier stays its own."""


class VerifierLink:
    """Talks to the live verifier, one message at a time."""

    def __init__(self, bus: Bus, registry: Registry) -> None:
        self._bus = bus
        self._registry = registry
        self._released: set[RequestId] = set()
        self._last: WorkerId | None = None
        self._num_changes = 0

    def release(self, request_id: RequestId) -> None:
        """Tell the verifier with the next message that the request is over."""
        self._released.add(request_id)

    async def worker(self) -> Worker | None:
        """A live verifier that serves no other manager, or None after waiting a moment for one."""
        usable = self._registry.verifiers()
        if usable:
            return usable[0]
        self._registry.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S):
                await self._registry.changed.wait()
        return None

    async def ask(self, worker: Worker, items: Sequence[VerifyItem]) -> VerifyReply:
        """The answer. Asking again is always safe.

        Raises Unavailable if the verifier is gone or its answer unusable, Unreachable if it has not even been asked or
        serves another manager, WireError if the question is too large for a message.
        """
        released = tuple(self._released)
        request = VerifyRequest(self._session_with(worker), released, tuple(items), trace=current_trace())
        body = encode(request)
        try:
            reply = decode(await self._exchange(worker, body), VerifyReply)
        except (Unavailable, WireError) as error:
            log_event(logger, logging.WARNING, "step not verified", worker_id=worker.worker_id, error=error)
            self._registry.lose(worker.worker_id)
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(str(error)) from error
        worker.announcement = replace(worker.announcement, holder=reply.holder)
        if reply.holder != self._registry.me:
            raise Unreachable(f"{worker.worker_id} serves {reply.holder}")
        self._released.difference_update(request.released)
        return reply

    async def leave(self) -> None:
        """Give the verifier up, so that another manager need not wait for the lease to end."""
        workers = [worker for worker in self._registry.verifiers() if worker.announcement.holder == self._registry.me]
        for worker in workers:
            request = VerifyRequest(self._session_with(worker), (), (), leaves=True)
            with suppress(Unavailable, WireError):
                await self._bus.request(step_subject("verifier", worker.worker_id), encode(request), _LEAVE_S)

    def _session_with(self, worker: Worker) -> str:
        """Another one at every change of verifier: one that is used again forgets what was over in the meantime."""
        if worker.worker_id != self._last:
            self._last = worker.worker_id
            self._num_changes += 1
        return session_of(self._registry.me, self._num_changes)

    async def _exchange(self, worker: Worker, body: bytes) -> bytes:
        async with worker.life.hold():
            return await self._bus.request(step_subject("verifier", worker.worker_id), body, _DEADLINE_S)
