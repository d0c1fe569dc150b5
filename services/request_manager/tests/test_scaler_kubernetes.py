"""Replicas in the Kubernetes API: the real client against an API that checks what it is sent, and fails."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from request_manager.scaler.kubernetes import ApiFailed, Apps, Deployment, NotLeader, VerifierGroups, connect
from request_manager.scaler.testing import NAMESPACE, FakeKubernetes, Fault, Misbehaviour, fake_kubernetes, role
from treecore.errors import ConfigError

TIMEOUT_S = 20.0
GROUPS = ("v-0", "v-1", "v-2")


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    """A cluster with a Deployment and three groups of two ranks, one of which is on."""
    with fake_kubernetes(role(["ssm"], GROUPS, "lease")) as kubernetes:
        kubernetes.add("deployments", "ssm", 2)
        for name, ranks in zip(GROUPS, (2, 0, 0), strict=True):
            kubernetes.add("statefulsets", name, ranks)
        yield kubernetes


@pytest.fixture
async def apps(kubernetes: FakeKubernetes) -> AsyncIterator[Apps]:
    """A leader's view of it."""
    async with connect(kubernetes.url) as client:
        yield Apps(client, NAMESPACE, lambda: True, TIMEOUT_S)


@pytest.fixture
def groups(apps: Apps) -> VerifierGroups:
    """The verifier groups."""
    return VerifierGroups(apps, GROUPS, ranks=2)


async def test_a_deployment_is_scaled_up_and_to_nothing(kubernetes: FakeKubernetes, apps: Apps) -> None:
    """A zero, which the API leaves out, reads as zero."""
    ssm = Deployment(apps, "ssm")
    assert await ssm.replicas() == 2
    await ssm.scale(2, 5)
    assert await ssm.replicas() == 5
    await ssm.scale(5, 0)
    assert await ssm.replicas() == 0
    assert kubernetes.writes == [("ssm", 5), ("ssm", 0)]


async def test_groups_are_turned_on_and_off_whole(kubernetes: FakeKubernetes, groups: VerifierGroups) -> None:
    """The first that are off, the last that are on; all ranks or none."""
    assert await groups.replicas() == 1
    await groups.scale(1, 3)
    assert await groups.replicas() == 3
    await groups.scale(3, 1)
    assert await groups.replicas() == 1
    assert kubernetes.writes == [("v-1", 2), ("v-2", 2), ("v-2", 0), ("v-1", 0)]


async def test_a_group_that_somebody_turned_off_is_the_first_to_come_back(
    kubernetes: FakeKubernetes, groups: VerifierGroups
) -> None:
    """Which groups are on is Kubernetes' knowledge, not ours."""
    kubernetes.add("statefulsets", "v-0", 0)
    kubernetes.add("statefulsets", "v-2", 2)
    await groups.scale(1, 2)
    assert kubernetes.writes == [("v-0", 2)]


async def test_what_changed_meanwhile_is_left_alone(kubernetes: FakeKubernetes, groups: VerifierGroups) -> None:
    """The decision was about another number of replicas."""
    with pytest.raises(ApiFailed, match="from 2 to 1"):
        await groups.scale(2, 3)
    with pytest.raises(ApiFailed, match="from 1 to 2"):
        await Deployment(groups.apps, "ssm").scale(1, 3)
    assert kubernetes.writes == []


async def test_a_write_that_overtakes_ours_wins(kubernetes: FakeKubernetes, apps: Apps) -> None:
    """Ours names the version that it was decided on: it conflicts."""
    scale = await apps.read_deployment("ssm")
    kubernetes.add("deployments", "ssm", 4)
    with pytest.raises(ApiFailed, match="409") as caught:
        await apps.write_deployment(scale, 3)
    assert caught.value.status == 409
    assert kubernetes.replicas("deployments", "ssm") == 4


async def test_nothing_is_written_without_the_lease(kubernetes: FakeKubernetes, apps: Apps) -> None:
    """Also when it is lost between two writes of one change."""
    answers = iter([True, False])
    careful = VerifierGroups(Apps(apps.client, NAMESPACE, lambda: next(answers), TIMEOUT_S), GROUPS, ranks=2)
    with pytest.raises(NotLeader):
        await careful.scale(1, 3)
    assert kubernetes.writes == [("v-1", 2)]


@pytest.mark.parametrize("how", [400, 401, 403, 404, 409, 429, 500, 503, "hang", "hang up", "html", "nonsense"])
@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_every_failure_is_one_error_of_one_line(
    kubernetes: FakeKubernetes, groups: VerifierGroups, method: str, how: Misbehaviour
) -> None:
    """And the next try succeeds."""
    kubernetes.faults += [Fault(method, "/v-", how)] * 2
    tried = VerifierGroups(replace(groups.apps, timeout_s=0.1), GROUPS, ranks=2) if how == "hang" else groups
    with pytest.raises(ApiFailed) as caught:
        await tried.scale(1, 2)
    kubernetes.faults.clear()
    assert "\n" not in str(caught.value)
    assert caught.value.status == (how if isinstance(how, int) else None)
    await groups.scale(await groups.replicas(), 3)
    assert await groups.replicas() == 3


async def test_only_what_the_role_names_is_allowed(kubernetes: FakeKubernetes, apps: Apps) -> None:
    """The message says what the API says."""
    kubernetes.add("deployments", "somebody-elses", 1)
    with pytest.raises(ApiFailed, match="403 Forbidden: Request forbidden"):
        await Deployment(apps, "somebody-elses").replicas()


def test_outside_a_cluster_the_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at the start."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--kubernetes-url"):
        connect(None)
