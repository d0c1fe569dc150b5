"""Where Debian's package cannot be had, that is one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_prometheus.py"
APT = "#!/bin/sh\necho 'W: apt warns' >&2\necho 'E: apt has no such package' >&2\nexit 100\n"


def fetch(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """With an empty cache, and only what is in tmp_path/bin."""
    env = os.environ | {"ESPALIER_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path / "bin")}
    return subprocess.run((sys.executable, SCRIPT), capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("has_apt", [False, True])
def test_the_reason_is_one_line(tmp_path: Path, has_apt: bool) -> None:
    """No apt, or an apt that refuses. Nothing half done stays in the cache."""
    (tmp_path / "bin").mkdir()
    if has_apt:
        apt = tmp_path / "bin" / "apt-get"
        apt.write_text(APT)
        apt.chmod(0o755)
    done = fetch(tmp_path)
    assert done.returncode == 1
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("fetch_prometheus: ")
    assert ("apt has no such package" if has_apt else "apt-get is needed") in line
    assert [path.name for path in (tmp_path / "cache" / "tools").iterdir()] == ["prometheus.lock"]
