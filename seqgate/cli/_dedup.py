"""`seqgate dedup`: shows deduplication state, and explains verdicts."""

from collections.abc import Mapping
from typing import Any

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._arguments import Topic, first_entry
from seqgate.cli._command import Run, command, group
from seqgate.cli._declared import argument
from seqgate.cli._known import check_known, has_state, known
from seqgate.cli._output import Columns, fields_of, words
from seqgate.cli._output import shown as text_shown
from seqgate.cli._policy import app as policy
from seqgate.cli._policy import policy_record
from seqgate.cli._sent_again import Standing, newest_snapshot, sent_again, snapshot_shown
from seqgate.cli._to_replay import entries_to_replay
from seqgate.cli._trace import trace_of
from seqgate.cli._wire import enum_name, position, record
from seqgate.client import ChunkMessageId, MessageId
from seqgate.errors import SeqgateError
from seqgate.types import SEQUENCE_ID_MAX

app = group("Inspect and repair deduplication state.")
app.add_typer(policy, name="policy")


@command(app, "status")
async def status(run: Run, topic: Topic) -> None:
    """Show whether a topic deduplicates, and how far its state covers the log.

    The number of entries to be replayed is known only if the ledger service answers.
    """
    in_log, no_log = None, ""
    try:
        in_log = (await run.services.call(ledger_pb2.GetTopicRequest(topic=topic))).topic
    except SeqgateError as error:
        no_log = f"not known: {error}"
    found = await run.services.call(pb.GetTopicStatusRequest(topic=topic))
    if not has_state(found):
        await check_known(run, topic)
    to_replay = None if in_log is None else await entries_to_replay(run, in_log, found)
    shown = status_record(topic, found) | {"entries_to_replay": to_replay}
    titles: Columns = {
        "Topic": "topic",
        "State": lambda each: each["state"].lower(),
        "Deduplicates": lambda each: _value(each["policy"]["enabled"]),
        "Epoch of the writer": "epoch",
        "Confirmed up to": "confirmed",
        "Entries to be replayed": lambda each: no_log or to_replay_shown(each),
        "Snapshot up to": lambda _: newest_snapshot(found),
        "Snapshot taken": "snapshot_taken_ms",
        "Entries since the snapshot": "entries_since_snapshot",
        "Last failed snapshot": lambda each: each["snapshot_error"] or "none at this instance",
        "Snapshot after entries": lambda each: _value(each["policy"]["snapshot_entries"]),
        "Snapshot after seconds": lambda each: _value(each["policy"]["snapshot_interval_s"]),
        "Producers": "producers",
        "Entries confirmed": "confirmed_entries",
        "Claims judged new": "new_claims",
        "Claims judged duplicate": "duplicate_claims",
        "Claims judged partial": "partial_claims",
        "Claims that had to wait": "waiting_claims",
        "Chunks out of their place": "misplaced_chunk_claims",
        "Large messages left unfinished": "aborted_attempts",
        "Producers forgotten, inactive": "purged_producers",
        "Producers forgotten, topic full": "evicted_producers",
        "Policy file": lambda each: each["policy_file_error"] or "up to date",
    }
    run.output.result(shown, fields_of({**shown["counts"], **shown}, titles))


@command(app, "producers")
async def producers(run: Run, topic: Topic) -> None:
    """List the producers that a topic tracks, and the last sequence id of each.

    JSON output is unordered, and may repeat a producer that publishes meanwhile.
    """
    columns: Columns = {
        "PRODUCER": "producer",
        "PERSISTED": "persisted_sequence_id",
        "PUSHED": "pushed_sequence_id",
        "UNFINISHED": lambda each: _unfinished_shown(each["unfinished"]),
        "LAST ACTIVE": "last_active_ms",
    }
    found = known(run, topic, run.services.pages(pb.ListProducersRequest(topic=topic)))
    records = (record(each) | {"unfinished": _unfinished(each)} async for each in found)
    await run.output.listing(columns, records, by="producer")


@command(app, "explain")
async def explain(
    run: Run,
    topic: Topic,
    producer: str = argument("PRODUCER", "The producer's name."),
    sequence_id: int = argument(
        "SEQUENCE_ID", "The message's sequence id.", min=0, max=SEQUENCE_ID_MAX
    ),
) -> None:
    """Explain the verdict on a message sent now, and what would happen to it. Read-only.

    If the ledger answers, also show whether and where the log has the message, and its trace.
    """
    found: pb.ExplainResponse = await run.services.call(
        pb.ExplainRequest(topic=topic, producer_name=producer, sequence_id=sequence_id)
    )
    if not has_state(found.status):
        await check_known(run, topic)
    standing = await _standing(run, topic, producer, sequence_id, found)
    fate, message_id = standing.fate, standing.message_id
    first = None if message_id is None else first_entry(MessageId.parse(message_id))
    trace_id = None if first is None else await trace_of(run, topic, *first)
    known, status = record(found.producer), record(found.status)
    unfinished = _unfinished(found.producer)
    shown = {
        "topic": topic,
        "producer": producer,
        "sequence_id": sequence_id,
        "verdict": enum_name(pb.ClaimVerdict, found.verdict),
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
        "snapshot_unknown": status["snapshot_unknown"],
        "snapshot_covers_it": standing.covered,
        "sent_again": sent_again(standing),
    }
    fields = [
        ("Verdict", words(shown["verdict"])),
        ("Why", found.explanation),
        ("Persisted", known["persisted_sequence_id"]),
        ("Pushed", known["pushed_sequence_id"]),
    ]
    if unfinished is not None:
        fields.append(("Unfinished", _unfinished_shown(unfinished)))
    if found.verdict == pb.CLAIM_VERDICT_DUPLICATE or fate is not None:
        fields.append(("The log", _fate_shown(fate, message_id)))
    fields.append(("Snapshot", snapshot_shown(standing)))
    if standing.position is not None:
        fields.append(("Trace", trace_id))
    fields.append(("If it is sent now", shown["sent_again"]))
    run.output.result(shown, fields)


@command(app, "snapshot")
async def snapshot(run: Run, topic: Topic) -> None:
    """Take a snapshot of the state now, into the topic's cursor seqgate.dedup.

    The service takes snapshots automatically; a fresh one shortens the next replay.
    """
    taken = record(await run.services.call(pb.TakeSnapshotRequest(topic=topic)))
    if taken["position"] is None:
        await check_known(run, topic)
    shown = {"topic": topic, "snapshot": taken["position"], "producers": taken["producers"]}
    fields: list[tuple[str, object]] = [("Topic", topic)]
    if shown["snapshot"] is None:
        fields.append(("Snapshot", "there is nothing to keep"))
    else:
        fields += [("Snapshot up to", shown["snapshot"]), ("Producers", shown["producers"])]
    run.output.result(shown, fields)


def status_record(topic: str, found: pb.GetTopicStatusResponse) -> dict[str, Any]:
    """A status; `entries_to_replay` is not part of it, since only the log has them all."""
    shown = {"topic": topic, **record(found), "policy": policy_record(found.policy)}
    shown["counts"] = record(found.counts)  # without a state, the service sends none
    del shown["entries_remaining"]
    return shown


def to_replay_shown(shown: Mapping[str, Any]) -> str:
    found = shown["entries_to_replay"]
    return "not known: the cursor service does not answer" if found is None else str(found)


async def _standing(
    run: Run, topic: str, producer: str, sequence_id: int, explained: pb.ExplainResponse
) -> Standing:
    """The message's deduplication verdict and its fate in the log, which is unknown if the ledger
    service is unreachable or does not have the topic."""
    request = ledger_pb2.FindMessageRequest(
        topic=topic, producer_name=producer, sequence_id=sequence_id
    )
    try:
        found = (await run.services.call(request)).fate
    except SeqgateError:
        return Standing(explained, None, None, None)
    fate = enum_name(ledger_pb2.Fate, found.fate)
    if not found.HasField("position"):
        is_old = explained.verdict == pb.CLAIM_VERDICT_DUPLICATE
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
            return "was trimmed: whether it held the message is unknown"
        case _:
            return "not known"


def _unfinished(producer: pb.Producer) -> dict[str, Any] | None:
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
    return f"{text_shown(value['value'])} (set by: {words(value['source'])})"
