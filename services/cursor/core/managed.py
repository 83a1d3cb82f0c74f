"""Pulsar's cursor records, and their translation to cursors of this service.

Pulsar stores a cursor in two places: a record in its metadata store, and the last entry of the
cursor's own ledger. Each is a whole, a position with the properties attached to it, and exactly one
of them applies:

    cursor ledger      its last entry      what applies
    none (-1)          -                   the record
    L                  given               the entry; the record is older
    L                  lost                the record, as a whole: stale, but consistent

(In the last case, Pulsar takes the position of the record and drops its properties.)

In Pulsar, a position may have entry id -1, before the first entry of its ledger. Here it may not;
the position just before (L, 0) is the highest of ledger L - 1, where no entry ever is:

    (L, -1)  <->  (L - 1, 2^63 - 1)         (1, -1) and (-1, -1), "earliest"  ->  absent

Ledgers begin with 1 here, so a cursor in BookKeeper's ledger 0 is refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from seqgate.services.cursor.core.cursor import BatchAck, Range, Succession
from seqgate.services.cursor.core.state import RESERVED, Head
from seqgate.services.errors import DomainError, Kind
from seqgate.types import SEQUENCE_ID_MAX, Position

NO_LEDGER: Final = -1
"""The cursor ledger's id if there is none."""

BATCH_SIZE_MAX: Final = 10_000
"""The most messages of a batch, as in cursor.proto."""

_WORD_BITS: Final = 64
_WORD: Final = 2**64 - 1
_INT64: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_ONES: Final = re.compile("1+")


class InvalidManagedCursor(DomainError):
    """A Pulsar cursor record does not decode, is inconsistent, or is incomplete."""

    kind = Kind.INVALID
    reason = "INVALID_MANAGED_CURSOR"

    def __init__(self, message: str, *, field: str = "managed_cursor_info", **details: Any) -> None:
        super().__init__(message, field=field, **details)


class Place(NamedTuple):
    """A position in Pulsar; entry -1 is before the first entry of the ledger."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


class Run(NamedTuple):
    """The acknowledged entries after `lower` and through `upper`."""

    lower: Place
    upper: Place


class Bitmap(NamedTuple):
    """Bit i of word w, from the least significant, is set if entry 64 w + i is acknowledged. Words
    are signed or unsigned 64-bit integers."""

    ledger_id: int
    words: Sequence[int]


class PartialBatch(NamedTuple):
    """Bit i of word w is set if message 64 w + i is not acknowledged. Pulsar stores no `size`."""

    place: Place
    words: Sequence[int]
    size: int | None = None


class Record(NamedTuple):
    """A position with its properties and the acknowledgements beyond it, as either place stores
    them. `longs` is the legacy form of the properties `strings`."""

    mark_delete: Place | None
    strings: Sequence[tuple[str, str]] = ()
    longs: Sequence[tuple[str, int]] = ()
    runs: Sequence[Run] = ()
    bitmaps: Sequence[Bitmap] = ()
    batches: Sequence[PartialBatch] = ()


class ManagedCursor(NamedTuple):
    """All of Pulsar's data: the metadata store's record with the cursor's own properties, and the
    last entry of the cursor ledger, if it is available."""

    cursor_ledger: int
    record: Record
    properties: Sequence[tuple[str, str]] = ()
    entry: Record | None = None


class Imported(NamedTuple):
    """The cursor in the form of this service. `ranges` and `batches` are ordered, disjoint, and
    beyond the mark-delete position. `successions` is what the records imply about the log."""

    mark_delete: Position | None
    mark_delete_properties: Mapping[str, str]
    properties: Mapping[str, str]
    ranges: tuple[Range, ...]
    batches: tuple[BatchAck, ...]
    successions: tuple[Succession, ...]
    stale: bool
    """The cursor ledger's entry is lost: entries acknowledged since the record come again."""


def import_cursor(managed: ManagedCursor) -> Imported:
    """Translate Pulsar's records.

    Raises:
        InvalidManagedCursor: they are inconsistent, or have no unambiguous meaning here.
    """
    record, stale = _newest(managed)
    mark_delete, runs = _absorb(_mark_delete(record), _runs(record))
    ranges = tuple(_range(run) for run in runs)
    return Imported(
        mark_delete=_position(mark_delete),
        mark_delete_properties=_attached(record),
        properties=_mapping(managed.properties),
        ranges=ranges,
        batches=tuple(_batches(record.batches, mark_delete, ranges)),
        successions=_first_entry(mark_delete),
        stale=stale,
    )


def export_cursor(
    head: Head, ranges: Iterable[Range], batches: Iterable[BatchAck]
) -> ManagedCursor:
    """Translate a cursor to the record that Pulsar writes when it closes one cleanly.

    The properties of the mark-delete position are in both forms if the legacy one can hold all of
    them; a subset would be a map that no caller attached. Seqgate's own properties, such as a
    snapshot's, are in the new form only.
    """
    attached = sorted(head.mark_delete_properties.items())
    others = [each for each in attached if not each[0].startswith(RESERVED)]
    numbers = [(name, int(value)) for name, value in others if _is_int64(value)]
    record = Record(
        mark_delete=_place(head.mark_delete),
        strings=attached,
        longs=numbers if len(numbers) == len(others) else (),
        runs=[_run(run) for run in ranges],
        batches=[_partial(batch) for batch in batches],
    )
    return ManagedCursor(NO_LEDGER, record, sorted(head.properties.items()))


# ---- choice of the record


def _newest(managed: ManagedCursor) -> tuple[Record, bool]:
    if managed.cursor_ledger < NO_LEDGER:
        raise InvalidManagedCursor(
            "cursors_ledger_id must be -1 or more", cursors_ledger_id=managed.cursor_ledger
        )
    if managed.cursor_ledger == NO_LEDGER:
        if managed.entry is not None:
            # Pulsar would ignore the entry, which is the older of the two.
            raise InvalidManagedCursor(
                "position_info given, but the record names no cursor ledger",
                field="position_info",
            )
        return managed.record, False
    if managed.entry is not None:
        return managed.entry, False
    return managed.record, True


def _mark_delete(record: Record) -> Place:
    place = record.mark_delete
    if place is None:
        raise InvalidManagedCursor("mark-delete position is missing")
    # Pulsar's "earliest": before the first ledger, whichever that is.
    return place if place == (-1, -1) else _checked(place)


# ---- properties


def _attached(record: Record) -> Mapping[str, str]:
    """The new form as a whole or else the legacy one, never a mixture: properties are attached all
    at once, and a writer of the new form writes all of them in it."""
    if record.strings:
        return _mapping(record.strings)
    return _mapping((name, str(value)) for name, value in record.longs)


def _mapping(properties: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    read: dict[str, str] = {}
    for name, value in properties:
        if read.setdefault(name, value) != value:
            # A status has little room, and a name may have any length.
            raise InvalidManagedCursor("duplicate property", property=name[:100])
    return read


def _is_int64(value: str) -> bool:
    """Whether the legacy form preserves this value exactly."""
    return _INT64.fullmatch(value) is not None and -(2**63) <= int(value) < 2**63


# ---- positions


def _checked(place: Place) -> Place:
    if place.ledger_id < 1 or place.entry_id < -1 or max(place) > SEQUENCE_ID_MAX:
        raise InvalidManagedCursor("position out of range", position=place)
    return place


def _position(place: Place) -> Position | None:
    if place.entry_id >= 0:
        return Position(*place)
    return Position(place.ledger_id - 1, SEQUENCE_ID_MAX) if place.ledger_id > 1 else None


def _place(position: Position | None) -> Place:
    if position is None:
        return Place(-1, -1)
    if position.entry_id == SEQUENCE_ID_MAX > position.ledger_id:
        return Place(position.ledger_id + 1, -1)
    return Place(*position)


def _first_entry(mark_delete: Place) -> tuple[Succession, ...]:
    """The succession from (L, -1), in our form, to (L, 0). No other caller can state it, and
    without it mark-delete would stop there."""
    last = _position(mark_delete)
    if last is None or mark_delete.entry_id >= 0:
        return ()
    return (Succession(last, Position(mark_delete.ledger_id, 0)),)


# ---- entries


def _runs(record: Record) -> Iterator[Run]:
    """The runs of a record. As in Pulsar, bitmaps are read only if there are no ranges."""
    if record.runs:
        yield from (_checked_run(run) for run in record.runs)
        return
    ledgers = sorted(bitmap.ledger_id for bitmap in record.bitmaps)
    for ledger_id, following in pairwise(ledgers):
        if ledger_id == following:
            raise InvalidManagedCursor("duplicate bitmap for a ledger", ledger_id=ledger_id)
    for bitmap in record.bitmaps:
        yield from _runs_of(bitmap)


def _runs_of(bitmap: Bitmap) -> Iterator[Run]:
    ledger_id, _ = _checked(Place(bitmap.ledger_id, -1))
    from_entry_0_on = f"{_bits(bitmap.words):b}"[::-1]
    for ones in _ONES.finditer(from_entry_0_on):
        yield Run(Place(ledger_id, ones.start() - 1), Place(ledger_id, ones.end() - 1))


def _checked_run(run: Run) -> Run:
    lower, upper = _checked(run.lower), _checked(run.upper)
    if upper < lower:
        raise InvalidManagedCursor("a range ends before it begins", lower=lower, upper=upper)
    return run


def _absorb(mark_delete: Place, runs: Iterable[Run]) -> tuple[Place, list[Run]]:
    """Merge runs that touch each other, and move the mark-delete position past those that touch it,
    as acknowledging them would; its properties stay.

    Nor is there another certain reading of a run that ends in a later ledger than it begins: beyond
    the mark-delete position, the end of the first ledger is unknown.
    """
    apart: list[Run] = []
    for run in sorted(runs):
        if run.lower <= mark_delete:
            mark_delete = max(mark_delete, run.upper)
        elif apart and run.lower <= apart[-1].upper:
            apart[-1] = Run(apart[-1].lower, max(apart[-1].upper, run.upper))
        elif run.lower < run.upper:
            apart.append(run)
    return mark_delete, apart


def _range(run: Run) -> Range:
    lower, upper = run
    if lower.ledger_id != upper.ledger_id:
        raise InvalidManagedCursor(
            "a range crosses the end of a ledger whose last entry is not in the records",
            lower=lower,
            upper=upper,
        )
    return Range(Position(lower.ledger_id, lower.entry_id + 1), upper.entry_id)


def _run(run: Range) -> Run:
    ledger_id, entry_id = run.first
    assert entry_id <= run.last_entry
    return Run(Place(ledger_id, entry_id - 1), Place(ledger_id, run.last_entry))


# ---- batches


def _batches(
    batches: Iterable[PartialBatch], mark_delete: Place, ranges: Sequence[Range]
) -> Iterator[BatchAck]:
    whole = iter(ranges)
    run = next(whole, None)
    last: Place | None = None
    for batch in sorted(batches, key=lambda batch: batch.place):
        place = _entry(batch.place)
        if place == last:
            raise InvalidManagedCursor("duplicate batch", position=place)
        last = place
        while run is not None and run.last < place:
            run = next(whole, None)
        is_whole = place <= mark_delete or (run is not None and run.first <= place)
        acknowledged = _batch(batch)
        if acknowledged is not None and not is_whole:
            yield acknowledged


def _entry(place: Place) -> Place:
    if place.entry_id < 0:
        raise InvalidManagedCursor("batch position is not an entry", position=place)
    return _checked(place)


def _batch(batch: PartialBatch) -> BatchAck | None:
    """None if every bit is clear: Pulsar does not write such a batch, and ignores one that it
    reads.

    Pulsar stores which messages of a batch are unacknowledged, but not how many there are. The size
    is taken from the words that it wrote. No unacknowledged message lies beyond them, so the entry
    becomes complete when it really is; and no unacknowledged message within them counts as
    acknowledged. Messages beyond the last word were acknowledged, too, but may not exist, so they
    are left out. The size is therefore a guess, which the first caller with the batch at hand
    replaces.
    """
    waiting = _bits(batch.words)
    if not waiting:
        return None
    size = batch.size
    if size is None:
        size = max(waiting.bit_length(), min(_WORD_BITS * len(batch.words), BATCH_SIZE_MAX))
    if not waiting.bit_length() <= size <= BATCH_SIZE_MAX:
        raise InvalidManagedCursor(
            f"batch_size must be 1 to {BATCH_SIZE_MAX:,} and cover the unacknowledged messages",
            position=batch.place,
            batch_size=size,
        )
    indexes = tuple(index for index in range(size) if not waiting >> index & 1)
    return BatchAck(Position(*batch.place), size, indexes, is_guess=batch.size is None)


def _partial(batch: BatchAck) -> PartialBatch:
    waiting = (1 << batch.size) - 1
    for index in batch.indexes:
        assert 0 <= index < batch.size
        waiting &= ~(1 << index)
    assert waiting, "a batch without a message that waits is an acknowledged entry"
    size = None if batch.is_guess else batch.size
    return PartialBatch(Place(*batch.position), _words(waiting), size)


# ---- words


def _bits(words: Iterable[int]) -> int:
    raw = b"".join((word & _WORD).to_bytes(8, "little") for word in words)
    return int.from_bytes(raw, "little")


def _words(bits: int) -> list[int]:
    """Signed 64-bit words, without empty ones at the end."""
    count = -(-bits.bit_length() // _WORD_BITS)
    raw = bits.to_bytes(count * 8, "little")
    return [
        int.from_bytes(raw[start : start + 8], "little", signed=True)
        for start in range(0, len(raw), 8)
    ]
