"""A release's objects find each other, and no other release's."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

VALUES = Path(__file__).parent / "values"


def matched(release: Any, selector: dict[str, str]) -> set[str]:
    """The owners of the pods that have these labels."""
    return {pod.owner for pod in release.pods if selector.items() <= pod.labels.items()}


def test_a_workload_selects_its_own_pods(release: Any) -> None:
    """And nobody else's; a StatefulSet's Service exists."""
    for each in [*release.of("Deployment"), *release.of("StatefulSet")]:
        assert matched(release, each["spec"]["selector"]["matchLabels"]) == {each["metadata"]["name"]}
    services = {each["metadata"]["name"] for each in release.of("Service")}
    assert {each["spec"]["serviceName"] for each in release.of("StatefulSet")} <= services


def test_a_service_or_budget_selects_what_its_name_says(release: Any) -> None:
    """One component, by the name that it shares with it; a named port is one of its pods'."""
    for each in release.of("Service"):
        name = each["metadata"]["name"].removesuffix("-operations")
        assert matched(release, each["spec"]["selector"]) == {name}
        ports = {port["name"] for pod in release.pods if pod.owner == name for port in pod.containers[0]["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"] if "targetPort" in port} <= ports
    for each in release.of("PodDisruptionBudget"):
        assert matched(release, each["spec"]["selector"]["matchLabels"]) == {each["metadata"]["name"]}


def test_every_part_but_the_broker_has_a_budget(render: Any) -> None:
    """A budget for one pod protects nothing."""
    release = render(VALUES / "everything-on.yaml")
    wanted = {pod.owner for pod in release.pods} - {"demo-nats", "demo-test", "demo-scaler"}
    assert {each["metadata"]["name"] for each in release.of("PodDisruptionBudget")} == wanted


def test_a_monitor_selects_all_services(render: Any) -> None:
    """By a port that all of them have."""
    release = render(VALUES / "everything-on.yaml")
    monitor = release.of("PodMonitor")[0]["spec"]
    components = monitor["selector"]["matchExpressions"][0]["values"]
    scraped = [pod for pod in release.pods if pod.labels["app.kubernetes.io/component"] in components]
    assert len(scraped) == len(release.pods) - 2  # the broker and the test
    for pod in scraped:
        assert monitor["podMetricsEndpoints"][0]["port"] in {port["name"] for port in pod.containers[0]["ports"]}


@pytest.mark.parametrize("names", [("one", "two"), ("espalier", "espalier-2"), ("a", "a-ssm")])
def test_two_releases_in_one_namespace(render: Any, names: tuple[str, str]) -> None:
    """No object of the same name, no pod that the other one selects, no common subject on a shared broker."""
    one, two = (render(VALUES / "everything-on.yaml", name=name) for name in names)
    keys = [{(each["kind"], each["metadata"]["name"]) for each in release.objects} for release in (one, two)]
    assert not keys[0] & keys[1]
    for each in [*one.of("Deployment"), *one.of("StatefulSet")]:
        assert not matched(two, each["spec"]["selector"]["matchLabels"])
    for each in one.of("NetworkPolicy"):
        assert not matched(two, each["spec"]["podSelector"]["matchLabels"])
    assert prefixes(one) != prefixes(two)


def test_another_model_is_another_world(render: Any) -> None:
    """While it is rolled out, gateways with its tokenizer must not meet verifiers of the old one. Nothing else is."""
    pvc = ("--set", "model.source=pvc", "--set", "model.pvc.claimName=c")
    models = [
        (),
        ("--set", "model.fetch.revision=v2"),
        ("--set", "model.fetch.repository=other/model"),
        (*pvc, "--set", "model.path=a"),
        (*pvc, "--set", "model.path=b"),
    ]
    found = [prefixes(render(flags=flags)) for flags in models]
    assert all(len(each) == 1 for each in found), "all parts of a release meet"
    assert len(set[str]().union(*found)) == len(models)
    same = (
        "--set",
        "model.fetch.volume.size=9Gi",
        "--set",
        "verifier.groups=2",
        "--set",
        "model.fetch.token.secretName=x",
    )
    assert prefixes(render(flags=same)) == found[0]


def prefixes(release: Any) -> set[str]:
    """The first token of all subjects."""
    return {
        each["value"]
        for pod in release.pods
        for each in pod.containers[0].get("env", [])
        if each["name"] == "ESPALIER_SUBJECT_PREFIX"
    }


def test_names_follow_one_value(render: Any) -> None:
    """Of objects, of hosts in variables, of references."""
    release = render(VALUES / "everything-on.yaml", name="long.release-name", flags=("--set", "fullnameOverride=x"))
    assert {each["metadata"]["name"].partition("-")[0] for each in release.objects} == {"x"}
    assert "nats://x-nats:4222" in yaml.safe_dump(release.objects)


def test_no_namespace_and_no_cluster_domain_is_assumed(release: Any) -> None:
    """Helm puts objects where the release is; hosts are Services' bare names."""
    text = yaml.safe_dump(release.objects)
    assert "cluster.local" not in text
    assert not re.search(r"[a-z]\.svc\b", text)
    assert not any("namespace" in each["metadata"] for each in release.objects)
    for each in release.of("RoleBinding"):
        assert [subject["namespace"] for subject in each["subjects"]] == ["here"]


def test_no_storage_class_is_assumed(render: Any) -> None:
    """The cluster's default, unless one is named; "" is a name too."""
    for values, wanted in (((), {None}), ((VALUES / "everything-on.yaml",), {"", "fast"})):
        claims = [
            claim["spec"]
            for each in render(*values).of("StatefulSet")
            for claim in each["spec"]["volumeClaimTemplates"]
        ]
        assert {claim.get("storageClassName") for claim in claims} == wanted
        assert all(claim["accessModes"] == ["ReadWriteOnce"] for claim in claims)


def test_the_scaler_may_do_what_it_needs(render: Any) -> None:
    """Read and change the scale of its targets, by name, and keep one lease; nothing in another namespace."""
    release = render(VALUES / "everything-on.yaml")
    assert not release.of("ClusterRole")
    rules = {tuple(rule["resources"]): rule for rule in release.of("Role")[0]["rules"] if "resourceNames" in rule}
    ssms = {pod.owner for pod in release.pods if pod.labels["app.kubernetes.io/component"] == "ssm-worker"}
    assert set(rules[("deployments/scale",)]["resourceNames"]) == ssms
    assert rules[("statefulsets/scale",)]["resourceNames"] == ["demo-verifier"]
    assert rules[("leases",)]["resourceNames"] == ["demo-scaler"]
    unnamed = [rule for rule in release.of("Role")[0]["rules"] if "resourceNames" not in rule]
    assert [(rule["resources"], rule["verbs"]) for rule in unnamed] == [(["leases"], ["create"])]


@pytest.mark.parametrize(
    ("mode", "wanted"), [("keda", ["gateway", "ssm-repeats", "verifier"]), ("hpa", ["gateway", "ssm-repeats"])]
)
def test_an_autoscaler_has_one_target_each(render: Any, mode: str, wanted: list[str]) -> None:
    """Which is there."""
    release = render(VALUES / f"{mode}.yaml")
    for each in [*release.of("ScaledObject"), *release.of("HorizontalPodAutoscaler")]:
        target = each["spec"]["scaleTargetRef"]
        assert release.one(target["kind"], wanted.pop(0))["metadata"]["name"] == target["name"]
    assert not wanted


def test_keda_leaves_stateful_sets_of_groups_alone(render: Any) -> None:
    """It would start half a group; a LeaderWorkerSet's replicas are groups."""
    values, stages = VALUES / "keda.yaml", ("--set", "verifier.pipelineParallelSize=2")
    kinds = [
        {each["spec"]["scaleTargetRef"]["kind"] for each in render(values, flags=flags).of("ScaledObject")}
        for flags in (stages, (*stages, "--set", "verifier.leaderWorkerSet.enabled=true"))
    ]
    assert kinds == [{"Deployment"}, {"Deployment", "LeaderWorkerSet"}]
