"""The evidence for the checkers: applications' journals, the logs, and the progress of
subscriptions. None of it is a service's own claim about its work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import MessageId
from seqgate.times import milliseconds
from seqgate.types import Position
from tools.stack.journal import Line
from tools.torture import messages
from tools.torture.shown import At, asking

ORIGIN_ID: Final = "seqgate.origin.id"
"""A dead letter's property that names its original entry."""

ALONE: Final = 0
"""The index of a message that is not in a batch."""


class Place(NamedTuple):
    """A message's entry (for a large message, its last one), and its index in the entry."""

    position: Position
    at: int

    def __str__(self) -> str:
        return f"{self.position.ledger_id}:{self.position.entry_id}:{self.at}"


def place_of(text: str) -> Place:
    parsed = MessageId.parse(text)
    return Place(Position(parsed.ledger_id, parsed.entry_id), max(parsed.batch_index, ALONE))


class Entry(NamedTuple):
    """An entry of the log, without its payload."""

    position: Position
    producer: str
    sequence_id: int
    append_ms: int
    messages: int = 1
    uuid: str = ""
    chunk_id: int = 0
    origin: str = ""


class Stored(NamedTuple):
    place: Place
    producer: str
    sequence_id: int
    uid: str
    key: str
    wanted_in: str = messages.PLACES[0]
    is_delayed: bool = False


@dataclass
class Log:
    """A topic, read back.

    Attributes:
        entries: the stored entries, including chunks of unfinished attempts.
        messages: in order; trimmed ones as a reader saw them.
        damaged: messages that could not be read, or differ from what was sent.
    """

    topic: str
    entries: list[Entry] = field(default_factory=list)
    messages: list[Stored] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Progress(NamedTuple):
    """The progress of a subscription, by its cursor.

    Attributes:
        mark_delete: every entry up to here is acknowledged; None if none is.
        ranges: acknowledged entries after that: the first and last of each range.
        is_whole: the ranges are known.
    """

    mark_delete: Position | None = None
    ranges: Sequence[tuple[Position, Position]] = ()
    is_whole: bool = True

    def has(self, position: Position) -> bool:
        if self.mark_delete is not None and position <= self.mark_delete:
            return True
        return any(first <= position <= last for first, last in self.ranges)


# ---- queries


async def read_log(ledger: At, topic: str) -> Log:
    """Read a whole topic; an unknown topic has an empty log."""
    log = Log(topic, await _entries(ledger, topic))
    if not log.entries:
        return log
    client = ledger.shown.client(ledger.address)
    async with client, client.reader(topic, follow=False) as reader:
        async for message in reader:
            try:
                said = messages.read(message.payload)
            except ValueError as damage:
                log.damaged.append(f"{message.id}: {damage}")
                continue
            if said.key != message.key or said.place != message.properties.get("place"):
                log.damaged.append(f"{message.id}: {said.uid} has the key {message.key}")
            log.messages.append(
                Stored(
                    place_of(str(message.id)),
                    message.producer_name,
                    message.sequence_id,
                    said.uid,
                    said.key,
                    said.place,
                    said.is_delayed,
                )
            )
    return log


async def read_letters(ledger: At, topic: str) -> list[str]:
    """The origins of the letters in a dead letter topic."""
    return [each.origin for each in await _entries(ledger, topic)]


async def _entries(ledger: At, topic: str) -> list[Entry]:
    """A topic's entries without markers; none if the topic is unknown."""
    found: list[Entry] = []
    async with asking(ledger, LedgerServiceStub) as stub:
        request = ledger_pb2.ReadRequest(
            topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest()), metadata_only=True
        )
        try:
            async for response in stub.Read(request):
                found += (
                    _entry(each)
                    for each in response.entries.entries
                    if not each.metadata.HasField("marker_type")
                )
        except aio.AioRpcError as error:
            if error.code() is not StatusCode.NOT_FOUND:
                raise
    return found


def _entry(wire: ledger_pb2.StoredEntry) -> Entry:
    metadata = wire.metadata
    return Entry(
        position(wire.position),
        metadata.producer_name,
        metadata.sequence_id,
        milliseconds(wire.append_time),
        max(1, metadata.num_messages_in_batch),
        metadata.uuid,
        metadata.chunk_id,
        metadata.properties.get(ORIGIN_ID, ""),
    )


def position(wire: Any) -> Position:
    return Position(wire.ledger_id, wire.entry_id)


async def last_position(ledger: Any, topic: str) -> Position | None:
    """The last position of a topic; None if it is empty."""
    answer = await ledger.GetLastMessageId(ledger_pb2.GetLastMessageIdRequest(topic=topic))
    return position(answer.last) if answer.HasField("last") else None


async def progress(cursor: At, topic: str, subscription: str) -> Progress:
    """A subscription's progress, from the cursor service."""
    mark_delete: Position | None = None
    ranges: list[tuple[Position, Position]] = []
    async with asking(cursor, CursorServiceStub) as stub:
        request = cursor_pb2.ListAcknowledgedRequest(topic=topic, cursor=subscription)
        while True:
            page = await stub.ListAcknowledged(request)
            if page.HasField("mark_delete"):
                mark_delete = position(page.mark_delete)
            ranges += (_range(each) for each in page.ranges)
            if not page.next_page_token:
                return Progress(mark_delete, ranges)
            request.page_token = page.next_page_token


def _range(wire: cursor_pb2.PositionRange) -> tuple[Position, Position]:
    first = position(wire.first)
    return first, Position(first.ledger_id, wire.last_entry_id)


async def progress_by_dispatcher(dispatcher: At, topic: str, subscription: str) -> Progress:
    """A subscription's progress, as far as the dispatcher reports it."""
    async with asking(dispatcher, DispatcherServiceStub) as stub:
        request = dispatcher_pb2.GetSubscriptionRequest(topic=topic, subscription=subscription)
        found = (await stub.GetSubscription(request)).subscription
    mark_delete = position(found.mark_delete) if found.HasField("mark_delete") else None
    return Progress(mark_delete, (), is_whole=not found.acknowledged_entries)


def with_trimmed(log: Log, read: Sequence[Line]) -> None:
    """Prepend to a log the messages that a reader read before they were trimmed."""
    first = log.messages[0].place if log.messages else None
    gone: dict[Place, Stored] = {}
    for line in read:
        if line["e"] == "read" and (first is None or place_of(line["id"]) < first):
            place = place_of(line["id"])
            gone[place] = Stored(place, line["p"], line["s"], line["u"], line["key"])
    log.messages[:0] = [gone[place] for place in sorted(gone)]


Journals = Mapping[str, Sequence[Line]]
