"""`seqgate topic`: which topics there are, and how they stand."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, Final

import typer

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run, Topic, command, group, topic_name
from seqgate.cli._dedup import status_record
from seqgate.cli._failure import DONE, reason_of
from seqgate.cli._message import Listing
from seqgate.cli._output import time_shown
from seqgate.cli._place import first_entry, message_id
from seqgate.cli._read import messages
from seqgate.cli._service import Service, dedup_service, ledger_service, pages, reaching
from seqgate.cli._tail import start_of_last
from seqgate.cli._wire import position, record
from seqgate.client import EARLIEST, LATEST, Message, MessageId, Start
from seqgate.client._channel import translated
from seqgate.errors import SeqgateError, UnavailableError
from seqgate.types import Position, TopicName

TAIL_MAX: Final = 100_000
"""How many messages `tail` shows at most: it holds them in memory."""

FARTHER: Final = 8
"""How many times more entries `tail` looks at, while it has not found enough messages."""

app = group("List, inspect and trim topics.")


@command(app, "ls")
async def ls(
    run: Run,
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="List only names with this prefix; without a slash, names in public/default.",
            show_default=False,
        ),
    ] = "",
) -> int:
    """List topics, in the order of their names."""
    columns = {name.upper(): name for name in ("topic", "entries", "messages", "bytes", "last")}
    request = pb.ListTopicsRequest(prefix=_expanded(prefix))
    async with ledger_service(run.settings) as service:
        topics = pages(service, "ListTopics", request, "topics")
        await run.output.listing(columns, (record(each) async for each in topics))
    return DONE


@command(app, "stat")
def stat(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """Show a topic and its deduplication state.

    If the dedup service does not answer, that part is omitted.
    """
    return _stat(run, topic_name(topic))


@command(app, "tail")
def tail(
    run: Run,
    topic: Topic,
    *,
    count: Annotated[
        int,
        typer.Option("-n", metavar="N", min=0, max=TAIL_MAX, help="Number of messages to show."),
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then wait for new messages.")
    ] = False,
) -> Coroutine[Any, Any, int]:
    """Show a topic's last messages.

    A table shows the start of each payload, JSON all of it.
    """
    return _tail(run, topic_name(topic), count, follow=follow)


@command(app, "trim")
def trim(
    run: Run,
    topic: Topic,
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE", help="The id of the first message to keep.", show_default=False
        ),
    ],
) -> Coroutine[Any, Any, int]:
    """Permanently remove a topic's first messages.

    Only messages that every cursor of the topic has acknowledged are removed. If BEFORE is in a
    batch, the whole batch is kept; if it is a large message, all its chunks.
    """
    return _trim(run, topic_name(topic), first_entry(message_id("BEFORE", before))[0])


async def _stat(run: Run, name: TopicName) -> int:
    async with ledger_service(run.settings) as ledger, dedup_service(run.settings) as dedup:
        found, status = await asyncio.gather(
            ledger.call("GetTopic", pb.GetTopicRequest(topic=str(name))),
            _status(dedup, name),
        )
    shown = record(found.topic)
    if isinstance(status, SeqgateError):
        shown |= {"dedup": None, "dedup_error": reason_of(status)}
    else:
        shown |= {"dedup": status_record(name, status), "dedup_error": None}
    fields = [
        ("Topic", shown["topic"]),
        ("Created", time_shown(shown["created_ms"])),
        ("Ledger", shown["ledger_id"]),
        ("First entry", shown["first"]),
        ("Last entry", shown["last"]),
        ("Entries", shown["entries"]),
        ("Messages", shown["messages"]),
        ("Bytes", shown["bytes"]),
        ("Connected producers", shown["connected_producers"]),
        ("Entries to be replayed", shown["entries_to_replay"]),
    ]
    if isinstance(status, SeqgateError):
        fields.append(("Deduplication", f"not known: {status}"))
    else:
        summary = shown["dedup"]
        fields += [
            ("Deduplication", summary["state"].lower()),
            ("Confirmed", summary["confirmed"]),
            ("Producers", summary["producers"]),
            ("Duplicates", summary["counts"]["duplicate_claims"]),
        ]
    run.output.result(shown, fields)
    return DONE


async def _trim(run: Run, name: TopicName, before: Position) -> int:
    request = pb.TrimTopicRequest(topic=str(name))
    request.before.ledger_id, request.before.entry_id = before
    async with ledger_service(run.settings) as service:
        trimmed = await service.call("TrimTopic", request)
    shown = {"topic": str(name), **record(trimmed)}
    run.output.result(
        shown,
        [
            ("Topic", shown["topic"]),
            ("Removed entries", shown["removed_entries"]),
            ("First entry", shown["first"]),
            *(("Held back by", cursor) for cursor in shown["held_back_by"]),
        ],
    )
    return DONE


async def _status(
    service: Service, name: TopicName
) -> dedup_pb2.GetTopicStatusResponse | SeqgateError:
    try:
        status: dedup_pb2.GetTopicStatusResponse = await service.call(
            "GetTopicStatus", dedup_pb2.GetTopicStatusRequest(topic=str(name))
        )
    except SeqgateError as error:
        return error
    return status


async def _tail(run: Run, name: TopicName, count: int, *, follow: bool) -> int:
    listing = Listing(run.output, whole=False)
    go_on: Start = LATEST
    if count:
        last = await _last_messages(run, name, count)
        for message in last:
            listing.add(message)
        go_on = last[-1].id if last else EARLIEST
    else:
        async with ledger_service(run.settings) as service:
            await service.call("GetTopic", pb.GetTopicRequest(topic=str(name)))
    if follow:
        async for message in messages(run, name, go_on, inclusive=False, follow=True):
            listing.add(message)
    return DONE


async def _last_messages(run: Run, name: TopicName, count: int) -> Sequence[Message]:
    """The last messages. So many entries hold them as a rule; where messages are large, and each is
    many entries, it is looked farther back."""
    entries = count
    async with ledger_service(run.settings) as service:
        while True:
            found = await service.call("GetTopic", pb.GetTopicRequest(topic=str(name)))
            last = deque[Message](maxlen=count)
            async for message in messages(
                run, name, await _start(run, service, found.topic, entries)
            ):
                last.append(message)
            if len(last) == count or entries >= found.topic.entries:
                return last
            entries *= FARTHER


async def _start(run: Run, service: Service, topic: pb.Topic, count: int) -> Start:
    """Where the last `count` entries start."""
    if not topic.HasField("first"):
        return EARLIEST
    last = position(topic.last)

    async def following(place: Position) -> list[Position]:
        request = pb.ReadRequest(
            topic=topic.name, max_entries=count, through=topic.last, metadata_only=True
        )
        request.at.ledger_id, request.at.entry_id = place
        with reaching("ledger", run.settings.ledger.value):
            return await translated(_positions(service, request, run.settings.timeout_s))

    start = await start_of_last(
        count,
        first=position(topic.first),
        last=last,
        entries=topic.entries,
        following=following,
    )
    return MessageId(*start)


async def _positions(service: Service, request: pb.ReadRequest, timeout_s: float) -> list[Position]:
    found = []
    async for response in service.stub.Read(request, timeout=timeout_s):
        if response.HasField("draining"):
            raise UnavailableError("the ledger service is shutting down", reason="DRAINING")
        found += [position(each.position) for each in response.entries.entries]
    return found


def _expanded(prefix: str) -> str:
    prefix = prefix.removeprefix("persistent://")
    return f"public/default/{prefix}" if prefix and "/" not in prefix else prefix
