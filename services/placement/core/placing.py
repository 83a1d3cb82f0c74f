"""Where topics go, and what became of one that was moved.

The keeper's record of a topic has a version, and changes only if that is as expected. So a move is
decided at one place, by one change of one record:

    version  owner
    v        source     sealed there: nobody writes it; its rows are sent to the target
    v + 1    target     it is the target's: the source forgets it
    v + 1    source     or it has stayed: the source goes on, and a late change by this move fails

Every attempt at a move ends with a new version, so each has one of its own.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Placement(NamedTuple):
    """The keeper's record of a topic: who holds it, how often the record changed, and which move
    brought it there ("": none did)."""

    topic: str
    owner: str
    version: int
    move: str


class State(Enum):
    """How an instance holds a topic."""

    HELD = "held"
    """It is here."""
    SEALED = "sealed"
    """It is here, and nobody may write it: a move of it has begun."""
    GONE = "gone"
    """It was here."""


class Holding(NamedTuple):
    """What an instance knows of a topic that is, or was, its own.

    Attributes:
        version: of the keeper's record, when it was last seen.
        move: of a sealed topic, which.
        other: of a sealed topic, where it is to go; of one that is gone, where it went.
    """

    topic: str
    state: State
    version: int
    move: str = ""
    other: str = ""


class Outcome(Enum):
    """What became of a move."""

    MOVED = auto()
    STAYED = auto()
    UNDECIDED = auto()


def outcome(sealed: Holding, record: Placement | None, own: str) -> Outcome:
    """What the keeper's record says of a topic that is sealed at `own`.

    Nobody but who holds a topic changes its record. So where it is somebody else's, and newer, this
    move was made, and perhaps others after it.
    """
    if record is None or record.version <= sealed.version:
        return Outcome.UNDECIDED
    return Outcome.STAYED if record.owner == own else Outcome.MOVED


def fewest(instances: Sequence[str], counts: Mapping[str, int]) -> str:
    """The instance with the fewest topics; of several, the first."""
    return min(instances, key=lambda each: counts.get(each, 0))


class Item(NamedTuple, Generic[T]):
    """Something in a list: by what it is ordered, itself, and how large it is."""

    key: tuple[str, ...]
    value: T
    size_bytes: int


class Page(NamedTuple, Generic[T]):
    """The beginning of what an instance lists, and whether there is more of it."""

    items: Sequence[Item[T]]
    more: bool


def merged(pages: Sequence[Page[T]], *, limit: int, bytes_max: int) -> tuple[list[T], bool]:
    """The beginning of what all list together, in order, and whether there is more.

    Where one has more than it showed, nothing behind the last that it showed can be told. What two
    list, because it is just on its way from one to the other, comes once.
    """
    ends = [page.items[-1].key for page in pages if page.more and page.items]
    horizon = min(ends, default=None)
    found: dict[tuple[str, ...], Item[T]] = {}
    for page in pages:
        for item in page.items:
            found.setdefault(item.key, item)
    values: list[T] = []
    size_bytes = 0
    for key in sorted(found):
        size_bytes += found[key].size_bytes
        beyond = horizon is not None and key > horizon
        if beyond or len(values) == limit or (values and size_bytes > bytes_max):
            return values, True
        values.append(found[key].value)
    return values, horizon is not None
