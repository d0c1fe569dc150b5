"""API keys: nobody comes in without one, keys rotate while the gateway runs, and none is ever shown."""

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from request_manager.contract import ModelCard
from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import tiny_codec
from request_manager.testing import ScriptedManager, deltas
from treecore.errors import ConfigError

CARD = ModelCard("tiny", 300, 64, (), 16)
ASK = {"model": "tiny", "prompt": "ab", "max_tokens": 2}


def client(keys: Path | None) -> httpx.AsyncClient:
    """A client of a gateway with the keys in that file."""
    manager = ScriptedManager(CARD, lambda _: deltas([1, 2], [], "length"))
    app = create_app(manager, tiny_codec(), GatewaySettings(api_keys_file=keys), CollectorRegistry())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def keys_file(path: Path, *keys: str) -> Path:
    """The file with these keys, replaced as a cluster replaces a Secret's files."""
    fresh = path.with_name("fresh")
    fresh.write_text("\n".join(keys) + "\n", "utf-8")
    fresh.replace(path)
    return path


async def status(gateway: httpx.AsyncClient, key: str | None, path: str = "/v1/completions") -> int:
    """What a request with that key gets."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await (gateway.post(path, json=ASK, headers=headers) if path.startswith("/v1/c") else gateway.get(path))
    return response.status_code


async def test_only_a_key_opens(tmp_path: Path) -> None:
    """Each key of the file does; none, another one, a part of one, an empty one and another scheme do not."""
    async with client(keys_file(tmp_path / "keys", "one", "", "  two  ")) as gateway:
        assert [await status(gateway, key) for key in ("one", "two")] == [200, 200]
        assert [await status(gateway, key) for key in (None, "", "on", "One", "three", "one two")] == [401] * 6
        refused = await gateway.post("/v1/completions", json=ASK, headers={"authorization": "Basic one"})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert "one" not in refused.text


async def test_an_editor_leaves_its_traces(tmp_path: Path) -> None:
    """A byte order mark, Windows' ends of lines and comments are no part of a key."""
    path = tmp_path / "keys"
    path.write_bytes("\ufeffone\r\n# team two\r\ntwo\r\n".encode())
    async with client(path) as gateway:
        assert [await status(gateway, key) for key in ("one", "two")] == [200, 200]
        assert [await status(gateway, key) for key in ("# team two", "team two")] == [401, 401]


@pytest.mark.parametrize("key", ["schlüssel", "a\tb"])
def test_a_key_that_no_header_carries_stops_the_start(tmp_path: Path, key: str) -> None:
    """It would never open anything. It is not shown."""
    with pytest.raises(ConfigError, match=r"keys: line 2: a key is printable ASCII$"):
        client(keys_file(tmp_path / "keys", "one", key))


async def test_probes_need_no_key_and_the_rest_does(tmp_path: Path) -> None:
    """A load balancer has none; models, metrics and paths that do not exist are not shown without one."""
    async with client(keys_file(tmp_path / "keys", "one")) as gateway:
        assert [await status(gateway, None, path) for path in ("/health", "/ready")] == [200, 200]
        closed = ("/v1/models", "/metrics", "/openapi.json", "/nowhere")
        assert [await status(gateway, None, path) for path in closed] == [401] * 4


async def test_keys_rotate_without_a_restart(tmp_path: Path) -> None:
    """A new key opens as soon as the file has it, an old one no longer; a file that goes away changes nothing."""
    path = keys_file(tmp_path / "keys", "old")
    async with client(path) as gateway:
        assert await status(gateway, "old") == 200
        keys_file(path, "old", "new")
        assert [await status(gateway, key) for key in ("old", "new")] == [200, 200]
        keys_file(path, "new")
        assert [await status(gateway, key) for key in ("old", "new")] == [401, 200]
        path.unlink()
        assert [await status(gateway, key) for key in ("old", "new")] == [401, 200]
        keys_file(path, "")
        assert await status(gateway, "new") == 200
        keys_file(path, "third")
        assert [await status(gateway, key) for key in ("new", "third")] == [401, 200]


async def test_without_a_file_everybody_may() -> None:
    """On a laptop there are no keys; one that is shown all the same does no harm."""
    async with client(None) as gateway:
        assert [await status(gateway, key) for key in (None, "any")] == [200, 200]


@pytest.mark.parametrize("content", [None, "", "\n \n", "# one\n"])
def test_a_file_without_keys_stops_the_start(tmp_path: Path, content: str | None) -> None:
    """An empty file would lock everybody out, a missing one let everybody think that there is a lock."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=r"ESPALIER_GATEWAY_API_KEYS_FILE: .*keys: (no key in it|No such file)"):
        client(path)
