"""Counts what a command would delete for good, for the question that it asks first."""

from typing import Final

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._command import Run
from seqgate.cli._wire import position
from seqgate.client._frames import Sampler
from seqgate.errors import SeqgateError
from seqgate.types import Position

INTERNAL: Final = "seqgate."
"""How the names of Seqgate's own cursors begin."""


def counted(count: int, one: str, many: str) -> str:
    """A number of things, such as 1,200 messages."""
    return f"{count:,} {one if count == 1 else many}"


async def of_topic(run: Run, topic: str) -> str:
    """What deleting a topic loses. Raises NotFoundError."""
    found = (await run.services.call(ledger_pb2.GetTopicRequest(topic=topic))).topic
    listing = cursor_pb2.ListCursorsRequest(topic=topic)
    try:
        names = [each.name async for each in run.services.pages(listing)]
        own = [each for each in names if not each.startswith(INTERNAL)]
        cursors = counted(len(own), "cursor or subscription", "cursors and subscriptions")
    except SeqgateError:
        cursors = "cursors that are not known"
    messages = f"{counted(found.messages, 'message', 'messages')} ({found.bytes:,} bytes)"
    return f"Topic {topic}, with {messages} and {cursors}, is deleted for good."


async def of_progress(
    run: Run, what: str, of: cursor_pb2.Cursor | dispatcher_pb2.Subscription
) -> str:
    """What deleting a cursor or a subscription loses: its place."""
    try:
        topic = (await run.services.call(ledger_pb2.GetTopicRequest(topic=of.topic))).topic
        lag = await Sampler(run.services, of.topic).lag(topic, of)
        unread = counted(lag, "entry", "entries")
    except SeqgateError:  # its log may not be in the ledger service
        unread = "an unknown number of entries"
    place = position(of.mark_delete) if of.HasField("mark_delete") else "the beginning"
    return (
        f"{what} {of.name} of {of.topic}, acknowledged up to {place} with {unread} still to come, "
        "is deleted for good."
    )


async def entries_before(run: Run, topic: str, place: Position) -> int:
    """The number of entries before a position. Raises NotFoundError."""
    await run.services.call(ledger_pb2.GetTopicRequest(topic=topic))
    count = 0
    async for each in run.services.pages(ledger_pb2.ListLedgersRequest(topic=topic)):
        if each.ledger_id < place.ledger_id:
            count += each.last_entry_id - each.first_entry_id + 1
        elif each.ledger_id == place.ledger_id:
            last = min(each.last_entry_id, place.entry_id - 1)
            count += max(0, last + 1 - each.first_entry_id)
    return count
