"""What the ledger service needs from outside: a store for logs, deduplication, and cursors.

tests/conformance judges every store by the same suite. The store is what a replicated log offers
too (an append on an expected tail under an epoch, range reads, a tail), so that one can take
SQLite's place.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    Writer,
)
from seqgate.services.errors import DomainError, Kind
from seqgate.services.ledger.core.columns import Columns
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.receipt import Fate
from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName

NO_INSTANCES: Final[Mapping[str, bytes]] = MappingProxyType({})
"""The producers' instances stay as they are."""


class TopicNotFound(DomainError):
    """The topic does not exist, and may not be created."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_NOT_FOUND"


class EntryCorrupt(DomainError):
    """Stored entries do not match their checksum."""

    kind = Kind.DATA_LOSS
    reason = "ENTRY_CORRUPT"


class DedupUnavailable(DomainError):
    """The dedup service does not answer. Whether the request took effect is unknown."""

    kind = Kind.UNAVAILABLE
    reason = "DEDUP_UNAVAILABLE"


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

    @property
    def start(self) -> Position:
        """Where the log begins: everything before it is trimmed, and it never goes back. As long as
        it stays, nothing is trimmed."""
        if self.first is not None:
            return self.first
        return Position(0, 0) if self.tail is None else following(self.tail)


def following(position: Position) -> Position:
    """The place right after a position."""
    if position.entry_id == SEQUENCE_ID_MAX:
        return Position(position.ledger_id + 1, 0)
    return Position(position.ledger_id, position.entry_id + 1)


class ReplayPage(NamedTuple):
    """A part of what deduplication is told of a log: producers of which entries were trimmed, or
    entries. `start` is where the log began when both were read."""

    start: Position
    producers: list[tuple[str, int]]
    entries: list[StoredEntry]


class Trimmed(NamedTuple):
    """What a trim removed, and the first entry that is left."""

    removed_entries: int
    first: Position | None


class Newest(NamedTuple):
    """The instance that was last appended for a producer; None: none ever was. The id of its last
    message that is in the log as a whole, or was trimmed; None: none is known. And the uuid of the
    attempt that its newest entry is a chunk of, if more chunks would have to follow; empty: none
    would."""

    instance: bytes | None = None
    whole: int | None = None
    unfinished: str = ""


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
        """Become the topic's writer: its ledger_id grows by one, and the writer before is
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
        *,
        instances: Mapping[str, bytes] = NO_INSTANCES,
    ) -> None:
        """Append all of the entries, durably, or none: the first as entry 0 of the ledger, or after
        the tail if that is in the ledger. With them, in the same transaction, goes who stores under
        a producer's name from now on: the instance, by the producer's name.

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
        """Where the messages with these ids are; if an id was stored twice, where it was
        last completed."""
        ...

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        """The first entry that was appended at a time or later; None: the last one was appended
        before, or there is none. Where the clock went back: one that was, and before which lies one
        that was not, or nothing."""
        ...

    async def highest(self, topic: TopicName, ledger_id: int, producer: str) -> int | None:
        """How far this producer has come, by its entries, trimmed or not: the highest id of the
        last one, which is lower than one before where it started over; None: it stored none. Of a
        large message that is in the log in part, the id before it. See core/marks.py.

        Raises:
            Fenced: the topic's ledger_id is another one: its writer may be storing more.
        """
        ...

    async def last_append_ms(self, topic: TopicName) -> int:
        """When the last entry was appended, trimmed or not, in milliseconds since 1970; 0: nothing
        was."""
        ...

    async def trimmed_through(self, topic: TopicName) -> Position | None:
        """The last entry that was trimmed; None: none was."""
        ...

    async def newest(self, topic: TopicName, producer: str) -> Newest:
        """What is known of a producer's newest entries, whatever was trimmed since."""
        ...

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        """How far each producer had come in the entries that were trimmed, in the order of the
        producers' names: those after a name, from the one after `skip` others on. The id of a large
        message counts if, when it was trimmed, the message was complete or overtaken."""
        ...

    async def replay(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        producers_after: str | None,
        limit: int,
        bytes_max: int,
    ) -> ReplayPage:
        """What deduplication is told of a log, by page, each read at one moment: first, unless
        `producers_after` is None, `trimmed_producers` after that name; if there is none, entries
        after a position, as from read, without payloads.

        A page follows another one only if both have the same `start`, or if no entry between the
        two was trimmed: what was trimmed meanwhile is in neither.
        """
        ...

    async def get(self, topic: TopicName) -> LogState:
        """The topic's log."""
        ...

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        """Topics in the order of their names, after a name."""
        ...

    async def trim(
        self, topic: TopicName, before: Position, *, renewing: bool = False, steps_max: int = 0
    ) -> Trimmed:
        """Remove the entries before a position, a part at a time, each with what is remembered of
        its producers; no more than so many parts (0: all), so that what is left may begin before
        the position. With `renewing`, the topic is renewed at the moment in which a large message
        that may still be completed loses chunks."""
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
        or is told of it late, counts no more. Its writer must take it again."""
        ...

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        """Whether a large message that may still be completed has chunks before a position."""
        ...

    async def delete(self, topic: TopicName, *, leaves_cursors: bool = False) -> None:
        """Remove the topic. Its name keeps its ledger_id, should it come back. With
        `leaves_cursors`, it is one of those that `leaving` names from the same moment on."""
        ...

    async def leaving(self, *, after: str, limit: int) -> list[TopicName]:
        """Deleted topics whose cursors are yet to be removed, in the order of their names, after a
        name. One that is made again is none of them."""
        ...

    async def left(self, topic: TopicName) -> None:
        """Nothing is to be removed any more of what a deleted topic has left."""
        ...

    async def check(self) -> None:
        """Return if the store answers."""
        ...


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
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
    ) -> Judged | Behind | Changed | Disabled: ...

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind | Disabled: ...

    async def rollback(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        """Withdraw every open claim."""
        ...

    async def keep(
        self, topic: TopicName, producers: Sequence[str], *, only_due: bool = False
    ) -> float | None:
        """Have producers remembered; within how many seconds to ask for it again. None: at any
        time. With `only_due`, nothing changes of those that were active lately."""
        ...

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        """Have a topic's state dropped; if it was deleted, also what was set for it."""
        ...

    async def snapshot(self, topic: TopicName) -> Position | None:
        """Have the topic's state attached to deduplication's cursor; how far what is attached then
        covers the log. None: there is nothing to keep, or it does not fit, and nothing is
        attached."""
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
