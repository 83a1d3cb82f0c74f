"""What became of a unit, and of the messages in it.

Deduplication knows only watermarks: an id at or below the last persisted one is not to be stored.
Whether it *is* stored is for the log to say, message by message, because success must mean that
every message is in the log:

    STORED    here it is
    STALE     a higher id of its producer was stored first; this one never was
    TRIMMED   the part of the log that would tell is gone
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from seqgate.types import Position
from services.errors import DomainError
from services.ledger.core.entry import Unit


class Found(NamedTuple):
    """A message that is in the log."""

    position: Position
    batch_index: int | None


class Missing(Enum):
    """A message that is not."""

    STALE = auto()
    TRIMMED = auto()


Fate = Found | Missing


class Status(Enum):
    """What became of a unit; ledger.proto says it in full."""

    STORED = auto()
    DUPLICATE = auto()
    STALE = auto()
    PARTIAL = auto()
    REFUSED = auto()
    FAILED = auto()
    SKIPPED = auto()


class Receipt(NamedTuple):
    """The answer to one unit."""

    status: Status
    position: Position | None = None
    fates: tuple[Fate, ...] = ()
    first_new: int | None = None
    error: DomainError | None = None


SKIPPED: Final = Receipt(Status.SKIPPED)


def stored(position: Position) -> Receipt:
    """All of it was appended, from this position on."""
    return Receipt(Status.STORED, position)


def refused(error: DomainError) -> Receipt:
    """It is wrong, and changed nothing."""
    return Receipt(Status.REFUSED, error=error)


def failed(error: DomainError) -> Receipt:
    """It was not stored, and may be tried again."""
    return Receipt(Status.FAILED, error=error)


def old_ids(unit: Unit, first_new: int | None) -> list[int]:
    """The ids whose fate a receipt must tell: all of them, in the order of the entries; or, when
    the unit is partly new, those below the first new one, ascending."""
    ids = [each for entry in unit.entries for each in entry.sequence_ids]
    return ids if first_new is None else sorted(each for each in ids if each < first_new)


def settled(unit: Unit, first_new: int | None, fates: Sequence[Fate]) -> Receipt:
    """The receipt of a unit that was not stored because of its ids; `fates` follow old_ids."""
    if first_new is not None:
        return Receipt(Status.PARTIAL, fates=tuple(fates), first_new=first_new)
    if any(isinstance(fate, Missing) for fate in fates):
        return Receipt(Status.STALE, fates=tuple(fates))
    position = _same_entry(unit, [fate for fate in fates if isinstance(fate, Found)])
    if position is not None:
        return Receipt(Status.DUPLICATE, position)
    return Receipt(Status.DUPLICATE, fates=tuple(fates))


def _same_entry(unit: Unit, places: Sequence[Found]) -> Position | None:
    """Where a unit is that is one entry, and is in the log as one entry of the same shape."""
    if len(unit.entries) > 1:
        return None
    position = places[0].position
    count = unit.entries[0].messages
    shape = [None] if count is None else list(range(count))
    same = [place.batch_index for place in places] == shape
    return position if same and all(each.position == position for each in places) else None
