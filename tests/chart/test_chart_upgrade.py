"""What an upgrade finds in the cluster and leaves as it is. A few answers of the Kubernetes API stand in for one."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

Answers = dict[str, dict[str, Any]]


KINDS = {
    "v1": ("Secret", "ConfigMap", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}


def discovery() -> Answers:
    """What the API says of itself."""
    groups = [each.split("/") for each in KINDS if "/" in each]
    versions = {name: {"groupVersion": f"{name}/{version}", "version": version} for name, version in groups}
    found: Answers = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [{"name": name, "versions": [each]} for name, each in versions.items()],
        },
    }
    for version, kinds in KINDS.items():
        resources = [{"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]} for kind in kinds]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        found[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return found


DISCOVERY = discovery()


class Api(BaseHTTPRequestHandler):
    """Tells what is in `answers`, and that there is nothing else."""

    answers: Answers = DISCOVERY

    def do_GET(self) -> None:
        """One object."""
        found = self.answers.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Quiet."""


@pytest.fixture
def cluster() -> Iterator[tuple[str, ...]]:
    """Flags for helm to look there. What there is, is set by `holds`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address)
        server.shutdown()


OURS = {
    "name": "any",
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "here"},
}


def holds(monkeypatch: pytest.MonkeyPatch, objects: Answers) -> None:
    """The release's objects by their path behind /namespaces/here/."""
    prefix = {"secrets": "/api/v1", "deployments": "/apis/apps/v1", "statefulsets": "/apis/apps/v1"}
    paths = {
        f"{prefix[path.partition('/')[0]]}/namespaces/here/{path}": {**each, "metadata": OURS}
        for path, each in objects.items()
    }
    monkeypatch.setattr(Api, "answers", DISCOVERY | paths)


def test_the_brokers_password_is_kept(helm: Any, cluster: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that run with it would be locked out; what others put into the Secret is not taken over."""
    kept = {"user": "dQ==", "password": "cHc="}
    secret = {"apiVersion": "v1", "kind": "Secret", "data": {**kept, "more": "eA=="}}
    holds(monkeypatch, {"secrets/demo-nats": secret})
    assert helm.template(flags=cluster).one("Secret", "nats")["data"] == kept


def test_a_first_password_is_new(helm: Any, cluster: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time: there is none to keep."""
    holds(monkeypatch, {})
    found = [helm.template(flags=cluster).one("Secret", "nats")["data"]["password"] for _ in range(2)]
    assert found[0] != found[1]


def scale(kind: str, replicas: int) -> dict[str, Any]:
    """A workload that somebody has scaled."""
    return {"apiVersion": "apps/v1", "kind": kind, "spec": {"replicas": replicas}}


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("none", {"gateway": 2, "ssm-repeats": 1, "verifier": 1}),
        ("scaler", {"gateway": 2, "ssm-repeats": 6, "verifier": 7}),
        ("keda", {"gateway": 5, "ssm-repeats": 6, "verifier": 7}),
        ("hpa", {"gateway": 5, "ssm-repeats": 6, "verifier": 1}),
    ],
)
def test_replicas_are_left_to_who_scales(
    helm: Any, cluster: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, mode: str, kept: dict[str, int]
) -> None:
    """And are the values' where nobody does."""
    holds(
        monkeypatch,
        {
            "deployments/demo-gateway": scale("Deployment", 5),
            "deployments/demo-ssm-repeats": scale("Deployment", 6),
            "statefulsets/demo-verifier": scale("StatefulSet", 7),
        },
    )
    flags = ("--set", f"scaling.mode={mode}", "--set", "scaling.keda.serverAddress=http://prometheus")
    release = helm.template(flags=(*cluster, *flags))
    workloads = [*release.of("Deployment"), *release.of("StatefulSet")]
    replicas = {each["metadata"]["name"].removeprefix("demo-"): each["spec"]["replicas"] for each in workloads}
    assert {name: replicas[name] for name in kept} == kept


def test_the_notes_are_the_next_three_commands(helm: Any, chart: Path) -> None:
    """With the names of this release."""
    done = helm.run(
        "install", "demo", chart, "--namespace", "here", "--dry-run=client", "--set", "gateway.service.port=81"
    )
    notes = done.stdout.partition("\nNOTES:\n")[2]
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")]
    assert commands == [
        "kubectl --namespace here rollout status deployment/demo-gateway --timeout=3600s",
        "helm test demo --namespace here",
        "kubectl --namespace here port-forward service/demo-gateway 8000:81",
    ]
    assert "gateway.apiKeys.secretName names no Secret" in notes
