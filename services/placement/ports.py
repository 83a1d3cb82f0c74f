"""What placement needs from outside: the keeper, a shelf with the topics, and the other instances.

tests/conformance judges every keeper by the same suite.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from services.errors import DomainError, Kind
from services.placement.core.placing import Holding, Placement


class NotOwner(DomainError):
    """Another instance holds the topic."""

    kind = Kind.IN_USE
    reason = "NOT_OWNER"


class Moving(DomainError):
    """The topic is being moved, and nobody changes it meanwhile."""

    kind = Kind.UNAVAILABLE
    reason = "MOVING"


class PlacementUnavailable(DomainError):
    """The keeper, who alone knows where a topic is, or another instance, does not answer."""

    kind = Kind.UNAVAILABLE
    reason = "PLACEMENT_UNAVAILABLE"


class NotKeeper(DomainError):
    """Another instance keeps the records."""

    kind = Kind.IN_USE
    reason = "NOT_KEEPER"


class InvalidInstance(DomainError):
    """An address is not one of the instances."""

    kind = Kind.INVALID
    reason = "INVALID_INSTANCE"


class TopicNotPlaced(DomainError):
    """The topic was never made."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_NOT_PLACED"


class TopicLost(DomainError):
    """The keeper's record says that a topic was moved here, and it is not here: this instance's
    store is not the one that it was."""

    kind = Kind.DATA_LOSS
    reason = "TOPIC_LOST"


class MoveFailed(DomainError):
    """The topic was not moved: it is where it was, or will be soon."""

    kind = Kind.UNAVAILABLE
    reason = "MOVE_FAILED"


class InvalidMove(DomainError):
    """What an instance was sent of a topic is not whole, or is no more what is to be moved."""

    kind = Kind.INVALID
    reason = "INVALID_MOVE"


class AlreadyHere(DomainError):
    """The topic that is being sent is here."""

    kind = Kind.IN_USE
    reason = "ALREADY_HERE"


Row = Sequence[Any]
"""A row as it is stored: which kind it is, and its values: None, integers, texts and bytes."""


class Keeper(Protocol):
    """The records of all topics.

    Raises:
        PlacementUnavailable, StoreUnavailable: from every method; whether it did what it was asked
            is not known.
        StoreFull: from place.
    """

    async def find(self, topic: str) -> Placement | None:
        """A topic's record; None: it was never made."""
        ...

    async def place(
        self, topic: str, *, version: int, owner: str, move: str
    ) -> tuple[Placement, bool]:
        """Change a record durably, if it has this version (0: there is none). The record then, and
        whether this call changed it.

        Args:
            owner: who holds the topic from now on; "", of a topic that has no record: the instance
                with the fewest topics.
        """
        ...

    async def page(self, *, prefix: str, after: str, limit: int) -> list[Placement]:
        """Records of topics that start so, after one, in the order of their names."""
        ...


class Staging(Protocol):
    """A topic that arrives, and that nobody sees.

    Raises:
        StoreUnavailable, StoreFull: from every method.
        InvalidMove: from add.
    """

    async def add(self, rows: Sequence[Row]) -> None:
        """Keep the next rows."""
        ...

    async def complete(self) -> None:
        """Note, durably, that all are there."""
        ...


class Shelf(Protocol):
    """The topics that an instance holds, and their rows.

    Raises:
        StoreUnavailable, StoreFull: from every method.
    """

    layout: int

    async def holdings(self) -> list[Holding]:
        """All topics that are or were here."""
        ...

    async def strays(self, *, limit: int) -> list[str]:
        """Topics that are in the store, and of which it is not known that they are here."""
        ...

    async def hold(self, holding: Holding) -> None:
        """Note how a topic is held."""
        ...

    async def seal(self, holding: Holding) -> None:
        """Note it, and fence off whoever may still write the topic."""
        ...

    def rows(self, topic: str) -> AsyncIterator[Sequence[Row]]:
        """All rows of a sealed topic, about a MiB at a time."""
        ...

    async def forget(self, holding: Holding) -> None:
        """Note that a topic is gone, and remove it."""
        ...

    async def stage(self, topic: str, move: str, version: int) -> Staging:
        """Begin to take in a topic; what came of it by earlier versions is dropped."""
        ...

    async def staged(self) -> list[Placement]:
        """The topics that came whole, and are not shown; without owners."""
        ...

    async def show(self, holding: Holding, move: str) -> None:
        """Note that a topic is held here; what a move brought ("": none did) is seen from now on,
        all at once. May be done again."""
        ...

    async def drop(self, move: str) -> None:
        """Remove what a move brought."""
        ...


class Peers(Protocol):
    """The other instances.

    Raises:
        PlacementUnavailable: from every method: no answer.
    """

    async def send(
        self, to: str, holding: Holding, layout: int, rows: AsyncIterator[Sequence[Row]]
    ) -> None:
        """Send a sealed topic.

        Raises:
            MoveFailed: it was refused.
        """
        ...

    async def locate(self, at: str, topic: str) -> Placement | None:
        """Ask an instance where a topic is. It takes over what was moved to it, if it did not do so
        before."""
        ...
