"""The chart as the tests see it: rendered by a real helm, as plain objects. Fetches helm once."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "espalier"
VALUES = Path(__file__).parent / "values"
CASES = {
    "default": (),
    "cpu": (CHART / "values-cpu.yaml",),
    "70b": (CHART / "values-70b-2x8.yaml",),
    **{path.stem: (path,) for path in sorted(VALUES.glob("*.yaml"))},
}

Object = dict[str, Any]
Render = Callable[..., "Release"]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that a release makes: what it comes from, its labels and its spec."""

    owner: str
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """Those that run as long as the pod."""
        return self.spec["containers"]

    @property
    def all_containers(self) -> list[Object]:
        """With those that run before."""
        return [*self.spec.get("initContainers", []), *self.containers]


@dataclass(frozen=True, slots=True)
class Release:
    """All objects of a release, those of its hooks included."""

    name: str
    namespace: str
    objects: list[Object] = field(repr=False)

    def of(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        """The object of that name, less the release's."""
        found = [each for each in self.of(kind) if each["metadata"]["name"] == f"{self.name}-{name}"]
        assert len(found) == 1, f"{kind} {name}: {len(found)}"
        return found[0]

    @property
    def pods(self) -> list[Pod]:
        """Those of workloads and hooks."""
        return [pod for each in self.objects for pod in _pods(each)]

    def pod(self, owner: str) -> Pod:
        """That of `gateway`, `ssm-repeats`, ..."""
        return next(pod for pod in self.pods if pod.owner == f"{self.name}-{owner}")


def _pods(each: Object) -> Iterator[Pod]:
    name, spec = each["metadata"]["name"], each.get("spec", {})
    match each["kind"]:
        case "Deployment" | "StatefulSet":
            yield Pod(name, spec["template"]["metadata"]["labels"], spec["template"]["spec"])
        case "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]["workerTemplate"]
            yield Pod(name, template["metadata"]["labels"], template["spec"])
        case "Pod":
            yield Pod(name, each["metadata"]["labels"], spec)


@dataclass(frozen=True, slots=True)
class Helm:
    """A helm binary."""

    binary: str

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Its output, whatever its exit status."""
        return subprocess.run((self.binary, *arguments), capture_output=True, text=True, check=False)

    def template(
        self, *values: Path, name: str = "demo", namespace: str = "here", flags: tuple[str, ...] = ()
    ) -> Release:
        """The rendered release; fails with what helm says."""
        files = [flag for path in values for flag in ("--values", str(path))]
        done = self.run("template", name, CHART, "--namespace", namespace, *files, *flags)
        assert done.returncode == 0, done.stderr
        return Release(name, namespace, [each for each in yaml.safe_load_all(done.stdout) if each])


def fetched(major: int) -> Helm:
    """The pinned helm of that version; one line if it cannot be had."""
    command = (sys.executable, REPOSITORY / "scripts" / "fetch_helm.py", "--major", str(major))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(done.stderr.strip(), pytrace=False)
    return Helm(done.stdout.strip())


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm 4."""
    return fetched(4)


@pytest.fixture(scope="session")
def helm3() -> Helm:
    """Helm 3, which many still have."""
    return fetched(3)


@pytest.fixture(scope="session")
def chart() -> Path:
    """Its directory."""
    return CHART


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """Renders with helm 4; the same arguments once."""
    known: dict[object, Release] = {}

    def rendered(*values: Path, **options: Any) -> Release:
        key = (values, tuple(sorted(options.items())))
        if key not in known:
            known[key] = helm.template(*values, **options)
        return known[key]

    return rendered


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Path, ...]:
    """The values files of each way to install that is tested."""
    return CASES[request.param]


@pytest.fixture
def release(case: tuple[Path, ...], render: Render) -> Release:
    """Each way to install, rendered."""
    return render(*case)
