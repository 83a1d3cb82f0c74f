"""The ports of the dispatcher: the log, cursors, dead letter topics, and filters.

tests/conformance judges every adapter of Cursors, and of Filters, by the same suite.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.dispatcher.core.effects import Persist
from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position, TopicName


class CursorsRefused(DomainError):
    """The cursor service refused a write for good. The dispatcher drops the subscription's state
    and reloads what is durable."""

    kind = Kind.FENCED
    reason = "CURSORS_REFUSED"


class CursorCorrupt(DomainError):
    """The subscription's cursor is damaged."""

    kind = Kind.DATA_LOSS
    reason = "CURSOR_CORRUPT"


class LedgerUnavailable(DomainError):
    """The ledger does not answer."""

    kind = Kind.UNAVAILABLE
    reason = "LEDGER_UNAVAILABLE"


class LetterRefused(DomainError):
    """The ledger refused a dead letter and will keep refusing it: the dead letter topic may not be
    created, for instance, or the message is too large."""

    kind = Kind.UNAVAILABLE
    reason = "DEAD_LETTER_REFUSED"


GENERATION: Final = "seqgate.dead.generation"
"""The property of a dead letter that counts the dead letter topics it went through."""

INTERNAL: Final = "seqgate."
"""The prefix of a cursor's properties that are not the application's."""


class FiltersUnavailable(DomainError):
    """The filter service does not answer, or not in time."""

    kind = Kind.UNAVAILABLE
    reason = "FILTERS_UNAVAILABLE"


class InvalidExpression(DomainError):
    """A filter's expression does not compile, has the wrong type, or costs too much."""

    kind = Kind.INVALID
    reason = "INVALID_EXPRESSION"


class InvalidChain(DomainError):
    """The filters do not form a valid chain, or do not fit the subscription's properties."""

    kind = Kind.INVALID
    reason = "INVALID_CHAIN"


class SubscriptionNotFound(DomainError):
    """The subscription does not exist."""

    kind = Kind.NOT_FOUND
    reason = "SUBSCRIPTION_NOT_FOUND"


class TopicNotFound(DomainError):
    """The topic does not exist."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_NOT_FOUND"


class NotOwner(DomainError):
    """Another instance owns the subscription."""

    kind = Kind.IN_USE
    reason = "NOT_OWNER"


class InvalidProperty(DomainError):
    """A property's name or value is too long, or there are too many properties."""

    kind = Kind.INVALID
    reason = "INVALID_PROPERTY"


class EntryCorrupt(DomainError):
    """An entry of the log is damaged."""

    kind = Kind.DATA_LOSS
    reason = "ENTRY_CORRUPT"


class Lease(NamedTuple):
    """The lease on a subscription."""

    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """A subscription, as its cursor keeps it.

    Attributes:
        mark_delete: everything up to here is acknowledged.
        acknowledged_entries: how many are beyond.
        owner: who has the lease; empty: nobody. As far as this machine's clock can tell: a lease
            is acquired and lost by the store's.
    """

    name: str
    mark_delete: Position | None
    properties: Mapping[str, str]
    acknowledged_entries: int
    created_ms: int
    owner: str

    @property
    def own(self) -> dict[str, str]:
        """The properties that are the application's."""
        return {
            name: value for name, value in self.properties.items() if not name.startswith(INTERNAL)
        }


class Run(NamedTuple):
    """Neighbours of one ledger."""

    first: Position
    last_entry_id: int


class Part(NamedTuple):
    """A batch of which messages (bits) are acknowledged."""

    position: Position
    messages: int
    acknowledged: int


class Cursors(Protocol):
    """Cursors of topics; a subscription is the one of its name.

    Every method raises CursorsUnavailable when the service does not answer, and CursorsRefused when
    it refuses what would be refused again. Those that name a cursor raise SubscriptionNotFound, and
    CursorCorrupt; those that take an epoch raise Fenced when the lease has a newer one.
    """

    async def create(
        self,
        topic: TopicName,
        name: str,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Cursor, bool]:
        """Make the cursor unless it exists; whether this call made it.

        Raises:
            InvalidProperty: a property is too long, or there are too many.
        """
        ...

    async def get(self, topic: TopicName, name: str) -> Cursor:
        """The cursor."""
        ...

    async def page(
        self, topic: TopicName, *, limit: int, token: str
    ) -> tuple[Sequence[Cursor], str]:
        """Cursors of a topic in the order of their names, and the token of the next page."""
        ...

    async def delete(self, topic: TopicName, name: str) -> None:
        """Remove the cursor."""
        ...

    async def reset(
        self, topic: TopicName, name: str, mark_delete: Position | None, epoch: int
    ) -> None:
        """Move the cursor, and forget what is acknowledged beyond, and attempts."""
        ...

    def acknowledged(self, topic: TopicName, name: str) -> AsyncIterator[Run | Part]:
        """What is acknowledged beyond the mark-delete position, in order."""
        ...

    def attempts(self, topic: TopicName, name: str) -> AsyncIterator[tuple[Position, int]]:
        """How often deliveries of entries failed that are not acknowledged."""
        ...

    async def persist(
        self, topic: TopicName, name: str, what: Persist, epoch: int
    ) -> Position | None:
        """Make acknowledgements durable. Returns the mark-delete position. May be repeated."""
        ...

    async def record(
        self, topic: TopicName, name: str, attempts: Sequence[tuple[Position, int]], epoch: int
    ) -> None:
        """Make durable how often deliveries failed. May be repeated."""
        ...

    async def set_properties(
        self,
        topic: TopicName,
        name: str,
        put: Mapping[str, str],
        remove: Sequence[str],
        *,
        epoch: int | None,
    ) -> Cursor:
        """Change the cursor's own properties; None: whoever has the lease. May be repeated.

        Raises:
            InvalidProperty: a property is too long, or there are too many.
        """
        ...

    async def acquire(self, topic: TopicName, name: str, owner: str, duration_ms: int) -> Lease:
        """Take the lease.

        Raises:
            NotOwner: somebody else has it, who is named.
        """
        ...

    async def renew(
        self,
        topic: TopicName,
        name: str,
        owner: str,
        epoch: int,
        duration_ms: int,
        *,
        next_epoch: bool = False,
    ) -> Lease:
        """Keep the lease for longer; with the next epoch, so that calls with this one which are
        still under way are fenced. May be repeated."""
        ...

    async def release(self, topic: TopicName, name: str, epoch: int) -> None:
        """Give the lease back."""
        ...

    async def check(self) -> None:
        """Return if the service answers."""
        ...


class Ends(NamedTuple):
    """The first entry that a log has, and the last."""

    first: Position | None
    last: Position | None


class Fetched(NamedTuple):
    """Entries at some of the positions that were asked for.

    Attributes:
        answered: how many positions that is, from the first on. Of these, the log has none but the
            entries that are here. Of the rest nothing is said.
    """

    entries: Sequence[ledger_pb2.StoredEntry]
    answered: int


class Log(Protocol):
    """The ledger service. Entries are given out as they are on the wire.

    Every method raises LedgerUnavailable when the service does not answer, TopicNotFound, and
    EntryCorrupt when an entry is damaged.
    """

    async def ends(self, topic: TopicName) -> Ends:
        """Where the log begins and ends now."""
        ...

    def follow(
        self, topic: TopicName, after: Position | None
    ) -> AsyncIterator[Sequence[ledger_pb2.StoredEntry]]:
        """What follows a position, and what is to come, until the service goes away."""
        ...

    async def scan(
        self, topic: TopicName, at: Position | None, after: Position | None, limit: int
    ) -> Sequence[ledger_pb2.StoredEntry]:
        """At most so many entries, without payloads: from a position on, or after one. There may be
        fewer than there are; none means that the log has none there."""
        ...

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], *, metadata_only: bool = False
    ) -> Sequence[ledger_pb2.StoredEntry]:
        """The entries at these positions, which are in order; those that the log does not have are
        left out."""
        ...

    async def fetch_some(
        self,
        topic: TopicName,
        positions: Sequence[Position],
        *,
        bytes_max: int,
        metadata_only: bool = False,
    ) -> Fetched:
        """The entries at the first of these positions, which are in order, as far as so many bytes
        go: at least one position is answered, whatever its size, and the last entry may be beyond
        the limit."""
        ...

    async def ledgers(self, topic: TopicName) -> Sequence[Run]:
        """What the log has of each ledger, in order."""
        ...

    async def last_before(self, topic: TopicName, ledger_id: int) -> Position | None:
        """The last entry of the ledgers before this one; None: there is none."""
        ...

    async def find(self, topic: TopicName, append_ms: int) -> Position | None:
        """The first entry that was appended at this time or later."""
        ...

    async def check(self) -> None:
        """Return if the service answers."""
        ...


class Letter(NamedTuple):
    """What is put into a dead letter topic.

    Attributes:
        number: counts the subscription's dead letters: with it, an entry that is put there again
            is found there already.
        entry: as it was stored.
        line: which of the subscription's producers publishes it, each with numbers of its own;
            empty: the first.
        generation: through how many dead letter topics it goes with this one.
        round: the number of the first letter since the subscription was made or moved: what dies
            again after that is not what died before.
    """

    topic: TopicName
    source: TopicName
    subscription: str
    number: int
    attempts: int
    entry: ledger_pb2.StoredEntry
    line: str = ""
    generation: int = 1
    round: int = 0


class DeadLetters(Protocol):
    """Where dead letters go."""

    async def put(self, letter: Letter) -> bool:
        """Publish it, once however often it is called. Letters of a subscription are put one after
        the other, in the order of their numbers, but for those that were refused. Returns whether
        it is there; if not, a letter with a higher number is, and this one never will be.

        Raises:
            LedgerUnavailable: it may be there or not; put it again.
            LetterRefused: this attempt did not put it there. It may be put again later.
        """
        ...


class Filter(NamedTuple):
    """One expression of a chain."""

    name: str
    version: int
    expression: str


class Rules(NamedTuple):
    """All that decides about an entry besides the entry itself.

    Attributes:
        filters: the chain; the first that does not accept decides.
        topic: what `topic` stands for.
        properties: names and values, what `subscription` stands for.
    """

    filters: tuple[Filter, ...]
    topic: str
    properties: tuple[tuple[str, str], ...] = ()


class Reads(NamedTuple):
    """What of an entry rules read: entries that do not differ in it have the same verdict.

    Attributes:
        variables: the names of variables.
        properties: the properties that are looked up by name; None: any may matter.
        subscription: the same of the subscription's.
    """

    variables: frozenset[str] = frozenset()
    properties: tuple[str, ...] | None = ()
    subscription: tuple[str, ...] | None = ()


class Failure(NamedTuple):
    """Why there is no verdict: a filter.v1.FailureReason without its prefix, and a sentence."""

    reason: str
    message: str


class Decision(NamedTuple):
    """What rules say of an entry.

    Attributes:
        verdict: as in core.effects; a failure has none.
        filter: the place in the chain of the filter that decided, or failed; None: all accept.
        failure: why there is no verdict; None: there is one.
    """

    verdict: int
    filter: int | None = None
    failure: Failure | None = None


class Line(Protocol):
    """A line of one's own to the filter service: one thing is asked after the other, and what is
    asked on other lines holds nothing up.

    Every method raises FiltersUnavailable when the service does not answer in time, and what is
    wrong with the rules: InvalidExpression, InvalidChain.
    """

    async def reads(self, rules: Rules) -> Reads:
        """What the rules read. So they are compiled."""
        ...

    async def judge(
        self, rules: Rules, metadata: Sequence[entry_pb2.EntryMetadata]
    ) -> Sequence[Decision]:
        """What the rules say of entries with these metadata, of which only what the rules read
        counts, and whether they are batches. However many they are."""
        ...

    async def close(self) -> None:
        """Nothing more is asked."""
        ...


class Filters(Protocol):
    """The filter service."""

    def line(self) -> Line:
        """A new line. It costs nothing until something is asked."""
        ...


class Ports(NamedTuple):
    """What subscriptions stand on.

    Attributes:
        owner: where clients reach this instance: the name that leases have.
        now_ms: what time it is, in ms since 1970, without jumps.
    """

    log: Log
    cursors: Cursors
    dead_letters: DeadLetters
    filters: Filters
    owner: str
    now_ms: Callable[[], int]
