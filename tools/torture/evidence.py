"""What the checkers go by: journals of applications, the log as it is read back, and how far the
subscriptions have come. Nothing of this is a service's word on what it has done."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from grpc import StatusCode, aio

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import MessageId
from seqgate.types import Position
from tools.torture import messages
from tools.torture.journal import Line, lines
from tools.torture.shown import At, asking

ORIGIN_ID: Final = "seqgate.origin.id"
"""The property of a dead letter that says which entry it is."""

ALONE: Final = 0
"""Which of its entry's messages one is that is in no batch."""


class Place(NamedTuple):
    """Where a message is: its entry, of a large message the last one, and which of its
    messages it is."""

    position: Position
    at: int

    def __str__(self) -> str:
        return f"{self.position.ledger_id}:{self.position.entry_id}:{self.at}"


def place_of(text: str) -> Place:
    """Where a message with this id is."""
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
    """A message of the log."""

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
        entries: what is there, chunks of attempts that came to nothing included.
        messages: in their order; those that were trimmed as a reader saw them.
        damaged: what could not be read, or is not what was sent.
    """

    topic: str
    entries: list[Entry] = field(default_factory=list)
    messages: list[Stored] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Progress(NamedTuple):
    """How far a subscription has come, by its cursor.

    Attributes:
        mark_delete: everything up to here is acknowledged; None: nothing is.
        ranges: what is acknowledged beyond: first and last entries.
        is_whole: whether the ranges are known.
    """

    mark_delete: Position | None = None
    ranges: Sequence[tuple[Position, Position]] = ()
    is_whole: bool = True

    def has(self, position: Position) -> bool:
        """Whether an entry is acknowledged."""
        if self.mark_delete is not None and position <= self.mark_delete:
            return True
        return any(first <= position <= last for first, last in self.ranges)


def read_journals(paths: Iterable[Path]) -> dict[str, list[Line]]:
    """All lines, by role."""
    return {path.stem: list(lines(path)) for path in paths}


# ---- asking services


async def read_log(ledger: At, topic: str) -> Log:
    """All of a topic; an empty log if there is none."""
    log = Log(topic)
    async with asking(ledger, LedgerServiceStub) as stub:
        request = ledger_pb2.ReadRequest(
            topic=topic, earliest=ledger_pb2.Earliest(), metadata_only=True
        )
        try:
            async for response in stub.Read(request):
                log.entries += (
                    _entry(each)
                    for each in response.entries.entries
                    if not each.metadata.HasField("marker_type")
                )
        except aio.AioRpcError as error:
            if error.code() is StatusCode.NOT_FOUND:
                return log
            raise
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
    """Which entries the letters of a dead letter topic are."""
    return [each.origin for each in await _entries(ledger, topic)]


async def _entries(ledger: At, topic: str) -> list[Entry]:
    found: list[Entry] = []
    async with asking(ledger, LedgerServiceStub) as stub:
        request = ledger_pb2.ReadRequest(
            topic=topic, earliest=ledger_pb2.Earliest(), metadata_only=True
        )
        try:
            async for response in stub.Read(request):
                found += map(_entry, response.entries.entries)
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
        wire.append_time,
        max(1, metadata.num_messages_in_batch),
        metadata.uuid,
        metadata.chunk_id,
        metadata.properties.get(ORIGIN_ID, ""),
    )


def position(wire: Any) -> Position:
    """A position as a value."""
    return Position(wire.ledger_id, wire.entry_id)


async def last_position(ledger: Any, topic: str) -> Position | None:
    """Where a topic ends; None: it is empty."""
    answer = await ledger.LastMessageId(ledger_pb2.LastMessageIdRequest(topic=topic))
    return position(answer.last) if answer.HasField("last") else None


async def progress(cursor: At, topic: str, subscription: str) -> Progress:
    """How far a subscription has come, by the cursor service."""
    mark_delete: Position | None = None
    ranges: list[tuple[Position, Position]] = []
    async with asking(cursor, CursorServiceStub) as stub:
        request = cursor_pb2.ReadAcknowledgedRequest(topic=topic, name=subscription)
        while True:
            page = await stub.ReadAcknowledged(request)
            if page.HasField("mark_delete"):
                mark_delete = position(page.mark_delete)
            ranges += (_range(each) for each in page.ranges)
            if not page.HasField("next_after"):
                return Progress(mark_delete, ranges)
            request.after.CopyFrom(page.next_after)


def _range(wire: cursor_pb2.PositionRange) -> tuple[Position, Position]:
    first = position(wire.first)
    return first, Position(first.ledger_id, wire.last_entry_id)


async def progress_by_dispatcher(dispatcher: At, topic: str, subscription: str) -> Progress:
    """The same, as far as the dispatcher service tells."""
    async with asking(dispatcher, DispatcherServiceStub) as stub:
        request = dispatcher_pb2.GetSubscriptionRequest(topic=topic, subscription=subscription)
        found = (await stub.GetSubscription(request)).subscription
    mark_delete = position(found.mark_delete) if found.HasField("mark_delete") else None
    return Progress(mark_delete, (), is_whole=not found.acknowledged_entries)


def with_trimmed(log: Log, read: Sequence[Line]) -> None:
    """Put in front of a log what a reader read of it before it was trimmed."""
    first = log.messages[0].place if log.messages else None
    gone: dict[Place, Stored] = {}
    for line in read:
        if line["e"] == "read" and (first is None or place_of(line["id"]) < first):
            place = place_of(line["id"])
            gone[place] = Stored(place, line["p"], line["s"], line["u"], line["key"])
    log.messages[:0] = [gone[place] for place in sorted(gone)]


Journals = Mapping[str, Sequence[Line]]
