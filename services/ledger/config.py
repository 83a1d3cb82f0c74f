"""Settings of the ledger service: SEQGATE_LEDGER_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import Field

from seqgate.services.runtime.config import CallerConfig, Port, Seconds, settings_for
from seqgate.types import LARGE_MESSAGE_BYTES_MAX

MINUTES_MAX: Final = 100 * 366 * 24 * 60
"""A hundred years."""


ENVELOPE_BYTES: Final = 16 * 1024
"""What the metadata of an entry and the request around it take of a gRPC message, in most cases."""


class LedgerConfig(CallerConfig):
    """What the ledger service can be told."""

    model_config = settings_for("ledger")
    service: ClassVar[str] = "ledger"

    listen: Port = "127.0.0.1:7702"

    store_path: Path = Path("ledger.db")
    """The SQLite database; its folder must exist."""

    store_bytes_max: Annotated[int, Field(ge=0)] = 0
    """How large the database may grow, in bytes, its write-ahead log included: that takes a
    sixteenth, and no more than 64 MiB. 0: as large as the disk."""

    store_readers: Annotated[int, Field(ge=1, le=64)] = 2
    """How many reads may go on at a time."""

    dedup_target: str = "127.0.0.1:7701"
    """The dedup service: host:port, or dns:///name:port to be balanced over its replicas."""

    dedup_timeout_s: Seconds = 5
    """How long one answer of the dedup service may take."""

    cursor_target: str = "127.0.0.1:7703"
    """The cursor service, as for dedup_target. While it does not answer, nothing is trimmed;
    publishing goes on. Empty: there is none, and nothing holds a trim back."""

    retention_minutes: Annotated[int, Field(ge=-1, le=MINUTES_MAX)] = -1
    """How long entries stay that every cursor of their topic has acknowledged; those of a topic
    without cursors count as acknowledged. 0: no longer than that; -1: for ever."""

    retention_bytes: Annotated[int, Field(ge=-1)] = -1
    """How large a topic may be before entries that every cursor has acknowledged go, in bytes, the
    oldest first. 0: as for retention_minutes; -1: of any size. What goes by either setting goes."""

    trim_interval_s: Seconds = 60
    """How often all topics are looked through for what retention keeps no longer."""

    inline_replay_entries_max: Annotated[int, Field(ge=0)] = 1_000_000
    """How many entries of a topic are replayed from here when deduplication has lost them. When it
    has lost more, the topic refuses with RECOVERING until a rebuild has loaded its state. 0: any
    number."""

    auto_create: tuple[str, ...] = ("*/*",)
    """In which namespaces publishing to a topic that does not exist creates it: patterns of
    tenant/namespace with * and ?. Empty: nowhere."""

    max_message_bytes: Annotated[int, Field(ge=1024, le=128 * 1024 * 1024)] = 5 * 1024 * 1024
    """The largest payload of an entry, in bytes (Pulsar's maxMessageSize). It fits into
    message_bytes_max, with 16 KiB for what is around it."""

    max_large_message_bytes: Annotated[int, Field(ge=1024, le=LARGE_MESSAGE_BYTES_MAX)] = (
        256 * 1024 * 1024
    )
    """The largest payload of a large message, all chunks together, as it is stored, in bytes."""

    max_chunks: Annotated[int, Field(ge=2, le=1_000_000)] = 10_000
    """How many chunks a large message may have."""

    window_messages: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """How many messages a producer may have unanswered."""

    window_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * 1024)] = 16 * 1024 * 1024
    """How many bytes a producer may have unanswered; one publication is always let through."""

    unanswered_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * 1024**3)] = 512 * 1024 * 1024
    """How many bytes all producers together may have unanswered, whatever their windows add up to.
    From there on no stream is read until something is answered, and what arrives all the same is
    sent back with LEDGER_BUSY; one publication is always let through."""

    publish_streams_max: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """How many producers may be connected."""

    read_streams_max: Annotated[int, Field(ge=1, le=100_000)] = 4_000
    """How many streams of entries may be read. A dispatcher has one for each subscription that has
    consumers, and a few more."""

    read_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * 1024**3)] = 256 * 1024 * 1024
    """How many bytes of pages may be read from the store and not be taken by their readers yet, of
    all streams together. Whoever wants more waits; one page is always read. Many times
    max_message_bytes: so much is set aside for each page while it is read."""

    slow_reader_s: Seconds = 10
    """How long a reader may take nothing of what it is sent while others wait for the room that it
    takes up; then its stream ends with SLOW_READER. While nobody waits, it may take its time."""

    group_entries_max: Annotated[int, Field(ge=1, le=4_000)] = 2_000
    """How many entries of a topic are stored together at most."""

    group_bytes_max: Annotated[int, Field(ge=1024, le=256 * 1024 * 1024)] = 8 * 1024 * 1024
    """How many bytes of a topic are stored together at most; one entry always is."""

    open_timeout_s: Seconds = 30
    """How long a producer that connects waits for its topic to be ready."""

    failures_max: Annotated[int, Field(ge=1, le=1_000)] = 6
    """After how many failures in a row waiting publications are sent back to their producers."""

    follow_poll_s: Seconds = 1
    """How often a reader that follows looks for entries that another process appended."""

    keep_interval_s: Seconds = 20
    """How often connected producers are reported to deduplication as alive, at least. Where policy
    forgets inactive producers, it is a third of that timeout if that is shorter; of a policy that
    was changed, the ledger learns with the next report. A third of the shortest timeout there is
    are 20 seconds."""

    idle_timeout_s: Seconds = 600
    """After how long a topic without producers is let go."""

    def check(self) -> None:
        if self.max_message_bytes + ENVELOPE_BYTES > self.message_bytes_max:
            raise ValueError(
                f"max_message_bytes must be {ENVELOPE_BYTES:,} below message_bytes_max: set it to "
                f"{self.message_bytes_max - ENVELOPE_BYTES:,} or less, or message_bytes_max to "
                f"{self.max_message_bytes + ENVELOPE_BYTES:,} or more"
            )
