"""Pulsar's cursor records, serialized.

managed.proto defines their fields, and core/managed.py their meaning.
"""

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from seqgate.api.cursor.v1 import managed_pb2 as pb
from seqgate.services.cursor.core.cursor import BatchAck, Range
from seqgate.services.cursor.core.managed import (
    Bitmap,
    Imported,
    InvalidManagedCursor,
    ManagedCursor,
    PartialBatch,
    Place,
    Record,
    Run,
    export_cursor,
    import_cursor,
)
from seqgate.services.cursor.core.state import Head

COMPRESSED: Final = b"\x47\x78"
"""The first bytes of a metadata store's record that Pulsar has compressed."""

M = TypeVar("M", bound=Message)


def import_managed_cursor(info: bytes, position: bytes) -> Imported:
    """Parse the metadata store's ManagedCursorInfo and the last PositionInfo of the cursor ledger;
    the latter is empty if there is none.

    Raises:
        InvalidManagedCursor: the bytes do not decode, a required field is missing, a field has
            the wrong type, or core/managed.py rejects the records.
    """
    if info.startswith(COMPRESSED):
        raise InvalidManagedCursor(
            "compressed records are not supported", field="managed_cursor_info"
        )
    stored = _parse(pb.ManagedCursorInfo(), info, "managed_cursor_info")
    return import_cursor(
        ManagedCursor(
            cursor_ledger=_required(stored, "cursors_ledger_id").cursors_ledger_id,
            record=_record(stored, _snapshot(stored)),
            properties=_strings(stored.cursor_properties),
            entry=_entry(position) if position else None,
        )
    )


def export_managed_cursor(
    head: Head, ranges: Iterable[Range], batches: Iterable[BatchAck]
) -> bytes:
    """Serialize the ManagedCursorInfo of a cleanly closed cursor. Ranges and batches are those
    beyond the mark-delete position; every batch has an unacknowledged message."""
    managed = export_cursor(head, ranges, batches)
    record = managed.record
    assert record.mark_delete is not None
    return pb.ManagedCursorInfo(
        cursors_ledger_id=managed.cursor_ledger,
        mark_delete_ledger_id=record.mark_delete.ledger_id,
        mark_delete_entry_id=record.mark_delete.entry_id,
        individual_deleted_messages=[
            pb.ManagedRange(lower_endpoint=_to_wire(run.lower), upper_endpoint=_to_wire(run.upper))
            for run in record.runs
        ],
        properties=[pb.ManagedLongProperty(name=name, value=value) for name, value in record.longs],
        batched_entry_deletion_index_info=[
            pb.ManagedBatch(
                position=_to_wire(batch.place), delete_set=batch.words, batch_size=batch.size
            )
            for batch in record.batches
        ],
        cursor_properties=_strings_to_wire(managed.properties),
        mark_delete_properties=_strings_to_wire(record.strings),
    ).SerializeToString()


# ---- parsing


def _parse(message: M, data: bytes, field: str) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise InvalidManagedCursor(f"does not decode as {name}", field=field) from error
    for part in _parts(message):
        _refuse_other_types(part, field)
    return message


def _parts(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                yield from _parts(part)


def _refuse_other_types(message: Message, field: str) -> None:
    """Refuse known fields of another wire type. Unknown fields may be skipped; but another type
    means that a different field took the number, and skipping it would drop data."""
    ours = message.DESCRIPTOR.fields_by_number
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        number = unknown[index].field_number
        if number in ours:
            raise InvalidManagedCursor(
                "a field has the wrong wire type",
                field=field,
                record=message.DESCRIPTOR.name,
                number=number,
            )


def _required(message: M, *names: str) -> M:
    for name in names:
        if not message.HasField(name):
            raise InvalidManagedCursor(
                "a required field is missing", record=message.DESCRIPTOR.name, missing=name
            )
    return message


# ---- records


def _snapshot(info: pb.ManagedCursorInfo) -> Place | None:
    """The metadata store's position; None unless both of its numbers are set."""
    if not info.HasField("mark_delete_ledger_id") and not info.HasField("mark_delete_entry_id"):
        return None
    _required(info, "mark_delete_ledger_id", "mark_delete_entry_id")
    return Place(info.mark_delete_ledger_id, info.mark_delete_entry_id)


def _entry(data: bytes) -> Record:
    entry = _parse(pb.PositionInfo(), data, "position_info")
    _required(entry, "ledger_id", "entry_id")
    bitmaps = [_bitmap(bitmap) for bitmap in entry.individual_deleted_message_ranges]
    return _record(entry, Place(entry.ledger_id, entry.entry_id))._replace(bitmaps=bitmaps)


def _record(stored: pb.ManagedCursorInfo | pb.PositionInfo, mark_delete: Place | None) -> Record:
    return Record(
        mark_delete=mark_delete,
        strings=_strings(stored.mark_delete_properties),
        longs=[(_required(one, "name", "value").name, one.value) for one in stored.properties],
        runs=[_run(run) for run in stored.individual_deleted_messages],
        batches=[_batch(batch) for batch in stored.batched_entry_deletion_index_info],
    )


def _strings(properties: Iterable[pb.ManagedStringProperty]) -> list[tuple[str, str]]:
    return [(_required(one, "name", "value").name, one.value) for one in properties]


def _run(run: pb.ManagedRange) -> Run:
    _required(run, "lower_endpoint", "upper_endpoint")
    return Run(_place(run.lower_endpoint), _place(run.upper_endpoint))


def _bitmap(bitmap: pb.ManagedBitmap) -> Bitmap:
    return Bitmap(_required(bitmap, "key").key, bitmap.values)


def _batch(batch: pb.ManagedBatch) -> PartialBatch:
    place = _place(_required(batch, "position").position)
    size = batch.batch_size if batch.HasField("batch_size") else None
    return PartialBatch(place, batch.delete_set, size)


def _place(position: pb.ManagedPosition) -> Place:
    _required(position, "ledger_id", "entry_id")
    return Place(position.ledger_id, position.entry_id)


def _to_wire(place: Place) -> pb.ManagedPosition:
    return pb.ManagedPosition(ledger_id=place.ledger_id, entry_id=place.entry_id)


def _strings_to_wire(properties: Iterable[tuple[str, str]]) -> list[pb.ManagedStringProperty]:
    return [pb.ManagedStringProperty(name=name, value=value) for name, value in properties]
