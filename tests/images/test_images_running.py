"""The images themselves, and the system that compose starts of them: what dies, and what clients see of it.

Slow, and it needs root and podman: `make images-test` builds the images and runs this.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import urllib3
from build_images import DOCKERFILE, TARGETS, Options, own_version
from urllib3.util import Retry

from espalier_local.cache import ModelCache
from espalier_local.models import SMOLLM2
from espalier_local.ports import ReservedPort

pytestmark = [pytest.mark.images, pytest.mark.timeout(1200)]

PATIENCE_S = 240.0
MOST_TRIES = 120
OPTIONS = Options("buildah", "cpu", "espalier", own_version(), "", "", "", None)
PYTHON_TARGETS = tuple(target for target in TARGETS if target != "nats")
PARTS = ("nats", "gateway", "manager", "ssm", "verifier")
BEHIND_THE_GATEWAY = ("ssm", "manager", "verifier", "nats")

# What podman needs in a container or a small VM: crun refuses hybrid cgroups, there is no systemd, limits are low.
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
CONFINED = ("--rm", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=none")
INSPECTION = """
import importlib.metadata as metadata, json, os, shutil
try:
    open("/opt/espalier/new", "w")
    writable = True
except OSError:
    writable = False
print(json.dumps({
    "versions": {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()},
    "programs": [name for name in ("gcc", "cc", "clang", "tcc") if shutil.which(name)],
    "uid": os.getuid(), "writable": writable,
}))
"""


@dataclass(frozen=True, slots=True)
class Podman:
    """podman, and a compose project of its own."""

    environment: dict[str, str]
    project: str

    def started_since(self, part: str, moment: datetime) -> None:
        """Wait until the part's container has started, if it has not since then."""
        wanted = ("--filter=event=start", f"--filter=container={self.container(part)}", f"--since={moment.isoformat()}")
        with subprocess.Popen(
            ("podman", "events", *wanted), env=self.environment, stdout=subprocess.PIPE, text=True
        ) as events:
            assert events.stdout is not None
            assert events.stdout.readline(), "podman tells no events"
            events.terminate()

    def __call__(self, *arguments: str) -> str:
        """What it says; raises with what it complains of."""
        return self._said("podman", *arguments)

    def compose(self, *arguments: str) -> None:
        """Of the repository's compose file."""
        program = str(Path(sys.executable).with_name("podman-compose"))
        self._said(
            program, "--project-name", self.project, "--file", str(DOCKERFILE.with_name("compose.yaml")), *arguments
        )

    def container(self, part: str) -> str:
        """The container of a part."""
        project = f"--filter=label=io.podman.compose.project={self.project}"
        service = f"--filter=label=com.docker.compose.service={part}"
        return self("ps", "--all", "--quiet", project, service).strip()

    def pid(self, part: str) -> int:
        """Its first process, as this machine knows it; 0 while there is none."""
        return int(self("inspect", "--format", "{{.State.Pid}}", self.container(part)))

    def _said(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout


@dataclass(frozen=True, slots=True)
class System:
    """The running system."""

    podman: Podman
    client: httpx.Client

    def ask(self, on_token: Callable[[int], None] = lambda _idx: None, **headers: str) -> str:
        """A streamed answer, sampled; `on_token` hears how many pieces have come. Raises where the stream breaks."""
        body = {
            "model": SMOLLM2.name,
            "messages": [{"role": "user", "content": "Tell me a story about a tree that learns to count."}],
            "max_tokens": 120,
            "temperature": 0.8,
            "stream": True,
            "ignore_eos": True,
            **({} if headers else {"seed": 11}),
        }
        text, num_pieces, finish_reason = "", 0, None
        with self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["delta"].get("content") or ""
                    finish_reason = choice["finish_reason"] or finish_reason
                    num_pieces += 1
                    on_token(num_pieces)
        assert finish_reason == "length"
        return text

    def wait_ready(self) -> None:
        """Until the gateway says so: it is asked as often as it likes to be (Retry-After)."""
        again = Retry(MOST_TRIES, status_forcelist={503}, backoff_factor=0.1, backoff_max=2.0)
        with urllib3.PoolManager(retries=again, timeout=5.0) as pool:
            assert pool.request("GET", f"{self.client.base_url}/ready").status == httpx.codes.OK


class Death:
    """Of a part's process, like a crash, when an answer has come so far."""

    def __init__(self, podman: Podman, part: str) -> None:
        self._podman = podman
        self._part = part
        self._pid = podman.pid(part)
        self._since = datetime.now(UTC)

    def __call__(self, num_pieces: int) -> None:
        """Hears how many pieces of an answer have come."""
        if num_pieces == 10:
            os.kill(self._pid, signal.SIGKILL)

    def wait_over(self) -> None:
        """Until the part's next life has begun."""
        self._podman.started_since(self._part, self._since)
        assert self._podman.pid(self._part) not in (0, self._pid)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """With the model where any user may read it."""
    directory = tmp_path_factory.mktemp("podman")
    directory.parent.chmod(0o755)
    directory.chmod(0o755)
    (directory / "containers.conf").write_text(CONTAINERS_CONF)
    models = directory / "models" / SMOLLM2.name
    shutil.copytree(ModelCache.from_environment().model_dir(SMOLLM2.name), models)
    for path in models.iterdir():
        path.chmod(0o644)
    port = ReservedPort("127.0.0.1", 0)
    environment = {
        **os.environ,
        "CONTAINERS_CONF": str(directory / "containers.conf"),
        "ESPALIER_MODELS": str(models.parent),
        "ESPALIER_PORT": str(port.number),
    }
    yield Podman(environment, f"espalier-test-{secrets.token_hex(4)}")
    port.close()


@pytest.fixture(scope="module")
def system(podman: Podman) -> Iterator[System]:
    """The five containers, ready."""
    port = podman.environment["ESPALIER_PORT"]
    try:
        podman.compose("up", "--detach", "--no-build")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as client:
            running = System(podman, client)
            running.wait_ready()
            yield running
    finally:
        podman.compose("down", "--volumes", "--timeout", "5")


def inspected(podman: Podman, target: str) -> dict[str, Any]:
    """What a container of that image sees of itself."""
    said = podman("run", *CONFINED, "--entrypoint=python", OPTIONS.image(target), "-c", INSPECTION)
    return json.loads(said)


def test_the_request_manager_is_small(podman: Podman) -> None:
    """At most 250 MB; the sizes of all are printed."""
    sizes = {target: int(podman("image", "inspect", "--format={{.Size}}", OPTIONS.image(target))) for target in TARGETS}
    print({target: f"{size / 1e6:.0f} MB" for target, size in sizes.items()})  # noqa: T201 - what was asked for
    assert sizes["request-manager"] <= 250e6


def test_workers_share_all_but_their_own_code(podman: Podman) -> None:
    """Torch is pulled and kept once."""
    of = {
        target: json.loads(podman("image", "inspect", "--format={{json .RootFS.Layers}}", OPTIONS.image(target)))
        for target in ("ssm-worker", "llm-verifier")
    }
    assert of["ssm-worker"][:-1] == of["llm-verifier"][:-1]


@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_an_image_has_the_pinned_versions_and_nothing_to_build_with(podman: Podman, target: str) -> None:
    """Neither compiler nor pip in the venv; torch with the workers only; not root, and a root that stays as it is."""
    found = inspected(podman, target)
    lines = (DOCKERFILE.parents[1] / "constraints.txt").read_text().splitlines()
    pinned = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    ours = {"treecore", "request-manager", "ssm-worker", "llm-verifier"}
    others = {name: version for name, version in found["versions"].items() if name not in ours}
    assert {name: version.partition("+")[0] for name, version in others.items()} == {
        name: pinned.get(name) for name in others
    }
    assert ("torch" in others) == (target in ("ssm-worker", "llm-verifier"))
    assert "pip" not in others
    assert (found["programs"], found["writable"]) == ([], False)
    assert found["uid"] == 65532


@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_an_image_says_where_it_comes_from(podman: Podman, target: str) -> None:
    """Version, revision and licence, in the words of the Open Container Initiative."""
    labels = json.loads(podman("image", "inspect", "--format={{json .Labels}}", OPTIONS.image(target)))
    told = {name.rpartition(".")[2]: value for name, value in labels.items()}
    assert (told["version"], told["licenses"]) == (own_version(), "Apache-2.0")
    assert len(told["revision"]) == 40


@pytest.mark.parametrize("target", TARGETS)
def test_no_image_tells_how_this_machine_finds_packages(podman: Podman, target: str) -> None:
    """Neither in its history nor in its configuration."""
    everything = podman("history", "--no-trunc", "--format={{.CreatedBy}}", OPTIONS.image(target))
    everything += podman("image", "inspect", OPTIONS.image(target))
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    places = [place for place in listing.stdout.replace("'", " ").split() if "/" in place]
    assert not [place for place in places if place in everything]


def test_the_parts_are_confined(system: System) -> None:
    """Each of the five runs as 65532 in a container whose root is read-only."""
    for part in PARTS:
        found = system.podman(
            "inspect", "--format={{.HostConfig.ReadonlyRootfs}} {{.Config.User}}", system.podman.container(part)
        )
        assert found.split() == ["true", "65532:65532"]
        status = Path(f"/proc/{system.podman.pid(part)}/status").read_text()
        assert "\nUid:\t65532\t65532\t65532\t65532\n" in status
        assert "\nCapEff:\t0000000000000000\n" in status


def test_a_chat_is_answered(system: System) -> None:
    """With drafts of the SSM: more than one token a step."""
    body = {
        "model": SMOLLM2.name,
        "messages": [{"role": "user", "content": "Count: one, two, three,"}],
        "max_tokens": 40,
    }
    answer = system.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["espalier"]["tokens_per_step"] > 1


@pytest.mark.parametrize("part", BEHIND_THE_GATEWAY)
def test_the_death_of_a_part_is_a_pause(system: System, part: str) -> None:
    """In the middle of an answer: the stream goes on, its text is the same, and the part comes back."""
    solo = system.ask()
    death = Death(system.podman, part)
    assert system.ask(death) == solo
    death.wait_over()
    assert system.ask() == solo


def test_the_death_of_a_gateway_is_a_lost_connection(system: System) -> None:
    """Which a retry with the same key makes good: the same answer, by a gateway that knows nothing of the first."""
    key = {"Idempotency-Key": secrets.token_hex(8)}
    answer = system.ask(**key)
    death = Death(system.podman, "gateway")
    with pytest.raises(httpx.TransportError):
        system.ask(death, **key)
    death.wait_over()
    system.wait_ready()
    assert system.ask(**key) == answer
