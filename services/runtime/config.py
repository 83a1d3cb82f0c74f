"""Settings that every service has, and where settings come from.

In order of precedence: the environment (SEQGATE_<SERVICE>_<NAME>), then a TOML file named by
SEQGATE_<SERVICE>_CONFIG_FILE, then the defaults written here. An unknown name in the file, or a
value out of its bounds, ends the process before it listens.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

PORT_MAX: Final = 65_535


def _with_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port[:9]) <= PORT_MAX):
        raise ValueError(f"host:port, the port at most {PORT_MAX}")
    return text


Port = Annotated[str, AfterValidator(_with_port)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ServiceConfig(BaseSettings):
    """What every service can be told. Subclasses name their service in model_config."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    service: ClassVar[str] = "service"

    listen: Port = "127.0.0.1:0"
    """host:port to listen on; port 0 takes a free one."""

    reflection: bool = False
    """Whether the server describes its services to tools like grpcurl."""

    drain_timeout_s: Seconds = 20
    """How long streams may take to move away after SIGTERM, before they are cut."""

    stop_grace_s: Seconds = 5
    """How long unary calls may take to finish after that."""

    health_interval_s: Seconds = 1
    """How often the dependencies are asked whether they answer."""

    message_bytes_max: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * 1024)] = 16 * 1024 * 1024
    """The largest gRPC message, in bytes."""

    metadata_bytes_max: Annotated[int, Field(ge=1024, le=1024 * 1024)] = 16 * 1024
    """The largest gRPC request metadata (headers), in bytes."""

    connection_age_max_s: Annotated[float, Field(ge=0, le=86_400)] = 0
    """After how long a client is asked to connect again, so that it sees new replicas; 0: never."""

    keepalive_s: Annotated[float, Field(ge=1, le=7200)] = 5
    """How often a silent connection is probed; one that does not answer within as long is dead."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are logged."""

    log_format: Literal["json", "text"] = "json"
    """json: one object a line, for machines. text: for people."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        file = os.environ.get(f"{cls.model_config['env_prefix']}CONFIG_FILE".upper())
        if file:
            sources += (TomlConfigSettingsSource(settings_cls, toml_file=_existing(Path(file))),)
        return sources


def settings_for(service: str) -> SettingsConfigDict:
    """The model_config of a service's settings."""
    return SettingsConfigDict(env_prefix=f"SEQGATE_{service.upper()}_", extra="forbid", frozen=True)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"no such settings file: {path}")
    return path
