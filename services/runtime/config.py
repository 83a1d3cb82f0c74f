"""Settings common to all services, and the sources of settings.

In order of precedence: the environment (SEQGATE_<SERVICE>_<NAME>), a TOML file named by
SEQGATE_<SERVICE>_CONFIG_FILE, the defaults in the classes. An unknown name or an invalid value ends
the process before it listens. --help shows a setting's docstring.
"""

import os
import sys
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

WORKERS_MAX: Final = 64


def _with_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port[:9]) <= PORT_MAX):
        raise ValueError(f"must be host:port, with a port of at most {PORT_MAX}")
    return text


def with_port_or_none(text: str) -> str:
    return text and _with_port(text)


def _target(text: str) -> str:
    """An address to connect to, by gRPC's rules, except that a host needs a port."""
    if text.startswith(("unix:", "unix-abstract:")):
        return text
    addresses = text.rpartition("/")[2] if text.startswith("dns:") else text
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        addresses = addresses.removeprefix(scheme)
    try:
        for each in addresses.split(","):
            _with_port(each)
    except ValueError as error:
        raise ValueError(f"{error}, or dns:///name:port") from error
    if "/" in addresses:
        raise ValueError("must be host:port, or dns:///name:port, without a path")
    return text


def _target_or_none(text: str) -> str:
    return text and _target(text)


def _of_topics(pattern: str) -> str:
    if pattern.count("/") != 2:
        raise ValueError("must be tenant/namespace/name, with * and ? as wildcards")
    return pattern


TopicPattern = Annotated[str, AfterValidator(_of_topics)]
Port = Annotated[str, AfterValidator(_with_port)]
Target = Annotated[str, AfterValidator(_target)]
TargetOrNone = Annotated[str, AfterValidator(_target_or_none)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class UnusableSetting(ValueError):
    """A valid setting cannot be used on this machine: its port is in use, or its folder missing."""


class ProcessConfig(BaseSettings):
    """Of every process. Subclasses name their service in model_config."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    service: ClassVar[str] = "service"

    listen: Port = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free port."""

    tls_certificate_file: Path | None = None
    """The service's certificate chain, in PEM, for the names under which clients reach it. Reloaded
    when it changes, as are all files below. None: no TLS."""

    tls_key_file: Path | None = None
    """Its key, in PEM, without a passphrase."""

    allow_insecure: bool = False
    """Whether to listen beyond this machine without authentication, or without TLS, which exposes
    tokens."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are logged."""

    log_format: LogFormat = "auto"
    """json: one object a line, for machines. text: for people. auto: text if standard error is a
    terminal, otherwise JSON."""

    @classmethod
    def variable(cls, name: str) -> str:
        """The environment variable of a setting."""
        return f"{cls.model_config['env_prefix']}{name}".upper()

    def unusable(self, name: str, why: str) -> UnusableSetting:
        return UnusableSetting(f"{self.variable(name)}: {why}")

    def check(self) -> None:
        """Check that the settings are consistent, before the service starts.

        Raises:
            ValueError: they are not.
        """

    @model_validator(mode="after")
    def _has_both_files(self) -> Self:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file must be set together")
        return self

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
        variable = cls.variable("config_file")
        file = os.environ.get(variable)
        if file:
            sources += (_toml(settings_cls, variable, Path(file)),)
        return sources


class MetricsConfig(ProcessConfig):
    """Of a process with metrics."""

    metrics_listen: Annotated[str, AfterValidator(with_port_or_none)] = ""
    """host:port on which Prometheus metrics are served (GET /metrics), unencrypted and without
    authentication unless metrics_tls is set. Empty: none. (The OTEL_* variables configure export
    over OTLP.)"""

    metrics_tls: bool = False
    """Whether metrics are served over TLS, with tls_certificate_file, and only to callers with a
    certificate of tls_client_ca_file, if that is set; the console: of peer_ca_file."""

    @property
    def metrics_authorities(self) -> Path | None:
        """The authorities of those who scrape over TLS; None: they need no certificate."""
        return None

    @model_validator(mode="after")
    def _serves_metrics(self) -> Self:
        if self.metrics_tls and self.tls_certificate_file is None:
            raise ValueError("metrics_tls requires tls_certificate_file")
        return self


class ServiceConfig(MetricsConfig):
    """Of a service with a gRPC API."""

    reflection: bool = False
    """Whether server reflection is on, for tools like grpcurl."""

    drain_timeout_s: Seconds = 20
    """The time after SIGTERM in which clients close their streams; then the streams are cut."""

    stop_grace_s: Seconds = 5
    """The time after that in which unary calls finish."""

    health_listen: Annotated[str, AfterValidator(with_port_or_none)] = ""
    """host:port on which the health protocol alone is also served, without TLS, for probes without
    TLS, like the kubelet's. Empty: none."""

    health_interval_s: Seconds = 1
    """The interval between checks of the dependencies; while one fails, at most 0.1 s."""

    message_bytes_max: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * 1024)] = 16 * 1024 * 1024
    """The largest gRPC message, in bytes."""

    metadata_bytes_max: Annotated[int, Field(ge=1024, le=1024 * 1024)] = 16 * 1024
    """The largest gRPC request metadata (headers), in bytes."""

    calls_max: Annotated[int, Field(ge=1, le=1_000_000)] = CALLS_MAX
    """The most unary calls served at once. A call beyond that is refused with SERVICE_BUSY. So is a
    call from a host that has half of them, while at most an eighth is free."""

    calls_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * 1024 * 1024 * 1024)] = BYTES_MAX
    """The most serialized bytes of requests being served and of unary answers being sent, all calls
    together. A request beyond that is refused with SERVICE_BUSY. While no others are served, a
    request of any size is accepted."""

    streams_max: Annotated[int, Field(ge=1, le=1_000_000)] = STREAMS_MAX
    """The most streams open at once, all methods together. A stream beyond that, or beyond its
    host's share (as for calls_max), is refused with SERVICE_BUSY."""

    first_message_timeout_s: Seconds = 30
    """The time limit for the first message of a stream; a stream without one ends with
    SILENT_STREAM."""

    connection_age_max_s: Annotated[float, Field(ge=0, le=86_400)] = 0
    """The age at which a connection is closed gracefully, so that the client reconnects and sees
    new replicas; 0: never."""

    keepalive_s: Annotated[float, Field(ge=1, le=7200)] = 5
    """The interval between probes of an idle connection; one that does not answer within the same
    time is dead."""

    tls_client_ca_file: Path | None = None
    """The authorities of client certificates, in PEM. If set, every caller must present a
    certificate. (Probes without one use health_listen.)"""

    jwt_keys_file: Path | None = None
    """The public keys of the token issuer, as JWKS or PEM. A token takes precedence over the
    caller's certificate. None: tokens are ignored."""

    jwt_audience: str = ""
    """The required audience (aud) of tokens."""

    jwt_issuer: str = ""
    """The required issuer (iss) of tokens."""

    access_file: Path | None = None
    """The TOML file with the access rules; a right that no rule grants is denied. Required with
    tls_client_ca_file or jwt_keys_file."""

    metrics_topics: tuple[TopicPattern, ...] = ()
    """The topics with metrics of their own: patterns of tenant/namespace/name with * and ?, which
    stop at a slash. At most 100 topics have (telemetry.metrics.TOPICS_MAX); all others count
    together, under the topic _other."""

    metrics_survey_s: Seconds = 15
    """The interval between surveys: metrics that take a query to the store or to another service. A
    slow survey is followed by a longer pause. None run unless metrics are exported."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
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
    def metrics_authorities(self) -> Path | None:
        return self.tls_client_ca_file

    @property
    def authenticates(self) -> bool:
        return self.tls_client_ca_file is not None or self.jwt_keys_file is not None

    @property
    def shares_port(self) -> bool:
        """Whether other processes listen on the same ports: the service's other workers."""
        return False


class CallerConfig(ServiceConfig):
    peer_ca_file: Path | None = None
    """The authorities, in PEM, of the services that this one calls; they are then called over TLS.
    None: no TLS."""

    peer_certificate_file: Path | None = None
    """The client certificate chain, in PEM, presented to them; None: none."""

    peer_key_file: Path | None = None
    """Its key, in PEM, without a passphrase."""

    peer_token_file: Path | None = None
    """The file with the token sent to them; None: none."""

    @model_validator(mode="after")
    def _calls_can_be_made(self) -> Self:
        if (self.peer_certificate_file is None) != (self.peer_key_file is None):
            raise ValueError("peer_certificate_file and peer_key_file must be set together")
        if self.peer_certificate_file is not None and self.peer_ca_file is None:
            raise ValueError("peer_certificate_file requires peer_ca_file")
        return self


class WorkersConfig(ServiceConfig):
    """Of a service without state of its own, which can run as several processes."""

    workers: Annotated[int, Field(ge=1, le=WORKERS_MAX)] = 1
    """The processes that serve, to use as many processors. Above 1, this process starts them,
    replaces those that die, and serves all their metrics, labelled by worker. Connections, not
    calls, are divided among them, so that it takes several clients to use them all. Every other
    limit is for each. Linux only."""

    @property
    def shares_port(self) -> bool:
        return self.workers > 1

    @model_validator(mode="after")
    def _can_share(self) -> Self:
        if self.shares_port and sys.platform != "linux":
            raise ValueError("workers above 1 require Linux, which divides connections among them")
        return self


def settings_for(service: str) -> SettingsConfigDict:
    return SettingsConfigDict(env_prefix=f"SEQGATE_{service.upper()}_")


def _toml(settings_cls: type[BaseSettings], variable: str, path: Path) -> TomlConfigSettingsSource:
    if not path.is_file():
        raise FileNotFoundError(f"{variable}: settings file not found: {path}")
    try:
        return TomlConfigSettingsSource(settings_cls, toml_file=path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{variable}: {path}: {error}") from error
