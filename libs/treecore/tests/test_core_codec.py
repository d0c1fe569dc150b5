"""The codec: round trips of every message, and whatever is not exactly a message raises WireError, nothing else."""

from dataclasses import fields, is_dataclass
from typing import Any, cast, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treecore import codec
from treecore.codec import MAX_PAYLOAD_BYTES, decode, encode
from treecore.errors import WireError
from treecore.expand import Expansion
from treecore.messages import (
    Announcement,
    BlockUsage,
    DraftItem,
    DraftRequest,
    Hello,
    RefusedItem,
    RequestId,
    VerifiedItem,
    VerifyReply,
    WorkerId,
)
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.any_message import every_message

KINDS = get_args(codec.Message)


def plain(value: Any) -> Any:
    """A message as comparable plain values, types included."""
    if is_dataclass(value):
        return (type(value), [plain(getattr(value, field.name)) for field in fields(value)])
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return (type(value), value)


def decoded_or_wire_error(body: bytes, kind: Any) -> Any:
    """What decode gives; only WireError may come out of it instead."""
    try:
        return decode(body, kind)
    except WireError:
        return None


@given(every_message)
def test_round_trip(message: codec.Message) -> None:
    """Values, types and dtypes come back as they were."""
    assert plain(decode(encode(message), type(message))) == plain(message)


@given(every_message, st.sampled_from(KINDS))
def test_another_kind_is_refused(message: codec.Message, kind: type) -> None:
    """A message is only ever taken for what it is."""
    if kind is not type(message):
        with pytest.raises(WireError):
            decode(encode(message), cast(Any, kind))


@given(every_message, st.data())
def test_truncated_bodies_are_refused(message: codec.Message, data: st.DataObject) -> None:
    """Every proper prefix is a WireError."""
    body = encode(message)
    with pytest.raises(WireError):
        decode(body[: data.draw(st.integers(0, len(body) - 1))], type(message))


@given(every_message, st.binary(min_size=1, max_size=4))
def test_trailing_bytes_are_refused(message: codec.Message, tail: bytes) -> None:
    """Two messages in one body are none."""
    with pytest.raises(WireError):
        decode(encode(message) + tail, type(message))


@settings(max_examples=300)
@given(every_message, st.data())
def test_flipped_bytes_give_a_message_or_a_wire_error(message: codec.Message, data: st.DataObject) -> None:
    """Corruption never escapes as another exception."""
    body = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_wire_error(bytes(body), type(message))


@given(st.binary(max_size=64), st.sampled_from(KINDS))
@example(b"", Hello)
@example(b"\xc1", Hello)
@example(b"\x91" * 2000 + b"\x01", Hello)
def test_random_bytes_are_refused(body: bytes, kind: type) -> None:
    """Bytes without structure."""
    assert decoded_or_wire_error(body, kind) is None


wild = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300)
@given(wild, st.sampled_from(KINDS))
def test_wild_values_are_refused_or_true_messages(value: Any, kind: Any) -> None:
    """Well-formed msgpack of other shapes: a WireError, or a message that encodes to the same value."""
    tag = KINDS.index(kind) + 1
    for parts in (value, [tag, codec.VERSION, value], [tag, codec.VERSION, *(value if type(value) is list else [])]):
        message = decoded_or_wire_error(msgpack.packb(parts), kind)
        if message is not None:
            assert msgpack.unpackb(encode(message)) == parts


def spoiled(index: int, value: Any) -> bytes:
    """A Hello whose tag, version or field is `value`."""
    parts: list[Any] = [KINDS.index(Hello) + 1, codec.VERSION, "me"]
    parts[index] = value
    return cast(bytes, msgpack.packb(parts))


V = codec.VERSION


@pytest.mark.parametrize("version", [0, V - 1, V + 1, -V, True, float(V), str(V), None, [V]])
def test_another_version_is_refused(version: Any) -> None:
    """The version is an integer; what merely equals it in Python is not."""
    with pytest.raises(WireError, match="version"):
        decode(spoiled(1, version), Hello)


@pytest.mark.parametrize("tag", [0, 7, 99, -6, 6.0, "6", None, [6], {}])
def test_another_tag_is_refused(tag: Any) -> None:
    """Unknown tags and tags of another type."""
    with pytest.raises(WireError):
        decode(spoiled(0, tag), Hello)


@pytest.mark.parametrize("value", [1, None, True, 1.5, b"me", ["me"]])
def test_another_type_is_refused(value: Any) -> None:
    """A string is a string."""
    with pytest.raises(WireError, match="str was due"):
        decode(spoiled(2, value), Hello)


def test_a_boolean_is_no_integer() -> None:
    """Python's True == 1 must not pass for a step number."""
    body = msgpack.unpackb(
        encode(VerifyReply(WorkerId("v"), (), (RefusedItem(RequestId("r"), 1, 0, "x"),), 0.0, 0.0, USAGE))
    )
    body[4][0][1] = True
    with pytest.raises(WireError, match="int was due"):
        decode(msgpack.packb(body), VerifyReply)


USAGE = BlockUsage(1, 0, 0, 1, 16)


def test_whole_numbers_may_stand_for_floats() -> None:
    """`temperature=0` type-checks as a float; it must not become a message that the worker refuses."""
    item = DraftItem(RequestId("r"), 0, 0, np.array([1], np.int32), SamplingParams(0, 0, 1, Seed(3)), Expansion((1,)))
    back = decode(encode(DraftRequest("me", 0, (), (item,))), DraftRequest).items[0].params
    assert back == SamplingParams(0.0, 0, 1.0, Seed(3))
    assert type(back.temperature) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("top_p", -0.5),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("seed", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("bias_ids", [1]),
        ("biases", [1.0]),
        ("end_token_ids", [-1]),
        ("prompt_len", -1),
        ("min_tokens", -1),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
        ("rule", "other"),
        ("grammar", ["other", "x"]),
    ],
)
def test_impossible_parameters_are_refused(name: str, value: object) -> None:
    """A worker that computed with them would die: they end at the codec."""
    good = DraftItem(RequestId("r"), 0, 0, np.array([1], np.int32), SamplingParams(1.0, 0, 1.0, Seed(0)), Expansion(()))
    parts = msgpack.unpackb(encode(DraftRequest("me", 0, (), (good,))))
    assert decode(msgpack.packb(parts), DraftRequest).items[0].params == good.params
    parts[5][0][4][[field.name for field in fields(SamplingParams)].index(name)] = value
    with pytest.raises(WireError):
        decode(msgpack.packb(parts), DraftRequest)


def test_arrays_of_odd_length_are_refused() -> None:
    """int32 arrays are whole."""
    parts = msgpack.unpackb(
        encode(
            VerifyReply(
                WorkerId("v"), (VerifiedItem(RequestId("r"), 1, np.zeros(2, np.int32), 0),), (), 0.0, 0.0, USAGE
            )
        )
    )
    parts[3][0][2] = b"12345"
    with pytest.raises(WireError, match="array of int32"):
        decode(msgpack.packb(parts), VerifyReply)


def test_oversized_messages_are_refused_both_ways() -> None:
    """Near its own limit NATS closes a client for good: neither sent nor read."""
    with pytest.raises(WireError, match="at most"):
        encode(Hello("x" * MAX_PAYLOAD_BYTES))
    with pytest.raises(WireError, match="bytes"):
        decode(b"\x00" * (MAX_PAYLOAD_BYTES + 1), Hello)
    assert decode(encode(Hello("x" * (MAX_PAYLOAD_BYTES - 64))), Hello).sender.endswith("x")


def test_decoded_arrays_are_the_receivers_own() -> None:
    """A decoded array can be written to: it shares no memory with the body."""
    reply = VerifyReply(
        WorkerId("v"), (VerifiedItem(RequestId("r"), 1, np.arange(3, dtype=np.int32), 2),), (), 0.0, 0.0, USAGE
    )
    found = decode(encode(reply), VerifyReply).items[0].tokens
    found[0] = 9
    assert found.tolist() == [9, 1, 2]


@pytest.mark.parametrize(
    ("idx", "value"),
    [
        *[(3, 0), (3, -1), (4, 0), (5, [-5]), (5, [20]), (6, [1, 0, 1, 0]), (6, [-1, 0, 1, 8])],
        *[(9, [[0, 5.0]]), (9, [[1, 0.0]]), (9, [[1, 5.0], [1, 7.0]]), (9, [[4, 5.0], [1, 4.0]])],
    ],
)
def test_impossible_announcements_are_refused(idx: int, value: object) -> None:
    """Nobody plans with a model that cannot be: no vocabulary, no context, ends outside of it, blocks of no length.

    Nor with costs of no rows, of no time, or of the same rows twice.
    """
    good = Announcement(WorkerId("v"), "verifier", "llm", 20, 99, (3,), BlockUsage(1, 0, 0, 1, 8), False)
    parts = msgpack.unpackb(encode(good))
    assert decode(msgpack.packb(parts), Announcement) == good
    parts[2 + idx] = value
    with pytest.raises(WireError):
        decode(msgpack.packb(parts), Announcement)


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_finite_number_is_refused(ms: float) -> None:
    """One NaN would make every estimate that it enters a NaN, for good."""
    with pytest.raises(WireError):
        decode(encode(VerifyReply(WorkerId("v"), (), (), ms, 0.0, USAGE)), VerifyReply)
