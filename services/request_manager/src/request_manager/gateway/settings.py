"""The gateway's settings: environment only, prefix ESPALIER_GATEWAY_. Knows nothing of models or managers."""

import os

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from treecore.errors import ConfigError

ENV_PREFIX = "ESPALIER_GATEWAY_"


class GatewaySettings(BaseSettings):
    """What an operator may set; lists are JSON in the environment.

    max_body_bytes: larger request bodies get 413. body_timeout_s: a body that takes longer to arrive gets 400.
    model_aliases: names that clients may use besides the model's own.
    max_choices: prompts times n in one request.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    max_body_bytes: int = Field(default=4 * 2**20, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    model_aliases: tuple[str, ...] = ()
    max_choices: int = Field(default=128, gt=0)

    @classmethod
    def from_env(cls) -> "GatewaySettings":
        """The settings of this process. Raises ConfigError naming an unknown or bad variable."""
        known = {ENV_PREFIX + name.upper() for name in cls.model_fields}
        for name in os.environ:
            if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
                raise ConfigError(f"unknown setting {name}")
        try:
            return cls()
        except ValueError as error:
            raise ConfigError(f"bad gateway setting: {error}") from error
