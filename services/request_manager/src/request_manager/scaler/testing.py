"""A Kubernetes API in this process, as far as the scaler needs one: scales and leases, versions, RBAC, and faults.

Bodies must be what the client's own models can hold, nothing more. Versions and permissions are checked as an API
server checks them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any, Literal

from kubernetes.aio.client import V1Lease, V1Scale
from pydantic import BaseModel, ValidationError

NAMESPACE = "somewhere"

_SCALE = re.compile(rf"/apis/(apps)/v1/namespaces/{NAMESPACE}/((?:deployments|statefulsets))/([a-z0-9-]+)(/scale)")
_LEASE = re.compile(rf"/apis/(coordination.k8s.io)/v1/namespaces/{NAMESPACE}/(leases)(?:/([a-z0-9-]+))?()")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_VERBS = {"GET": "get", "PATCH": "patch", "PUT": "update", "POST": "create"}

Object = dict[str, Any]
Rule = Mapping[str, Sequence[str]]
Misbehaviour = int | Literal["hang", "hang up", "html", "nonsense"]


def role(deployments: Sequence[str], stateful_sets: Sequence[str], lease: str) -> list[Rule]:
    """The rules of the least Role for these targets, as docs/scaling.md shows them."""
    read_and_write = ["get", "patch"]
    return [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": deployments,
            "verbs": read_and_write,
        },
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": stateful_sets,
            "verbs": read_and_write,
        },
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [lease],
            "verbs": ["get", "update"],
        },
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    ]


@dataclass(frozen=True, slots=True)
class Fault:
    """The next call with this method and this part of a path fails: with a status, or otherwise.

    The client tries a GET or PUT once more where the API hangs up, by itself.
    """

    method: str
    path: str
    how: Misbehaviour


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(HTTPStatus(status).phrase)
        self.status = status


@dataclass(slots=True)
class FakeKubernetes:
    """The API's state. `writes`: the replicas that were set, in order; `calls`: method and path of each call."""

    rules: Sequence[Rule]
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    writes: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""
    closing: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)
    version: int = 0

    def add(self, plural: str, name: str, replicas: int) -> None:
        """There is a workload."""
        self._store(plural, name, {"spec": {"replicas": replicas}, "status": {"replicas": replicas}})

    def replicas(self, plural: str, name: str) -> int:
        """What a workload's spec says."""
        return int(self.objects[plural, name]["spec"]["replicas"])

    def holder(self, name: str) -> str:
        """Who holds the lease."""
        return str(self.objects["leases", name]["spec"]["holderIdentity"])

    def fault(self, method: str, path: str) -> Misbehaviour | None:
        """How this call fails, if it does; notes the call."""
        self.calls.append((method, path))
        for fault in self.faults:
            if fault.method == method and fault.path in path:
                self.faults.remove(fault)
                return fault.how
        return None

    def answer(self, method: str, path: str, content_type: str, body: Object) -> Object:
        """The object that a call is answered with; raises _Refused."""
        match = _SCALE.fullmatch(path) or _LEASE.fullmatch(path)
        if match is None:
            raise _Refused(404)
        group, plural, name, subresource = match.groups()
        self._authorise(group, plural + subresource, name, _VERBS[method])
        if method == "POST":
            return self._create(plural, body)
        if (plural, name) not in self.objects:
            raise _Refused(404)
        if method == "PATCH":
            return self._patch(plural, name, content_type, body)
        if method == "PUT":
            return self._replace(plural, name, body)
        return self._shown(plural, name)

    def _authorise(self, group: str, resource: str, name: str | None, verb: str) -> None:
        for rule in self.rules:
            names = rule.get("resourceNames")
            is_named = names is None or name in names
            if is_named and group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                return
        raise _Refused(403)

    def _create(self, plural: str, body: Object) -> Object:
        self._check_lease(body)
        name = body["metadata"]["name"]
        if (plural, name) in self.objects:
            raise _Refused(409)
        return self._store(plural, name, {"spec": body["spec"]})

    def _replace(self, plural: str, name: str, body: Object) -> Object:
        self._check_lease(body)
        self._check_version(plural, name, body)
        return self._store(plural, name, {"spec": body["spec"]})

    def _patch(self, plural: str, name: str, content_type: str, body: Object) -> Object:
        if content_type != "application/merge-patch+json":
            raise _Refused(415)
        _check(V1Scale, body)
        self._check_version(plural, name, body)
        self.writes.append((name, body["spec"]["replicas"]))
        return self._store(plural, name, {"spec": body["spec"]})

    def _check_lease(self, body: Object) -> None:
        _check(V1Lease, body)
        if not all(_MICRO_TIME.fullmatch(body["spec"].get(name, "")) for name in ("acquireTime", "renewTime")):
            raise _Refused(400)

    def _check_version(self, plural: str, name: str, body: Object) -> None:
        if body["metadata"].get("resourceVersion") != self.objects[plural, name]["metadata"]["resourceVersion"]:
            raise _Refused(409)

    def _store(self, plural: str, name: str, content: Object) -> Object:
        self.version += 1
        metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": str(self.version)}
        self.objects[plural, name] = {"metadata": metadata, **content}
        return self._shown(plural, name)

    def _shown(self, plural: str, name: str) -> Object:
        """As Go's encoder writes it: a zero is left out."""
        found = self.objects[plural, name]
        if plural == "leases":
            return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **found}
        spec = {key: value for key, value in found["spec"].items() if value != 0}
        status = {"replicas": found["spec"]["replicas"]}
        return {"apiVersion": "autoscaling/v1", "kind": "Scale", **found, "spec": spec, "status": status}


def _check(model: type[BaseModel], body: Object) -> None:
    """Refuse what the client's model cannot hold, or leaves out."""
    try:
        held = model.model_validate(body).model_dump(by_alias=True, exclude_none=True)
    except ValidationError as error:
        raise _Refused(400) from error
    if _names(held) != _names(body):
        raise _Refused(400)


def _names(value: object) -> object:
    return {name: _names(each) for name, each in value.items()} if isinstance(value, dict) else None


@contextmanager
def fake_kubernetes(rules: Sequence[Rule]) -> Iterator[FakeKubernetes]:
    """The API, served for as long as the body runs."""
    kubernetes = FakeKubernetes(rules)
    handler = type("_Bound", (_Exchange,), {"kubernetes": kubernetes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    kubernetes.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield kubernetes
    finally:
        kubernetes.closing.set()
        server.shutdown()
        server.server_close()


class _Exchange(BaseHTTPRequestHandler):
    """One call."""

    kubernetes: FakeKubernetes

    def do_GET(self) -> None:
        """Answer, or misbehave."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        with self.kubernetes.lock:
            how = self.kubernetes.fault(self.command, self.path)
        match how:
            case None:
                self._answer(body)
            case "hang":
                self.kubernetes.closing.wait()
            case "hang up":
                self.close_connection = True
            case "html":
                self._send(200, "text/html", "<html>a proxy</html>")
            case "nonsense":
                self._send(200, "application/json", '{"metadata": 3}')
            case status:
                self._refuse(status)

    do_PATCH = do_PUT = do_POST = do_GET  # noqa: N815 - http.server's names

    def _answer(self, body: Object) -> None:
        try:
            with self.kubernetes.lock:
                content_type = self.headers.get("Content-Type", "")
                found = self.kubernetes.answer(self.command, self.path, content_type, body)
        except _Refused as refused:
            self._refuse(refused.status)
        else:
            self._send(200, "application/json", json.dumps(found))

    def _refuse(self, status: int) -> None:
        answer = {"kind": "Status", "code": status, "message": HTTPStatus(status).description}
        self._send(status, "application/json", json.dumps(answer))

    def _send(self, status: int, content_type: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Nothing to tell."""
