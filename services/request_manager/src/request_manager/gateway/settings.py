"""The gateway's settings, from variables with the prefix ESPALIER_GATEWAY_. Knows nothing of models or managers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from treecore.errors import ConfigError
from treecore.params import Rule

ENV_PREFIX = "ESPALIER_GATEWAY_"


def _names(value: object) -> object:
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


class GatewaySettings(BaseModel):
    """What an operator may set. The constructor reads nothing but its arguments.

    max_body_bytes: larger request bodies get 413. body_timeout_s: a body that takes longer to arrive gets 400.
    model_aliases: names that clients may use besides the model's own; comma-separated in the environment.
    max_choices: prompts times n in one request. verification: the rule of requests that name none. api_keys_file: who
    may use the gateway (see keys.py); without it everybody.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: int = Field(default=4 * 2**20, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    model_aliases: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)] = ()
    max_choices: int = Field(default=128, gt=0)
    verification: Rule = "coupled"
    api_keys_file: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "GatewaySettings":
        """The settings in `environ`. Raises ConfigError naming an unknown or bad variable."""
        ours = [name.removeprefix(ENV_PREFIX) for name in environ if name.startswith(ENV_PREFIX)]
        try:
            return cls.model_validate({name.lower(): environ[ENV_PREFIX + name] for name in ours})
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{ENV_PREFIX}{str(first['loc'][0]).upper()}: {first['msg']}") from error
