"""Start and end of a service process: settings that name what is wrong, one clear line, the right exit status."""

import asyncio
import logging
import os
import signal

import pytest
from pydantic import Field

from treecore.errors import ConfigError
from treecore.service.lifecycle import run_service
from treecore.service.settings import ServiceSettings, read_settings


class Settings(ServiceSettings):
    """What a service adds to the shared settings."""

    port: int = Field(8000, ge=0, le=65535)
    model_dir: str


GOOD = ["--model-dir", "here"]


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside, and logging of its own: start_logging closes what it finds at the root."""
    for name in [name for name in os.environ if name.startswith("ESPALIER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def test_flags_win_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, then environment, then defaults."""
    monkeypatch.setenv("ESPALIER_PORT", "1234")
    monkeypatch.setenv("ESPALIER_LOG_LEVEL", "debug")
    settings = read_settings(Settings, [*GOOD, "--port", "99"])
    assert (settings.port, settings.log_level, settings.model_dir) == (99, "debug", "here")
    assert settings.subject_prefix == "espalier"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([*GOOD, "--port", "65536"], "--port"),
        ([*GOOD, "--port", "many"], "--port"),
        ([*GOOD, "--log-level", "loud"], "--log-level"),
        ([*GOOD, "--subject-prefix", "a.b"], "--subject-prefix"),
        ([*GOOD, "--subject-prefix", ""], "--subject-prefix"),
        ([], "--model-dir"),
        ([*GOOD, "--prot", "1"], "--prot"),
        ([*GOOD, "stray"], "stray"),
        *[
            ([*GOOD, "--nats-url", url], "--nats-url")
            for url in ("", "nats://", "not a url", "http://h:1", "nats://h:port", "nats://h:99999", "127.0.0.1:4222")
        ],
    ],
)
def test_a_bad_setting_is_named(argv: list[str], name: str) -> None:
    """An unknown, missing or bad value is a ConfigError of one line with the flag's name."""
    with pytest.raises(ConfigError) as caught:
        read_settings(Settings, argv)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the flag of the same setting."""
    monkeypatch.setenv("ESPALIER_PORT", "-1")
    with pytest.raises(ConfigError, match="--port"):
        read_settings(Settings, GOOD)


async def returns(_settings: Settings, _stop: asyncio.Event) -> None:
    """A service that has nothing to do."""


async def refuses(_settings: Settings, _stop: asyncio.Event) -> None:
    """A service whose checkpoint is broken."""
    raise ConfigError("the model is no model")


async def crashes(_settings: Settings, _stop: asyncio.Event) -> None:
    """A service with a bug."""
    raise RuntimeError("a bug")


def test_a_service_that_ends_by_itself_exits_with_0() -> None:
    """Nothing to complain about."""
    assert run_service("svc", Settings, returns, GOOD) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_set_stop_and_exit_with_0(number: signal.Signals) -> None:
    """Both signals mean: come to an end in good order."""

    async def waits(_settings: Settings, stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 10)

    before = signal.getsignal(number)
    assert run_service("svc", Settings, waits, GOOD) == 0
    signal.signal(number, before)


def test_what_start_up_refuses_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback."""
    assert run_service("svc", Settings, refuses, GOOD) == 1
    assert capsys.readouterr().err == "svc: the model is no model\n"


def test_a_bad_flag_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything else happens."""
    assert run_service("svc", Settings, returns, [*GOOD, "--port", "x"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("svc: --port: ")
    assert complaint.count("\n") == 1


def test_a_crash_is_logged_and_exits_with_70(capsys: pytest.CaptureFixture[str]) -> None:
    """With its traceback, under the service's name: a supervisor may try again."""
    assert run_service("svc", Settings, crashes, GOOD) == 70
    logged = capsys.readouterr().err
    assert "ERROR svc service crashed" in logged
    assert "RuntimeError: a bug" in logged
