"""`seqgate topic`: creates, lists, inspects, trims and deletes topics."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._arguments import Topic, first_entry, message_id
from seqgate.cli._command import Run, command, group
from seqgate.cli._confirm import Yes, confirm
from seqgate.cli._declared import argument, flag, option
from seqgate.cli._dedup import status_record, to_replay_shown
from seqgate.cli._failure import reason_of
from seqgate.cli._losses import counted, entries_before, of_topic
from seqgate.cli._message import Listing
from seqgate.cli._output import Columns, Fields, fields_of
from seqgate.cli._read import messages
from seqgate.cli._sent_again import newest_snapshot
from seqgate.cli._to_replay import entries_to_replay
from seqgate.cli._wire import position, record, wire_position
from seqgate.client import EARLIEST, LATEST, Message, MessageId, Start
from seqgate.client._log import following, start_of_last
from seqgate.errors import SeqgateError

TAIL_MAX: Final = 100_000
"""The most messages that `tail` shows: it holds them in memory."""

FARTHER: Final = 8
"""The factor by which `tail` reads more entries until it has enough messages."""

app = group("Create, list, inspect, trim and delete topics.")


def _expanded(prefix: str) -> str:
    prefix = prefix.removeprefix("persistent://")
    return f"public/default/{prefix}" if prefix and "/" not in prefix else prefix


@command(app, "ls")
async def ls(
    run: Run,
    prefix: str = argument(
        "PREFIX",
        "List only names with this prefix; without a slash, names in public/default.",
        default="",
        parse=_expanded,
    ),
) -> None:
    """List topics, sorted by name."""
    columns = {name.upper(): name for name in ("topic", "entries", "messages", "bytes", "last")}
    topics = run.services.pages(pb.ListTopicsRequest(prefix=prefix))
    await run.output.listing(columns, (record(each) async for each in topics))


@command(app, "create")
async def create(
    run: Run,
    topic: Topic,
) -> None:
    """Create a topic. An existing one is left unchanged."""
    answer = await run.services.call(pb.CreateTopicRequest(topic=topic))
    shown = {"topic": topic, "created": answer.created}
    created = "now" if answer.created else "before; left unchanged"
    run.output.result(shown, [("Topic", topic), ("Created", created)])


@command(app, "rm")
async def rm(
    run: Run,
    topic: Topic,
    *,
    force: bool = flag("Delete it even with connected producers, and disconnect them."),
    yes: Yes = False,
) -> None:
    """Delete a topic with its messages, its deduplication state, its cursors and subscriptions.

    Counts what is lost, and asks first; without a terminal, --yes is required.
    """
    await confirm(await of_topic(run, topic), yes=yes)
    await run.services.call(pb.DeleteTopicRequest(topic=topic, force=force))
    run.output.result({"topic": topic, "removed": True})


@command(app, "show")
async def show(run: Run, topic: Topic) -> None:
    """Show a topic and its deduplication state.

    If the dedup service does not answer, that part is omitted.
    """
    found = (await run.services.call(pb.GetTopicRequest(topic=topic))).topic
    shown = record(found)
    titles: Columns = {
        "Topic": "topic",
        "Created": "created_ms",
        "Ledger": "ledger_id",
        "First entry": "first",
        "Last entry": "last",
        "Entries": "entries",
        "Messages": "messages",
        "Bytes": "bytes",
        "Connected producers": "connected_producers",
    }
    try:
        status = await run.services.call(dedup_pb2.GetTopicStatusRequest(topic=topic))
    except SeqgateError as error:
        to_replay = found.entries_to_replay or None  # 0: as far as the ledger knows
        shown |= {"dedup": None, "dedup_error": reason_of(error), "entries_to_replay": to_replay}
        known: Fields = [
            ("Entries to be replayed", to_replay or "not known"),
            ("Deduplication", f"not known: {error}"),
        ]
    else:
        summary = status_record(topic, status)
        to_replay = await entries_to_replay(run, found, status)
        shown |= {"dedup": summary, "dedup_error": None, "entries_to_replay": to_replay}
        known = [
            ("Entries to be replayed", to_replay_shown(shown)),
            ("Deduplication", summary["state"].lower()),
            ("Confirmed", summary["confirmed"]),
            ("Snapshot up to", newest_snapshot(status)),
            ("Producers", summary["producers"]),
            ("Duplicates", summary["counts"]["duplicate_claims"]),
        ]
    run.output.result(shown, [*fields_of(shown, titles), *known])


@command(app, "tail")
async def tail(
    run: Run,
    topic: Topic,
    *,
    count: int = option("N", "Number of messages to show.", "-n", default=10, min=0, max=TAIL_MAX),
    follow: bool = flag("Then wait for new messages.", "--follow", "-f"),
) -> None:
    """Show a topic's last messages.

    A table shows the start of each payload, JSON all of it.
    """
    listing = Listing(run.output, whole=False)
    go_on: Start = LATEST
    if count:
        last = await _last_messages(run, topic, count)
        for message in last:
            listing.add(message)
        go_on = last[-1].id if last else EARLIEST
    else:
        await run.services.call(pb.GetTopicRequest(topic=topic))
    if follow:
        async for message in messages(run, topic, go_on, inclusive=False, follow=True):
            listing.add(message)


@command(app, "trim")
async def trim(
    run: Run,
    topic: Topic,
    before: MessageId = argument(
        "BEFORE", "The id of the first message to keep.", parse=partial(message_id, "BEFORE")
    ),
    *,
    yes: Yes = False,
) -> None:
    """Permanently remove a topic's first messages.

    Only messages that every cursor of the topic has acknowledged are removed. If BEFORE is in a
    batch, the whole batch is kept; if it is a large message, all its chunks. Asks first if there
    are such messages; without a terminal, --yes is required.
    """
    first, _ = first_entry(before)
    if not yes and (count := await entries_before(run, topic, first)):
        entries = counted(count, "entry", "entries")
        await confirm(
            f"Of the {entries} of {topic} before {first}, those that every cursor has acknowledged "
            "are deleted for good.",
            yes=yes,
        )
    request = pb.TrimTopicRequest(topic=topic, before=wire_position(first))
    shown = {"topic": topic, **record(await run.services.call(request))}
    fields = [
        ("Topic", topic),
        ("Removed entries", shown["removed_entries"]),
        ("First entry", shown["first"]),
        *(("Held back by", cursor) for cursor in shown["held_back_by"]),
    ]
    run.output.result(shown, fields)


async def _last_messages(run: Run, topic: str, count: int) -> Sequence[Message]:
    """The last `count` messages. Usually the last `count` entries contain them; a large message
    takes many entries, and then the search goes farther back."""
    entries = count
    while True:
        found = (await run.services.call(pb.GetTopicRequest(topic=topic))).topic
        last = deque[Message](maxlen=count)
        async for message in messages(run, topic, await _start(run, found, entries)):
            last.append(message)
        if len(last) == count or entries >= found.entries:
            return last
        entries *= FARTHER


async def _start(run: Run, topic: pb.Topic, count: int) -> Start:
    if not topic.HasField("first"):
        return EARLIEST
    start = await start_of_last(
        count,
        first=position(topic.first),
        last=position(topic.last),
        entries=topic.entries,
        following=following(run.services, topic.name, count, topic.last),
    )
    return MessageId(*start)
