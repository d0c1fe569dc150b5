"""Replicas of Deployments and verifier groups in the Kubernetes API, and nothing else of it.

Knows the API's objects and errors. Must not know why a number is what it is, nor who leads: it asks before every write.
docs/scaling.md lists the rules of the Role that these calls need.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, AppsV1Api, Configuration, V1Scale
from kubernetes.aio.config import ConfigException, load_incluster_config

from treecore.errors import ConfigError, Unavailable

T = TypeVar("T")

_MERGE_PATCH = "application/merge-patch+json"


class ApiFailed(Unavailable):
    """The API refused a call or did not answer; `status` is HTTP's, if there was one. The message is one line."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NotLeader(Unavailable):
    """Another scaler may be acting: nothing was written."""


def connect(url: str | None) -> ApiClient:
    """A client for the API at `url`, or for that of the cluster this runs in. Raises ConfigError."""
    configuration = Configuration(host=url)
    if url is None:
        try:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        except ConfigException as error:
            raise ConfigError(f"not in a cluster ({error}), and no --kubernetes-url") from error
    return ApiClient(configuration)


async def call(request: Awaitable[T], timeout_s: float) -> T:
    """What the API answers; raises ApiFailed, whatever went wrong."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request
    except ApiException as error:
        raise ApiFailed(f"{error.status} {error.reason}: {_message(error)}", error.status) from error
    except TimeoutError as error:
        raise ApiFailed(f"no answer within {timeout_s} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an answer that is no object of the API
        first_line, *_ = str(error).split("\n", 1)
        raise ApiFailed(f"{type(error).__name__}: {first_line}") from error


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, TypeError, KeyError):  # no Status object: something in front of the API has answered
        return "no message"


class Scalable(Protocol):
    """Something with a number of replicas. Both methods raise ApiFailed; `scale` raises NotLeader too."""

    async def replicas(self) -> int:
        """How many it should have, as Kubernetes knows it."""

    async def scale(self, current: int, replicas: int) -> None:
        """Let it have `replicas` instead of `current`; fails if it has another number by now.

        A failure may leave a part of the change done.
        """


@dataclass(frozen=True, slots=True)
class Apps:
    """The API's `scale` subresources in a namespace. `may_write` is asked right before each write."""

    client: ApiClient
    namespace: str
    may_write: Callable[[], bool]
    timeout_s: float

    async def read_deployment(self, name: str) -> V1Scale:
        """The scale of a Deployment."""
        return await call(self._api.read_namespaced_deployment_scale(name, self.namespace), self.timeout_s)

    async def read_stateful_set(self, name: str) -> V1Scale:
        """The scale of a StatefulSet."""
        return await call(self._api.read_namespaced_stateful_set_scale(name, self.namespace), self.timeout_s)

    async def write_deployment(self, scale: V1Scale, replicas: int) -> None:
        """Change a Deployment's replicas, unless it has changed since `scale` was read."""
        await self._write(self._api.patch_namespaced_deployment_scale, scale, replicas)

    async def write_stateful_set(self, scale: V1Scale, replicas: int) -> None:
        """Change a StatefulSet's replicas, unless it has changed since `scale` was read."""
        await self._write(self._api.patch_namespaced_stateful_set_scale, scale, replicas)

    @property
    def _api(self) -> AppsV1Api:
        return AppsV1Api(self.client)

    async def _write(self, patch: Callable[..., Awaitable[V1Scale]], scale: V1Scale, replicas: int) -> None:
        if not self.may_write():
            raise NotLeader("the lease is not held")
        assert scale.metadata is not None
        body = {"metadata": {"resourceVersion": scale.metadata.resource_version}, "spec": {"replicas": replicas}}
        await call(patch(scale.metadata.name, self.namespace, body, _content_type=_MERGE_PATCH), self.timeout_s)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The replicas of a Deployment."""

    apps: Apps
    name: str

    async def replicas(self) -> int:
        """What its spec says."""
        return _replicas(await self.apps.read_deployment(self.name))

    async def scale(self, current: int, replicas: int) -> None:
        """Change what its spec says."""
        scale = await self.apps.read_deployment(self.name)
        _check_unchanged(current, _replicas(scale))
        await self.apps.write_deployment(scale, replicas)


@dataclass(frozen=True, slots=True)
class VerifierGroups:
    """Verifier groups: each is a StatefulSet that has either all of its `ranks` or none, never a part of them."""

    apps: Apps
    names: Sequence[str]
    ranks: int

    async def replicas(self) -> int:
        """How many groups are on."""
        return sum(_replicas(scale) > 0 for scale in await self._read())

    async def scale(self, current: int, replicas: int) -> None:
        """Turn groups on, the first ones that are off, or off, the last ones that are on."""
        scales = await self._read()
        on = [scale for scale in scales if _replicas(scale) > 0]
        off = [scale for scale in scales if _replicas(scale) == 0]
        _check_unchanged(current, len(on))
        for scale in off[: max(0, replicas - current)]:
            await self.apps.write_stateful_set(scale, self.ranks)
        for scale in reversed(on[replicas:]):
            await self.apps.write_stateful_set(scale, 0)

    async def _read(self) -> list[V1Scale]:
        return [await self.apps.read_stateful_set(name) for name in self.names]


def _check_unchanged(expected: int, found: int) -> None:
    if expected != found:
        raise ApiFailed(f"somebody else changed its replicas from {expected} to {found}")


def _replicas(scale: V1Scale) -> int:
    return (scale.spec.replicas if scale.spec else None) or 0  # the API leaves a zero out
