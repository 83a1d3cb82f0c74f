"""The fate of a unit, and of its messages.

Deduplication knows only watermarks: an id at or below the last persisted one must not be stored.
Only the log knows, message by message, whether it *is* stored, and success must mean that every
message is in the log:

    STORED    the message is in the log, at this position
    STALE     a higher id of its producer was stored first; this message never was
    TRIMMED   the part of the log that would show it was trimmed

A large message is in the log when all its chunks of one attempt are.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from seqgate.services.errors import DomainError
from seqgate.services.ledger.core.entry import Unit
from seqgate.types import Chunk, Layout, Position


class Found(NamedTuple):
    """A message in the log. Of a large one, `position` is that of its last chunk, and `chunks`
    those of all chunks of the attempt `uuid`."""

    position: Position
    batch_index: int | None
    chunks: tuple[Position, ...] = ()
    uuid: str = ""


class Unfinished(NamedTuple):
    """A large message that is in the log in part, with the positions of each attempt's chunks."""

    attempts: Mapping[Layout, tuple[Position, ...]]


class Missing(Enum):
    """The fate of a message that is not in the log."""

    STALE = auto()
    TRIMMED = auto()


Fate = Found | Unfinished | Missing


class Status(Enum):
    """The outcome of a unit; see ledger.proto."""

    STORED = auto()
    DUPLICATE = auto()
    STALE = auto()
    PARTIAL = auto()
    REFUSED = auto()
    FAILED = auto()
    SKIPPED = auto()
    CHUNK_GAP = auto()
    LAYOUT_CONFLICT = auto()


class Receipt(NamedTuple):
    """The answer to a unit; see ledger.proto.

    Attributes:
        differs, not_compared: messages by their index in repeated_ids, whose content is not that of
            the stored message, or could not be compared with it.
    """

    status: Status
    position: Position | None = None
    fates: tuple[Fate, ...] = ()
    first_new: int | None = None
    error: DomainError | None = None
    differs: tuple[int, ...] = ()
    not_compared: tuple[int, ...] = ()


SKIPPED: Final = Receipt(Status.SKIPPED)
CHUNK_GAP: Final = Receipt(Status.CHUNK_GAP)
LAYOUT_CONFLICT: Final = Receipt(Status.LAYOUT_CONFLICT)


class Repeated(NamedTuple):
    """A unit that was not stored because of its ids. From `first_new` on they are new (None: none
    is); of ids up to `decided` nothing more will be stored."""

    unit: Unit
    first_new: int | None
    decided: int


def stored(position: Position) -> Receipt:
    return Receipt(Status.STORED, position)


def refused(error: DomainError) -> Receipt:
    """The receipt of an invalid unit. Nothing changed."""
    return Receipt(Status.REFUSED, error=error)


def failed(error: DomainError) -> Receipt:
    """The receipt of a unit that was not stored; a retry may succeed."""
    return Receipt(Status.FAILED, error=error)


def repeated_ids(repeated: Repeated) -> list[int]:
    """The ids whose fates belong in a receipt: all, in the order of the entries; or, if the unit is
    partly new, those below the first new one, ascending."""
    unit, first_new, _ = repeated
    ids = [each for entry in unit.entries for each in entry.sequence_ids]
    return ids if first_new is None else sorted(each for each in ids if each < first_new)


def receipt_of(repeated: Repeated, fates: Sequence[Fate]) -> Receipt:
    """The receipt of a unit not stored because of its ids; `fates` are ordered as repeated_ids."""
    unit, first_new, decided = repeated
    if unit.chunk is not None:
        return _chunk_receipt(unit.chunk, fates[0], finished=unit.lowest <= decided)
    known = tuple(Missing.STALE if isinstance(fate, Unfinished) else fate for fate in fates)
    if first_new is not None:
        return Receipt(Status.PARTIAL, fates=known, first_new=first_new)
    places = [fate for fate in known if isinstance(fate, Found)]
    if len(places) < len(known):
        return Receipt(Status.STALE, fates=known)
    position = _same_entry(unit, places)
    if position is not None:
        return Receipt(Status.DUPLICATE, position)
    return Receipt(Status.DUPLICATE, fates=known)


def _chunk_receipt(chunk: Chunk, fate: Fate, *, finished: bool) -> Receipt:
    """The receipt has the position of the same chunk of the same attempt; or, if another attempt
    stored the message, the position of that message."""
    match fate:
        case Found(_, _, chunks, chunk.uuid) if len(chunks) == chunk.num_chunks:
            return Receipt(Status.DUPLICATE, chunks[chunk.chunk_id])
        case Found():
            return Receipt(Status.DUPLICATE, fates=(fate,))
        case Unfinished(attempts):
            chunks = () if finished else attempts.get(chunk.layout, ())
            if chunk.chunk_id < len(chunks):
                return Receipt(Status.DUPLICATE, chunks[chunk.chunk_id])
            return Receipt(Status.STALE, fates=(Missing.STALE,))
        case Missing():
            return Receipt(Status.STALE, fates=(fate,))


def _same_entry(unit: Unit, places: Sequence[Found]) -> Position | None:
    """The position of the entry that already holds a unit of one entry: its messages have the same
    indexes in the same entry of the log, which is the same entry or a batch with it as a prefix."""
    if len(unit.entries) > 1 or places[0].chunks:
        return None
    position = places[0].position
    count = unit.entries[0].messages
    shape = [None] if count is None else list(range(count))
    same = [place.batch_index for place in places] == shape
    return position if same and all(each.position == position for each in places) else None
