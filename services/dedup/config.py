"""Settings of the dedup service: SEQGATE_DEDUP_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from services.runtime.config import Port, Seconds, ServiceConfig, settings_for


class DedupConfig(ServiceConfig):
    """What the dedup service can be told."""

    model_config = settings_for("dedup")
    service: ClassVar[str] = "dedup"

    listen: Port = "127.0.0.1:7701"

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Where the state is kept: redis://, rediss:// or unix://."""

    redis_timeout_s: Seconds = 2
    """How long Redis may take to answer or to be connected to."""

    redis_connections_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    """How many connections to Redis are open at most; a call beyond that is refused."""

    cursor_target: str = "127.0.0.1:7703"
    """The cursor service, where snapshots and policies are kept: host:port, or dns:///name:port to
    be balanced over its replicas. Empty: there is none; what Redis forgets is replayed from the
    log's beginning, and no policy can be set by a call."""

    cursor_timeout_s: Seconds = 5
    """How long one answer of the cursor service may take."""

    policy_file: Path | None = None
    """The TOML file with policies; none: built-in values."""

    policy_interval_s: Seconds = 1
    """How often the policy file is looked at."""

    purge_interval_s: Seconds = 1200
    """How often inactive producers are looked for."""

    snapshot_check_interval_s: Seconds = 10
    """How often it is looked whether a snapshot is due by time."""
