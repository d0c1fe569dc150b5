"""What start-up refuses: one clear line, exit 1, no traceback, no orphan."""

import shutil
import socket
from pathlib import Path

import pytest

from espalier_local.cli import main
from treecore.testing.checkpoints import write_tiny_llama


def refused(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line of `espalier up`, which must not start."""
    assert main(["up", *flags]) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


def test_port_in_use(capfd: pytest.CaptureFixture[str], llm_dir: Path) -> None:
    """The line names the port and the flag."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(capfd, "--model", str(llm_dir), "--ssm", "none", "--port", port)
    assert port in line
    assert "--port" in line


def test_missing_model(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The line names what was asked for."""
    assert "nowhere" in refused(capfd, "--model", str(tmp_path / "nowhere"), "--port", "0")


@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_corrupt_weights(capfd: pytest.CaptureFixture[str], llm_dir: Path, tmp_path: Path, keep: int) -> None:
    """Weights cut off at the start, in the header and at the last byte: the line names the file."""
    broken = tmp_path / "broken"
    shutil.copytree(llm_dir, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "model.safetensors" in refused(capfd, "--model", str(broken), "--ssm", "none", "--port", "0")


def test_ssm_that_is_no_checkpoint(capfd: pytest.CaptureFixture[str], llm_dir: Path, tmp_path: Path) -> None:
    """A directory that is no checkpoint is refused by name."""
    assert "config.json" in refused(capfd, "--model", str(llm_dir), "--ssm", str(tmp_path), "--port", "0")


def test_ssm_of_another_vocabulary(capfd: pytest.CaptureFixture[str], llm_dir: Path, tmp_path: Path) -> None:
    """An SSM that could never draft is refused, not served in silence."""
    other = write_tiny_llama(tmp_path)
    line = refused(capfd, "--model", str(llm_dir), "--ssm", str(other), "--port", "0")
    assert f"{other}: vocab_size=61" in line
