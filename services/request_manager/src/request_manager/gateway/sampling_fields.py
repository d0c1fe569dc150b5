"""The fields that choose tokens and end the output: their shapes, and nothing that needs the model.

Token ids are checked against the vocabulary in admission.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from request_manager.gateway.strict import MAX_INT, Strict, at_most

MAX_BIASES = 300
MAX_STOPS = 4
MAX_STOP_IDS = 300

_MAX_STOP_CHARS = 1024  # each choice compiles its stop strings, in time and memory that grow with their length
_SMALLEST_REPETITION = 0.01  # dividing a logit by less than that leaves float32

TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # as JSON writes a key
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]

_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": _MAX_STOP_CHARS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": _MAX_STOP_CHARS},
            "maxItems": MAX_STOPS,
        },
    ]
}


def _stop_strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SamplingFields(Strict):
    """How tokens are chosen. top_k 0 is off; a negative seed stands for itself modulo 2^64.

    min_tokens: while the output has fewer, no EOS, no stop token and no stop string ends it.
    """

    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=MAX_INT)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=_SMALLEST_REPETITION, le=2.0)
    logit_bias: Annotated[
        dict[TokenIdText, Annotated[float, Field(ge=-100.0, le=100.0)]],
        BeforeValidator(at_most(MAX_BIASES, "logit_bias")),
    ] = Field(default={}, max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    min_tokens: int = Field(default=0, ge=0, le=MAX_INT)
    stop: Annotated[list[StopString], BeforeValidator(_stop_strings), WithJsonSchema(_STOP_SCHEMA)] = Field(
        default=[], max_length=MAX_STOPS
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_INT)]] = Field(
        default=[], max_length=MAX_STOP_IDS, fail_fast=True
    )
    ignore_eos: bool = False
