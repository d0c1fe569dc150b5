"""The command as a process: one line on stderr, the right exit status, no traceback."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from espalier_local.cli import build_parser, main

COMMAND = (sys.executable, "-m", "espalier_local")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """No test sees the machine's own cache."""
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """The command with these arguments."""
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], words: str) -> None:
    """Exit status 1, nothing on stdout, one line on stderr with these words."""
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("espalier: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_missing_model_names_the_fetch_command() -> None:
    """Before anything starts."""
    assert_one_line(run("up", "--port", "0"), "espalier models fetch smollm2-135m-instruct")


def test_a_port_in_use_names_the_way_out() -> None:
    """Even if the model is missing too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        done = run("up", "--port", str(number))
    assert_one_line(done, f"port {number} is in use; choose another with --port")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "hi", "--model", "/no/such/model"], "neither a checkpoint directory"),
        (["generate", "hi", "--tensor-parallel-size", "16", "--threads", "100"], "16 ranks; use 1 to"),
        (["generate", "hi", "--tensor-parallel-size", "9", "--pipeline-parallel-size", "2"], "at most 16 ranks here"),
        (["generate", "hi", "--threads", "0"], "--threads 0: this machine has"),
        (["generate", "hi", "--threads", "100000"], "--threads 100000: this machine has"),
        (["generate", "hi", "--url", "http://127.0.0.1:1"], "is no Espalier that answers"),
        (["generate", "hi", "--url", "http://[::1"], "is no URL of a gateway"),
        (["generate", "hi", "--url", "http://127.0.0.1:65536"], "is no URL of a gateway"),
        (["generate", "hi", "--url", "127.0.0.1:8000"], "is no URL of a gateway"),
        (["generate", "hi", "--url", "http://127.0.0.1:1", "--temperature", "nan"], "--temperature nan"),
        (["generate", "hi\udcff", "--url", "http://127.0.0.1:1"], "not valid UTF-8"),
        (["generate", "hi", "--model", "~no-such-user/llm"], "neither a checkpoint directory"),
        (["up", "--port", "0", "--ssm", "none", "--ssm", "default"], "fetch"),
        (["up", "--port", "0", "--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
    ],
)
def test_what_cannot_be_done_is_one_line(args, words, capsys) -> None:
    """Exit status 1."""
    assert main(args) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("espalier: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_model_that_no_service_can_load_is_one_line(tmp_path, gone) -> None:
    """The service's own words; all others are stopped."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    done = run("generate", "hi", "--model", str(tmp_path / "bad"), "--threads", "1")
    assert_one_line(done, ": ")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["dance"],
        ["up", "--port", "65536"],
        ["up", "--port", "-1"],
        ["up", "--dtype", "int8"],
        ["generate"],
        ["generate", "hi", "--tree", "2,0"],
        ["generate", "hi", "--tree", "two"],
        ["generate", "hi", "--chat", "--raw"],
        ["models", "fetch", "gpt-5"],
    ],
)
def test_wrong_usage_is_exit_status_2(args, capsys) -> None:
    """As argparse does it."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: espalier" in capsys.readouterr().err


def test_models_list_says_where_or_how(cache, capsys) -> None:
    """The directory, or the command."""
    assert main(["models", "list"]) == 0
    assert "espalier models fetch smollm2-135m-instruct" in capsys.readouterr().out
    directory = cache / "models" / "smollm2-135m-instruct"
    directory.mkdir(parents=True)
    main(["models", "list"])
    assert str(directory) in capsys.readouterr().out


def test_ctrl_c_is_exit_status_130_without_a_traceback() -> None:
    """While it waits for a gateway that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = subprocess.Popen([*COMMAND, "generate", "hi", "--url", url], stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()
        with command, connection:
            command.send_signal(signal.SIGINT)
            assert command.wait(20) == 130
            assert command.stderr is not None
            assert command.stderr.read() == ""


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    """`espalier models list | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "models", "list"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_every_subcommand_has_help() -> None:
    """And names itself in it."""
    text = build_parser().format_help()
    for name in ("up", "generate", "bench", "models", "doctor"):
        assert f"\n    {name}" in text
        with pytest.raises(SystemExit) as caught:
            build_parser([name]).parse_args([name, "--help"])
        assert caught.value.code == 0
