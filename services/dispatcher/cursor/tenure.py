"""The cursor of a subscription, as the holder of its lease changes it, in order.

A call may arrive late, or twice: a service stalls, a network delays, a proxy retries a request.
Acknowledgements and counts only add up, so they may arrive any number of times. Calls that replace
state may not: an acknowledgement from before a reset would skip entries that are to be redelivered,
a late reset would take back acknowledgements made since, and old properties would undo newer ones.
So no epoch of a lease holds two calls of which the first, arriving after the second, would undo it:
the holder takes the next epoch in between, and the first call is fenced.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Final, TypeVar

import structlog

from seqgate.services.dispatcher.core.effects import FailedEntry, Persist
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.ports import (
    Cursor,
    Cursors,
    CursorsRefused,
    Log,
    Part,
    SubscriptionNotFound,
)
from seqgate.services.errors import DomainError, Fenced
from seqgate.types import Position, TopicName

log = structlog.get_logger()

T = TypeVar("T")

RENEWALS: Final = 6
"""Renewals of a lease per term."""

BEFORE_FIRST: Final = Position(0, 0)
"""Stands for the end of an empty log: the log's first entry follows it."""


class _Change(Enum):
    """The kinds of calls that change a cursor."""

    ADD = auto()
    RESET = auto()
    PUT = auto()


_UNDONE_BY: Final[Mapping[_Change, frozenset[_Change]]] = {
    _Change.ADD: frozenset({_Change.RESET}),
    _Change.RESET: frozenset({_Change.ADD, _Change.RESET}),
    _Change.PUT: frozenset({_Change.PUT}),
}
"""By kind: the kinds that, sent before it under the same epoch, would undo it by arriving late."""


class Tenure:
    """The cursor of one subscription, as the holder of its lease changes it.

    Attributes:
        topic, name: the subscription.

    Raises, from every method:
        CursorsUnavailable, CursorsRefused, CursorCorrupt, SubscriptionNotFound: see Cursors.
        Fenced: another instance took the lease.
    """

    def __init__(
        self, cursors: Cursors, topic: TopicName, name: str, owner: str, epoch: int, lease_ms: int
    ) -> None:
        """`epoch` is the epoch of the acquired lease."""
        self.topic = topic
        self.name = name
        self._cursors = cursors
        self._names = topic, name
        self._owner = owner
        self._epoch = epoch
        self._lease_ms = lease_ms
        self._sent: set[_Change] = set()  # under this epoch
        self._left = 0  # the last epoch whose successor was requested
        self._renewing = asyncio.Lock()
        self._putting = asyncio.Lock()

    @property
    def epoch(self) -> int:
        return self._epoch

    # ---- reading

    async def get(self) -> Cursor:
        return await self._cursors.get(*self._names)

    def acknowledged(self) -> AsyncIterator[Run | Part]:
        """The acknowledged entries beyond the mark-delete position, in order."""
        return self._cursors.acknowledged(*self._names)

    def attempts(self) -> AsyncIterator[FailedEntry]:
        """The failed deliveries of unacknowledged entries."""
        return self._cursors.attempts(*self._names)

    # ---- calls that add up

    async def persist(self, what: Persist) -> Position | None:
        """Make acknowledgements durable. Returns the mark-delete position."""
        return await self._changed(
            _Change.ADD, lambda epoch: self._cursors.persist(*self._names, what, epoch)
        )

    async def record(self, failed: Sequence[FailedEntry]) -> None:
        """Make failed deliveries durable."""
        await self._changed(
            _Change.ADD, lambda epoch: self._cursors.record(*self._names, failed, epoch)
        )

    # ---- calls that replace

    async def reset(self, mark_delete: Position | None) -> None:
        """Move the cursor, and forget acknowledgements beyond it and failed deliveries."""
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
        await self._done(
            lambda epoch: self._cursors.renew(*self._names, self._owner, epoch, self._lease_ms)
        )

    async def release(self) -> None:
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
                    pass  # wait if this instance is taking the next epoch
                if epoch == self._epoch and self._left != epoch:
                    raise
                await self._leave(epoch)

    async def _leave(self, epoch: int) -> None:
        """Take the epoch after this one."""
        async with self._renewing:
            if epoch != self._epoch:
                return
            self._left = epoch
            lease = await self._cursors.renew(
                *self._names, self._owner, epoch, self._lease_ms, next_epoch=True
            )
            self._epoch = lease.epoch
            self._sent.clear()


async def keep_lease(
    tenure: Tenure, name: str, lease_s: float, lost_s: float, stop: Callable[[DomainError], None]
) -> None:
    """Renew an acquired lease; once it is lost, or may be, call `stop`. By the loop's clock it is
    held at least until `lost_s`, one term after its request: the term cannot begin before the
    request, however late the response comes."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(lease_s / RENEWALS, max(0.0, lost_s - loop.time())))
        asked_s = loop.time()
        try:
            async with asyncio.timeout_at(lost_s):
                await tenure.renew()
            lost_s = asked_s + lease_s
        except (Fenced, SubscriptionNotFound) as error:
            stop(error)
            return
        except (DomainError, TimeoutError) as error:
            log.warning("lease not renewed", subscription=name, why=str(error))
            if loop.time() >= lost_s:
                stop(Fenced("the lease on the subscription was lost"))
                return


async def persist(tenure: Tenure, log: Log, topic: TopicName, what: Persist) -> Position | None:
    """Make acknowledgements durable. Returns the mark-delete position. May be repeated.

    The cursor may know a succession from when the log began earlier, which a subscription that was
    moved back to before a trim contradicts. The log's first entry reconciles both.

    Raises:
        CursorsRefused: none of this can be made durable, however often it is repeated.
        CursorsUnavailable, Fenced, SubscriptionNotFound, CursorCorrupt, LedgerUnavailable.
    """
    try:
        return await tenure.persist(what)
    except CursorsRefused:
        first = (await log.ends(topic)).first if what.successions else None
        if first is None:
            raise
    told = replace(what, successions=((BEFORE_FIRST, first), *what.successions))
    return await tenure.persist(told)
