"""Prints the directory of prometheus and promtool, out of the distribution's package; fetched once, into our cache.

Nothing is installed, and root is not needed: apt checks what it downloads, and dpkg-deb unpacks it. A Prometheus in
PATH is not used: tests must not depend on what a machine happens to have.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from espalier_local.cache import ModelCache

_PACKAGE = "prometheus"
_APT = ("apt-get", "-q", "-o", "Acquire::http::Timeout=30")


class FetchFailed(Exception):
    """One line for people."""


def prometheus_dir() -> Path:
    """Where the two binaries are, fetched if they are not in the cache. Raises FetchFailed."""
    kept = ModelCache.from_environment().root / "tools" / _PACKAGE
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, and apt does not like company
        if not kept.is_dir():
            with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
                _unpacked(_downloaded(Path(scratch))).rename(kept)
    return kept


def _downloaded(directory: Path) -> Path:
    """The package. Whoever may, makes apt look again at what there is before giving up."""
    try:
        _run(*_APT, "download", _PACKAGE, cwd=directory)
    except FetchFailed:
        if os.geteuid() != 0:
            raise
        _run(*_APT, "update", cwd=directory)
        _run(*_APT, "download", _PACKAGE, cwd=directory)
    return next(directory.glob("*.deb"))


def _unpacked(package: Path) -> Path:
    _run("dpkg-deb", "--extract", package, package.parent, cwd=package.parent)
    return package.parent / "usr" / "bin"


def _run(*command: str | Path, cwd: Path) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise FetchFailed(f"{command[0]} is needed to get Debian's package {_PACKAGE}") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchFailed(f"Debian's package {_PACKAGE} could not be fetched: {reason}")


def main() -> int:
    """Print the path; returns the exit status."""
    try:
        print(prometheus_dir())
    except FetchFailed as error:
        print(f"fetch_prometheus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
