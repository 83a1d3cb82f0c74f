"""Reads a subscription's dead letters from its dead letter topic.

A letter is an entry whose properties name the subscription and the entry's position in its topic.
The dead letter topic may have entries of others, too: they are passed over.
"""

import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.letters.chunks import whole
from seqgate.services.dispatcher.letters.forged import FORGED, number_of, text_of
from seqgate.services.dispatcher.ports import MEND, ORIGIN, PRODUCER, Log, TopicNotFound
from seqgate.types import Position, TopicName

SCAN_ENTRIES: Final = 1_000
"""How many entries are read at a time."""

SCANNED_MAX: Final = 20_000
"""The most entries read for a page: letters may be rare in their topic."""


class Letters(NamedTuple):
    """A page of letters; `last` is the last entry that was read, None: the topic has no more."""

    letters: Sequence[StoredEntry]
    last: Position | None


class Listing:
    """The letters of one subscription in one dead letter topic."""

    def __init__(self, log: Log, dead_letter_topic: TopicName, topic: TopicName, name: str) -> None:
        self.dead_letter_topic = dead_letter_topic
        self._log = log
        self._origin = (str(topic), name)

    def has(self, entry: StoredEntry) -> bool:
        """Whether an entry of the dead letter topic is a letter of the subscription. Only
        dispatchers may use the producer names of letters, where access is restricted."""
        if not entry.metadata.producer_name.startswith(PRODUCER):
            return False
        properties = entry.metadata.properties
        origin = (properties.get(f"{ORIGIN}topic"), properties.get(f"{ORIGIN}subscription"))
        return origin == self._origin and origin_of(entry.metadata) is not None

    async def page(
        self,
        after: Position | None,
        limit: int,
        is_wanted: Callable[[StoredEntry], bool] = lambda _: True,
    ) -> Letters:
        """Up to `limit` wanted letters after a position, without payloads. Raises
        LedgerUnavailable, EntryCorrupt."""
        found: list[StoredEntry] = []
        scanned = 0
        while scanned < SCANNED_MAX:
            try:
                entries = await self._log.scan(self.dead_letter_topic, None, after, SCAN_ENTRIES)
            except TopicNotFound:
                entries = ()
            if not entries:
                return Letters(found, None)
            for entry in entries:
                after = position_of(entry)
                if self.has(entry) and is_wanted(entry):
                    found.append(entry)
                    if len(found) == limit:
                        return Letters(found, after)
            scanned += len(entries)
        return Letters(found, after)

    async def of(self, origin: Position, since_ms: int) -> Letters:
        """The letters of a message, of those appended at this time or later. Raises as `page`."""
        found: list[StoredEntry] = []
        scanned = 0
        after = None
        try:
            at = await self._log.find(self.dead_letter_topic, since_ms)
            while at is not None and scanned < SCANNED_MAX:
                start = at if after is None else None
                entries = await self._log.scan(self.dead_letter_topic, start, after, SCAN_ENTRIES)
                if not entries:
                    return Letters(found, None)
                after = position_of(entries[-1])
                scanned += len(entries)
                found += [
                    each
                    for each in entries
                    if self.has(each) and origin_of(each.metadata) == origin
                ]
        except TopicNotFound:
            pass
        return Letters(found, after)

    async def find(self, positions: Sequence[Position]) -> Sequence[StoredEntry]:
        """The letters at these positions, without payloads. Raises as `page`."""
        try:
            entries = await self._log.fetch(
                self.dead_letter_topic, sorted(positions), metadata_only=True
            )
        except TopicNotFound:
            return ()
        return [each for each in entries if self.has(each)]

    async def whole(self, letter: StoredEntry) -> Sequence[StoredEntry]:
        """The chunks of a large letter, given any of them, in order, without payloads; some may be
        missing. Of another letter, itself. Raises as `page`."""
        return await whole(self._log, self.dead_letter_topic, letter, self.has)

    async def first_of(self, letter: StoredEntry) -> Position | None:
        """The position at which a letter's message begins; None: not known. Raises as `page`."""
        if letter.metadata.num_chunks_from_msg <= 1:
            return origin_of(letter.metadata)
        first = (await self.whole(letter))[0]
        return origin_of(first.metadata) if first.metadata.chunk_id == 0 else None

    async def get(self, position: Position) -> StoredEntry | None:
        """The letter at a position, with its payload; None: there is none. Raises as `page`."""
        try:
            entries = await self._log.fetch(self.dead_letter_topic, [position])
        except TopicNotFound:
            return None
        return next((each for each in entries if self.has(each)), None)


def origin_of(metadata: EntryMetadata) -> Position | None:
    """The position of a letter's message in its topic; None: the properties name none."""
    ledger_id, _, entry_id = metadata.properties.get(f"{ORIGIN}id", "").partition(":")
    if not (_is_number(ledger_id) and _is_number(entry_id)):
        return None
    return Position(int(ledger_id), int(entry_id))


class Mend(NamedTuple):
    """The mend that made a letter: the letter that was mended, and who requested it, when."""

    original: Position
    request_id: str
    caller: str
    at_ms: int


def mend_of(metadata: EntryMetadata) -> Mend | None:
    """The mend that made a letter; None: it is no mended letter."""
    try:
        original, request_id, caller, at_ms = json.loads(metadata.properties.get(MEND, "null"))
        ledger_id, entry_id = map(number_of, original.split(":"))
        place = Position(ledger_id, entry_id)
        return Mend(place, text_of(request_id), text_of(caller), int(at_ms))
    except FORGED:
        return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20
