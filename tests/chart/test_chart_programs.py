"""What the chart puts into pods besides our services: the broker's settings, the fetch, the test's request."""

import base64
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import nats
import nats.errors
import pytest
from huggingface_hub import snapshot_download
from nats.aio.client import Client

from espalier_local.broker import nats_program, wait_listening
from espalier_local.ports import ReservedPort

MODULES = """
import sys, types
hub = types.ModuleType("huggingface_hub")
def snapshot_download(repository, *, revision, local_dir, allow_patterns):
    if repository == "no/such":
        raise OSError("404: no such repository")
    local_dir.mkdir(parents=True, exist_ok=True)
    with open(local_dir / "asked", "a") as asked:
        asked.write(f"{repository} {revision} {' '.join(allow_patterns)}\\n")
hub.snapshot_download = snapshot_download
sys.modules["huggingface_hub"] = hub
"""


def run(program: str, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """As the container does."""
    command = (sys.executable, "-c", program, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env or {}, timeout=60)


def fetch_program(chart: Path) -> str:
    """With a hub that writes down what it was asked for."""
    return MODULES + (chart / "files" / "fetch_model.py").read_text(encoding="utf-8")


def test_the_hubs_client_takes_these_arguments() -> None:
    """The one that images have; what stands in for it below must not differ."""
    inspect.signature(snapshot_download).bind("a/b", revision="v1", local_dir=Path("x"), allow_patterns=["*"])


def test_a_model_is_fetched_once(chart: Path, tmp_path: Path) -> None:
    """A restart of the pod asks nobody."""
    target = tmp_path / "models" / "a--b--v1"
    target.mkdir(parents=True)
    for _ in range(2):
        assert run(fetch_program(chart), "a/b", "v1", target, "*.json").returncode == 0
    assert (target / "asked").read_text() == "a/b v1 *.json\n"


def test_other_files_of_the_model_are_fetched(chart: Path, tmp_path: Path) -> None:
    """A volume that had the tokenizer only gets the weights."""
    target = tmp_path / "models" / "a--b--v1"
    target.mkdir(parents=True)
    for patterns in (["*.json"], ["*.json", "*.safetensors"]):
        assert run(fetch_program(chart), "a/b", "v1", target, *patterns).returncode == 0
    assert (target / "asked").read_text() == "a/b v1 *.json\na/b v1 *.json *.safetensors\n"


def test_another_model_makes_room(chart: Path, tmp_path: Path) -> None:
    """The volume is made for one."""
    for name in ("old", "new"):
        target = tmp_path / name
        target.mkdir()
        assert run(fetch_program(chart), f"a/{name}", "v1", target, "*").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_failed_fetch_is_one_line_and_is_not_taken_for_done(chart: Path, tmp_path: Path) -> None:
    """The pod tries again."""
    target = tmp_path / "models" / "x"
    target.mkdir(parents=True)
    done = run(fetch_program(chart), "no/such", "main", target, "*")
    assert done.returncode == 1
    assert done.stderr == "fetch_model: no/such at main: 404: no such repository\n"
    assert list(target.iterdir()) == []


class Gateway(BaseHTTPRequestHandler):
    """Says what it is told to, and keeps what it was asked."""

    answer: tuple[int, dict[str, Any]] = (200, {})
    asked: dict[str, Any]

    def do_POST(self) -> None:
        """One completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked = {"path": self.path, "key": self.headers["authorization"], **body}
        status, told = self.answer
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Quiet."""


@pytest.fixture
def gateway() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_test_generates_a_token(chart: Path, gateway: str) -> None:
    """With the first of the keys, where there are any."""
    program = (chart / "files" / "generate_token.py").read_text(encoding="utf-8")
    Gateway.answer = (200, {"choices": [{"text": " blue"}], "usage": {"completion_tokens": 1}})
    done = run(program, gateway, "llm", env={"API_KEYS": "first\nsecond\n"})
    assert (done.returncode, done.stdout) == (0, "generated ' blue'\n")
    assert Gateway.asked["path"] == "/v1/completions"
    assert (Gateway.asked["model"], Gateway.asked["max_tokens"], Gateway.asked["key"]) == ("llm", 1, "Bearer first")
    assert run(program, gateway, "llm").returncode == 0
    assert Gateway.asked["key"] is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, {"error": {"message": "no verifier"}}), "no verifier"),
        ((401, {"error": {"message": "a valid API key is needed"}}), "a valid API key"),
        ((200, {"choices": [], "usage": {"completion_tokens": 0}}), "no token"),
    ],
)
def test_the_test_fails_with_what_the_gateway_says(chart: Path, gateway: str, answer: Any, words: str) -> None:
    """In its log."""
    Gateway.answer = answer
    done = run((chart / "files" / "generate_token.py").read_text(encoding="utf-8"), gateway, "llm")
    assert done.returncode == 1
    assert words in done.stderr


@contextmanager
def broker(release: Any, directory: Path, login: dict[str, str]) -> Iterator[int]:
    """A real nats-server with the rendered settings, but for ports and directories; yields its port."""
    port, monitor = ReservedPort("127.0.0.1", 0), ReservedPort("127.0.0.1", 0)
    settings = release.one("ConfigMap", "nats")["data"]["nats.conf"]
    for old, new in (("4222", port.number), ("8222", monitor.number), ("/data", directory)):
        assert old in settings
        settings = settings.replace(old, str(new))
    (directory / "nats.conf").write_text(settings)
    flags = release.pod("nats").containers[0]["command"][1:-1]
    environment = {"NATS_USER": login["user"], "NATS_PASSWORD": login["password"]}
    command = [nats_program(), *flags, directory / "nats.conf"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield port.number
    finally:
        server.terminate()
        server.wait(20)
        port.close()
        monitor.close()


async def test_the_broker_takes_its_settings_and_asks_for_the_password(render: Any, tmp_path: Path) -> None:
    """Those of the rendered Secret; and it takes as large messages as the launcher's broker."""
    release = render()
    login = {key: base64.b64decode(value).decode() for key, value in release.one("Secret", "nats")["data"].items()}
    with broker(release, tmp_path, login) as port:
        await wait_listening(port)
        url = f"nats://127.0.0.1:{port}"
        client = await nats.connect(url, user=login["user"], password=login["password"])
        assert client.max_payload == 8 * 2**20
        assert (await client.jetstream().account_info()).limits is not None
        await client.close()
        stranger = Client()
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            await stranger.connect(url, user=login["user"], password="wrong", allow_reconnect=False)
        await stranger.close()


def test_a_password_is_long_and_read_as_text(helm: Any) -> None:
    """The server would read one that begins with a digit as a number."""
    found = {
        helm.template(flags=("--show-only", "templates/nats/secret.yaml")).objects[0]["data"]["password"] for _ in "ab"
    }
    assert len(found) == 2
    for each in found:
        assert re.fullmatch(r"p[A-Za-z0-9]{39}", base64.b64decode(each).decode())
