"""TCP ports that stay ours from the check until a child listens on them, and through its restarts.

A socket that is bound with SO_REUSEADDR but does not listen lets another such socket bind and listen, while the kernel
gives the port to nobody else. So there is no moment in which a port that was found free can be lost.
"""

import errno
import socket

from treecore.errors import ConfigError

_NOT_OURS = {errno.EACCES, errno.EADDRNOTAVAIL}


class ReservedPort:
    """A port held until `close`. 0 asks for any free one."""

    def __init__(self, host: str, port: int) -> None:
        """Reserve; raises ConfigError, in one line, if the port is in use or the host is not ours."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ConfigError(f"host {host}: {error.strerror}") from error
        except UnicodeError as error:  # a name that DNS cannot carry
            raise ConfigError(f"host {host[:80]!r} is no name of a host ({error})") from error
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise ConfigError(_why_not(host, port, error)) from error

    @property
    def number(self) -> int:
        """The port's number."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Give it back."""
        self._socket.close()


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; choose another with --port"
    if error.errno in _NOT_OURS:
        return f"cannot listen on {host}:{port}: {error.strerror}"
    return f"port {port}: {error.strerror}"
