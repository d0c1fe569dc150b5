"""msgpack for the wire types: [tag, version, fields...]; strict both ways.

Knows how dataclasses become bytes; must not know what they mean. Whatever is not exactly a message of this version
raises WireError: a truncated body, an unknown tag, another version, a wrong type, an array of odd length.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from treecore import messages, streams
from treecore.errors import WireError

VERSION = 3
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024

Message = messages.Message | streams.Message

_TAGS: dict[type, int] = {kind: tag for tag, kind in enumerate(get_args(Message), start=1)}
_KINDS = {tag: kind for kind, tag in _TAGS.items()}
_WIRE_DTYPES = {np.dtype(np.int32): np.dtype("<i4"), np.dtype(np.float32): np.dtype("<f4")}

M = TypeVar("M", bound=Message)
Reader = Callable[[Any], Any]


def encode(message: Message) -> bytes:
    """The message's bytes.

    Raises WireError above MAX_PAYLOAD_BYTES: near its own limit NATS closes a client for good.
    """
    body: bytes = msgpack.packb([_TAGS[type(message)], VERSION, *_plain_fields(message)], use_bin_type=True)
    if len(body) > MAX_PAYLOAD_BYTES:
        raise WireError(f"{type(message).__name__} of {len(body)} bytes; at most {MAX_PAYLOAD_BYTES} are sent")
    return body


def decode(body: bytes, expected: type[M]) -> M:
    """The message in `body`, which must be of type `expected`; raises WireError."""
    if len(body) > MAX_PAYLOAD_BYTES:
        raise WireError(f"a message of {len(body)} bytes")
    try:
        parts = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from error
    if not isinstance(parts, list) or len(parts) < 2:
        raise WireError("not a message")
    if type(parts[1]) is not int or parts[1] != VERSION:
        raise WireError(f"protocol version {parts[1]!r}, this is {VERSION}")
    kind = _KINDS.get(parts[0]) if type(parts[0]) is int else None
    if kind is not expected:
        raise WireError(f"{kind.__name__ if kind else f'tag {parts[0]!r}'} where {expected.__name__} was due")
    message: M = _reader(cast(Any, expected))(parts[2:])
    return message


def _plain_fields(value: Any) -> list[Any]:
    return [_plain(getattr(value, field.name)) for field in fields(value)]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, np.ndarray):
        return value.astype(_WIRE_DTYPES[value.dtype], copy=False).tobytes()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@cache
def _reader(kind: Any) -> Reader:
    """The function that turns plain msgpack values into `kind`, built once from its annotation."""
    kind = getattr(kind, "__supertype__", kind)
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin is np.ndarray:
        return _array_reader(np.dtype(get_args(get_args(kind)[1])[0]))
    if origin is tuple:
        return _tuple_reader(_reader(get_args(kind)[0]))
    if origin is Literal:
        return _literal_reader(get_args(kind))
    if origin in (types.UnionType, Union):
        return _optional_reader(_reader(get_args(kind)[0]))
    return _read_float if kind is float else _scalar_reader(kind)


def _dataclass_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]))
    readers = [_reader(hints[field.name]) for field in fields(kind)]

    def read(values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(readers):
            raise WireError(f"{kind.__name__} needs {len(readers)} fields")
        try:
            return kind(*[reader(value) for reader, value in zip(readers, values, strict=True)])
        except ValueError as error:  # the type's own check
            raise WireError(str(error)) from error

    return read


def _tuple_reader(item: Reader) -> Reader:
    def read(values: Any) -> Any:
        if not isinstance(values, list):
            raise WireError(f"a list was due, not {type(values).__name__}")
        return tuple([item(value) for value in values])

    return read


def _optional_reader(inner: Reader) -> Reader:
    return lambda value: None if value is None else inner(value)


def _literal_reader(allowed: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if value not in allowed:
            raise WireError(f"{value!r} is none of {allowed}")
        return value

    return read


def _scalar_reader(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise WireError(f"{kind.__name__} was due, not {type(value).__name__}")
        return value

    return read


def _read_float(value: Any) -> Any:
    """A whole number is a float too: Python and mypy take one for the other. Nothing that is told is infinite."""
    if type(value) not in (float, int):
        raise WireError(f"float was due, not {type(value).__name__}")
    if not isfinite(value):
        raise WireError(f"a finite number was due, not {value}")
    return float(value)


def _array_reader(dtype: np.dtype[Any]) -> Reader:
    wire = _WIRE_DTYPES[dtype]

    def read(value: Any) -> Any:
        if not isinstance(value, bytes) or len(value) % wire.itemsize:
            raise WireError(f"an array of {dtype} was due")
        return np.frombuffer(value, wire).astype(dtype)

    return read
