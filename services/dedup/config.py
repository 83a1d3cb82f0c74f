"""Settings of the dedup service: SEQGATE_DEDUP_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from seqgate.services.dedup.redis_url import parse_redis_url
from seqgate.services.runtime.config import (
    CallerConfig,
    Port,
    Seconds,
    TargetOrNone,
    WorkersConfig,
    settings_for,
)


def _checked(url: str) -> str:
    parse_redis_url(url)
    return url


class DedupConfig(CallerConfig, WorkersConfig):
    model_config = settings_for("dedup") | {"hide_input_in_errors": True}  # it may have a password
    service: ClassVar[str] = "dedup"

    listen: Port = "127.0.0.1:7701"

    redis_url: Annotated[str, AfterValidator(_checked)] = "redis://127.0.0.1:6379/0"
    """The Redis that stores the state.

    - one server: redis://[user:password@]host:port/database, or unix:///path
    - a master that Sentinels know by name:
      redis+sentinel://[user:password@]host:port,host:port,host:port/name[/database]; the
      Sentinels' own credentials are options, ?sentinel_username=...&sentinel_password=...
    - a cluster, by some of its nodes: redis+cluster://[user:password@]host:port,host:port,host:port

    rediss instead of redis uses TLS, with the options ssl_ca_certs, ssl_certfile, ssl_keyfile,
    ssl_cert_reqs and ssl_check_hostname. User, password and options are percent-encoded."""

    redis_password_file: Path | None = None
    """The file with the password for Redis and for Sentinels, if redis_url has none; read for each
    connection. A user in redis_url is that of Redis. None: no password, or the URL's."""

    redis_timeout_s: Seconds = 2
    """The time limit for a connection to Redis, and for a command; in a cluster, for a command with
    all its redirections."""

    redis_connections_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    """The most connections to Redis, in a cluster to each node, besides one for health checks; a
    command beyond that waits."""

    cursor_target: TargetOrNone = "127.0.0.1:7703"
    """The cursor service, which stores snapshots and policies: host:port, or dns:///name:port to
    balance over its replicas. Empty: none; a state that Redis loses is replayed from the start of
    the log, and SetPolicy is refused."""

    cursor_timeout_s: Seconds = 5
    """The time limit of a call to the cursor service."""

    policy_file: Path | None = None
    """The TOML file with policies; none: the built-in values."""

    policy_interval_s: Seconds = 1
    """The shortest interval between checks of the policy file for changes."""

    purge_interval_s: Seconds = 1200
    """The interval between purges of inactive producers."""

    snapshot_check_interval_s: Seconds = 10
    """The interval between checks for snapshots that are due by time."""

    @model_validator(mode="after")
    def _has_one_password(self) -> Self:
        at = parse_redis_url(self.redis_url)
        if self.redis_password_file and ("password" in at.options or "password" in at.sentinel):
            raise ValueError("redis_url and redis_password_file both name a password")
        return self
