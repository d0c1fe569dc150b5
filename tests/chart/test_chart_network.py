"""Who may talk to whom: the rendered NetworkPolicies, evaluated, are the flows of the architecture and nothing else.

The oracle is the table `FLOWS`; what it does not name must be denied, for every pair of pods and every port in use.
"""

import ipaddress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

VALUES = Path(__file__).parent / "values"
HTTP, OPERATIONS, NATS, MONITOR, RENDEZVOUS, OTHER = 8000, 9090, 4222, 8222, 7800, 45000
PORTS = (HTTP, OPERATIONS, NATS, MONITOR, RENDEZVOUS, OTHER)
SERVICES = {"gateway", "manager", "ssm-worker", "llm-verifier"}
FLOWS = {
    ("test", "gateway", HTTP),
    *((service, "nats", NATS) for service in SERVICES),
    *(("scaler", service, OPERATIONS) for service in SERVICES - {"llm-verifier"}),
    *(("llm-verifier", "llm-verifier", port) for port in PORTS),
}


@dataclass(frozen=True)
class Peer:
    """A pod of the release (with a component), or somebody outside."""

    component: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    namespace: dict[str, str] = field(default_factory=dict)
    address: str = "192.0.2.1"
    is_here: bool = False


STRANGER = Peer(labels={"app": "shop"}, namespace={"team": "shop"})
NEIGHBOUR = Peer(labels={"app.kubernetes.io/name": "espalier", "app.kubernetes.io/instance": "other"}, is_here=True)
PROMETHEUS = Peer(labels={"app.kubernetes.io/name": "prometheus"}, namespace={"kind": "monitoring"})


def members(release: Any) -> list[Peer]:
    """The pods of the release."""
    return [Peer(pod.labels["app.kubernetes.io/component"], pod.labels, {}, "192.0.2.9", True) for pod in release.pods]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """A label selector, as far as the chart uses it."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    wanted = selector.get("matchLabels", {}).items()
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return all(labels.get(key) == value for key, value in wanted)


def is_peer(rule: dict[str, Any], peer: Peer) -> bool:
    """A NetworkPolicyPeer."""
    if "ipBlock" in rule:
        return ipaddress.ip_address(peer.address) in ipaddress.ip_network(rule["ipBlock"]["cidr"])
    if "namespaceSelector" not in rule:
        return peer.is_here and matches(rule["podSelector"], peer.labels)
    return matches(rule["namespaceSelector"], peer.namespace) and matches(rule.get("podSelector", {}), peer.labels)


def is_port(rule: dict[str, Any], port: int, protocol: str) -> bool:
    """A NetworkPolicyPort."""
    assert isinstance(rule["port"], int), "not every network plugin knows ports by name"
    return (rule["port"], rule.get("protocol", "TCP")) == (port, protocol)


def passes(release: Any, subject: Peer, other: Peer, way: str, port: int, protocol: str) -> bool:
    """Whether the policies for `subject` let traffic through, ingress from `other` or egress to it."""
    policies = [
        each["spec"]
        for each in release.of("NetworkPolicy")
        if way.capitalize() in each["spec"]["policyTypes"] and matches(each["spec"]["podSelector"], subject.labels)
    ]
    if not policies or not subject.component:
        return True  # nobody isolates it
    side = "from" if way == "ingress" else "to"
    return any(
        any(is_port(each, port, protocol) for each in rule["ports"] if rule["ports"]) if "ports" in rule else True
        for policy in policies
        for rule in policy.get(way, [])
        if side not in rule or any(is_peer(each, other) for each in rule[side])
    )


def may(release: Any, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection comes about."""
    out = passes(release, source, target, "egress", port, protocol)
    return out and passes(release, target, source, "ingress", port, protocol)


@pytest.mark.parametrize("case", ["everything-on", "leader-worker-set", "external-nats", "default"])
def test_the_parts_talk_as_the_architecture_says(render: Any, case: str) -> None:
    """Every pair, every port: allowed at both ends if and only if the table has it."""
    release = render(*([VALUES / f"{case}.yaml"] if case != "default" else []))
    pods = members(release)
    components = {pod.component for pod in pods}
    has_stages = case in ("everything-on", "leader-worker-set")
    wanted = {
        (source, target, port)
        for source, target, port in FLOWS
        if {source, target} <= components and (has_stages or source != target)
    }
    ways = list(product(pods, pods, PORTS))
    sent = {
        (source.component, target.component, port)
        for source, target, port in ways
        if passes(release, source, target, "egress", port, "TCP")
    }
    taken = {
        (source.component, target.component, port)
        for source, target, port in ways
        if passes(release, target, source, "ingress", port, "TCP")
    }
    assert sent == wanted
    public = {flow for flow in taken if flow[1:] == ("gateway", HTTP)}  # whoever is a client
    assert taken - public == wanted - public


def test_everything_else_is_denied(render: Any) -> None:
    """By a policy that is about every pod, whatever others there are."""
    release = render()
    policy = release.one("NetworkPolicy", "default-deny")["spec"]
    assert all(matches(policy["podSelector"], pod.labels) for pod in members(release))
    assert policy.keys() == {"podSelector", "policyTypes"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_everybody_is_a_client_unless_said_otherwise(render: Any) -> None:
    """Of the gateway's public port, and of nothing else."""
    release = render()
    for outside, pod, port in product((STRANGER, NEIGHBOUR), members(release), PORTS):
        assert may(release, outside, pod, port) == (pod.component == "gateway" and port == HTTP)


def test_clients_can_be_named(render: Any) -> None:
    """Others are kept out, the release's own test is not."""
    release = render(VALUES / "everything-on.yaml")
    gateway, test = (next(pod for pod in members(release) if pod.component == name) for name in ("gateway", "test"))
    friend = Peer(namespace={"team": "search"})
    assert may(release, friend, gateway, HTTP)
    assert may(release, test, gateway, HTTP)
    assert not may(release, STRANGER, gateway, HTTP)


def test_prometheus_reads_operations_ports_only(render: Any) -> None:
    """In any namespace, of every service."""
    release = render(VALUES / "everything-on.yaml")
    for pod, port in product(members(release), PORTS):
        is_read = pod.component in SERVICES | {"scaler"} and port == OPERATIONS
        if pod.component != "gateway" or port != HTTP:
            assert may(release, PROMETHEUS, pod, port) == is_read, (pod.component, port)


def test_what_leaves_the_release(render: Any) -> None:
    """Names; the hub for who fetches; the API server for the scaler."""
    release = render(VALUES / "everything-on.yaml")
    server = Peer(address="10.0.0.1")
    for pod in members(release):
        assert may(release, pod, STRANGER, 53, "UDP")
        assert may(release, pod, STRANGER, 53)
        fetches = pod.labels.get("espalier-fetches") == "true"
        assert may(release, pod, STRANGER, 443) == may(release, pod, STRANGER, 3128) == fetches
        assert may(release, pod, server, 6443) == (pod.component == "scaler")
        assert not may(release, pod, STRANGER, 6443)
        assert not may(release, pod, STRANGER, 80)


def test_traces_go_to_the_collector(render: Any) -> None:
    """At the port of its address, or of its scheme."""
    release = render(VALUES / "everything-on.yaml")
    collector = Peer(namespace={"kind": "tracing"})
    for pod in members(release):
        assert may(release, pod, collector, 4318) == (pod.component in SERVICES)
        assert not may(release, pod, STRANGER, 4318)
    ports = {"https://otlp.example": 443, "http://otlp.example/x": 80, "http://[fd00::1]:4318": 4318}
    for url, port in ports.items():
        policy = render(flags=("--set", f"tracing.endpoint={url}")).one("NetworkPolicy", "tracing")
        assert policy["spec"]["egress"] == [{"ports": [{"port": port}]}]


def test_who_fetches_is_who_may(release: Any) -> None:
    """Init containers and the label that opens the way go together."""
    for pod in release.pods:
        assert ("initContainers" in pod.spec) == ("espalier-fetches" in pod.labels), pod.owner


def test_an_external_broker_is_reached_where_it_is(render: Any) -> None:
    """At its port, within the block that was named; nobody else goes there."""
    release = render(VALUES / "external-nats.yaml")
    broker = Peer(address="10.20.3.4")
    for pod in members(release):
        assert may(release, pod, broker, 4443) == (pod.component in SERVICES)
        assert not may(release, pod, STRANGER, 4443)


def test_switched_off_there_are_none(render: Any) -> None:
    """For clusters that have policies of their own."""
    assert not render(VALUES / "everything-off.yaml").of("NetworkPolicy")
