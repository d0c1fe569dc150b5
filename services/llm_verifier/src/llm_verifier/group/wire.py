"""What ranks tell each other outside of collectives: frames over a TCP connection. Knows bytes; nothing of failures.

Length-prefixed msgpack, `[kind, *fields]`. Never pickle: whoever can reach the port can send bytes.
"""

import socket
import struct
import threading
from typing import Any, NamedTuple

import msgpack

from treecore.errors import WireError

MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")


class Frame(NamedTuple):
    """A message. Kinds: hello, formed, refused, beat, do, ready, failed, leaving, ended, stop."""

    kind: str
    fields: list[Any]


def packed(kind: str, *fields: Any) -> bytes:
    """A frame as it goes over the wire."""
    body: bytes = msgpack.packb([kind, *fields])
    assert len(body) <= MAX_FRAME_BYTES, "a step is far smaller"
    return _LENGTH.pack(len(body)) + body


class Wire:
    """One connection. Any thread may send, one receives."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """timeout_s: for a frame that has begun to come or to go."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._connection = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def send(self, kind: str, *fields: Any) -> None:
        """Send a frame; raises OSError where the connection is broken or the other end does not read."""
        self.send_packed(packed(kind, *fields))

    def send_packed(self, frame: bytes) -> None:
        """Send what `packed` made, the same to several."""
        with self._sending:
            self._connection.sendall(frame)

    def receive(self) -> Frame:
        """The next frame; raises OSError where the connection has ended, or WireError."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {length} bytes")
        return _frame(self._exactly(length))

    def close(self) -> None:
        """Close the connection: the other end sees it at once."""
        self._connection.close()

    def _exactly(self, num_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            part = self._connection.recv(num_bytes - len(found))
            if not part:
                raise ConnectionResetError("closed by the other end")
            found += part
        return bytes(found)


def _frame(body: bytes) -> Frame:
    try:
        kind, *fields = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError("no frame of a verifier group") from error
    if not isinstance(kind, str):
        raise WireError("a frame without a kind")
    return Frame(kind, fields)
