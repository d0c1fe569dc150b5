"""What a checkpoint's config.json says, validated. Knows the configuration's fields; must not know tensors or torch."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treecore.errors import ConfigError

Config = Mapping[str, Any]

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_CONTEXT_LEN = 2**22  # the rotation of every position is tabulated at load
DRAFT_KEYS = {"teacher_embedding", "head_token_ids", "teacher"}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; `scaling` is None where frequencies are taken as they are."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What an SSM artefact leaves out of its checkpoint: the teacher's embedding; head rows that it never proposes."""

    teacher_embedding: bool
    trimmed_head: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a Llama-family decoder. `eos_token_ids` may be empty; `draft` is None for a plain checkpoint."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    context_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    draft: DraftSpec | None = None


def read_spec(path: Path) -> ModelSpec:
    """The spec of the checkpoint directory `path`. Raises ConfigError naming the file or the field that is at fault."""
    config = dict(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.exists():  # generate() lets it override config.json, and so do we
        overrides = read_json(generation)
        config.update(
            {key: overrides[key] for key in ("bos_token_id", "eos_token_id") if overrides.get(key) is not None}
        )
    return parse_spec(config, name=path.resolve().name)


def read_json(path: Path) -> Config:
    """The JSON object in `path`. Raises ConfigError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def parse_spec(config: Config, name: str) -> ModelSpec:
    """The spec that a config.json object states. Raises ConfigError naming an absent, malformed or unsupported one."""
    _refuse_unsupported(config)
    num_heads = _positive_int(config, "num_attention_heads")
    hidden_size = _positive_int(config, "hidden_size")
    spec = ModelSpec(
        name=name,
        vocab_size=_positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=_positive_int(config, "num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_positive_int(config, "num_key_value_heads", num_heads),
        head_dim=_positive_int(config, "head_dim", hidden_size // num_heads),
        rms_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        context_len=_positive_int(config, "max_position_embeddings", 2048, most=MAX_CONTEXT_LEN),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id")), None),
        eos_token_ids=_token_ids(config, "eos_token_id"),
        draft=_draft(config.get("espalier")),
    )
    _check_heads(spec)
    return spec


def _refuse_unsupported(config: Config) -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "model_type": ("llama",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, None),
    }
    for field, supported in expected.items():
        value = config.get(field)
        if value not in supported:
            raise ConfigError(f"config.json: {field}={value!r} is not supported (expected {supported[0]!r})")


def _check_heads(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={spec.num_kv_heads} does not divide {spec.num_heads} heads"
        )
    if spec.head_dim % 2:
        raise ConfigError(f"config.json: head_dim={spec.head_dim} is odd; rotary embedding needs pairs")


def _rope(config: Config) -> RopeSpec:
    """Reads both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_parameters={rope!r} is no object")
    theta = _positive({"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, LinearScaling(_positive(rope, "factor")))
    if kind == "llama3":
        return RopeSpec(theta, _llama3(rope))
    raise ConfigError(f"config.json: rope_type={kind!r} is not supported (default, linear or llama3)")


def _llama3(rope: Config) -> Llama3Scaling:
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"config.json: low_freq_factor={low} must be below high_freq_factor={high}")
    original = _positive_int(rope, "original_max_position_embeddings")
    return Llama3Scaling(_positive(rope, "factor"), low, high, original)


def _draft(value: object) -> DraftSpec | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: espalier={value!r} is no object")
    if unknown := set(value) - DRAFT_KEYS:
        raise ConfigError(f"config.json: espalier has unknown fields {sorted(unknown)}")
    teacher_embedding = bool(value.get("teacher_embedding", False))
    return DraftSpec(teacher_embedding, bool(value.get("head_token_ids", teacher_embedding)))


def _token_ids(config: Config, field: str) -> tuple[int, ...]:
    value = config.get(field)
    ids = value if isinstance(value, list) else [value]
    if value is None:
        return ()
    if not all(type(item) is int and 0 <= item <= MAX_SIZE for item in ids):
        raise ConfigError(f"config.json: {field}={value!r} is neither a token id nor a list of them")
    return tuple(ids)


def _positive_int(config: Config, field: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    value = _present(config, field, default)
    if type(value) is not int or not 0 < value <= most:
        raise ConfigError(f"config.json: {field}={value!r} is not a positive integer (of at most {most})")
    return value


def _positive(config: Config, field: str, default: float | None = None) -> float:
    value = _present(config, field, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"config.json: {field}={value!r} is not a positive number")
    return float(value)


def _present(config: Config, field: str, default: float | None) -> Any:
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {field} is missing")
    return value
