"""Settings of the ledger service: SEQGATE_LEDGER_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field

from seqgate.services.runtime.config import (
    CallerConfig,
    Port,
    Seconds,
    Target,
    TargetOrNone,
    settings_for,
    with_port_or_none,
)
from seqgate.services.runtime.store_config import StoreConfig
from seqgate.types import LARGE_MESSAGE_BYTES_MAX

MINUTES_MAX: Final = 100 * 366 * 24 * 60


ENVELOPE_BYTES: Final = 16 * 1024
"""The bytes of a gRPC message besides the payload, in most cases: metadata and framing."""


EVERYWHERE: Final = ("0.0.0.0", "[::]", "")  # noqa: S104 - only compared
"""Hosts to listen on that are no address of this machine's."""


class LedgerConfig(StoreConfig, CallerConfig):
    model_config = settings_for("ledger")
    service: ClassVar[str] = "ledger"

    listen: Port = "127.0.0.1:7702"

    advertise: Annotated[str, AfterValidator(with_port_or_none)] = ""
    """host:port under which clients reach this process: with postgres_url, other ledgers name it to
    whoever asks them for its topics. Empty: `listen`."""

    store_path: Path = Path("ledger.db")

    dedup_target: Target = "127.0.0.1:7701"
    """The dedup service: host:port, or dns:///name:port to balance over its replicas."""

    dedup_timeout_s: Seconds = 5
    """The time limit of a call to the dedup service."""

    cursor_target: TargetOrNone = "127.0.0.1:7703"
    """The cursor service, as for dedup_target. While it does not answer, nothing is trimmed;
    publishing continues. Empty: none, and no cursor holds a trim back."""

    retention_minutes: Annotated[int, Field(ge=-1, le=MINUTES_MAX)] = -1
    """The age, since the append, up to which entries are kept that every cursor of their topic has
    acknowledged; in a topic without cursors, entries count as acknowledged. 0: they are trimmed
    once acknowledged; -1: they are kept forever."""

    retention_bytes: Annotated[int, Field(ge=-1)] = -1
    """The size of a topic, in bytes, above which entries that every cursor has acknowledged are
    trimmed, the oldest first. 0: as for retention_minutes; -1: no limit. Entries beyond either
    limit are trimmed."""

    trim_interval_s: Seconds = 60
    """The interval between trims of all topics by retention."""

    inline_replay_entries_max: Annotated[int, Field(ge=0)] = 1_000_000
    """The most entries of a topic that this service replays to deduplication after a loss of state.
    Beyond that, publishing is refused with RECOVERING until a rebuild has loaded the state. 0: no
    limit."""

    auto_create: tuple[str, ...] = ("*/*",)
    """The namespaces in which publishing creates a missing topic: patterns of tenant/namespace with
    * and ?. Empty: none."""

    max_message_bytes: Annotated[int, Field(ge=1024, le=128 * 1024 * 1024)] = 5 * 1024 * 1024
    """The largest payload of an entry, in bytes (Pulsar's maxMessageSize). It must be at least
    16 KiB below message_bytes_max, for the metadata."""

    max_large_message_bytes: Annotated[int, Field(ge=1024, le=LARGE_MESSAGE_BYTES_MAX)] = (
        256 * 1024 * 1024
    )
    """The largest payload of a large message as stored, all chunks together, in bytes."""

    max_chunks: Annotated[int, Field(ge=2, le=1_000_000)] = 10_000
    """The most chunks of a large message."""

    window_messages: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """The most unanswered messages of a producer."""

    window_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * 1024)] = 16 * 1024 * 1024
    """The most unanswered bytes of a producer. While there are none, a publication of any size is
    accepted."""

    unanswered_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * 1024**3)] = 512 * 1024 * 1024
    """The limit of unanswered bytes of all producers together, regardless of the sum of their
    windows. At the limit no stream is read until some are answered, and publications that still
    arrive fail with LEDGER_BUSY. While there are none, a publication of any size is accepted."""

    publish_streams_max: Annotated[int, Field(ge=1, le=100_000)] = 5_000
    """The most connected producers."""

    read_streams_max: Annotated[int, Field(ge=1, le=100_000)] = 4_000
    """The most open streams of entries. A dispatcher has one for each subscription with consumers,
    and a few more."""

    read_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * 1024**3)] = 256 * 1024 * 1024
    """The most bytes of pages read from the store and not yet taken by readers, for all streams
    together. Beyond that, streams wait; while there are none, a page of any size is read. Set it to
    many times max_message_bytes, which is reserved for each page while it is read."""

    slow_reader_s: Seconds = 10
    """How long a reader may go without reading while other streams wait for the room that it takes
    up; then its stream ends with SLOW_READER. While none waits, there is no limit."""

    group_entries_max: Annotated[int, Field(ge=1, le=4_000)] = 2_000
    """The most entries of a topic stored together."""

    group_bytes_max: Annotated[int, Field(ge=1024, le=256 * 1024 * 1024)] = 8 * 1024 * 1024
    """The most bytes of a topic stored together; a single entry may be larger."""

    open_timeout_s: Seconds = 30
    """How long a connecting producer waits for its topic to be ready."""

    failures_max: Annotated[int, Field(ge=1, le=1_000)] = 6
    """The number of consecutive failures after which waiting publications fail."""

    follow_poll_s: Seconds = 1
    """The interval at which a following reader looks for entries appended by another process."""

    keep_interval_s: Seconds = 20
    """The longest interval between reports to deduplication that connected producers are alive. If
    policy forgets inactive producers, a third of that timeout applies if it is shorter; a changed
    policy applies from the next report on. A third of the shortest possible timeout is 20
    seconds."""

    idle_timeout_s: Seconds = 600
    """The time after which a topic without producers is released."""

    def check(self) -> None:
        super().check()
        host, _, port = self.listen.rpartition(":")
        if self.postgres_url and not self.advertise and (host in EVERYWHERE or port == "0"):
            raise ValueError(
                "advertise must be set to the host:port under which clients reach this process: "
                f"others cannot tell it from listen, {self.listen}"
            )
        if self.max_message_bytes + ENVELOPE_BYTES > self.message_bytes_max:
            raise ValueError(
                f"max_message_bytes must be {ENVELOPE_BYTES:,} below message_bytes_max: set it to "
                f"{self.message_bytes_max - ENVELOPE_BYTES:,} or less, or message_bytes_max to "
                f"{self.max_message_bytes + ENVELOPE_BYTES:,} or more"
            )
