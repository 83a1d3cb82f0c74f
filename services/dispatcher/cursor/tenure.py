"""What the holder of a subscription does to its cursor, in the order in which it does it.

A call may come late, or again: a service stands still, a network delays, and a proxy repeats what
it sent before, answered or not. Acknowledgements and counts may come as often as they like, since
they only add up. What takes the place of something else may not: an acknowledgement of before a
reset would skip what is to be delivered once more, the reset would take back what was acknowledged
since, and properties of before would undo newer ones. So no epoch of a lease holds two calls of
which the first, coming after the second, would undo it: the holder goes on with the next epoch in
between, and the first is fenced.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, TypeVar

from seqgate.types import Position, TopicName
from services.dispatcher.core.effects import Persist
from services.dispatcher.ports import Cursor, Cursors, Part, Run
from services.errors import Fenced

T = TypeVar("T")


class _Change(Enum):
    """What a call does to a cursor."""

    ADD = auto()
    RESET = auto()
    PUT = auto()


_UNDONE_BY: Final[Mapping[_Change, frozenset[_Change]]] = {
    _Change.ADD: frozenset({_Change.RESET}),
    _Change.RESET: frozenset({_Change.ADD, _Change.RESET}),
    _Change.PUT: frozenset({_Change.PUT}),
}
"""What may not come after each, if it was sent before."""


class Tenure:
    """The cursor of one subscription, as the holder of its lease has it.

    Raises, from every method:
        CursorsUnavailable, CursorsRefused, CursorCorrupt, SubscriptionNotFound: see Cursors.
        Fenced: somebody else took the lease.
    """

    def __init__(
        self, cursors: Cursors, topic: TopicName, name: str, owner: str, epoch: int, lease_ms: int
    ) -> None:
        """`epoch` is the one that the lease was acquired with."""
        self._cursors = cursors
        self._names = topic, name
        self._owner = owner
        self._epoch = epoch
        self._lease_ms = lease_ms
        self._sent: set[_Change] = set()  # under this epoch
        self._left = 0  # the last one after which the next was asked for
        self._renewing = asyncio.Lock()
        self._putting = asyncio.Lock()

    @property
    def epoch(self) -> int:
        """The lease's, by now."""
        return self._epoch

    # ---- reading

    async def get(self) -> Cursor:
        """The cursor."""
        return await self._cursors.get(*self._names)

    def acknowledged(self) -> AsyncIterator[Run | Part]:
        """What is acknowledged beyond the mark-delete position, in order."""
        return self._cursors.acknowledged(*self._names)

    def attempts(self) -> AsyncIterator[tuple[Position, int]]:
        """How often deliveries of entries failed that are not acknowledged."""
        return self._cursors.attempts(*self._names)

    # ---- what adds up

    async def persist(self, what: Persist) -> Position | None:
        """Make acknowledgements durable. Returns the mark-delete position."""
        return await self._changed(
            _Change.ADD, lambda epoch: self._cursors.persist(*self._names, what, epoch)
        )

    async def record(self, attempts: Sequence[tuple[Position, int]]) -> None:
        """Make durable how often deliveries failed."""
        await self._changed(
            _Change.ADD, lambda epoch: self._cursors.record(*self._names, attempts, epoch)
        )

    # ---- what takes the place of something

    async def reset(self, mark_delete: Position | None) -> None:
        """Move the cursor, and forget what is acknowledged beyond, and attempts."""
        await self._changed(
            _Change.RESET, lambda epoch: self._cursors.reset(*self._names, mark_delete, epoch)
        )

    async def set_properties(self, put: Mapping[str, str], remove: Sequence[str]) -> Cursor:
        """Change the cursor's own properties.

        Raises:
            InvalidProperty: a property is too long, or there are too many.
        """
        async with self._putting:  # two at once would fence each other in turn
            return await self._changed(
                _Change.PUT,
                lambda epoch: self._cursors.set_properties(*self._names, put, remove, epoch=epoch),
            )

    # ---- the lease

    async def renew(self) -> None:
        """Keep the lease for longer."""
        await self._done(
            lambda epoch: self._cursors.renew(*self._names, self._owner, epoch, self._lease_ms)
        )

    async def release(self) -> None:
        """Give the lease back."""
        await self._done(lambda epoch: self._cursors.release(*self._names, epoch))

    async def _changed(self, change: _Change, call: Callable[[int], Awaitable[T]]) -> T:
        async def changed(epoch: int) -> T:
            self._sent.add(change)
            return await call(epoch)

        return await self._done(changed, _UNDONE_BY[change])

    async def _done(
        self, call: Callable[[int], Awaitable[T]], undone_by: frozenset[_Change] = frozenset()
    ) -> T:
        while True:
            while self._sent & undone_by:
                await self._leave(self._epoch)
            epoch = self._epoch
            try:
                return await call(epoch)
            except Fenced:
                async with self._renewing:
                    pass  # it may be that this instance goes on with the next one
                if epoch == self._epoch and self._left != epoch:
                    raise
                await self._leave(epoch)

    async def _leave(self, epoch: int) -> None:
        """Go on with the epoch after this one."""
        async with self._renewing:
            if epoch != self._epoch:
                return
            self._left = epoch
            lease = await self._cursors.renew(
                *self._names, self._owner, epoch, self._lease_ms, next_epoch=True
            )
            self._epoch = lease.epoch
            self._sent.clear()
