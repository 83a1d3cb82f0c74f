"""Finds entries in a topic's log.

Entries are numbered from 0 in each ledger, and only reading a ledger shows how many it has. But the
number of entries that follow a position never grows as the position moves on, so binary search
finds a position with enough followers: first among the ledgers, then inside one.

    ledger      3            4        6          start_of_last(6)
    entries     0 1 2 3 4    0 1      0 1 2        = 3:4
    followed    10 9 8 7 6   5 4      3 2 1        last_before(6) = 4:1
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._arguments import message_id
from seqgate.client._calls import Calls
from seqgate.client._codec import position_of
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import InvalidRequestError, NotFoundError
from seqgate.message_id import LATEST_ID, ChunkMessageId, MessageId
from seqgate.times import CLOCKS_MS, MS_NS, milliseconds
from seqgate.types import SEQUENCE_ID_MAX, Position

Following = Callable[[Position], Awaitable[Sequence[Position]]]
"""The first entries at or after a position and up to the last one: as many as requested, or all."""


def following(calls: Calls, topic: str, count: int, through: common_pb2.Position) -> Following:
    async def positions(place: Position) -> Sequence[Position]:
        request = pb.ReadRequest(
            topic=topic, max_entries=count, through=through, metadata_only=True
        )
        request.start.at.CopyFrom(to_wire(place))
        responses = await calls.responses(request)
        return [position_of(each.position) for read in responses for each in read.entries.entries]

    return positions


async def start_of_last(
    count: int, *, first: Position, last: Position, entries: int, following: Following
) -> Position:
    """The position at which the last `count` entries (at least 1) start; the first entry if the
    topic has fewer. `first`, `last` and `entries` are the topic's; `following` reads up to `count`
    entries."""
    if count >= entries:
        return first
    if last.entry_id + 1 >= count:
        return Position(last.ledger_id, last.entry_id + 1 - count)

    async def enough_after(position: Position) -> bool:
        return len(await following(position)) >= count

    ledger_id = await _last(
        first.ledger_id, last.ledger_id + 1, lambda each: enough_after(Position(each, 0))
    )
    started = await following(Position(ledger_id, 0))
    if not started or started[0].ledger_id != ledger_id:
        return first  # trimmed meanwhile
    low = started[0].entry_id
    entry_id = await _last(low, low + entries, lambda each: enough_after(Position(ledger_id, each)))
    return Position(ledger_id, entry_id)


def check_place(place: Place, last: Position | None, *, field: str) -> None:
    """Raise InvalidRequestError for a place beyond the end of a log: after an entry that it does
    not have yet, or a time to come. The end itself is a place: right after the last entry, which is
    `last`; None: the log never had one."""
    match place:
        case MessageId():
            end = Position(1, 0) if last is None else last._replace(entry_id=last.entry_id + 1)
            is_beyond = place.position > end and place.position != LATEST_ID.position
        case datetime():
            now_ms = time.time_ns() // MS_NS
            is_beyond = milliseconds(start_to_wire(place).time) > now_ms + CLOCKS_MS
        case _:
            is_beyond = False
    if is_beyond:
        where = "which is empty" if last is None else f"whose last entry is {last}"
        raise InvalidRequestError(
            f"{field} is beyond the end of the log, {where}: give latest for the end",
            reason="INVALID_START",
            details={"field": field, "last": "" if last is None else str(last)},
        )


async def check_within(calls: Calls, topic: str, place: Place, *, field: str) -> None:
    """Raise InvalidRequestError for a place beyond the end of a topic. A topic that the ledger
    service does not have may be of a log of the caller's own, whose end only the caller knows."""
    start_to_wire(place)  # raises if it is none
    if place in ("earliest", "latest"):
        return
    with suppress(NotFoundError):
        check_place(place, await last_entry(calls, topic), field=field)


async def before(calls: Calls, topic: str, place: Place) -> Position | None:
    """The last entry before a place; None: it has none. For a message in a batch, that is the entry
    before the batch; for a large message, the one before its first chunk."""
    start_to_wire(place)  # raises if it is none
    match place:
        case MessageId() if place.position == LATEST_ID.position:
            return await last_entry(calls, topic)
        case MessageId():
            place = message_id("start", place)
            first = place.first_chunk if isinstance(place, ChunkMessageId) else place
            return await _before_entry(calls, topic, first.position)
        case datetime():
            found = await position_at(calls, topic, place)
            if found is None:
                return await last_entry(calls, topic)
            return await _before_entry(calls, topic, found)
        case "latest":
            return await last_entry(calls, topic)
        case _:
            return None


async def position_at(calls: Calls, topic: str, at: datetime) -> Position | None:
    """The first entry stored at a time or later, by the ledger's clock; None: there is none."""
    append_time = start_to_wire(at).time
    answer = await calls.call(pb.FindPositionRequest(topic=topic, append_time=append_time))
    return position_of(answer.position) if answer.HasField("position") else None


async def _before_entry(calls: Calls, topic: str, entry: Position) -> Position | None:
    """The last entry before another one. Before the first entry of a ledger, that is the last one
    of an earlier ledger, which only the ledger service knows."""
    if entry.entry_id > 0:
        return Position(entry.ledger_id, entry.entry_id - 1)
    return await last_before(calls, topic, entry.ledger_id)


async def last_entry(calls: Calls, topic: str) -> Position | None:
    """A topic's last entry, even if trimmed; None: it never had one."""
    answer = await calls.call(pb.GetLastMessageIdRequest(topic=topic))
    return position_of(answer.last) if answer.HasField("last") else None


def to_wire(place: Position) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=place.ledger_id, entry_id=place.entry_id)


async def last_before(calls: Calls, topic: str, ledger_id: int) -> Position | None:
    """The last entry of all ledgers before this one; None: there is none."""
    found = await calls.call(pb.GetTopicRequest(topic=topic))
    if not ledger_id:
        return None
    through = common_pb2.Position(ledger_id=ledger_id - 1, entry_id=SEQUENCE_ID_MAX)
    positions = following(calls, topic, 1, through)

    async def followed(position: Position) -> bool:
        return bool(await positions(position))

    first = await positions(Position(0, 0))
    if not first:
        return None
    ledger = await _last(first[0].ledger_id, ledger_id, lambda each: followed(Position(each, 0)))
    place = (*await positions(Position(ledger, 0)), *first)[0]
    entry_id = await _last(
        place.entry_id,
        place.entry_id + found.topic.entries,
        lambda each: followed(Position(place.ledger_id, each)),
    )
    return Position(place.ledger_id, entry_id)


async def _last(low: int, high: int, holds: Callable[[int], Awaitable[bool]]) -> int:
    """The last number from `low` to below `high` for which `holds` is true. It is true of `low`,
    and once false it stays false."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return low
