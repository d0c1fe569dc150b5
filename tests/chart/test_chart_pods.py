"""Every pod of every way to install: restricted, sized, probed, and told nothing secret."""

import re
from pathlib import Path
from typing import Any

import pytest

SECRET_WORDS = re.compile(r"(PASSWORD|SECRET|TOKEN|API_KEYS?)$")
GPU = "nvidia.com/gpu"


def test_pod_security_is_restricted(release: Any) -> None:
    """The restricted profile of the Pod Security Standards, and a read-only root besides."""
    for pod in release.pods:
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security.get("runAsUser") != 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for container in pod.all_containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_only_who_was_told_to_mounts_the_host(render: Any, release: Any, case: tuple[Path, ...]) -> None:
    """A hostPath is no part of the restricted profile."""
    found = [pod for pod in release.pods if any("hostPath" in volume for volume in pod.spec.get("volumes", []))]
    assert bool(found) == any(path.stem == "everything-off" for path in case)


def test_images_are_named_exactly(release: Any) -> None:
    """By a version or a digest."""
    for pod in release.pods:
        for container in pod.all_containers:
            name = container["image"].rpartition("/")[2]
            version = name.partition("@")[2] or name.partition(":")[2]
            assert version, container["image"]
            assert version != "latest"


def test_an_image_is_registry_repository_and_version(render: Any) -> None:
    """The variant is part of the default tag only."""
    on = render(Path(__file__).parent / "values" / "everything-on.yaml")
    images = {pod.owner: pod.containers[0]["image"] for pod in on.pods}
    assert images["demo-gateway"] == "registry.example:5000/team/espalier/request-manager:1.2.3"
    assert images["demo-ssm-repeats"] == "registry.example:5000/team/espalier/ssm-worker:0.1.0-cpu"
    assert images["demo-verifier"].startswith("registry.example:5000/team/espalier/llm-verifier@sha256:0123")
    assert render().pod("verifier").containers[0]["image"] == "espalier/llm-verifier:0.1.0-cuda"
    assert on.pod("gateway").spec["imagePullSecrets"] == [{"name": "registry-login"}]


def test_every_container_is_sized(release: Any) -> None:
    """Requests and limits of cpu and memory."""
    for pod in release.pods:
        for container in pod.all_containers:
            for bound in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][bound].keys(), (pod.owner, container["name"])


def test_every_container_answers_three_different_questions(release: Any) -> None:
    """On ports that it has. What runs to an end (before others, or as a test) is asked nothing."""
    for pod in release.pods:
        if pod.spec.get("restartPolicy") == "Never":
            continue
        for container in pod.containers:
            probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
            assert len({probe["path"] for probe in probes}) == 3
            assert {probe["port"] for probe in probes} <= {port["name"] for port in container["ports"]}


def test_loading_weights_is_given_its_time(render: Any) -> None:
    """The start-up probe's patience is the value; where it matters nothing else gives up before."""
    release = render(flags=("--set", "verifier.startupTimeoutS=1801"))
    probe = release.pod("verifier").containers[0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 1805
    for name in ("gateway", "manager"):  # they are not ready before a verifier is
        assert release.one("Deployment", name)["spec"]["progressDeadlineSeconds"] > 1805


def test_no_secret_stands_in_a_manifest(release: Any) -> None:
    """Secrets come by reference; the only Secret is the broker's, whose password is made up."""
    for pod in release.pods:
        for container in pod.all_containers:
            for each in container.get("env", []):
                if SECRET_WORDS.search(each["name"]):
                    assert "value" not in each, each
                    assert "secretKeyRef" in each["valueFrom"]
    assert [each["metadata"]["name"] for each in release.of("Secret")] in ([], ["demo-nats"])


def test_no_variable_twice(release: Any) -> None:
    """Server-side apply refuses that."""
    for pod in release.pods:
        for container in pod.all_containers:
            names = [each["name"] for each in container.get("env", [])]
            assert len(names) == len(set(names)), names


def test_what_is_mounted_is_there(release: Any) -> None:
    """And the other way round. Volumes are written only where they may be, and /tmp is writable for all services."""
    claims = {each["metadata"]["name"]: templates(each) for each in release.of("StatefulSet")}
    for pod in release.pods:
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | claims.get(pod.owner, set())
        mounts = [mount for container in pod.all_containers for mount in container.get("volumeMounts", [])]
        assert {mount["name"] for mount in mounts} == volumes, pod.owner
        for container in pod.containers:
            writable = {m["mountPath"] for m in container.get("volumeMounts", []) if not m.get("readOnly")}
            assert writable <= {"/tmp", "/dev/shm", "/data"}


def templates(stateful_set: Any) -> set[str]:
    """Volumes of a StatefulSet's claims."""
    return {each["metadata"]["name"] for each in stateful_set["spec"].get("volumeClaimTemplates", [])}


def test_service_links_are_off(release: Any) -> None:
    """Kubernetes would make ESPALIER_GATEWAY_PORT of a Service named espalier-gateway, and the gateway refuse it."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in release.pods)


def test_only_the_scaler_may_talk_to_the_api(release: Any) -> None:
    """Nobody else has a token."""
    for pod in release.pods:
        may = pod.spec.get("automountServiceAccountToken", True)
        assert may == (pod.labels["app.kubernetes.io/component"] == "scaler"), pod.owner


@pytest.mark.parametrize(("drain_s", "delay_s"), [(120, 5), (600, 30), (0.5, 0)])
def test_the_grace_period_covers_draining(render: Any, drain_s: float, delay_s: int) -> None:
    """The wait for endpoints, then the drain, then some time to leave."""
    flags = ("--set-json", f"gateway.drainTimeoutS={drain_s}", "--set", f"gateway.endpointDelayS={delay_s}")
    spec = render(flags=flags).pod("gateway").spec
    container = spec["containers"][0]
    told = {each["name"]: each.get("value") for each in container["env"]}
    before = {"lifecycle": {"preStop": {"sleep": {"seconds": delay_s}}}} if delay_s else {}
    assert {key: each for key, each in container.items() if key == "lifecycle"} == before
    assert float(told["ESPALIER_DRAIN_TIMEOUT_S"]) == drain_s
    assert spec["terminationGracePeriodSeconds"] >= delay_s + drain_s + 10


def test_an_update_needs_no_spare_gpu(release: Any) -> None:
    """What loads weights is replaced in its place, one at a time; what is small has its successor first.

    A gateway that is a manager too has none: it would wait for the verifier of the one that waits for it.
    """
    managers = [each for each in release.of("Deployment") if each["metadata"]["name"].endswith("-manager")]
    for each in release.of("Deployment"):
        strategy = each["spec"].get("strategy", {})
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "ssm-worker":
            assert strategy == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
        elif component == "gateway" and not managers:
            assert strategy == {"type": "Recreate"}
        elif component in ("gateway", "manager"):
            assert strategy == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    for each in release.of("LeaderWorkerSet"):
        assert each["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}
    for each in release.of("StatefulSet"):
        assert each["spec"].get("updateStrategy", {"type": "RollingUpdate"}) == {"type": "RollingUpdate"}


def test_gpus_are_the_tensor_parallel_size(render: Any, chart: Path) -> None:
    """A pod is a stage: two nodes of eight GPUs. Its ranks share memory; others have none to share."""
    release = render(chart / "values-70b-2x8.yaml")
    spec = release.one("StatefulSet", "verifier")["spec"]
    pod = release.pod("verifier").spec
    container = pod["containers"][0]
    assert spec["replicas"] == 2
    assert spec["podManagementPolicy"] == "Parallel"
    assert container["resources"]["limits"][GPU] == 8
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in pod["volumes"]
    told = {each["name"]: each.get("value") for each in container["env"]}
    assert told["ESPALIER_TENSOR_PARALLEL_SIZE"] == told["ESPALIER_RANKS_PER_POD"] == "8"
    assert told["ESPALIER_GROUP_SERVICE"] == spec["serviceName"] == "demo-verifier"


def test_without_a_gpu_none_is_asked_for(render: Any, chart: Path) -> None:
    """One rank on a CPU: no GPU, no shared memory, no rendezvous."""
    release = render(chart / "values-cpu.yaml")
    pod = release.pod("verifier").spec
    assert not any(
        GPU in container["resources"]["limits"] for each in release.pods for container in each.all_containers
    )
    assert not any(volume["name"] == "shm" for volume in pod["volumes"])
    assert not any("GROUP" in each["name"] for each in pod["containers"][0]["env"])


def test_an_ssm_on_a_gpu_has_one(render: Any) -> None:
    """And the image, the word and the limit that go with it; its neighbours have none."""
    on = render(Path(__file__).parent / "values" / "everything-on.yaml")
    found = {}
    for pod in on.pods:
        container = pod.containers[0]
        told = {each["name"]: each.get("value") for each in container.get("env", [])}
        limit = container["resources"]["limits"].get(GPU)
        found[pod.owner] = told.get("ESPALIER_DEVICE"), container["image"].rpartition("-")[2], limit
    assert found["demo-ssm-fetched-one"] == ("cuda", "cuda", 1)
    assert found["demo-ssm-shipped-one"] == ("cpu", "cpu", None)
    assert found["demo-ssm-repeats"] == (None, "cpu", None)


def test_a_leader_worker_set_has_groups_of_stages(render: Any) -> None:
    """Two groups of two pods; the rank comes from its controller."""
    release = render(Path(__file__).parent / "values" / "leader-worker-set.yaml")
    spec = release.of("LeaderWorkerSet")[0]["spec"]
    told = {each["name"]: each for each in release.pod("verifier").containers[0]["env"]}
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert "ESPALIER_GROUP_SERVICE" not in told
    generation = told["ESPALIER_GROUP_GENERATION"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert generation == "metadata.labels['leaderworkerset.sigs.k8s.io/template-revision-hash']"
    assert not [each for each in release.of("StatefulSet") if each["metadata"]["name"].endswith("verifier")]
    assert not [each for each in release.of("Service") if each["metadata"]["name"].endswith("verifier")]


def test_a_change_of_the_chart_alone_restarts_nothing(render: Any) -> None:
    """Its version is no part of a pod: loading 65B again takes half an hour."""
    for pod in render().pods:
        if pod.spec.get("restartPolicy") != "Never":
            assert not any("version" in name or "chart" in name for name in pod.labels)


def test_the_brokers_settings_are_part_of_its_pod(release: Any) -> None:
    """So that a change of theirs restarts it."""
    for each in release.of("StatefulSet"):
        if each["metadata"]["name"] == "demo-nats":
            assert re.fullmatch(r"[0-9a-f]{64}", each["spec"]["template"]["metadata"]["annotations"]["checksum/config"])


def test_every_way_to_place_a_pod_reaches_it(render: Any) -> None:
    """As the values say; a constraint with a selector of its own keeps it, one without is about its component."""
    spec = render(Path(__file__).parent / "values" / "everything-on.yaml").pod("gateway").spec
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert spec["affinity"] == {"podAntiAffinity": {}}
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "gvisor")
    assert spec["topologySpreadConstraints"][0]["labelSelector"] == {"matchLabels": {"a": "b"}}
    by_default = render().pod("gateway").spec["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
    assert by_default["app.kubernetes.io/component"] == "gateway"
