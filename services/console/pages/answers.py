"""Parts of the services' answers, as templates show them."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.errors import SeqgateError
from seqgate.keys import sticky_key
from seqgate.payloads import PayloadDamaged, open_batch, unpack
from seqgate.services.console.pages.query import key_query, number_of
from seqgate.services.console.pages.visit import Query, Values, Visit
from seqgate.services.console.payloads import check_size, key_text, shown
from seqgate.services.console.searching import position_of, whole_payload
from seqgate.times import moment_of

T = TypeVar("T")

PROPERTIES_MAX: Final = 50
"""The most properties of a message that a page shows."""

PROPERTY_CHARACTERS_MAX: Final = 300
"""The most characters of a property that a page shows."""

BATCHED_PROPERTIES_MAX: Final = 3
"""The most properties of each message of a batch that a page shows."""

MESSAGES_MAX: Final = 50
"""The most messages of a batch that a page lists."""


async def part(call: Awaitable[T]) -> T | SeqgateError:
    """An answer that a page can do without: the refusal, if there is none."""
    try:
        return await call
    except SeqgateError as error:
        return error


def known(answer: Any, read: Callable[[Any], T]) -> T | None:
    """What a part of a page reads of its answer; None: it was refused."""
    return None if isinstance(answer, SeqgateError) else read(answer)


def enum_name(kind: Any, number: int) -> str:
    """An enum's value without the enum's name; the number, if this version does not know it."""
    names = kind.DESCRIPTOR.values_by_number
    prefix = names[0].name.removesuffix("UNSPECIFIED")
    return names[number].name.removeprefix(prefix) if number in names else str(number)


def time_of(message: Any, field: str) -> datetime | None:
    return moment_of(getattr(message, field)) if message.HasField(field) else None


def verdict_counts(status: dedup_pb2.GetTopicStatusResponse) -> dict[str, float]:
    counts = status.counts
    return {
        "new": counts.new_claims,
        "duplicate": counts.duplicate_claims,
        "other": counts.partial_claims + counts.waiting_claims + counts.misplaced_chunk_claims,
    }


def entry_row(entry: ledger_pb2.StoredEntry) -> Values:
    metadata = entry.metadata
    notes = []
    if metadata.HasField("chunk_id"):
        notes.append(f"chunk {metadata.chunk_id + 1} of {metadata.num_chunks_from_msg}")
    if metadata.HasField("marker_type"):
        notes.append("marker")
    if metadata.HasField("deliver_at_time"):
        notes.append("delayed")
    if entry.aborts:
        notes.append("aborts an attempt")
    has_key = metadata.HasField("partition_key") or metadata.HasField("ordering_key")
    highest = metadata.highest_sequence_id
    return {
        "position": position_of(entry.position),
        "time": moment_of(entry.append_time),
        "producer": metadata.producer_name,
        "sequence_id": metadata.sequence_id,
        "to_sequence_id": highest if highest > metadata.sequence_id else None,
        "key": key_text(sticky_key(metadata)) if has_key else None,
        "key_query": key_query(sticky_key(metadata)),
        "messages": metadata.num_messages_in_batch or 1,
        "is_chunk": metadata.HasField("chunk_id"),
        "is_batch": metadata.HasField("num_messages_in_batch"),
        "bytes": entry.payload_bytes or len(entry.payload),
        "notes": notes,
    }


async def open_whole(visit: Visit, topic: str, entry: ledger_pb2.StoredEntry) -> Values:
    """As open_entry; of a chunk, the payload of its whole message."""
    if not entry.metadata.HasField("chunk_id"):
        return open_entry(entry, visit.query)
    whole, why_not = await whole_payload(visit.calls, topic, entry)
    if why_not:
        return {**open_entry(entry, visit.query), "why_not": why_not}
    return {**open_entry(entry, visit.query, whole), "chunks": entry.metadata.num_chunks_from_msg}


def open_entry(entry: ledger_pb2.StoredEntry, query: Query, whole: bytes | None = None) -> Values:
    """An entry's payload, or that of the message of its batch with the query's `index`, in the form
    that the query asks for.

    Args:
        whole: all chunks of its message.
    """
    index = number_of(query, "index") or 0
    batch: list[Any] = []
    damage = ""
    payload = entry.payload
    try:
        check_size(entry.metadata)
        if entry.metadata.HasField("num_messages_in_batch"):
            batch = list(open_batch(entry.metadata, entry.payload))
            payload = batch[index].payload if index < len(batch) else b""
        elif whole is not None or not entry.metadata.HasField("chunk_id"):
            payload = unpack(entry.metadata, entry.payload if whole is None else whole)
    except PayloadDamaged as error:
        damage = str(error)
    return {
        "messages": [_message_row(each) for each in batch[:MESSAGES_MAX]],
        "messages_in_all": len(batch),
        "index": index,
        "bytes": len(payload),
        "shown": shown(payload, query.get("as", "")),
        "damage": damage,
    }


def _message_row(message: Any) -> Values:
    metadata = message.metadata
    return {
        "key": metadata.partition_key if metadata.HasField("partition_key") else None,
        "sequence_id": metadata.sequence_id,
        "bytes": len(message.payload),
        "properties": properties_shown(metadata.properties, BATCHED_PROPERTIES_MAX),
    }


def properties_shown(
    properties: Mapping[str, str], most: int = PROPERTIES_MAX
) -> list[tuple[str, str]]:
    """The first of a message's properties, by name, cut to PROPERTY_CHARACTERS_MAX; then how many
    there are more."""
    rows = [(cut(name), cut(properties[name])) for name in sorted(properties)[:most]]
    left_out = len(properties) - len(rows)
    return [*rows, ("…", f"{left_out:,} more")] if left_out else rows


def cut(text: str, characters_max: int = PROPERTY_CHARACTERS_MAX) -> str:
    return text if len(text) <= characters_max else f"{text[:characters_max]}…"


def key_row(each: dispatcher_pb2.KeyReport) -> Values:
    return {
        "key": key_text(each.key),
        "key_query": key_query(each.key),
        "slot": each.slot,
        "reason": enum_name(dispatcher_pb2.Reason, each.reason),
        "since": time_of(each, "since"),
        "holder": each.holder,
        "owner": each.owner,
        "oldest": position_of(each.oldest) if each.HasField("oldest") else None,
        "attempts": each.attempts,
        "in_flight": each.in_flight_entries,
        "parked": each.parked_entries,
        "next_retry": time_of(each, "next_retry"),
    }
