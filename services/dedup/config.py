"""Settings of the dedup service: SEQGATE_DEDUP_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from seqgate.services.dedup.redis_url import parse_redis_url
from seqgate.services.runtime.config import CallerConfig, Port, Seconds, settings_for


def _checked(url: str) -> str:
    parse_redis_url(url)
    return url


class DedupConfig(CallerConfig):
    """What the dedup service can be told."""

    model_config = settings_for("dedup") | {"hide_input_in_errors": True}  # it may have a password
    service: ClassVar[str] = "dedup"

    listen: Port = "127.0.0.1:7701"

    redis_url: Annotated[str, AfterValidator(_checked)] = "redis://127.0.0.1:6379/0"
    """Where the state is kept.

    - one server: redis://[user:password@]host:port/database, or unix:///path
    - the master that Sentinels know by a name:
      redis+sentinel://[user:password@]host:port,host:port,host:port/name[/database]; what the
      Sentinels themselves want are options, ?sentinel_username=...&sentinel_password=...
    - a cluster, by some of its nodes: redis+cluster://[user:password@]host:port,host:port,host:port

    With rediss instead of redis, over TLS; ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs
    and ssl_check_hostname are options then. User, password and options are percent-encoded."""

    redis_timeout_s: Seconds = 2
    """How long Redis may take to answer or to be connected to; in a cluster, for all of a command
    with its redirections."""

    redis_connections_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    """How many connections to Redis are open at most, in a cluster to each node; a call beyond that
    is refused."""

    cursor_target: str = "127.0.0.1:7703"
    """The cursor service, where snapshots and policies are kept: host:port, or dns:///name:port to
    be balanced over its replicas. Empty: there is none; what Redis forgets is replayed from the
    log's beginning, and no policy can be set by a call."""

    cursor_timeout_s: Seconds = 5
    """How long one answer of the cursor service may take."""

    policy_file: Path | None = None
    """The TOML file with policies; none: built-in values."""

    policy_interval_s: Seconds = 1
    """The policy file is checked for changes at most this often."""

    purge_interval_s: Seconds = 1200
    """How often inactive producers are looked for."""

    snapshot_check_interval_s: Seconds = 10
    """How often it is looked whether a snapshot is due by time."""
