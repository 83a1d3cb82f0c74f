"""What the ledger service needs from outside: a store for logs, deduplication, and cursors.

tests/conformance judges every store by the same suite. The store is what a replicated log offers
too (an append on an expected tail under an epoch, range reads, a tail), so that one can take
SQLite's place.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from seqgate.types import Position, TopicName
from services.errors import DomainError, Kind
from services.ledger.core.columns import Columns
from services.ledger.core.entry import Entry, StoredEntry, Unit
from services.ledger.core.receipt import Fate
from services.ledger.core.writer import Confirmation, Verdict


class TopicNotFound(DomainError):
    """There is no such topic, and it may not be made."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_NOT_FOUND"


class EntryCorrupt(DomainError):
    """Stored bytes do not match their checksum."""

    kind = Kind.DATA_LOSS
    reason = "ENTRY_CORRUPT"


class DedupUnavailable(DomainError):
    """The dedup service does not answer; whether it did what it was asked is not known."""

    kind = Kind.UNAVAILABLE
    reason = "DEDUP_UNAVAILABLE"


class CursorsUnavailable(DomainError):
    """The cursor service does not answer; whether it did what it was asked is not known."""

    kind = Kind.UNAVAILABLE
    reason = "CURSORS_UNAVAILABLE"


class TooManyProducers(DomainError):
    """The topic tracks as many producers as policy allows."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_PRODUCERS"


class LogState(NamedTuple):
    """A topic's log. `first` is None when it holds nothing; `tail` only when it never did."""

    topic: TopicName
    incarnation: int
    ledger_id: int
    created_ms: int
    first: Position | None
    tail: Position | None
    entries: int
    messages: int
    size_bytes: int


class Trimmed(NamedTuple):
    """What a trim removed, and the first entry that is left."""

    removed_entries: int
    first: Position | None


class LedgerRange(NamedTuple):
    """The part of a ledger that the log still has. Its entry ids are consecutive."""

    ledger_id: int
    first_entry: int
    last_entry: int


class LedgerStore(Protocol):
    """Logs by topic.

    Raises:
        TopicNotFound: from every method that names a topic, but create, and take with create.
        StoreUnavailable: from every method.
        StoreFull: from every method that writes.
        EntryCorrupt: from read, read_at, columns and find; it names the last position that cannot
            be read.
    """

    async def create(self, topic: TopicName) -> tuple[LogState, bool]:
        """Make the topic unless it exists; whether this call made it."""
        ...

    async def take(
        self, topic: TopicName, *, create: bool, ledger_id: int | None = None
    ) -> LogState:
        """Become the topic's writer: its ledger_id grows by one, and whoever wrote before is
        fenced. A topic that was deleted comes back with a higher incarnation and ledger_id.

        Raises:
            Fenced: the topic's ledger_id is not the one given, so another writer came between.
        """
        ...

    async def append(
        self,
        topic: TopicName,
        ledger_id: int,
        expected_tail: Position | None,
        entries: Sequence[Entry],
        append_ms: int,
    ) -> None:
        """Append all of the entries, durably, or none: the first as entry 0 of the ledger, or after
        the tail if that is in the ledger.

        Raises:
            Fenced: the topic's ledger_id or tail is another one.
            StoreFull: nothing was stored.
            StoreUnavailable: the entries may have been stored.
        """
        ...

    async def read(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        entries_max: int,
        bytes_max: int,
        payloads: bool,
    ) -> list[StoredEntry]:
        """Entries after a position that are not trimmed, in order: at least one if there is one,
        and no more than fits. Without payloads, these are empty."""
        ...

    async def read_at(
        self, topic: TopicName, positions: Sequence[Position], *, bytes_max: int, payloads: bool
    ) -> list[StoredEntry]:
        """The entries at these positions, which are in order, that are there and not trimmed: at
        least one if there is one, and no more than fits; what is left out then lies after those.
        Without payloads, these are empty."""
        ...

    async def columns(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        through: Position,
        metadata: bool,
        runs_max: int,
        bytes_max: int,
    ) -> list[Columns]:
        """Entries after one position and through another that are not trimmed, in order, as runs of
        what was appended together: at least one if there is one, and no more than fits."""
        ...

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        """The ledgers after one that hold entries, in order."""
        ...

    async def count_after(self, topic: TopicName, position: Position | None) -> int:
        """About how many entries follow a position; never 0 when one does."""
        ...

    async def find(
        self, topic: TopicName, producer: str, sequence_ids: Sequence[int], *, uuid: str = ""
    ) -> list[Fate]:
        """Where the messages with these ids are; if an id was stored twice, where it was first."""
        ...

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        """The first entry that was appended at a time or later; None: the last one was appended
        before, or there is none. Where the clock went back: one that was, and before which lies one
        that was not, or nothing."""
        ...

    async def highest(self, topic: TopicName, ledger_id: int, producer: str) -> int | None:
        """The highest id that this producer ever stored, trimmed or not; None: it stored none. Of a
        large message that is in the log in part, the id before it.

        Raises:
            Fenced: the topic's ledger_id is another one: its writer may be storing more.
        """
        ...

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        """The highest id of each producer among the entries that were trimmed, in the order of the
        producers' names: those after a name, from the one after `skip` others on. The id of a large
        message counts if, when it was trimmed, the message was complete or overtaken."""
        ...

    async def get(self, topic: TopicName) -> LogState:
        """The topic's log."""
        ...

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        """Topics in the order of their names, after a name."""
        ...

    async def trim(self, topic: TopicName, before: Position) -> Trimmed:
        """Remove the entries before a position."""
        ...

    async def retained_from(
        self, topic: TopicName, *, appended_since_ms: int | None, bytes_max: int | None
    ) -> Position | None:
        """Where the entries begin that retention keeps: those before were appended before that
        time, or are what the topic is too large by; entries that were appended together, together.
        Of many that are to go, this may be only a part. None: the topic holds nothing."""
        ...

    async def renew(self, topic: TopicName) -> None:
        """Make the topic another incarnation of itself, so that what deduplication remembers of it,
        or is told of it late, counts no more. Whoever writes it must take it again."""
        ...

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        """Whether a large message that may still be completed has chunks before a position."""
        ...

    async def delete(self, topic: TopicName) -> None:
        """Remove the topic. Its name keeps its ledger_id, should it come back."""
        ...

    async def check(self) -> None:
        """Return if the store answers."""
        ...


class WriterName(NamedTuple):
    """Who asks: see dedup.proto, Writer."""

    incarnation: int
    epoch: int
    position: Position | None
    revision: int | None = None


class Judged(NamedTuple):
    """A verdict for each unit, and the last persisted id of its producer or -1; by the place of a
    unit, the attempt at a large message that it ends."""

    revision: int
    verdicts: list[Verdict]
    persisted: list[int]
    aborts: dict[int, str]


class Applied(NamedTuple):
    """A confirmation or a rollback was applied."""

    revision: int


class Behind(NamedTuple):
    """The state lacks entries after `confirmed`."""

    confirmed: Position | None


class Changed(NamedTuple):
    """The state is not the one that the writer last saw."""


class Disabled(NamedTuple):
    """Policy has switched deduplication off."""


class Deduplicator(Protocol):
    """The dedup service, as the ledger asks it.

    Raises:
        Fenced: from admit, confirm and rollback: another writer has the topic.
        TooManyProducers: from admit.
        DedupUnavailable: from every method; the outcome is not known.
    """

    async def admit(
        self,
        topic: TopicName,
        writer: WriterName,
        confirmation: Confirmation | None,
        units: Sequence[Unit],
    ) -> Judged | Behind | Changed | Disabled: ...

    async def confirm(
        self, topic: TopicName, writer: WriterName, confirmation: Confirmation
    ) -> Applied | Behind | Disabled: ...

    async def rollback(
        self, topic: TopicName, writer: WriterName, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        """Withdraw every open claim."""
        ...

    async def keep(self, topic: TopicName, producers: Sequence[str]) -> None:
        """Have producers remembered."""
        ...

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        """Have a topic's state dropped; if it was deleted, also what was set for it."""
        ...

    async def snapshot(self, topic: TopicName) -> Position | None:
        """Have the topic's state attached to deduplication's cursor; how far what is attached then
        covers the log. None: there is nothing to keep, and nothing is attached."""
        ...

    async def check(self) -> None:
        """Return if the service is ready."""
        ...


class Cursors(Protocol):
    """The cursor service, as the ledger asks it.

    Raises:
        CursorsUnavailable: from every method; the outcome is not known.
    """

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        """How far each cursor of a topic has acknowledged everything, in the order of their names;
        None: nothing."""
        ...

    async def delete_all(self, topic: TopicName) -> None:
        """Remove a topic's cursors."""
        ...
