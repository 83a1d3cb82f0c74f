"""Settings that every service has, and where settings come from.

In order of precedence: the environment (SEQGATE_<SERVICE>_<NAME>), then a TOML file named by
SEQGATE_<SERVICE>_CONFIG_FILE, then the defaults written here. An unknown name, or a value out of
its bounds, ends the process before it listens. --help shows a setting's docstring.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from seqgate.services.runtime.load import BYTES_MAX, CALLS_MAX, STREAMS_MAX
from seqgate.services.runtime.logs import LogFormat

PORT_MAX: Final = 65_535


def _with_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port[:9]) <= PORT_MAX):
        raise ValueError(f"must be host:port, with a port of at most {PORT_MAX}")
    return text


def _with_port_or_none(text: str) -> str:
    return text and _with_port(text)


def _of_topics(pattern: str) -> str:
    if pattern.count("/") != 2:
        raise ValueError("must be tenant/namespace/name, with * and ? as wildcards")
    return pattern


TopicPattern = Annotated[str, AfterValidator(_of_topics)]
Port = Annotated[str, AfterValidator(_with_port)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ServiceConfig(BaseSettings):
    """What every service can be told. Subclasses name their service in model_config."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    service: ClassVar[str] = "service"

    listen: Port = "127.0.0.1:0"
    """host:port to listen on; port 0 takes a free one."""

    reflection: bool = False
    """Whether the server describes its services to tools like grpcurl."""

    drain_timeout_s: Seconds = 20
    """How long streams may take to move away after SIGTERM, before they are cut."""

    stop_grace_s: Seconds = 5
    """How long unary calls may take to finish after that."""

    health_listen: Annotated[str, AfterValidator(_with_port_or_none)] = ""
    """host:port on which the health protocol alone is served besides, without TLS, for probes that
    know none, like the kubelet's. Empty: nowhere."""

    health_interval_s: Seconds = 1
    """How often the dependencies are asked whether they answer."""

    message_bytes_max: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * 1024)] = 16 * 1024 * 1024
    """The largest gRPC message, in bytes."""

    metadata_bytes_max: Annotated[int, Field(ge=1024, le=1024 * 1024)] = 16 * 1024
    """The largest gRPC request metadata (headers), in bytes."""

    calls_max: Annotated[int, Field(ge=1, le=1_000_000)] = CALLS_MAX
    """How many unary calls are served at once; a call beyond that is refused with SERVICE_BUSY, and
    so is one from a host that has half of them, while no more than an eighth is free."""

    calls_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * 1024 * 1024 * 1024)] = BYTES_MAX
    """How large the requests of all calls are together that are being served, with the answers of
    unary calls that are under way, in bytes, serialized; a request beyond that is refused with
    SERVICE_BUSY. The largest one finds room alone."""

    streams_max: Annotated[int, Field(ge=1, le=1_000_000)] = STREAMS_MAX
    """How many streams are open at once, all methods together; one beyond that, or beyond a host's
    share, as of calls, is refused with SERVICE_BUSY."""

    first_message_timeout_s: Seconds = 30
    """How long a stream may be open, in seconds, before its first message comes; one that is silent
    for longer ends with SILENT_STREAM."""

    connection_age_max_s: Annotated[float, Field(ge=0, le=86_400)] = 0
    """After how long a client is asked to connect again, so that it sees new replicas; 0: never."""

    keepalive_s: Annotated[float, Field(ge=1, le=7200)] = 5
    """How often a silent connection is probed; one that does not answer within as long is dead."""

    tls_certificate_file: Path | None = None
    """The service's certificate chain, in PEM; read again when it changes, as all files below. Its
    names are those under which it is reached. None: no TLS."""

    tls_key_file: Path | None = None
    """Its key, in PEM, without a passphrase."""

    tls_client_ca_file: Path | None = None
    """The authorities, in PEM, whose certificates callers may show. Then every caller must show
    one. (Probes that have none use health_listen.)"""

    jwt_keys_file: Path | None = None
    """Public keys, a JWKS or PEM, of who signs callers' tokens. None: tokens do not count. A caller
    that sends a token is who the token says, whatever its certificate."""

    jwt_audience: str = ""
    """For whom tokens must be."""

    jwt_issuer: str = ""
    """Of whom they must be."""

    access_file: Path | None = None
    """The TOML file that says who may do what; what it does not allow is denied. Required with
    tls_client_ca_file or jwt_keys_file."""

    allow_insecure: bool = False
    """Whether to listen beyond this machine although anybody could call, or could read the tokens
    of those who do."""

    metrics_listen: Annotated[str, AfterValidator(_with_port_or_none)] = ""
    """host:port on which GET /metrics is answered for Prometheus, in the clear and to anybody.
    Empty: nowhere. (Over OTLP metrics go where the OTEL_* variables say.)"""

    metrics_topics: tuple[TopicPattern, ...] = ()
    """Which topics are told apart in metrics: patterns of tenant/namespace/name with * and ?, which
    stop at a slash. At most 100 topics are (telemetry.metrics.TOPICS_MAX); all others count
    together, under the topic _other."""

    metrics_survey_s: Seconds = 15
    """How often that is looked up for metrics which is not at hand: in the store, or of another
    service. After a look that takes long there is a longer rest. Only where anybody is told."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are logged."""

    log_format: LogFormat = "auto"
    """json: one object a line, for machines. text: for people. auto: text if standard error is a
    terminal, otherwise JSON."""

    def check(self) -> None:
        """What is looked at before a service starts: whether the settings go together.

        Raises:
            ValueError: they do not.
        """

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file must be set together")
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            raise ValueError("tls_client_ca_file requires tls_certificate_file")
        of_tokens = (self.jwt_keys_file is not None, self.jwt_audience, self.jwt_issuer)
        if any(of_tokens) and not all(of_tokens):
            raise ValueError("jwt_keys_file, jwt_audience and jwt_issuer must be set together")
        if self.authenticates != (self.access_file is not None):
            raise ValueError(
                "access_file must be set with tls_client_ca_file or jwt_keys_file, and only then"
            )
        return self

    @property
    def authenticates(self) -> bool:
        """Whether callers must show who they are."""
        return self.tls_client_ca_file is not None or self.jwt_keys_file is not None

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


class CallerConfig(ServiceConfig):
    """What a service can be told that calls others."""

    peer_ca_file: Path | None = None
    """The authorities, in PEM, of the services that this one calls; it calls them over TLS then.
    None: without."""

    peer_certificate_file: Path | None = None
    """The certificate chain, in PEM, that it shows them; None: none."""

    peer_key_file: Path | None = None
    """Its key, in PEM, without a passphrase."""

    peer_token_file: Path | None = None
    """The token that it sends them; None: none."""

    @model_validator(mode="after")
    def _calls_can_be_made(self) -> Self:
        if (self.peer_certificate_file is None) != (self.peer_key_file is None):
            raise ValueError("peer_certificate_file and peer_key_file must be set together")
        if self.peer_certificate_file is not None and self.peer_ca_file is None:
            raise ValueError("peer_certificate_file requires peer_ca_file")
        return self


def settings_for(service: str) -> SettingsConfigDict:
    """The model_config of a service's settings."""
    return SettingsConfigDict(env_prefix=f"SEQGATE_{service.upper()}_")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"settings file not found: {path}")
    return path
