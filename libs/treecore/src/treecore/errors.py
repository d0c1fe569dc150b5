"""The one error tree. An error's `code` drives the HTTP status, the wire and the metrics label.

EspalierError
  ConfigError         a setting, a checkpoint or a machine that start-up refuses
  InvalidRequest      the client's input; names the parameter
    PayloadTooLarge
  Unauthorized        no valid API key
  Overloaded          admission is full; come back after `retry_after_s`
  Unavailable         no verifier can step right now
    Unreachable       a message reached nobody
      Unlinked        because there is no link to the broker: it says nothing of whom it was for
    GroupFailed       ranks that are no verifier group, or no longer one
  WireError           bytes that are no message of ours
  StateMissing        a worker lacks the tokens that a step builds on
  OutOfBlocks         the KV cache has no room for this step
  ModelFailed         a forward gave no numbers
"""

from typing import ClassVar


class EspalierError(Exception):
    """Base of all errors that cross a border. `code` is stable; the message is for people."""

    code: ClassVar[str] = "internal_error"


class ConfigError(EspalierError):
    """Start-up cannot go on; the message is the one line that the user sees."""

    code = "config_error"


class InvalidRequest(EspalierError):
    """The client's input is wrong. `param` is the name of the field as the client wrote it, if one is to blame."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.reason = code or self.code


class PayloadTooLarge(InvalidRequest):
    """The request's body exceeds the limit."""

    code = "payload_too_large"


class Unauthorized(EspalierError):
    """The client has shown no key, or none that is known."""

    code = "invalid_api_key"


class Overloaded(EspalierError):
    """Admission is full. Nothing was admitted."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(EspalierError):
    """No worker can do this now."""

    code = "unavailable"


class Unreachable(Unavailable):
    """The message was not delivered: what it asked for has not been done, nor begun."""


class Unlinked(Unreachable):
    """There is no link to the broker. That says nothing of whom the message was for."""


class GroupFailed(Unavailable):
    """The ranks of a verifier group have not come together, or one of them has failed; starting again may help."""

    code = "group_failed"


class WireError(EspalierError):
    """Bytes that are not a well-formed message of this protocol version."""

    code = "malformed_message"


class StateMissing(EspalierError):
    """The worker holds only the first `held_len` committed tokens of the request; send the rest again."""

    code = "state_missing"

    def __init__(self, held_len: int) -> None:
        super().__init__(f"state holds {held_len} tokens")
        self.held_len = held_len


class OutOfBlocks(EspalierError):
    """The KV cache cannot hold this step; nothing was changed."""

    code = "out_of_blocks"


class ModelFailed(EspalierError):
    """A forward of the model gave NaN: its weights are broken, or beyond the range of the number format."""

    code = "model_failed"


def code_of(error: Exception) -> str:
    """What the client, the wire and the metrics call it; anything outside the tree is an `internal_error`."""
    if isinstance(error, InvalidRequest):
        return error.reason
    return error.code if isinstance(error, EspalierError) else EspalierError.code
