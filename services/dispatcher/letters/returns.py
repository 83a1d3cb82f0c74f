"""Dead letters that come back to their subscription.

    letter ──redrive──▶ return ──delivered, acknowledged──▶ settled
                           └────── failed too often ──────▶ settled; another letter

A return maps the position of a message, which is acknowledged in the topic, to its letter in the
dead letter topic, or, in a replay, to itself. Returns, settled letters and the latest redrives are
properties of the subscription's cursor: each step is one change of them, fenced by the epoch of the
lease.
docs/decisions/dead-letters-come-back-by-their-old-positions.md explains the choices.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import Entry, FailedDelivery, FailedEntry, Persist
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.entries import entry_of, position_of
from seqgate.services.dispatcher.errors import LetterNotRedrivable, TooManyReturns
from seqgate.services.dispatcher.letters.listing import Listing, mend_of, origin_of
from seqgate.services.dispatcher.letters.lives import (
    NOTED_BYTES_MAX,
    failures_of,
    noted,
    with_life,
)
from seqgate.services.dispatcher.letters.marks import (
    PAGE_LETTERS,
    PAGES_MAX,
    Fate,
    Marks,
    mending_name,
)
from seqgate.services.dispatcher.letters.operations import Operation, Operations
from seqgate.services.dispatcher.letters.record import RedriveRecord, records_of
from seqgate.services.dispatcher.ports import (
    ACKNOWLEDGED,
    ATTEMPTS,
    FAILURES,
    INTERNAL,
    LIVES,
    MEND,
    ORIGIN,
    REASON,
    REDRIVES,
    STEPS,
    Cursor,
    EntryCorrupt,
    Fetched,
    Log,
    TopicNotFound,
)
from seqgate.types import Position, TopicName

log = structlog.get_logger()

_RETURN: Final = f"{INTERNAL}return."
_LATEST: Final = f"{INTERNAL}redrives"

RETURNS_MAX: Final = 500
"""The most letters of a subscription that are on their way back, some 200 bytes each."""

RETURN_BYTES_MAX: Final = 4_000
"""The longest property of a return, in bytes, beyond which failed deliveries are left out: with its
name it fits into a property."""

LATEST_MAX: Final = 32
"""How many redrives are remembered by their request ids."""

REDRIVES_MAX: Final = 20
"""How often a message is redriven."""


class Redrive(NamedTuple):
    """A redrive that was made: its number, its caller's id for it, and how many letters it has."""

    number: int
    request_id: str
    letters: int


class Return(NamedTuple):
    """A letter on its way back.

    Attributes:
        topic, letter: the dead letter topic, and the letter's position in it; of a replayed
            message, the topic and its position.
        redrive: the number of the redrive.
        messages: the number of messages of the entry.
        acknowledged: of a batch, the messages acknowledged since (bits).
        attempts, failures: how many deliveries of it failed since; the latest of them.
        last: of a chunk, the position of its large message's last one.
    """

    topic: TopicName
    letter: Position
    redrive: int
    messages: int
    acknowledged: int = 0
    attempts: int = 0
    failures: tuple[FailedDelivery, ...] = ()
    last: Position | None = None

    @property
    def left(self) -> int:
        """The messages that are not acknowledged (bits)."""
        return (1 << self.messages) - 1 & ~self.acknowledged

    def to_text(self) -> str:
        values = (str(self.topic), *self.letter, self.redrive, self.messages)
        text = json.dumps([*values, f"{self.acknowledged:x}", self.attempts, self.last])
        room = min(NOTED_BYTES_MAX, RETURN_BYTES_MAX - len(text.encode()))
        failures = noted(self.failures, room)
        return f"{text[:-1]}, {failures}]" if failures else text

    @classmethod
    def from_text(cls, text: str) -> "Return":
        topic, ledger_id, entry_id, redrive, messages, bits, attempts, last, *rest = json.loads(
            text
        )
        return cls(
            TopicName.parse(topic),
            Position(ledger_id, entry_id),
            redrive,
            messages,
            int(bits, 16),
            attempts,
            failures_of(*rest) if rest else (),
            Position(*last) if last else None,
        )


class Messages(NamedTuple):
    """The machine's view of returned messages, and those whose letters are damaged."""

    entries: Sequence[Entry]
    damaged: Sequence[Position]


class Returns:
    """The returns of one subscription."""

    def __init__(self, tenure: Tenure, entries: Log) -> None:
        self.open: dict[Position, Return] = {}
        """By the position of the message in the topic."""
        self.settled = asyncio.Event()
        """Set whenever returns are settled, or removed."""
        self._names = {"topic": str(tenure.topic), "subscription": tenure.name}
        self._topic = tenure.topic
        self._tenure = tenure
        self._log = entries
        self.marks = Marks()
        self._latest: list[Redrive] = []
        self._number = 0  # the number of the latest redrive
        self.operations = Operations()
        self.writing = asyncio.Lock()
        """Held while these properties are changed: each change begins with the latest values."""

    # ---- durable state

    async def load(self, cursor: Cursor, acknowledged: Acknowledged) -> None:
        """Replace the state by the cursor's durable one. A return whose message is not acknowledged
        any more, since the subscription was reset, is removed before anything is delivered: once
        the message that the log delivers is acknowledged, the return would deliver it again. So are
        the chunks before it: the rest of their message does not come back."""
        self.open = {}
        self.marks.load(cursor.properties)
        self.operations.load(cursor.properties)
        void: list[str] = []
        self._latest = [Redrive(*each) for each in json.loads(cursor.properties.get(_LATEST, "[]"))]
        numbers = [*(each.number for each in self._latest), *records_of(cursor.properties)]
        self._number = max(numbers, default=0)
        for name, value in cursor.properties.items():
            if name.startswith(_RETURN):
                position = _position(name.removeprefix(_RETURN))
                back = Return.from_text(value)
                if position in acknowledged and (back.last or position) in acknowledged:
                    self.open[position] = back
                else:
                    void.append(name)
        self.settled.set()
        if void:
            await self._tenure.set_properties({}, void)

    @property
    def partial(self) -> dict[Position, int]:
        """Of partly acknowledged batches, the messages left (bits)."""
        return {each: back.left for each, back in self.open.items() if back.acknowledged}

    @property
    def attempts(self) -> dict[Position, int]:
        return {position: each.attempts for position, each in self.open.items() if each.attempts}

    @property
    def failures(self) -> dict[Position, tuple[FailedDelivery, ...]]:
        """The latest failed deliveries since, the oldest first."""
        return {position: each.failures for position, each in self.open.items() if each.failures}

    def is_returning(self, topic: TopicName, letter: Position) -> bool:
        """Whether a letter is on its way back."""
        return any((each.topic, each.letter) == (topic, letter) for each in self.open.values())

    def is_replay(self, each: Return) -> bool:
        """Whether a return is no letter, but the message itself."""
        return each.topic == self._topic

    def is_redriven(self, topic: TopicName, letter: Position) -> bool:
        """Whether a letter is on its way back, or its message was settled after a redrive."""
        if self.marks.fate(topic, letter) is Fate.REDRIVEN:
            return True
        return self.is_returning(topic, letter)

    # ---- redrives

    @property
    def latest(self) -> Sequence[Redrive]:
        """The latest redrives of named letters, the oldest first."""
        return tuple(self._latest)

    @property
    def next_number(self) -> int:
        """The number of the next redrive."""
        return self._number + 1

    def repeated(self, request_id: str) -> Redrive | None:
        """The redrive that a request made before; None: it made none."""
        return next((each for each in self._latest if each.request_id == request_id), None)

    async def check(
        self, listing: Listing, letters: Sequence[Position], acknowledged: Acknowledged
    ) -> dict[Position, tuple[Return, Entry]]:
        """The returns of letters, with the number 0, and the machine's view of their messages, by
        the positions of the messages.

        Raises:
            LetterNotRedrivable: one of them cannot be redriven, or is no letter.
            TooManyReturns: too many are on their way.
            LedgerUnavailable, EntryCorrupt.
        """
        if len(self.open) + len(letters) > RETURNS_MAX:
            raise too_many_returns()
        found: dict[Position, tuple[Return, Entry]] = {}
        taken: set[Position] = set()
        for letter, chunks in (await self.named(listing, letters)).items():
            because = "" if chunks else self._why_not(listing, letter, None, acknowledged, found)
            if chunks and len(chunks) < chunks[0].metadata.num_chunks_from_msg:
                because = "some chunks of its large message are missing"
            elif len(chunks) > RETURNS_MAX:
                because = f"its large message has {len(chunks):,} chunks (limit {RETURNS_MAX})"
            for entry in () if because or position_of(chunks[0]) in taken else chunks:
                taken.add(position_of(entry))
                because = self._why_not(listing, position_of(entry), entry, acknowledged, found)
                if because:
                    break
                origin, last = (origin_of(each.metadata) for each in (entry, chunks[-1]))
                assert origin is not None
                assert last is not None
                found[origin] = self.back(listing.dead_letter_topic, entry, origin, last)
            if because:
                raise LetterNotRedrivable(
                    f"letter {letter} cannot be redriven: {because}",
                    letter=letter,
                    dead_letter_topic=listing.dead_letter_topic,
                )
        if len(self.open) + len(found) > RETURNS_MAX:
            raise too_many_returns()
        if not self.has_pages(back for back, _ in found.values()):
            raise too_many_settled()
        return found

    async def named(
        self, listing: Listing, letters: Sequence[Position]
    ) -> dict[Position, Sequence[StoredEntry]]:
        """The entries of letters: of a large one, all chunks; none of one that is missing. Raises
        LedgerUnavailable, EntryCorrupt."""
        entries = {position_of(each): each for each in await listing.find(letters)}
        return {
            each: await listing.whole(entries[each]) if each in entries else () for each in letters
        }

    def has_pages(self, more: Iterable[Return]) -> bool:
        """Whether there is room to mark more letters as settled."""
        backs = [each for each in (*self.open.values(), *more) if not self.is_replay(each)]
        letters = [(each.topic, each.letter) for each in backs]
        return not self.marks.are_full_with(letters, Fate.REDRIVEN)

    def back(
        self,
        topic: TopicName,
        entry: StoredEntry,
        position: Position,
        last: Position,
        number: int = 0,
    ) -> tuple[Return, Entry]:
        """The return of an entry of `topic` as the message at a position, and the machine's view of
        it. `last`: the position of the message's last chunk."""
        message = _message(entry, position)
        of_large = None if message.chunk is None else last
        back = Return(topic, position_of(entry), number, message.messages, last=of_large)
        if not self.is_replay(back):
            back = back._replace(acknowledged=_acknowledged(entry, message.messages))
        return back, message

    def _why_not(
        self,
        listing: Listing,
        letter: Position,
        entry: StoredEntry | None,
        acknowledged: Acknowledged,
        found: Mapping[Position, object],
    ) -> str:
        """Why a letter cannot be redriven; empty: it can."""
        if because := self.why_settled(listing, letter, entry, acknowledged):
            return because
        assert entry is not None
        origin = origin_of(entry.metadata)
        if is_lone_chunk(entry):
            return "it is a part of a large message whose other chunks are not there"
        if origin in self.open or origin in found:
            return "its message is on its way back"
        if redrives_of(entry) >= REDRIVES_MAX:
            return f"its message was redriven {REDRIVES_MAX} times"
        return ""

    def why_settled(
        self,
        listing: Listing,
        letter: Position,
        entry: StoredEntry | None,
        acknowledged: Acknowledged,
        *,
        is_mend: bool = False,
    ) -> str:
        """Why a letter can neither be redriven nor discarded, nor mended (`is_mend`); empty: it
        can."""
        if entry is None:
            return "the dead letter topic has no such letter of the subscription"
        topic = listing.dead_letter_topic
        if self.is_returning(topic, letter):
            return "it is on its way back"
        if because := self.why_over(topic, entry, is_mend=is_mend):
            return because
        origin = origin_of(entry.metadata)
        if origin is None or origin not in acknowledged:
            return (
                "its message is not acknowledged: it is being delivered, or was in an earlier "
                "topic of this name, which was deleted"
            )
        return ""

    def why_over(self, topic: TopicName, entry: StoredEntry, *, is_mend: bool = False) -> str:
        """Why a letter is settled, or its mend has to be completed first; empty: neither."""
        letter, mend = position_of(entry), mend_of(entry.metadata)
        if (fate := self.marks.fate(topic, letter)) is not None:
            return f"it was {fate.value.lower()} before"
        if mend is not None and self.marks.successor(topic, mend.original) != letter:
            return f"its mend was interrupted: mend letter {mend.original} again"
        if not is_mend and mending_name(topic, letter) in self.marks.mending:
            return "its mend was interrupted: mend it again"
        return ""

    async def begin(
        self,
        returns: Mapping[Position, Return],
        request_id: str,
        operation: Operation | None = None,
    ) -> Redrive:
        """Make a redrive durable, and the record of its operation; None: it is not recorded. Raises
        CursorsUnavailable, InvalidProperty: it may be durable or not: the subscription's durable
        state must be loaded again."""
        async with self.writing:
            return await self._begin(returns, request_id, operation)

    async def _begin(
        self, returns: Mapping[Position, Return], request_id: str, operation: Operation | None
    ) -> Redrive:
        number = self.next_number
        letters = len(returns) if operation is None else operation.size
        redrive = Redrive(number, request_id, letters)
        latest = [*self._latest, redrive][-LATEST_MAX:]
        numbered = {each: found._replace(redrive=number) for each, found in returns.items()}
        put = {_name(each): found.to_text() for each, found in numbered.items()}
        put[_LATEST] = json.dumps(latest)
        made, remove = None, list[str]()
        if operation is not None:
            made = self.operations.numbered(operation)
            recorded, remove = self.operations.change(made)
            put |= recorded
        await self._tenure.set_properties(put, remove)
        if made is not None:
            self.operations.record(made)
        self._latest, self._number = latest, number
        self.open.update(numbered)
        log.info("dead letters redriven", **self._names, redrive=number, letters=letters)
        return redrive

    async def bring(
        self, returns: Mapping[Position, Return], record: RedriveRecord, remove: Sequence[str] = ()
    ) -> None:
        """Make returns of a redrive durable, in one change with its record; also remove properties.
        Raises as `begin`."""
        async with self.writing:
            put = {_name(each): found.to_text() for each, found in returns.items()}
            put[record.name] = record.to_text()
            await self._tenure.set_properties(put, remove)
            self._number = max(self._number, record.number)
            self.open.update(returns)

    # ---- settlements

    async def persist(self, what: Persist, held: Callable[[Position], str | None]) -> None:
        """Make acknowledgements of returned messages durable, before those of the cursor. `held`
        returns the property that holds a message's key behind it; None: there is none. May be
        repeated."""
        if self.open:
            async with self.writing:
                await self._persist(what, held)

    async def _persist(self, what: Persist, held: Callable[[Position], str | None]) -> None:
        put: dict[str, str] = {}
        settled: list[tuple[TopicName, Position]] = []
        remove: list[str] = []
        left = dict(self.open)
        for position in [each for each in self.open if _is_in(each, what)]:
            each = left.pop(position)
            if not self.is_replay(each):
                settled.append((each.topic, each.letter))
            remove.append(_name(position))
            if (key := held(position)) is not None:
                remove.append(key)
        for position, _, bits in what.parts:
            if position in left:
                each = left[position]
                left[position] = each._replace(acknowledged=each.acknowledged | bits)
                put[_name(position)] = left[position].to_text()
        if not (remove or put):
            return
        pages = self.marks.with_letters(settled)
        await self._tenure.set_properties(put | pages.texts, remove)
        self.open = left
        self.marks.apply(pages)
        self.settled.set()

    async def record(self, failed: Iterable[FailedEntry]) -> None:
        """Make failed deliveries durable. May be repeated."""
        if self.open:
            async with self.writing:
                await self._record(failed)

    async def _record(self, failed: Iterable[FailedEntry]) -> None:
        changed = {
            position: self.open[position]._replace(attempts=attempts, failures=failures)
            for position, attempts, failures in failed
            if position in self.open
        }
        if changed:
            put = {_name(position): each.to_text() for position, each in changed.items()}
            await self._tenure.set_properties(put, ())
            self.open |= changed

    # ---- contents

    async def entries(self, positions: Sequence[Position]) -> list[StoredEntry]:
        """Returned messages as they are delivered; those whose letter is gone are left out."""
        found: list[StoredEntry] = []
        for position in positions:
            each = self.open.get(position)
            if each is not None:
                letters = await self._letters(each)
                if not self.is_replay(each):
                    letters = [delivered(letter, position) for letter in letters]
                found += letters
        return found

    async def messages(self, positions: Iterable[Position]) -> Messages:
        """The machine's view of these messages, if they are returned. One whose letter is gone has
        another key than its own: when it is delivered, it turns out to be gone. One whose letter is
        damaged stays where it is, and blocks nothing but its key."""
        found, damaged = list[Entry](), list[Position]()
        for position in positions:
            each = self.open.get(position)
            if each is None:
                continue
            try:
                letters = await self._letters(each, metadata_only=True)
            except EntryCorrupt as error:
                log.critical("damaged dead letter", **self._names, **error.details)
                damaged.append(position)
                continue
            messages = [_message(letter, position) for letter in letters]
            found += messages or [Entry(position, b"", each.messages)]
        return Messages(found, damaged)

    async def _letters(self, each: Return, *, metadata_only: bool = False) -> Sequence[StoredEntry]:
        try:
            return await self._log.fetch(each.topic, [each.letter], metadata_only=metadata_only)
        except TopicNotFound:
            return ()

    async def fetch(self, topic: TopicName, positions: Sequence[Position]) -> Sequence[StoredEntry]:
        """As Log.fetch, for the subscription's topic and one position."""
        (position,) = positions
        if position in self.open:
            return await self.entries(positions)
        return await self._log.fetch(topic, positions)

    async def fetch_some(
        self, topic: TopicName, positions: Sequence[Position], *, bytes_max: int
    ) -> Fetched:
        """As Log.fetch_some, for the subscription's topic."""
        if positions[0] in self.open:
            entries = await self.entries(positions[:1])
            for each in entries:  # for its next letter, not for consumers
                each.metadata.properties.pop(LIVES, None)
            return Fetched(entries, 1)
        end = next((n for n, each in enumerate(positions) if each in self.open), len(positions))
        return await self._log.fetch_some(topic, positions[:end], bytes_max=bytes_max)


def _message(letter: StoredEntry, position: Position) -> Entry:
    """The machine's view of a letter's message."""
    return entry_of(letter)._replace(position=position, deliver_at_ms=0)


def delivered(letter: StoredEntry, position: Position) -> StoredEntry:
    """A letter as it is delivered again: at the position of its message, whose producer and
    sequence id it has, and with the number of redrives."""
    entry = StoredEntry()
    entry.CopyFrom(letter)
    entry.position.ledger_id, entry.position.entry_id = position
    metadata = entry.metadata
    properties = metadata.properties
    metadata.producer_name = properties.get(f"{ORIGIN}producer", metadata.producer_name)
    sequence_id = properties.get(f"{ORIGIN}sequence_id", "")
    if sequence_id.isascii() and sequence_id.isdecimal() and len(sequence_id) < 20:
        metadata.sequence_id = int(sequence_id)
        steps = _steps(properties.get(STEPS, ""), metadata.num_messages_in_batch)
        metadata.sequence_id_steps.extend(steps)
        if metadata.HasField("highest_sequence_id"):
            span = sum(steps) if steps else max(1, metadata.num_messages_in_batch) - 1
            metadata.highest_sequence_id = metadata.sequence_id + span
    redrives, lives = str(redrives_of(letter) + 1), with_life(letter)
    for name in [each for each in properties if each.startswith(ORIGIN)]:
        del properties[name]
    for name in (ATTEMPTS, REASON, FAILURES, ACKNOWLEDGED, MEND):
        properties.pop(name, None)
    properties[REDRIVES], properties[LIVES] = redrives, lives
    return entry


def _steps(text: str, messages: int) -> list[int]:
    """The distances of a batch's sequence ids; empty: all are 1."""
    found = text.split(",") if text else []
    if len(found) != messages - 1 or not all(each.isdecimal() and len(each) < 10 for each in found):
        return []
    return [int(each) for each in found]


def _acknowledged(entry: StoredEntry, messages: int) -> int:
    """Of a letter's batch, the messages acknowledged before it was dead-lettered (bits)."""
    try:
        bits = int(entry.metadata.properties.get(ACKNOWLEDGED, "0")[: messages // 4 + 1], 16)
    except ValueError:
        return 0
    whole = (1 << messages) - 1
    return 0 if bits & whole == whole else bits & whole


def is_lone_chunk(entry: StoredEntry) -> bool:
    """Whether an entry is a chunk that was dead-lettered without the others of its message."""
    return f"{ORIGIN}chunk" in entry.metadata.properties


def redrives_of(entry: StoredEntry) -> int:
    """How often a letter's message was redriven."""
    said = entry.metadata.properties.get(REDRIVES, "0")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 10 else 0


def too_many_returns() -> TooManyReturns:
    return TooManyReturns(
        f"too many letters on their way back (limit {RETURNS_MAX})",
        retry_after_s=1.0,
        returns_max=RETURNS_MAX,
    )


def too_many_settled() -> TooManyReturns:
    return TooManyReturns(
        f"too many settled letters (limit {PAGES_MAX} pages of {PAGE_LETTERS:,})",
        retry_after_s=60.0,
        pages_max=PAGES_MAX,
    )


def _is_in(position: Position, what: Persist) -> bool:
    ledger_id, entry_id = position
    return any(
        run.first.ledger_id == ledger_id and run.first.entry_id <= entry_id <= run.last_entry_id
        for run in what.runs
    )


def _name(position: Position) -> str:
    return f"{_RETURN}{position.ledger_id}:{position.entry_id}"


def _position(text: str) -> Position:
    ledger_id, _, entry_id = text.partition(":")
    return Position(int(ledger_id), int(entry_id))
