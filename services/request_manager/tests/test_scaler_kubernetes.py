"""Replicas in the Kubernetes API: the real client against an API that checks what it is sent, and fails."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from request_manager.scaler.kubernetes import ApiFailed, Apps, NotLeader, Workload, connect
from request_manager.scaler.testing import NAMESPACE, FakeKubernetes, Fault, Misbehaviour, fake_kubernetes, role
from treecore.errors import ConfigError

TIMEOUT_S = 20.0


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    """A cluster with a Deployment, and a StatefulSet with two groups of three pods."""
    with fake_kubernetes(role(["ssm"], ["verifier"], "lease")) as kubernetes:
        kubernetes.add("deployments", "ssm", 2)
        kubernetes.add("statefulsets", "verifier", 6)
        yield kubernetes


@pytest.fixture
async def apps(kubernetes: FakeKubernetes) -> AsyncIterator[Apps]:
    """A leader's view of it."""
    async with connect(kubernetes.url) as client:
        yield Apps(client, NAMESPACE, lambda: True, TIMEOUT_S)


@pytest.fixture
def ssm(apps: Apps) -> Workload:
    """The Deployment."""
    return Workload(apps, "deployment", "ssm")


@pytest.fixture
def groups(apps: Apps) -> Workload:
    """The verifier groups."""
    return Workload(apps, "statefulset", "verifier", pods_per_replica=3)


async def test_a_deployment_is_scaled_up_and_to_nothing(kubernetes: FakeKubernetes, ssm: Workload) -> None:
    """A zero, which the API leaves out, reads as zero."""
    assert await ssm.replicas() == 2
    await ssm.scale(2, 5)
    assert await ssm.replicas() == 5
    await ssm.scale(5, 0)
    assert await ssm.replicas() == 0
    assert kubernetes.writes == [("ssm", 5), ("ssm", 0)]


async def test_groups_come_and_go_whole(kubernetes: FakeKubernetes, groups: Workload) -> None:
    """All pods of a group; a part of one, as somebody left it, counts as one and is made whole or taken away."""
    assert await groups.replicas() == 2
    await groups.scale(2, 3)
    await groups.scale(3, 1)
    assert kubernetes.writes == [("verifier", 9), ("verifier", 3)]
    kubernetes.add("statefulsets", "verifier", 4)
    assert await groups.replicas() == 2
    await groups.scale(2, 1)
    assert kubernetes.replicas("statefulsets", "verifier") == 3


async def test_what_changed_meanwhile_is_left_alone(
    kubernetes: FakeKubernetes, ssm: Workload, groups: Workload
) -> None:
    """The decision was about another number of replicas."""
    with pytest.raises(ApiFailed, match="from 3 to 2"):
        await groups.scale(3, 4)
    with pytest.raises(ApiFailed, match="from 1 to 2"):
        await ssm.scale(1, 3)
    assert kubernetes.writes == []


async def test_a_write_that_overtakes_ours_wins(kubernetes: FakeKubernetes, apps: Apps) -> None:
    """Ours names the version that it was decided on: it conflicts."""
    scale = await apps.read("deployment", "ssm")
    kubernetes.add("deployments", "ssm", 4)
    with pytest.raises(ApiFailed, match="409") as caught:
        await apps.write("deployment", scale, 3)
    assert caught.value.status == 409
    assert kubernetes.replicas("deployments", "ssm") == 4


async def test_nothing_is_written_without_the_lease(kubernetes: FakeKubernetes, ssm: Workload) -> None:
    """Also when it was lost since the decision: it is asked for right before the write."""
    with pytest.raises(NotLeader):
        await replace(ssm, apps=replace(ssm.apps, may_write=lambda: False)).scale(2, 3)
    assert kubernetes.writes == []


@pytest.mark.parametrize("how", [400, 401, 403, 404, 409, 429, 500, 503, "hang", "hang up", "html", "nonsense"])
@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_every_failure_is_one_error_of_one_line(
    kubernetes: FakeKubernetes, groups: Workload, method: str, how: Misbehaviour
) -> None:
    """And the next try succeeds."""
    kubernetes.faults += [Fault(method, "/verifier", how)] * 2
    hasty = replace(groups, apps=replace(groups.apps, timeout_s=0.1)) if how == "hang" else groups
    with pytest.raises(ApiFailed) as caught:
        await hasty.scale(2, 3)
    kubernetes.faults.clear()
    assert "\n" not in str(caught.value)
    assert caught.value.status == (how if isinstance(how, int) else None)
    await groups.scale(await groups.replicas(), 4)
    assert await groups.replicas() == 4


async def test_only_what_the_role_names_is_allowed(kubernetes: FakeKubernetes, apps: Apps) -> None:
    """The message says what the API says."""
    kubernetes.add("deployments", "somebody-elses", 1)
    with pytest.raises(ApiFailed, match="403 Forbidden: Request forbidden"):
        await Workload(apps, "deployment", "somebody-elses").replicas()


def test_outside_a_cluster_the_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at the start."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--kubernetes-url"):
        connect(None)
