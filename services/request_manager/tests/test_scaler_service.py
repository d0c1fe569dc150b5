"""The scaler as a process, its settings, and what docs/scaling.md promises about both."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from request_manager.scaler.settings import ScalerSettings
from request_manager.scaler.testing import NAMESPACE, FakeKubernetes, fake_kubernetes, role
from treecore.errors import ConfigError
from treecore.service.settings import ServiceSettings, read_settings

DOCS = Path(__file__).parents[3] / "docs" / "scaling.md"
NEEDED = ["--namespace", "n", "--load-endpoints", "gateways:9100"]
SSM = '{"name": "a", "deployment": "d", "endpoint": "e:9100", "max_replicas": 2}'


def documented(key: str) -> object:
    """What a YAML block of the page has under `key`."""
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)]
    return next(block[key] for block in blocks if key in block)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets."""
    for name in [name for name in os.environ if name.startswith("ESPALIER_")]:
        monkeypatch.delenv(name)


def test_the_documented_environment_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chart sets it."""
    environment = documented("env")
    assert isinstance(environment, dict)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(ScalerSettings, [])
    assert settings.verifier is not None
    assert settings.limits(settings.verifier).max_replicas == 2
    limits = settings.limits(settings.ssms[0])
    assert (limits.min_replicas, limits.max_replicas, limits.stale_after_s) == (1, 4, 37.5)


def test_the_documented_role_is_the_one_that_the_tests_enforce() -> None:
    """The fake API refuses whatever it does not allow."""
    assert documented("rules") == role(["espalier-ssm-default"], ["espalier-verifier"], "espalier-scaler")


def test_every_setting_is_documented() -> None:
    """By its name."""
    own = set(ScalerSettings.model_fields) - set(ServiceSettings.model_fields)
    assert [name for name in own if f"`{name}`" not in DOCS.read_text()] == []


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--namespace", "n"], "--load-endpoints"),
        (["--namespace", "n", "--load-endpoints", "no-port"], "--load-endpoints"),
        ([*NEEDED, "--quantile", "1"], "--quantile"),
        ([*NEEDED, "--verifier", '{"max_replicas": 1}'], "--verifier.stateful-set"),
        (
            [*NEEDED, "--verifier", '{"stateful_set": "v", "max_replicas": 1, "maxReplicas": 1}'],
            "--verifier.maxReplicas",
        ),
        ([*NEEDED, "--ssms", f'[{SSM[:-1]}, "min_replicas": 3}}]'], "min_replicas exceeds max_replicas"),
        ([*NEEDED, "--scrape-timeout-s", "20"], "scrape_timeout_s exceeds period_s"),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], name: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError) as caught:
        read_settings(ScalerSettings, argv)
    assert name in str(caught.value)


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    """A cluster with fewer SSM replicas than the settings allow."""
    with fake_kubernetes(role(["d"], [], "espalier-scaler")) as kubernetes:
        kubernetes.add("deployments", "d", 1)
        yield kubernetes


async def test_a_process_takes_the_lease_and_gives_it_up(kubernetes: FakeKubernetes) -> None:
    """It tells in one line what it cannot scrape, and ends in good order on SIGTERM."""
    argv = ["--namespace", NAMESPACE, "--load-endpoints", "127.0.0.1:1", "--ssms", f"[{SSM}]"]
    times = ["--period-s", "0.05", "--scrape-timeout-s", "0.05"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "request_manager.scaler", "--kubernetes-url", kubernetes.url, *argv, *times),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while "lease taken" not in (line := (await process.stderr.readline()).decode()):
            assert line
        assert kubernetes.holder("espalier-scaler")
        while "scrape failed error=127.0.0.1:1: " not in (line := (await process.stderr.readline()).decode()):
            assert line
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0
    assert kubernetes.holder("espalier-scaler") == ""
    assert kubernetes.writes == []
