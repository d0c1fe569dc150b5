"""What all ranks of a group must have in common. Knows settings and files; reads a few kilobytes of the weights."""

import hashlib
from importlib.metadata import version
from pathlib import Path

from llm_verifier.settings import VerifierSettings
from treecore.errors import ConfigError
from treecore.model.backend import choose_device
from treecore.service.settings import ServiceSettings

_OWN = {  # what a rank may have to itself
    *ServiceSettings.model_fields,
    *("model", "name", "rank", "local_rank", "rendezvous", "group_service", "group_port"),
    *("group_timeout_s", "rendezvous_timeout_s"),
}
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def facts(settings: VerifierSettings) -> dict[str, str]:
    """Name -> value of everything that must be equal, the checkpoint's content and our version included."""
    common = settings.model_dump(mode="json", exclude=_OWN)
    told = {name: str(value) for name, value in common.items()}
    told["device"] = choose_device(settings.device)  # `auto` may be one thing here and another there
    return {"version": version("llm-verifier"), "checkpoint": checkpoint_digest(settings.model), **told}


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first fact that differs, for people; None if none does."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'unknown')!r} there and {ours.get(name, 'unknown')!r} at rank 0"
    return None


def checkpoint_digest(path: Path) -> str:
    """SHA-256 over the configuration and over samples of the weights, where fine-tunes of one model differ."""
    files = [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*.safetensors")])
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.name.encode() + b"\0" + _sampled(file))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            return opened.read()
        parts = [size.to_bytes(8, "little")]
        for idx in range(_SAMPLES):
            opened.seek((size - _SAMPLE_BYTES) * idx // (_SAMPLES - 1))
            parts.append(opened.read(_SAMPLE_BYTES))
    return b"".join(parts)
