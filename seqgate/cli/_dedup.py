"""`seqgate dedup`: what deduplication knows, and why it decides as it does."""

from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._command import Run, Topic, command, group, topic_name
from seqgate.cli._failure import DONE
from seqgate.cli._output import Columns, time_shown
from seqgate.cli._output import shown as text_shown
from seqgate.cli._place import first_entry
from seqgate.cli._policy import app as policy
from seqgate.cli._policy import level_shown, policy_record
from seqgate.cli._sent_again import Standing, sent_again, snapshot_shown
from seqgate.cli._service import dedup_service, ledger_service, pages
from seqgate.cli._trace import trace_of
from seqgate.cli._wire import enum_name, position, record
from seqgate.client import ChunkMessageId, MessageId
from seqgate.errors import SeqgateError
from seqgate.types import SEQUENCE_ID_MAX, TopicName

app = group("Inspect and repair deduplication state.")
app.add_typer(policy, name="policy")


@command(app, "status")
def status(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """Show whether a topic deduplicates, and how far its state covers the log."""
    return _status(run, topic_name(topic))


@command(app, "producers")
def producers(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """List the producers that a topic tracks, and the last sequence id of each.

    JSON output is unordered, and may list a producer twice if it publishes meanwhile.
    """
    return _producers(run, topic_name(topic))


@command(app, "explain")
def explain(
    run: Run,
    topic: Topic,
    producer: Annotated[
        str, typer.Argument(metavar="PRODUCER", help="The producer's name.", show_default=False)
    ],
    sequence_id: Annotated[
        int,
        typer.Argument(
            metavar="SEQUENCE_ID",
            min=0,
            max=SEQUENCE_ID_MAX,
            help="The message's sequence id.",
            show_default=False,
        ),
    ],
) -> Coroutine[Any, Any, int]:
    """Explain the verdict that a message would get now, and what would happen to it. Read-only.

    If the ledger answers, also show whether and where the log holds the message, and its trace.
    """
    return _explain(run, topic_name(topic), producer, sequence_id)


@command(app, "snapshot")
def snapshot(run: Run, topic: Topic) -> Coroutine[Any, Any, int]:
    """Take a snapshot of the state now, into the topic's cursor seqgate.dedup.

    The service takes snapshots by itself; a fresh one shortens the next replay.
    """
    return _snapshot(run, topic_name(topic))


def status_record(name: TopicName, found: pb.GetTopicStatusResponse) -> dict[str, Any]:
    """A topic's status, for a program."""
    return {"topic": str(name), **record(found), "policy": policy_record(found.policy)}


async def _status(run: Run, name: TopicName) -> int:
    async with dedup_service(run.settings) as service:
        request = pb.GetTopicStatusRequest(topic=str(name))
        shown = status_record(name, await service.call("GetTopicStatus", request))
    counts, policy = shown["counts"], shown["policy"]
    run.output.result(
        shown,
        [
            ("Topic", shown["topic"]),
            ("State", shown["state"].lower()),
            ("Deduplicates", _value(policy["enabled"])),
            ("Epoch of the writer", shown["epoch"]),
            ("Confirmed up to", shown["confirmed"]),
            ("Entries to be replayed", shown["entries_remaining"]),
            ("Snapshot up to", shown["snapshot"]),
            ("Snapshot taken", time_shown(shown["snapshot_taken_ms"])),
            ("Entries since the snapshot", shown["entries_since_snapshot"]),
            ("Last snapshot", shown["snapshot_error"] or "did not fail"),
            ("Snapshot after entries", _value(policy["snapshot_entries"])),
            ("Snapshot after seconds", _value(policy["snapshot_interval_s"])),
            ("Producers", shown["producers"]),
            ("Entries confirmed", counts["confirmed_entries"]),
            ("Claims judged new", counts["new_claims"]),
            ("Claims judged duplicate", counts["duplicate_claims"]),
            ("Claims judged partial", counts["partial_claims"]),
            ("Claims that had to wait", counts["waiting_claims"]),
            ("Chunks out of their place", counts["misplaced_chunk_claims"]),
            ("Large messages left unfinished", counts["aborted_attempts"]),
            ("Producers forgotten, inactive", counts["purged_producers"]),
            ("Producers forgotten, topic full", counts["evicted_producers"]),
            ("Policy file", shown["policy_file_error"] or "up to date"),
        ],
    )
    return DONE


async def _snapshot(run: Run, name: TopicName) -> int:
    async with dedup_service(run.settings) as service:
        taken = record(await service.call("TakeSnapshot", pb.TakeSnapshotRequest(topic=str(name))))
    shown = {"topic": str(name), "snapshot": taken["position"], "producers": taken["producers"]}
    fields = [("Topic", shown["topic"])]
    if shown["snapshot"] is None:
        fields.append(("Snapshot", "there is nothing to keep"))
    else:
        fields += [("Snapshot up to", shown["snapshot"]), ("Producers", shown["producers"])]
    run.output.result(shown, fields)
    return DONE


async def _producers(run: Run, name: TopicName) -> int:
    found: dict[str, dict[str, Any]] = {}
    request = pb.ListProducersRequest(topic=str(name))
    async with dedup_service(run.settings) as service:
        async for producer in pages(service, "ListProducers", request, "producers"):
            shown = record(producer) | {"unfinished": _unfinished(producer)}
            if run.output.json:
                run.output.record(shown)
            else:
                found[producer.name] = shown
    if not run.output.json:
        columns: Columns = {
            "PRODUCER": "producer",
            "PERSISTED": "persisted_sequence_id",
            "PUSHED": "pushed_sequence_id",
            "UNFINISHED": lambda each: _unfinished_shown(each["unfinished"]),
            "LAST ACTIVE": lambda each: time_shown(each["last_active_ms"]),
        }
        run.output.rows(columns, (each for _, each in sorted(found.items())))
    return DONE


async def _explain(run: Run, name: TopicName, producer: str, sequence_id: int) -> int:
    request = pb.ExplainRequest(topic=str(name), producer_name=producer, sequence_id=sequence_id)
    async with dedup_service(run.settings) as service:
        found: pb.ExplainResponse = await service.call("Explain", request)
    standing = await _standing(run, name, producer, sequence_id, found)
    fate, message_id = standing.fate, standing.message_id
    first = None if message_id is None else first_entry(MessageId.parse(message_id))
    trace_id = None if first is None else await trace_of(run, str(name), *first)
    known, status = record(found.producer), record(found.status)
    unfinished = _unfinished(found.producer)
    shown = {
        "topic": str(name),
        "producer": producer,
        "sequence_id": sequence_id,
        "verdict": enum_name(pb.Verdict, found.verdict),
        "explanation": found.explanation,
        "persisted_sequence_id": known["persisted_sequence_id"],
        "pushed_sequence_id": known["pushed_sequence_id"],
        "unfinished": unfinished,
        "state": status["state"],
        "fate": fate,
        "message_id": message_id,
        "trace_id": trace_id,
        "forgotten": standing.is_forgotten,
        "snapshot": status["snapshot"],
        "snapshot_covers_it": standing.covered,
        "sent_again": sent_again(standing),
    }
    fields = [
        ("Verdict", shown["verdict"].lower().replace("_", " ")),
        ("Why", found.explanation),
        ("Persisted", known["persisted_sequence_id"]),
        ("Pushed", known["pushed_sequence_id"]),
    ]
    if unfinished is not None:
        fields.append(("Unfinished", _unfinished_shown(unfinished)))
    if found.verdict == pb.VERDICT_DUPLICATE or fate is not None:
        fields.append(("The log", _fate_shown(fate, message_id)))
    if standing.position is not None:
        fields.append(("Snapshot", snapshot_shown(standing)))
        fields.append(("Trace", trace_id))
    fields.append(("If it is sent now", shown["sent_again"]))
    run.output.result(shown, fields)
    return DONE


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
    fate = enum_name(ledger_pb2.Fate, found.fate)
    if not found.HasField("position"):
        is_old = explained.verdict == pb.VERDICT_DUPLICATE
        return Standing(explained, fate if is_old else None, None, None)
    batch_index = found.batch_index if found.HasField("batch_index") else -1
    place = position(found.position)
    message_id = MessageId(*place, batch_index=batch_index)
    if found.HasField("first_chunk_position"):
        message_id = ChunkMessageId(MessageId(*position(found.first_chunk_position)), message_id)
    return Standing(explained, fate, str(message_id), place)


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


def _value(value: dict[str, Any]) -> str:
    """A value of a policy, and its level."""
    return f"{text_shown(value['value'])} (set by: {level_shown(value['source'])})"
