"""What Pulsar keeps of a cursor, and what it means here.

Pulsar keeps a cursor in two places: a record in its metadata store, and the last entry of the
cursor's own ledger. Each is whole, a position together with the properties attached to it, and
exactly one of them counts:

    cursor ledger      its last entry      what counts
    none (-1)          -                   the record
    L                  given               the entry; the record is older
    L                  lost                the record, as a whole: it is stale, but a pair

(Pulsar takes the position of the record in the last case, and drops its properties.)

A position of Pulsar's may have entry id -1, before the first entry of its ledger. Ours may not; the
position right before (L, 0) is the highest of ledger L - 1, where no entry ever is:

    (L, -1)  <->  (L - 1, 2^63 - 1)         (1, -1) and (-1, -1), "earliest"  ->  absent

Our ledgers begin with 1, so a cursor that is in BookKeeper's ledger 0 is refused.
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
"""There is no cursor ledger."""

BATCH_SIZE_MAX: Final = 10_000
"""The most messages of a batch; cursor.proto's bound."""

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
    """A position of Pulsar's; entry -1 is before the first entry of the ledger."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


class Run(NamedTuple):
    """Everything after `lower` up to `upper` is acknowledged."""

    lower: Place
    upper: Place


class Bitmap(NamedTuple):
    """Bit i of word w, from the least significant, is set when entry 64 w + i is acknowledged. A
    word is an int64 or what it is without a sign."""

    ledger_id: int
    words: Sequence[int]


class PartialBatch(NamedTuple):
    """Bit i of word w is set when message 64 w + i is not acknowledged; `size` is not Pulsar's."""

    place: Place
    words: Sequence[int]
    size: int | None = None


class Record(NamedTuple):
    """One pair and what is acknowledged beyond its position, as either place keeps it. `longs` are
    the legacy form of the properties `strings`."""

    mark_delete: Place | None
    strings: Sequence[tuple[str, str]] = ()
    longs: Sequence[tuple[str, int]] = ()
    runs: Sequence[Run] = ()
    bitmaps: Sequence[Bitmap] = ()
    batches: Sequence[PartialBatch] = ()


class ManagedCursor(NamedTuple):
    """All that Pulsar keeps: the metadata store's record and the cursor's own properties, and the
    last entry of the cursor ledger, if it is there."""

    cursor_ledger: int
    record: Record
    properties: Sequence[tuple[str, str]] = ()
    entry: Record | None = None


class Imported(NamedTuple):
    """The cursor as it is here. `ranges` and `batches` are in order, apart from each other and
    beyond the mark-delete position. `successions` is what the records say of the log."""

    mark_delete: Position | None
    mark_delete_properties: Mapping[str, str]
    properties: Mapping[str, str]
    ranges: tuple[Range, ...]
    batches: tuple[BatchAck, ...]
    successions: tuple[Succession, ...]
    stale: bool
    """The cursor ledger's entry is lost: the pair is an older one, and what was acknowledged since
    comes again."""


def import_cursor(managed: ManagedCursor) -> Imported:
    """Read Pulsar's records.

    Raises:
        InvalidManagedCursor: they contradict themselves, or reading them would be guesswork.
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
    """Describe a cursor as Pulsar does when it closes one in good order.

    The properties attached to the mark-delete position are in both forms if the legacy one can
    hold every one of them: a part of them would be a map that nobody attached. Seqgate's own, like
    that of a snapshot, are in the new form only.
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


# ---- which record


def _newest(managed: ManagedCursor) -> tuple[Record, bool]:
    if managed.cursor_ledger < NO_LEDGER:
        raise InvalidManagedCursor(
            "cursors_ledger_id must be -1 or more", cursors_ledger_id=managed.cursor_ledger
        )
    if managed.cursor_ledger == NO_LEDGER:
        if managed.entry is not None:
            # Pulsar would not look at it, and of the two it is the older one.
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
    # Pulsar's "earliest": before whatever the first ledger is.
    return place if place == (-1, -1) else _checked(place)


# ---- properties


def _attached(record: Record) -> Mapping[str, str]:
    """The new form as a whole, or else the legacy one. Never a mixture: what is attached to a
    position was attached at once, and who writes the new form writes all of it."""
    if record.strings:
        return _mapping(record.strings)
    return _mapping((name, str(value)) for name, value in record.longs)


def _mapping(properties: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    read: dict[str, str] = {}
    for name, value in properties:
        if read.setdefault(name, value) != value:
            # A status has little room, and the name may be of any length.
            raise InvalidManagedCursor("duplicate property", property=name[:100])
    return read


def _is_int64(value: str) -> bool:
    """Whether a legacy property holds it so that it comes back as it was."""
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
    """That nothing lies between (L, -1), as we have it, and (L, 0): nobody else can say it, and
    mark-delete would stop there."""
    last = _position(mark_delete)
    if last is None or mark_delete.entry_id >= 0:
        return ()
    return (Succession(last, Position(mark_delete.ledger_id, 0)),)


# ---- entries


def _runs(record: Record) -> Iterator[Run]:
    """Bitmaps are read when there are no runs, as Pulsar does."""
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
    """Let the mark-delete position take in the runs that touch it, and merge those that touch each
    other, as acknowledging them would have done; the properties stay.

    That is also the only certain reading of a run that ends in a later ledger than it begins: past
    the mark-delete position, where its first ledger ends is not known here.
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
    """Those that are not acknowledged whole, in order."""
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
    """None when every bit is clear, which Pulsar does not write, and passes over when it reads it.

    Pulsar does not say how many messages a batch has, only which of them are not acknowledged. The
    words that it wrote are the size: no message that is not acknowledged is outside, so the entry
    is complete when it really is, and none inside is said to be acknowledged that exists and is
    not. What lies beyond the last word was acknowledged, too, but whether there is anything is not
    known here; it is left out. So the size is a guess, and gives way to the first one that somebody
    says who has the batch.
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
    """As int64, without empty ones at the end."""
    count = -(-bits.bit_length() // _WORD_BITS)
    raw = bits.to_bytes(count * 8, "little")
    return [
        int.from_bytes(raw[start : start + 8], "little", signed=True)
        for start in range(0, len(raw), 8)
    ]
