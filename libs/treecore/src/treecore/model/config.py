"""Fields of a config.json, read with checks. Knows JSON and field kinds; must not know what a field is for."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treecore.errors import ConfigError

MAX_SIZE = 2**31 - 1

Config = Mapping[str, Any]


def read_json(path: Path) -> Config:
    """The JSON object in `path`. Raises ConfigError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def refuse_others(config: Config, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ConfigError naming the first field that is not absent and has none of its `supported` values."""
    for field, values in supported.items():
        value = config.get(field)
        if value is not None and value not in values:
            raise ConfigError(f"config.json: {field}={value!r} is not supported (expected {values[0]!r})")


def positive_int(
    config: Config, field: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
) -> int:
    """A field from `least` to `most`; `default` where it is absent. Raises ConfigError."""
    value = _present(config, field, default)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"config.json: {field}={value!r} is not an integer from {least} to {most}")
    return value


def positive(config: Config, field: str, default: float | None = None) -> float:
    """A field above 0 and finite; `default` where it is absent. Raises ConfigError."""
    value = _present(config, field, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"config.json: {field}={value!r} is not a positive number")
    return float(value)


def positive_or_none(config: Config, field: str) -> float | None:
    """A field above 0; None where it is absent or null. Raises ConfigError."""
    return None if config.get(field) is None else positive(config, field)


def token_ids(config: Config, field: str) -> tuple[int, ...]:
    """A token id, a list of them, or nothing. Raises ConfigError."""
    value = config.get(field)
    ids = value if isinstance(value, list) else [value]
    if value is None:
        return ()
    if not all(type(item) is int and 0 <= item <= MAX_SIZE for item in ids):
        raise ConfigError(f"config.json: {field}={value!r} is neither a token id nor a list of them")
    return tuple(ids)


def nested(config: Config, field: str) -> Config:
    """An object, empty where the field is absent or null. Raises ConfigError."""
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {field}={value!r} is no object")
    return value


def _present(config: Config, field: str, default: float | None) -> Any:
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {field} is missing")
    return value
