"""`seqgate dedup`: what deduplication knows, and why it decides as it does."""

from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any

import typer

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._command import Run, command, group, topic_name
from seqgate.cli._failure import DONE
from seqgate.cli._output import shown, time_shown
from seqgate.cli._policy import app as policy
from seqgate.cli._policy import enum_name, level_shown, policy_record
from seqgate.cli._sent_again import Standing, sent_again, snapshot_shown
from seqgate.cli._service import Service, dedup_service, ledger_service
from seqgate.cli._trace import trace_of
from seqgate.client import ChunkMessageId, MessageId
from seqgate.errors import SeqgateError
from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName

app = group("What deduplication knows, and why it decides so.")
app.add_typer(policy, name="policy")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]


@command(app, "status")
def status(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """Show whether a topic deduplicates, and how far its state has come."""
    return _status(run, topic_name(topic))


@command(app, "producers")
def producers(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """List the producers that are remembered, and how far each has come.

    As JSON they come as the service lists them: in no order, and one that is active meanwhile may
    come twice.
    """
    return _producers(run, topic_name(topic))


@command(app, "explain")
def explain(
    run: Run,
    topic: Topic,
    producer: Annotated[
        str, typer.Argument(metavar="PRODUCER", help="Its name.", show_default=False)
    ],
    sequence_id: Annotated[
        int,
        typer.Argument(
            metavar="SEQUENCE_ID",
            min=0,
            max=SEQUENCE_ID_MAX,
            help="The message's id.",
            show_default=False,
        ),
    ],
) -> Coroutine[Any, Any, int]:
    """Tell how a message would be judged now, and why, and what would become of it. It changes
    nothing.

    The log is asked, if it answers, whether and where it holds the message, and its trace.
    """
    return _explain(run, topic_name(topic), producer, sequence_id)


@command(app, "snapshot")
def snapshot(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """Keep the state in the topic's cursor seqgate.dedup, now.

    The service does so on its own; a snapshot that was just taken makes a replay short.
    """
    return _snapshot(run, topic_name(topic))


def status_record(name: TopicName, found: pb.GetTopicStatusResponse) -> dict[str, Any]:
    """A topic's status, for a program."""
    counts = found.counts
    return {
        "topic": str(name),
        "state": _state(found.state),
        "epoch": found.epoch,
        "confirmed": _place(found.confirmed) if found.HasField("confirmed") else None,
        "entries_remaining": found.entries_remaining,
        "snapshot": _place(found.snapshot) if found.HasField("snapshot") else None,
        "snapshot_taken_ms": (
            found.snapshot_taken.ToMilliseconds() if found.HasField("snapshot_taken") else None
        ),
        "entries_since_snapshot": found.entries_since_snapshot,
        "snapshot_error": found.snapshot_error or None,
        "producers": found.producers,
        "counts": {
            "confirmed_entries": counts.confirmed_entries,
            "new_claims": counts.new_claims,
            "duplicate_claims": counts.duplicate_claims,
            "partial_claims": counts.partial_claims,
            "waiting_claims": counts.waiting_claims,
            "purged_producers": counts.purged_producers,
            "evicted_producers": counts.evicted_producers,
            "misplaced_chunk_claims": counts.misplaced_chunk_claims,
            "aborted_attempts": counts.aborted_attempts,
        },
        "policy": policy_record(found.policy),
        "policy_file_error": found.policy_file_error or None,
    }


async def _status(run: Run, name: TopicName) -> int:
    record = status_record(name, await _ask_status(run, name))
    if run.output.json:
        run.output.record(record)
        return DONE
    counts, enabled = record["counts"], record["policy"]["enabled"]
    run.output.fields(
        [
            ("Topic", record["topic"]),
            ("State", record["state"].lower()),
            ("Deduplicates", _value(enabled)),
            ("Epoch of the writer", record["epoch"]),
            ("Confirmed up to", record["confirmed"]),
            ("Entries to be replayed", record["entries_remaining"]),
            ("Snapshot up to", record["snapshot"]),
            ("Snapshot taken", time_shown(record["snapshot_taken_ms"])),
            ("Entries since the snapshot", record["entries_since_snapshot"]),
            ("Last snapshot", record["snapshot_error"] or "did not fail"),
            ("Snapshot after entries", _value(record["policy"]["snapshot_entries"])),
            ("Snapshot after seconds", _value(record["policy"]["snapshot_interval_s"])),
            ("Producers", record["producers"]),
            ("Entries confirmed", counts["confirmed_entries"]),
            ("Claims judged new", counts["new_claims"]),
            ("Claims judged duplicate", counts["duplicate_claims"]),
            ("Claims judged partial", counts["partial_claims"]),
            ("Claims that had to wait", counts["waiting_claims"]),
            ("Chunks out of their place", counts["misplaced_chunk_claims"]),
            ("Large messages left unfinished", counts["aborted_attempts"]),
            ("Producers forgotten, inactive", counts["purged_producers"]),
            ("Producers forgotten, topic full", counts["evicted_producers"]),
            ("Policy file", record["policy_file_error"] or "up to date"),
        ]
    )
    return DONE


async def _snapshot(run: Run, name: TopicName) -> int:
    async with dedup_service(run.settings) as service:
        taken = await service.call("TakeSnapshot", pb.TakeSnapshotRequest(topic=str(name)))
    record = {
        "topic": str(name),
        "snapshot": _place(taken.position) if taken.HasField("position") else None,
        "producers": taken.producers,
    }
    if run.output.json:
        run.output.record(record)
    elif record["snapshot"] is None:
        run.output.fields([("Topic", record["topic"]), ("Snapshot", "there is nothing to keep")])
    else:
        run.output.fields(
            [
                ("Topic", record["topic"]),
                ("Snapshot up to", record["snapshot"]),
                ("Producers", record["producers"]),
            ]
        )
    return DONE


async def _producers(run: Run, name: TopicName) -> int:
    found: dict[str, dict[str, Any]] = {}
    async with dedup_service(run.settings) as service:
        async for producer in _pages(service, name):
            record = _producer_record(producer)
            if run.output.json:
                run.output.record(record)
            else:
                found[producer.name] = record
    if not run.output.json:
        run.output.table(
            ("PRODUCER", "PERSISTED", "PUSHED", "UNFINISHED", "LAST ACTIVE"),
            [
                (
                    each["producer"],
                    each["persisted_sequence_id"],
                    each["pushed_sequence_id"],
                    _unfinished_shown(each["unfinished"]),
                    time_shown(each["last_active_ms"]),
                )
                for _, each in sorted(found.items())
            ],
        )
    return DONE


async def _explain(run: Run, name: TopicName, producer: str, sequence_id: int) -> int:
    request = pb.ExplainRequest(topic=str(name), producer_name=producer, sequence_id=sequence_id)
    async with dedup_service(run.settings) as service:
        found: pb.ExplainResponse = await service.call("Explain", request)
    standing = await _standing(run, name, producer, sequence_id, found)
    fate, message_id = standing.fate, standing.message_id
    first = None if message_id is None else _first_entry(MessageId.parse(message_id))
    trace_id = None if first is None else await trace_of(run, str(name), *first)
    status = found.status
    record = {
        "topic": str(name),
        "producer": producer,
        "sequence_id": sequence_id,
        "verdict": _verdict(found.verdict),
        "explanation": found.explanation,
        "persisted_sequence_id": _persisted(found.producer),
        "pushed_sequence_id": _pushed(found.producer),
        "unfinished": _unfinished(found.producer),
        "state": _state(status.state),
        "fate": fate,
        "message_id": message_id,
        "trace_id": trace_id,
        "forgotten": standing.is_forgotten,
        "snapshot": _place(status.snapshot) if status.HasField("snapshot") else None,
        "snapshot_covers_it": standing.covered,
        "sent_again": sent_again(standing),
    }
    if run.output.json:
        run.output.record(record)
        return DONE
    fields = [
        ("Verdict", _verdict(found.verdict).lower().replace("_", " ")),
        ("Why", found.explanation),
        ("Persisted", record["persisted_sequence_id"]),
        ("Pushed", record["pushed_sequence_id"]),
    ]
    if found.HasField("producer") and found.producer.HasField("unfinished"):
        fields.append(("Unfinished", _unfinished_shown(_unfinished(found.producer))))
    if found.verdict == pb.VERDICT_DUPLICATE or fate is not None:
        fields.append(("The log", _fate_shown(fate, message_id)))
    if standing.position is not None:
        fields.append(("Snapshot", snapshot_shown(standing)))
        fields.append(("Trace", trace_id))
    fields.append(("If it is sent now", record["sent_again"]))
    run.output.fields(fields)
    return DONE


async def _ask_status(run: Run, name: TopicName) -> pb.GetTopicStatusResponse:
    async with dedup_service(run.settings) as service:
        found: pb.GetTopicStatusResponse = await service.call(
            "GetTopicStatus", pb.GetTopicStatusRequest(topic=str(name))
        )
    return found


async def _pages(service: Service, name: TopicName) -> AsyncIterator[pb.Producer]:
    request = pb.ListProducersRequest(topic=str(name))
    while True:
        page = await service.call("ListProducers", request)
        for producer in page.producers:
            yield producer
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _standing(
    run: Run, name: TopicName, producer: str, sequence_id: int, explained: pb.ExplainResponse
) -> Standing:
    """What deduplication says, and the log; nothing of the log when it does not answer, or does not
    keep this topic."""
    request = ledger_pb2.FindMessageRequest(
        topic=str(name), producer_name=producer, sequence_id=sequence_id
    )
    try:
        async with ledger_service(run.settings) as service:
            found = (await service.call("FindMessage", request)).fate
    except SeqgateError:
        return Standing(explained, None, None, None)
    fate = enum_name(ledger_pb2.Fate, found.fate, "FATE_")
    if not found.HasField("position"):
        is_old = explained.verdict == pb.VERDICT_DUPLICATE
        return Standing(explained, fate if is_old else None, None, None)
    batch_index = found.batch_index if found.HasField("batch_index") else -1
    position, first = found.position, found.first_chunk_position
    message_id = MessageId(position.ledger_id, position.entry_id, batch_index=batch_index)
    if found.HasField("first_chunk_position"):
        message_id = ChunkMessageId(MessageId(first.ledger_id, first.entry_id), message_id)
    place = Position(position.ledger_id, position.entry_id)
    return Standing(explained, fate, str(message_id), place)


def _first_entry(message_id: MessageId) -> tuple[Position, int]:
    """The entry that a message begins in, and its place in its batch."""
    if isinstance(message_id, ChunkMessageId):
        return message_id.first_chunk.position, -1
    return message_id.position, message_id.batch_index


def _fate_shown(fate: str | None, message_id: str | None) -> str:
    match fate:
        case "STORED":
            return f"holds it at {message_id}"
        case "STALE":
            return "does not hold it: a higher id was stored first"
        case "TRIMMED":
            return "was trimmed, and no longer tells"
        case _:
            return "not known"


def _producer_record(producer: pb.Producer) -> dict[str, Any]:
    active = producer.HasField("last_active")
    return {
        "producer": producer.name,
        "persisted_sequence_id": _persisted(producer),
        "pushed_sequence_id": _pushed(producer),
        "last_active_ms": producer.last_active.ToMilliseconds() if active else None,
        "unfinished": _unfinished(producer),
    }


def _unfinished(producer: pb.Producer) -> dict[str, Any] | None:
    """The large message that is stored in part."""
    if not producer.HasField("unfinished"):
        return None
    chunk = producer.unfinished.last_chunk
    return {
        "sequence_id": producer.unfinished.sequence_id,
        "uuid": chunk.uuid,
        "chunks_stored": chunk.chunk_id + 1,
        "chunks": chunk.num_chunks,
        "bytes": chunk.total_bytes,
    }


def _unfinished_shown(unfinished: dict[str, Any] | None) -> str | None:
    if unfinished is None:
        return None
    return "{sequence_id}: {chunks_stored} of {chunks} chunks".format_map(unfinished)


def _persisted(producer: pb.Producer) -> int | None:
    known = producer.HasField("persisted_sequence_id")
    return producer.persisted_sequence_id if known else None


def _pushed(producer: pb.Producer) -> int | None:
    known = producer.HasField("pushed_sequence_id")
    return producer.pushed_sequence_id if known else None


def _place(position: entry_pb2.Position) -> str:
    return str(Position(position.ledger_id, position.entry_id))


def _value(policy: dict[str, Any]) -> str:
    """A value of a policy, and its level."""
    return f"{shown(policy['value'])} (set by: {level_shown(policy['source'])})"


def _state(number: int) -> str:
    return enum_name(pb.TopicState, number, "TOPIC_STATE_")


def _verdict(number: int) -> str:
    return enum_name(pb.Verdict, number, "VERDICT_")
