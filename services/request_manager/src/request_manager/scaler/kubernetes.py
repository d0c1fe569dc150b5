"""Replicas of Deployments and StatefulSets in the Kubernetes API, and nothing else of it.

Knows the API's objects and errors. Must not know why a number is what it is, nor who leads: it asks before every write.
docs/scaling.md lists the rules of the Role that these calls need.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, AppsV1Api, Configuration, V1Scale
from kubernetes.aio.config import ConfigException, load_incluster_config

from treecore.errors import ConfigError, Unavailable

T = TypeVar("T")

Kind = Literal["deployment", "statefulset"]

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
        """Let it have `replicas` instead of `current`; fails if it has another number by now."""


@dataclass(frozen=True, slots=True)
class Apps:
    """The API's `scale` subresources in a namespace. `may_write` is asked right before each write."""

    client: ApiClient
    namespace: str
    may_write: Callable[[], bool]
    timeout_s: float

    async def read(self, kind: Kind, name: str) -> V1Scale:
        """The scale of a workload."""
        api = AppsV1Api(self.client)
        if kind == "deployment":
            return await call(api.read_namespaced_deployment_scale(name, self.namespace), self.timeout_s)
        return await call(api.read_namespaced_stateful_set_scale(name, self.namespace), self.timeout_s)

    async def write(self, kind: Kind, scale: V1Scale, pods: int) -> None:
        """Let a workload have so many pods, unless it has changed since `scale` was read."""
        if not self.may_write():
            raise NotLeader("the lease is not held")
        assert scale.metadata is not None
        body = {"metadata": {"resourceVersion": scale.metadata.resource_version}, "spec": {"replicas": pods}}
        target = (scale.metadata.name, self.namespace, body)
        api = AppsV1Api(self.client)
        patch: Callable[..., Awaitable[V1Scale]] = api.patch_namespaced_stateful_set_scale
        if kind == "deployment":
            patch = api.patch_namespaced_deployment_scale
        await call(patch(*target, _content_type=_MERGE_PATCH), self.timeout_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet, in replicas of `pods_per_replica` pods: a verifier group is whole or not there."""

    apps: Apps
    kind: Kind
    name: str
    pods_per_replica: int = 1

    async def replicas(self) -> int:
        """See Scalable. A part of a replica, which is somebody else's doing, counts as one."""
        return self._replicas(await self.apps.read(self.kind, self.name))

    async def scale(self, current: int, replicas: int) -> None:
        """See Scalable."""
        scale = await self.apps.read(self.kind, self.name)
        found = self._replicas(scale)
        if found != current:
            raise ApiFailed(f"somebody else changed its replicas from {current} to {found}")
        await self.apps.write(self.kind, scale, replicas * self.pods_per_replica)

    def _replicas(self, scale: V1Scale) -> int:
        pods = (scale.spec.replicas if scale.spec else None) or 0  # the API leaves a zero out
        return math.ceil(pods / self.pods_per_replica)
