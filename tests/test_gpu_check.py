"""scripts/gpu_check.sh: what it says without a GPU, and a rehearsal of all its checks and tables in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.sh"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The script, with every GPU of this machine hidden."""
    hidden = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    hidden.pop("TRITON_INTERPRET", None)
    return subprocess.run([str(SCRIPT), *flags], check=False, capture_output=True, text=True, env=hidden)


def test_without_a_device_it_says_so_in_one_line() -> None:
    """And ends with its own status, so that nobody takes it for a pass."""
    found = run()
    assert (found.returncode, found.stderr) == (3, "")
    assert found.stdout.startswith("gpu_check: no CUDA device")
    assert found.stdout.count("\n") == 1


def test_a_rehearsal_passes() -> None:
    """Every check and table runs to its end: what is not run at all is broken by the time a GPU is there."""
    pytest.importorskip("triton")
    found = run("--interpret")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("\nok ") == 5
    assert "all checks passed" in found.stdout
