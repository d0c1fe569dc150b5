"""Who of several scalers acts: the holder of a coordination.k8s.io Lease.

Knows leases. Must not know what is done while one is held.

Writes carry the resourceVersion that was read, so of two that write at once one gets a conflict. A holder counts from
before it asked, on its own monotonic clock, and stops `hold_s` later unless it has renewed; others wait until they have
seen no change for `duration_s`, which is longer by more than an API call may take. So clocks need not agree, and what a
holder sent at the last moment has arrived before anybody else acts. docs/decisions/0012-scaler.md says why this is not
the client's own election.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from kubernetes.aio.client import ApiClient, CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta

from request_manager.scaler.kubernetes import ApiFailed, call
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

_NOT_FOUND, _CONFLICT = 404, 409


@dataclass(frozen=True, slots=True)
class Terms:
    """Times of a lease, in seconds."""

    duration_s: int = 30
    hold_s: float = 20.0
    interval_s: float = 5.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.hold_s + self.timeout_s < self.duration_s, "a call of the last holder may outlast its lease"


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Who (`identity`, unique to a process) wants which lease."""

    namespace: str
    name: str
    identity: str


class Lease:
    """One candidate's view of a lease. `clock` is monotonic, in seconds."""

    def __init__(self, client: ApiClient, candidacy: Candidacy, clock: Callable[[], float], terms: Terms) -> None:
        self._api = CoordinationV1Api(client)
        self._namespace, self._name, self._identity = candidacy.namespace, candidacy.name, candidacy.identity
        self._clock = clock
        self._terms = terms
        self._held_until_s = -math.inf
        self._knows_until_s = -math.inf
        self._was_held = False
        self._seen: tuple[str | None, float] = (None, -math.inf)  # a resourceVersion, and since when it stands

    def is_held(self) -> bool:
        """Whether this candidate may act now."""
        return self._clock() < self._held_until_s

    def knows(self) -> bool:
        """Whether the API has lately said who holds it."""
        return self._clock() < self._knows_until_s

    async def keep(self) -> None:
        """Try to get the lease and to keep it, for ever."""
        while True:
            await self.turn()
            await asyncio.sleep(self._terms.interval_s)

    async def turn(self) -> None:
        """Take the lease if it is free, renew it if it is held, else watch it. Failures are logged, one line each."""
        try:
            await self._take_or_watch()
        except ApiFailed as error:
            if error.status == _CONFLICT:  # somebody else has written: a holder stops before it knows who
                self._held_until_s = -math.inf
            log_event(logger, logging.WARNING, "lease call failed", lease=self._name, error=error)
        if self.is_held() != self._was_held:
            self._was_held = self.is_held()
            event = "lease taken" if self._was_held else "lease lost"
            log_event(logger, logging.INFO, event, lease=self._name, identity=self._identity)

    async def release(self) -> None:
        """Give the lease up if it is ours, so that another candidate need not wait for its end."""
        self._held_until_s = -math.inf
        with suppress(ApiFailed):  # then it ends by itself
            lease = await self._read()
            if lease is not None and _holder(lease) == self._identity:
                await self._replace(lease, "")

    async def _take_or_watch(self) -> None:
        asked_at_s = self._clock()
        lease = await self._read()
        if lease is None:
            await self._create()
        elif self._is_free(lease):
            await self._replace(lease, self._identity)
        else:
            self._knows_until_s, self._held_until_s = asked_at_s + self._terms.hold_s, -math.inf
            return
        self._knows_until_s = self._held_until_s = asked_at_s + self._terms.hold_s

    def _is_free(self, lease: V1Lease) -> bool:
        version = lease.metadata.resource_version if lease.metadata else None
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        duration_s = (lease.spec.lease_duration_seconds if lease.spec else None) or self._terms.duration_s
        return _holder(lease) in ("", self._identity) or self._clock() - self._seen[1] >= duration_s

    async def _read(self) -> V1Lease | None:
        try:
            return await call(self._api.read_namespaced_lease(self._name, self._namespace), self._terms.timeout_s)
        except ApiFailed as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def _create(self) -> None:
        lease = V1Lease(metadata=V1ObjectMeta(name=self._name), spec=self._spec(V1LeaseSpec(), self._identity))
        await call(self._api.create_namespaced_lease(self._namespace, lease), self._terms.timeout_s)

    async def _replace(self, lease: V1Lease, holder: str) -> None:
        changed = lease.model_copy(update={"spec": self._spec(lease.spec or V1LeaseSpec(), holder)})
        await call(self._api.replace_namespaced_lease(self._name, self._namespace, changed), self._terms.timeout_s)

    def _spec(self, old: V1LeaseSpec, holder: str) -> V1LeaseSpec:
        now = _now()
        is_new = old.holder_identity != holder
        is_taken_over = is_new and bool(holder) and old.holder_identity is not None
        return V1LeaseSpec(
            holder_identity=holder,
            lease_duration_seconds=self._terms.duration_s,
            acquire_time=now if is_new else old.acquire_time,
            renew_time=now,
            lease_transitions=(old.lease_transitions or 0) + is_taken_over,
        )


def _holder(lease: V1Lease) -> str:
    return (lease.spec.holder_identity if lease.spec else None) or ""


def _now() -> datetime:
    """The time, for people who look at the lease. The API wants a fraction, and the client leaves one of zero out."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond or 1)
