"""Builds Espalier's images with buildah or docker, and prints what they weigh.

Knows the build tools' command lines and how this machine's pip finds packages, which the build is lent as secrets. Must
not know what is in an image: docker/Dockerfile does. Runs on any Python 3.11, without Espalier being installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
TARGETS = ("request-manager", "scaler", "ssm-worker", "llm-verifier", "nats")
OWN_BASE = "localhost/espalier-base:bookworm"

_WITH_TORCH = ("ssm-worker", "llm-verifier")
_PIP_KEYS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "trusted-host",
    "proxy",
    "cert",
    "default-timeout",
    "timeout",
)
_PULL_S = 120
_CA_SECRET = "ca.pem"

Builder = Literal["buildah", "docker"]


class BuildFailed(Exception):
    """One line for people."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be built. base None: the Dockerfile's own, or one of ours where no registry can be reached."""

    builder: Builder
    variant: str
    repository: str
    version: str
    revision: str
    source: str
    torch_index_url: str
    base: str | None

    def image(self, target: str) -> str:
        """The name of an image; what depends on the variant says so."""
        variant = f"-{self.variant}" if target in _WITH_TORCH else ""
        return f"{self.repository}/{target}:{self.version}{variant}"


@dataclass(frozen=True, slots=True)
class PipSource:
    """Where this machine's pip gets packages: a configuration for the build, and what of this machine it speaks of."""

    config: str
    ca_bundle: Path | None
    directories: tuple[Path, ...]


def pip_source(listing: str) -> PipSource:
    """What `pip config list` said, for a build: certificates come as a secret, directories under their own names."""
    settings = _settings(listing)
    ca_bundle = settings.pop("cert", None)
    lines = [f"{key} = {' '.join(value.split())}" for key, value in settings.items()]
    if ca_bundle is not None:
        lines.append(f"cert = /run/secrets/{_CA_SECRET}")
    places = " ".join(settings.get(key, "") for key in ("index-url", "extra-index-url", "find-links")).split()
    directories = tuple(dict.fromkeys(path for place in places if (path := _directory(place)) is not None))
    return PipSource("\n".join(["[global]", *lines, ""]), None if ca_bundle is None else Path(ca_bundle), directories)


def _settings(listing: str) -> dict[str, str]:
    """By key; the environment's values win, as they do in pip."""
    found = re.findall(r"^(\S+)\.([\w-]+)='(.*)'$", listing.replace("\\n", " "), re.MULTILINE)
    ranked = sorted(found, key=lambda entry: entry[0] == ":env:")
    return {key: value for _, key, value in ranked if key in _PIP_KEYS}


def _directory(place: str) -> Path | None:
    """The directory of this machine that a place lies in. An index's links may lead beside its directory `simple`."""
    parts = urlsplit(place)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(parts.path)
    return path.parent if path.name == "simple" else path


def build_command(options: Options, base: str, target: str, source: PipSource, secrets: Path) -> list[str]:
    """The command that builds one target."""
    given = {
        "BASE": base,
        "VARIANT": options.variant,
        "TORCH_INDEX_URL": options.torch_index_url,
        "VERSION": options.version,
        "REVISION": options.revision,
        "SOURCE": options.source,
    }
    command = [*_FRONT[options.builder], "--file", str(DOCKERFILE), "--target", target, "--tag", options.image(target)]
    command += [f"--build-arg={name}={value}" for name, value in given.items()]
    command += [f"--secret=id=pip.conf,src={secrets / 'pip.conf'}"]
    if source.ca_bundle is not None:
        command += [f"--secret=id={_CA_SECRET},src={source.ca_bundle}"]
    if options.builder == "buildah":
        command += [f"--volume={path}:{path}:ro" for path in source.directories]
    return [*command, str(ROOT)]


_FRONT: Mapping[Builder, Sequence[str]] = {
    "buildah": ("buildah", "build", "--layers"),
    "docker": ("docker", "buildx", "build", "--load"),
}


def build(options: Options, targets: Iterable[str]) -> None:
    """Build, and print each image's size. Raises BuildFailed."""
    base = options.base or _base(options.builder)
    source = pip_source(_said(sys.executable, "-m", "pip", "config", "list"))
    with tempfile.TemporaryDirectory() as secrets:
        (Path(secrets) / "pip.conf").write_text(source.config, encoding="utf-8")
        for target in targets:
            _run(*build_command(options, base, target, source, Path(secrets)))
            print(f"{options.image(target)}  {_size(options, target)}", flush=True)


def _size(options: Options, target: str) -> str:
    if options.builder == "buildah":
        return _said("buildah", "images", "--format", "{{.Size}}", options.image(target)).strip()
    size = int(_said("docker", "image", "inspect", "--format", "{{.Size}}", options.image(target)))
    return f"{size / 1e6:.0f} MB"


def _base(builder: Builder) -> str:
    """The Dockerfile's base if it can be had, else ours, made if it is not there."""
    default = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert default is not None, "the Dockerfile names its base"
    if _has(builder, default[1]) or _succeeds(builder, "pull", default[1]):
        return default[1]
    if not _has(builder, OWN_BASE):
        print(f"{default[1]} cannot be had here: making a base image of Debian's packages", flush=True)
        _run(str(ROOT / "scripts" / "base-image.sh"), OWN_BASE)
    return OWN_BASE


def _has(builder: Builder, image: str) -> bool:
    return _succeeds(builder, "inspect", "--type", "image", image)


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=_PULL_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _run(*command: str) -> None:
    # what works in a container too, where a build has no namespaces of its own
    environment = {"BUILDAH_ISOLATION": "chroot", **os.environ}
    if subprocess.run(command, check=False, env=environment).returncode != 0:
        raise BuildFailed(f"failed: {' '.join(command)}")


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def own_version() -> str:
    """Espalier's version."""
    with (ROOT / "deploy" / "local" / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def _any_builder() -> Builder:
    if shutil.which("buildah"):
        return "buildah"
    if shutil.which("docker"):
        return "docker"
    raise BuildFailed("neither buildah nor docker is here; mend it with: apt install buildah")


def _revision() -> str:
    try:
        return _said("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    except (BuildFailed, OSError):
        return ""  # not a checkout


def main() -> int:
    """Build what the flags say; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    add("--builder", choices=("buildah", "docker"), help="default: buildah if it is here")
    add("--variant", choices=("cpu", "cuda"), default="cpu", help="which torch the workers get (default cpu)")
    add("--base", help="base image (default: the Dockerfile's; one made of Debian's packages where that cannot be had)")
    add("--repository", default="espalier", help="what stands before the images' names (default espalier)")
    add("--version", default=own_version(), help="the images' tag (default: Espalier's version)")
    add("--source", default="", help="URL of the source, for a label")
    add("--torch-index-url", default="", help="one more package index to look for torch in")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    try:
        options = Options(
            args.builder or _any_builder(),
            args.variant,
            args.repository,
            args.version,
            _revision(),
            args.source,
            args.torch_index_url,
            args.base,
        )
        build(options, args.targets or TARGETS)
    except BuildFailed as error:
        print(f"build_images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
