"""The ledger service's ports: a store for logs, the dedup service, and the cursor service.

tests/conformance runs the same suite over every store. The operations are those of a replicated log
(an append on an expected tail under an epoch, range reads, a tail), so that one can replace SQLite.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from seqgate.services.cursors import IsGone
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
from seqgate.services.ledger.core.attempts import OpenAttempt
from seqgate.services.ledger.core.columns import Columns
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.ownership import Beat
from seqgate.services.ledger.core.receipt import Fate
from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName

NO_INSTANCES: Final[Mapping[str, bytes]] = MappingProxyType({})
"""Leaves the recorded instances of producers unchanged."""


class TopicNotFound(DomainError):
    """The topic does not exist, and policy does not create it."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_NOT_FOUND"


class EntryCorrupt(DomainError):
    """Stored entries do not match their checksum."""

    kind = Kind.DATA_LOSS
    reason = "ENTRY_CORRUPT"


class DedupUnavailable(DomainError):
    """The dedup service does not answer. The outcome of the request is unknown."""

    kind = Kind.UNAVAILABLE
    reason = "DEDUP_UNAVAILABLE"


class DedupBusy(DedupUnavailable):
    """The dedup service has too much to do. Nothing was done."""


class LogState(NamedTuple):
    """A topic's log. `first` is None if it holds no entry, `tail` only if it never held one."""

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
        """The first position that is not trimmed. It only grows, with each trim."""
        if self.first is not None:
            return self.first
        return Position(0, 0) if self.tail is None else following(self.tail)


def following(position: Position) -> Position:
    if position.entry_id == SEQUENCE_ID_MAX:
        return Position(position.ledger_id + 1, 0)
    return Position(position.ledger_id, position.entry_id + 1)


class ReplayPage(NamedTuple):
    """A page of a replay to deduplication: either producers with trimmed entries, or entries.
    `start` is the start of the log when the page was read."""

    start: Position
    producers: list[tuple[str, int]]
    entries: list[StoredEntry]


class Trimmed(NamedTuple):
    """A trim's result: the number of removed entries, and the first entry left."""

    removed_entries: int
    first: Position | None


class Newest(NamedTuple):
    """A producer's newest entries.

    Attributes:
        instance: the instance that stored the last entry; None: none is recorded.
        whole: the id of the last message that is complete in the log or trimmed; None: unknown.
        unfinished: the attempt at a large message that the newest entry leaves unfinished.
    """

    instance: bytes | None = None
    whole: int | None = None
    unfinished: OpenAttempt | None = None


class LedgerRange(NamedTuple):
    """The part of a ledger that the log still has. Its entry ids are consecutive."""

    ledger_id: int
    first_entry: int
    last_entry: int


class LedgerStore(Protocol):
    """Logs by topic.

    Raises:
        TopicNotFound: from every method that names a topic, except create, and take with create.
        StoreUnavailable: from every method.
        StoreFull: from every method that writes.
        EntryCorrupt: from read, read_at, columns and find; it names the last unreadable position.
    """

    async def create(self, topic: TopicName) -> tuple[LogState, bool]:
        """Create a topic unless it exists. Returns whether this call created it."""
        ...

    async def take(
        self, topic: TopicName, *, create: bool, ledger_id: int | None = None
    ) -> LogState:
        """Become the topic's writer: its ledger_id grows by one, which fences the previous writer.
        A deleted topic is recreated with a higher incarnation and ledger_id.

        Raises:
            Fenced: the topic has another ledger_id than the given one: another writer took it.
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
        """Append all entries durably, or none: as entry 0 of the ledger and following, or after the
        tail if that is in the ledger. The same transaction records `instances`, by producer name,
        as the instances that store under these names from now on.

        Raises:
            Fenced: the topic has another ledger_id or tail.
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
        """Entries after a position that are not trimmed, in order, within the limits but at least
        one if any is left. Without `payloads`, payloads are empty."""
        ...

    async def read_at(
        self, topic: TopicName, positions: Sequence[Position], *, bytes_max: int, payloads: bool
    ) -> list[StoredEntry]:
        """The entries at ascending positions that exist and are not trimmed, within the limit but
        at least one if any exists; the limit cuts off the last. Without `payloads`, payloads are
        empty."""
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
        entries appended together, within the limits but at least one if any is left."""
        ...

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        """The ledgers above `after` that hold entries, in order."""
        ...

    async def count_after(self, topic: TopicName, position: Position | None) -> int:
        """The approximate number of entries after a position; exact if 0."""
        ...

    async def find(
        self, topic: TopicName, producer: str, sequence_ids: Sequence[int], *, uuid: str = ""
    ) -> list[Fate]:
        """The fates of the messages with these ids; of an id stored twice, that of the copy
        completed last."""
        ...

    async def goes_on(self, topic: TopicName, producer: str, uuid: str, position: Position) -> bool:
        """Whether an attempt at a large message goes on, and is whole, after the entry at this
        position, which names it as aborted."""
        ...

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        """The first entry appended at this time or later; None: the last entry was appended before,
        or there is none. If the clock went back, an entry appended at this time or later that is
        the first one, or whose predecessor was appended before."""
        ...

    async def highest(self, topic: TopicName, ledger_id: int, producer: str) -> int | None:
        """The highest id of this producer's last entry, trimmed or not; None: it stored none. The
        id is below earlier ones if the producer started over. For an incomplete large message, it
        is the id before that message. See core/marks.py.

        Raises:
            Fenced: the topic has another ledger_id, whose writer may be storing more.
        """
        ...

    async def last_append_ms(self, topic: TopicName) -> int:
        """The append time of the last entry, trimmed or not, in ms since 1970; 0: there is none."""
        ...

    async def trimmed_through(self, topic: TopicName) -> Position | None:
        """The last trimmed entry; None: nothing was trimmed."""
        ...

    async def newest(self, topic: TopicName, producer: str) -> Newest:
        """A producer's newest entries, trimmed or not."""
        ...

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        """Each producer's last id among its trimmed entries, by producer name, starting after
        `after` and then skipping `skip` names. The id of a large message counts if the message was
        complete or overtaken when it was trimmed."""
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
        """A page of a replay to deduplication, read at one moment: `trimmed_producers` after a
        name, unless `producers_after` is None; if none is left, entries after a position without
        payloads, as from `read`.

        A page continues another only if both have the same `start`, or no entry between them was
        trimmed: neither contains the entries that were trimmed in between.
        """
        ...

    async def get(self, topic: TopicName) -> LogState: ...

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        """Topics after a name, in the order of their names. The prefix filters the names."""
        ...

    async def trim(
        self,
        topic: TopicName,
        before: Position,
        *,
        ledger_id: int | None = None,
        renewing: bool = False,
        steps_max: int = 0,
    ) -> Trimmed:
        """Remove the entries before a position, in steps; each step also records the producers'
        last ids. After `steps_max` steps (0: no limit), entries before the position may be left.
        With `renewing`, a step that removes chunks of a large message which could still be
        completed also renews the topic.

        Raises:
            Fenced: the topic has another ledger_id than the given one; nothing more was removed.
        """
        ...

    async def retained_from(
        self, topic: TopicName, *, appended_since_ms: int | None, bytes_max: int | None
    ) -> Position | None:
        """The first entry that retention keeps: entries before it were appended before the given
        time, or exceed the given size. Entries appended together are kept or removed together. If
        many are to be removed, one call may cover only some. None: the topic is empty."""
        ...

    async def renew(
        self, topic: TopicName, *, ledger_id: int | None = None, above: int = 0
    ) -> LogState:
        """Give the topic a new incarnation, which invalidates its deduplication state and late
        requests about that state. The writer must take the topic again. The new ledger_id is
        greater than `above`.

        Raises:
            Fenced: the topic has another ledger_id than the given one.
        """
        ...

    async def reserve(self, topic: TopicName, above: int) -> None:
        """Have a topic that does not exist begin above this ledger_id when it is created. Nothing
        changes if it exists."""
        ...

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        """Whether a large message that could still be completed has chunks before a position."""
        ...

    async def delete(
        self, topic: TopicName, *, ledger_id: int | None = None, leaves_cursors: bool = False
    ) -> None:
        """Delete the topic. Its ledger_id is kept for a later topic of this name. With
        `leaves_cursors`, the same transaction adds the topic to `leaving`.

        Raises:
            Fenced: the topic has another ledger_id than the given one.
        """
        ...

    async def leaving(self, *, after: str, limit: int) -> list[TopicName]:
        """Deleted topics after a name whose cursors are yet to be removed, in the order of their
        names. A recreated topic is not among them."""
        ...

    async def is_leaving(self, topic: TopicName) -> bool:
        """Whether a topic is in `leaving`. In contrast to what reads return, this is current even
        if the store's server was replaced."""
        ...

    async def left(self, topic: TopicName) -> None:
        """Remove a topic from `leaving`, after its cursors are removed."""
        ...

    async def check(self) -> None:
        """Return if the store answers; raise otherwise."""
        ...


class Register(Protocol):
    """The instances that share a store, and which of them should write each topic.

    Raises:
        StoreUnavailable: from every method; the outcome is unknown.
    """

    async def beat(self, instance: str, address: str) -> list[Beat]:
        """Add one to an instance's counter, which begins with its first beat. Returns all
        instances."""
        ...

    async def leave(self, instance: str) -> None:
        """Remove an instance, and its topics' records."""
        ...

    async def owner(self, topic: TopicName) -> str | None:
        """The instance that is recorded for a topic; None: none is."""
        ...

    async def own(self, topic: TopicName, ledger_id: int, instance: str) -> None:
        """Record the instance that took a topic with this ledger_id, or that it is handed over to;
        nothing changes if a higher ledger_id is recorded."""
        ...

    async def disown(self, topic: TopicName, ledger_id: int) -> None:
        """Remove a topic's record, unless a higher ledger_id is recorded."""
        ...

    async def owned(self, instance: str) -> frozenset[str]:
        """The names of the topics that are recorded for an instance."""
        ...


class Deduplicator(Protocol):
    """The dedup service, as the ledger uses it.

    Raises:
        Fenced: from admit, confirm and rollback: another writer owns the topic.
        TooManyProducers: from admit.
        DedupUnavailable: from every method; the outcome is unknown.
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
        """Report producers as alive. Returns the seconds until the next report is due; None: no
        limit. With `only_due`, recently active producers are left unchanged."""
        ...

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        """Drop a topic's state and, if it was deleted, its policy."""
        ...

    async def snapshot(self, topic: TopicName) -> Position | None:
        """Take a snapshot of the topic's state. Returns the position up to which the newest
        snapshot covers the log; None: there is no state to keep, or it does not fit, and no
        snapshot is left."""
        ...

    async def check(self) -> None:
        """Return if the service is ready; raise otherwise."""
        ...


class Cursors(Protocol):
    """The cursor service, as the ledger uses it.

    Raises:
        CursorsUnavailable: from every method; the outcome is unknown.
    """

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        """The mark-delete position of each cursor, by name; None: nothing is acknowledged."""
        ...

    async def delete_all(self, topic: TopicName, is_gone: IsGone) -> bool:
        """Delete the cursors of a deleted topic. Returns false, and deletes none, if the topic is
        there again. `is_gone` is asked after the cursors were listed, and only the listed ones are
        deleted: those of a topic that is recreated meanwhile stay."""
        ...
