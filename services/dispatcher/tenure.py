"""What the holder of a subscription does to its cursor, in the order in which it does it.

Of a call that is not answered nobody knows whether it is still to be done: by a service that stands
still, or a network that delays. Acknowledgements and counts may come as late as they like, since
they only add up. What takes the place of something else may not: an acknowledgement of before a
reset would skip what is to be delivered once more, and properties of before would undo newer ones.
So, after a call that was not answered, the holder goes on with the next epoch of its lease before
it replaces anything: whatever is still under way is fenced then.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from seqgate.types import Position, TopicName
from services.dispatcher.core.effects import Persist
from services.dispatcher.ports import Cursor, Cursors, Part, Run
from services.errors import DomainError, Fenced, Kind

T = TypeVar("T")

_UNKNOWN: Final = frozenset({Kind.UNAVAILABLE, Kind.EXHAUSTED})
"""After these a call may still be done."""


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
        self._doubted = 0  # the last epoch with a call that was not answered
        self._left = 0  # the last one after which the next was asked for
        self._renewing = asyncio.Lock()

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
        return await self._done(lambda epoch: self._cursors.persist(*self._names, what, epoch))

    async def record(self, attempts: Sequence[tuple[Position, int]]) -> None:
        """Make durable how often deliveries failed."""
        await self._done(lambda epoch: self._cursors.record(*self._names, attempts, epoch))

    # ---- what takes the place of something

    async def reset(self, mark_delete: Position | None) -> None:
        """Move the cursor, and forget what is acknowledged beyond, and attempts."""
        await self._without_doubt()
        await self._done(lambda epoch: self._cursors.reset(*self._names, mark_delete, epoch))

    async def set_properties(self, put: Mapping[str, str], remove: Sequence[str]) -> Cursor:
        """Change the cursor's own properties.

        Raises:
            InvalidProperty: a property is too long, or there are too many.
        """
        await self._without_doubt()
        return await self._done(
            lambda epoch: self._cursors.set_properties(*self._names, put, remove, epoch=epoch)
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

    async def _done(self, call: Callable[[int], Awaitable[T]]) -> T:
        while True:
            epoch = self._epoch
            try:
                return await call(epoch)
            except Fenced:
                async with self._renewing:
                    pass  # it may be that this instance goes on with the next one
                if epoch == self._epoch and self._left != epoch:
                    raise
                await self._leave(epoch)
            except DomainError as error:
                if error.kind in _UNKNOWN:
                    self._doubted = max(self._doubted, epoch)
                raise
            except BaseException:
                self._doubted = max(self._doubted, epoch)
                raise

    async def _without_doubt(self) -> None:
        if self._doubted == self._epoch:
            await self._leave(self._epoch)

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
