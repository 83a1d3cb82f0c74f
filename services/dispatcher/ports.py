"""The ports of the dispatcher: the log, cursors, dead letter topics, and filters.

tests/conformance has one suite per port, run over every adapter of Cursors, and of Filters.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.dispatcher.core.effects import FailedDelivery, FailedEntry, Persist, Why
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position, TopicName


class CursorsRefused(DomainError):
    """The cursor service refused a write for good. The dispatcher drops the subscription's state
    and reloads the durable state."""

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
"""The property of a dead letter that counts the dead letter topics that it passed through."""

REASON: Final = "seqgate.dead.reason"
"""The property of a dead letter that says why it is one: the name of an effects.Why."""

FAILURES: Final = "seqgate.dead.failures"
"""The property of a dead letter with its latest failed deliveries, as JSON: of each, how it failed
(the name of an effects.How), when in ms since 1970, and the name of its consumer."""

PRODUCER: Final = "seqgate.dead/"
"""The prefix of the names of the producers of dead letters."""

ORIGIN: Final = "seqgate.origin."
"""The prefix of a dead letter's properties that name its message in the log."""

ATTEMPTS: Final = "seqgate.attempts"
"""The property of a dead letter that counts its failed deliveries."""

ACKNOWLEDGED: Final = "seqgate.dead.acknowledged"
"""The property of a dead letter that is a batch: the messages that were acknowledged before, as a
hexadecimal number with a bit for each."""

STEPS: Final = f"{ORIGIN}sequence_id_steps"
"""The property of a dead letter that is a batch: the distances of its sequence ids, with commas."""

REDRIVES: Final = "seqgate.dead.redrives"
"""The property of a redriven message, and of its next letter, that counts its redrives."""

LIVES: Final = "seqgate.dead.lives"
"""The property of a redriven message's letter with its earlier lives, as JSON: letters/lives.py."""

MEND: Final = "seqgate.dead.mend"
"""The property of a mended letter with its mend, as JSON: the original's position in the dead
letter topic, the id of the request, who requested it, and when in ms since 1970."""

LETTER_BYTES_MAX: Final = 127 * 1024
"""The largest metadata of a letter, origin included, in bytes: 1 KiB below the ledger's limit."""

PROPERTIES_MAX: Final = 128
"""How many properties an entry may have (entry.proto)."""

INTERNAL: Final = "seqgate."
"""The prefix of cursor properties that are Seqgate's, not the application's."""


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
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """A subscription's cursor, as the cursor service stores it.

    Attributes:
        mark_delete: every entry up to here is acknowledged.
        acknowledged_entries: the number of acknowledged entries beyond it.
        owner: the holder of the lease; empty: none. An estimate by this machine's clock: the
            store's decides when leases expire.
    """

    name: str
    mark_delete: Position | None
    properties: Mapping[str, str]
    acknowledged_entries: int
    created_ms: int
    owner: str

    @property
    def own(self) -> dict[str, str]:
        """The application's properties."""
        return {
            name: value for name, value in self.properties.items() if not name.startswith(INTERNAL)
        }


class Part(NamedTuple):
    """A partly acknowledged batch: its number of messages, and the acknowledged ones (bits)."""

    position: Position
    messages: int
    acknowledged: int


class Cursors(Protocol):
    """The cursor service. A subscription is the cursor of its name.

    Every method raises CursorsUnavailable when the service does not answer, and CursorsRefused when
    it refuses for good. Those that name a cursor raise SubscriptionNotFound and CursorCorrupt;
    those that take an epoch raise Fenced when the lease has a newer one."""

    async def create(
        self,
        topic: TopicName,
        name: str,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Cursor, bool]:
        """Create the cursor unless it exists. Returns it, and whether this call created it.

        Raises:
            InvalidProperty: a property is too long, or there are too many.
        """
        ...

    async def get(self, topic: TopicName, name: str) -> Cursor: ...

    async def page(
        self, topic: TopicName, *, limit: int, token: str
    ) -> tuple[Sequence[Cursor], str]:
        """Cursors of a topic, by name, and the token of the next page; empty: this is the last."""
        ...

    async def delete(self, topic: TopicName, name: str) -> None: ...

    async def reset(
        self, topic: TopicName, name: str, mark_delete: Position | None, epoch: int
    ) -> None:
        """Move the cursor, and forget acknowledgements beyond it and failed deliveries."""
        ...

    def acknowledged(self, topic: TopicName, name: str) -> AsyncIterator[Run | Part]:
        """The acknowledgements beyond the mark-delete position, in order."""
        ...

    def attempts(self, topic: TopicName, name: str) -> AsyncIterator[FailedEntry]:
        """The failed deliveries of unacknowledged entries."""
        ...

    async def persist(
        self, topic: TopicName, name: str, what: Persist, epoch: int
    ) -> Position | None:
        """Make acknowledgements durable. Returns the mark-delete position. May be repeated."""
        ...

    async def record(
        self, topic: TopicName, name: str, failed: Sequence[FailedEntry], epoch: int
    ) -> None:
        """Make failed deliveries durable. May be repeated."""
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
        """Change the cursor's own properties; `epoch` None: whoever has the lease. May be repeated.

        Raises:
            InvalidProperty: a property is too long, or there are too many.
        """
        ...

    async def acquire(self, topic: TopicName, name: str, owner: str, duration_ms: int) -> Lease:
        """Take the lease, for `duration_ms`.

        Raises:
            NotOwner: another instance has it; the error names it.
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
        """Extend the lease to `duration_ms` from now. `next_epoch` also advances its epoch, so that
        calls under `epoch` that are still under way are fenced. May be repeated."""
        ...

    async def release(self, topic: TopicName, name: str, epoch: int) -> None:
        """Release the lease."""
        ...

    async def check(self) -> None:
        """Raise unless the service answers."""
        ...


class Ends(NamedTuple):
    """The first and the last entry of a log; None: it has none."""

    first: Position | None
    last: Position | None


class Fetched(NamedTuple):
    """Entries at the first of the requested positions.

    Attributes:
        answered: the number of these positions. At these the log has no other entries than the
            returned ones; about the rest nothing is known.
    """

    entries: Sequence[ledger_pb2.StoredEntry]
    answered: int


class Log(Protocol):
    """The ledger service. Entries are in their wire form.

    Every method raises LedgerUnavailable when the service does not answer, TopicNotFound, and
    EntryCorrupt when an entry is damaged."""

    async def ends(self, topic: TopicName) -> Ends:
        """The log's first and last entry now."""
        ...

    def follow(
        self, topic: TopicName, after: Position | None
    ) -> AsyncIterator[Sequence[ledger_pb2.StoredEntry]]:
        """The entries after a position, including those yet to be appended, until the service goes
        away."""
        ...

    async def scan(
        self, topic: TopicName, at: Position | None, after: Position | None, limit: int
    ) -> Sequence[ledger_pb2.StoredEntry]:
        """At most `limit` entries, without payloads, from `at` on, or after `after`. There may be
        more than returned; an empty answer means that there are none."""
        ...

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], *, metadata_only: bool = False
    ) -> Sequence[ledger_pb2.StoredEntry]:
        """The entries at these positions, which are in order; positions without an entry are left
        out."""
        ...

    async def fetch_some(
        self,
        topic: TopicName,
        positions: Sequence[Position],
        *,
        bytes_max: int,
        metadata_only: bool = False,
    ) -> Fetched:
        """The entries at the first of these positions, which are in order, in about `bytes_max`: at
        least one position is answered, whatever its size, and the last entry may exceed the
        limit."""
        ...

    async def ledgers(self, topic: TopicName) -> Sequence[Run]:
        """The entries that the log has of each ledger, in order."""
        ...

    async def last_before(self, topic: TopicName, ledger_id: int) -> Position | None:
        """The last entry of the ledgers before this one; None: none."""
        ...

    async def find(self, topic: TopicName, append_ms: int) -> Position | None:
        """The first entry appended at this time or later; None: none."""
        ...

    async def check(self) -> None:
        """Raise unless the service answers."""
        ...


class Letter(NamedTuple):
    """A dead letter.

    Attributes:
        number: counts the subscription's dead letters, so that a letter that is put again is
            recognized as a duplicate.
        entry: as it was stored.
        line: which of the subscription's producers publishes it, each with numbers of its own;
            empty: the first.
        generation: the number of dead letter topics that it has passed through, with this one.
        round: of a chunk, the number of the letter of its message's first one: a message that is
            dead-lettered again, after a reset or a replay, is a new letter, not a duplicate.
        why, failures: why it is dead-lettered (None: not known), and its latest failed deliveries.
        acknowledged: of a batch, the messages acknowledged before (bits).
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
    why: Why | None = None
    failures: tuple[FailedDelivery, ...] = ()
    acknowledged: int = 0


class Added(NamedTuple):
    """The outcome of publishing a mended letter.

    Attributes:
        position: where it is; None: not known. It may be there, published before, or it never will
            be, because one with a higher sequence id is.
        refused: why the ledger refuses the entry as it is; empty: it does not.
    """

    position: Position | None
    refused: str = ""


class DeadLetters(Protocol):
    """The dead letter topics."""

    async def put(self, letter: Letter) -> bool:
        """Publish a letter, once however often it is called. Letters of a subscription are put one
        after the other, in the order of their numbers, except refused ones. Returns whether it is
        there; if not, a letter with a higher number is, and this one never will be.

        Raises:
            LedgerUnavailable: it may be there or not; put it again.
            LetterRefused: this attempt did not put it there. It may be put again later.
        """
        ...


class AuditPage(NamedTuple):
    """An entry of an audit topic. `number` counts the pages of its producer."""

    number: int
    key: str
    properties: Mapping[str, str]
    payload: bytes


class AuditTopics(Protocol):
    """The audit topics."""

    async def put(self, topic: TopicName, producer: str, pages: Sequence[AuditPage]) -> None:
        """Publish pages in the order of their numbers, each once however often it is put. The next
        ones are put when these are there.

        Raises:
            LedgerUnavailable: each may be there or not; put all of them again.
        """
        ...


class DeadLetterTopics(DeadLetters, Protocol):
    """The dead letter topics, with mended letters."""

    async def add(self, topic: TopicName, entry: ledger_pb2.Entry) -> Added:
        """Publish a mended letter under its producer's name and sequence id, once however often it
        is called. Raises as `put`."""
        ...


class Filter(NamedTuple):
    """One expression of a chain."""

    name: str
    version: int
    expression: str


class Rules(NamedTuple):
    """Everything that decides about an entry besides the entry itself.

    Attributes:
        filters: the chain; the first that does not accept decides.
        topic: the value of the variable `topic`.
        properties: names and values, the variable `subscription`.
    """

    filters: tuple[Filter, ...]
    topic: str
    properties: tuple[tuple[str, str], ...] = ()


class Reads(NamedTuple):
    """The parts of an entry that rules read. Entries equal in these have the same verdict.

    Attributes:
        variables: the names of variables.
        properties: the properties looked up by name; None: any may matter.
        subscription: the same of the subscription's properties.
    """

    variables: frozenset[str] = frozenset()
    properties: tuple[str, ...] | None = ()
    subscription: tuple[str, ...] | None = ()


class Failure(NamedTuple):
    """Why there is no verdict: a filter.v1.FailureReason without its prefix, and a sentence."""

    reason: str
    message: str


class Decision(NamedTuple):
    """The decision of rules on an entry.

    Attributes:
        verdict: as in core.effects; a failure has none.
        filter: the place in the chain of the filter that decided, or failed; None: all accept.
        failure: why there is no verdict; None: there is one.
    """

    verdict: int
    filter: int | None = None
    failure: Failure | None = None


class Line(Protocol):
    """A stream of requests to the filter service, one at a time. Requests on one line do not delay
    those on others.

    Every method raises FiltersUnavailable when the service does not answer in time, and
    InvalidExpression or InvalidChain when it rejects the rules."""

    async def reads(self, rules: Rules) -> Reads:
        """Compile the rules. Returns the parts of an entry that they read."""
        ...

    async def judge(
        self, rules: Rules, metadata: Sequence[entry_pb2.EntryMetadata]
    ) -> Sequence[Decision]:
        """Judge entries with these metadata, any number of them. A verdict depends only on the
        parts that the rules read, and on whether an entry is a batch."""
        ...

    async def close(self) -> None:
        """Close the line; no request may follow."""
        ...


class Filters(Protocol):
    """The filter service."""

    def line(self) -> Line:
        """Create a line. It costs nothing until its first request."""
        ...


class Ports(NamedTuple):
    """The ports of subscriptions.

    Attributes:
        owner: the address at which clients reach this instance, which leases name as their owner.
        now_ms: returns the time in ms since 1970, without jumps.
    """

    log: Log
    cursors: Cursors
    dead_letters: DeadLetterTopics
    filters: Filters
    owner: str
    now_ms: Callable[[], int]
