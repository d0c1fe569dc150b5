"""One settings class a service: environment, then flags. An unknown or bad value stops the start and names itself."""

from collections.abc import Sequence
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from treecore.errors import ConfigError
from treecore.service.bus import Broker

LogLevel = Literal["debug", "info", "warning", "error"]


class ServiceSettings(BaseSettings):
    """Settings that all services share. Environment variables carry the prefix ESPALIER_."""

    model_config = SettingsConfigDict(env_prefix="ESPALIER_", extra="forbid", cli_kebab_case=True)

    nats_url: str = Field("nats://127.0.0.1:4222", description="where the broker listens")
    subject_prefix: str = Field("espalier", pattern=r"^[A-Za-z0-9_-]+$", description="first token of every subject")
    nats_user: str | None = Field(None, description="user at the broker, where it asks for one")
    nats_password: SecretStr | None = Field(None, description="best given as ESPALIER_NATS_PASSWORD")
    log_level: LogLevel = "info"
    otlp_endpoint: str | None = Field(
        None, pattern=r"^https?://", description="OTLP/HTTP collector that gets traces, like http://collector:4318"
    )
    operations_host: str = Field("127.0.0.1", description="where the operations port listens")
    operations_port: int | None = Field(
        None, ge=0, le=65535, description="port of probes and /metrics; 0: any free one"
    )
    live_timeout_s: float = Field(30, gt=0, description="an event loop that stands still for so long is not alive")

    @property
    def broker(self) -> Broker:
        """What these settings say of the broker."""
        password = None if self.nats_password is None else self.nats_password.get_secret_value()
        return Broker(self.nats_url, self.subject_prefix, self.nats_user, password)

    @field_validator("nats_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        """An address that can never be reached ends the start; one where nobody is yet does not."""
        parts = urlsplit(url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname or parts.port == 0:  # `port` raises ValueError too
            raise ValueError(f"must look like nats://host:4222, not {url!r}")
        return url


S = TypeVar("S", bound=ServiceSettings)


def read_settings(kind: type[S], argv: Sequence[str]) -> S:
    """The settings from flags over environment; raises ConfigError naming the first bad value."""
    try:
        return CliApp.run(kind, cli_args=list(argv), cli_exit_on_error=False)
    except ValidationError as error:
        raise ConfigError(_told(error.errors()[0])) from error
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _told(fault: ErrorDetails) -> str:
    """The flag, and what is wrong with it; a fault of several flags names them itself."""
    message = fault["msg"].removeprefix("Value error, ")
    return f"--{'.'.join(map(str, fault['loc'])).replace('_', '-')}: {message}" if fault["loc"] else message
