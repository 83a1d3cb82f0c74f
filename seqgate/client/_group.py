"""One future for the outcomes of many messages, which costs less than a future for each."""

import asyncio
from typing import Any, Generic, TypeVar

from seqgate.errors import SeqgateError

T = TypeVar("T")


class Group(Generic[T]):
    """Outcomes in the order of their members: results, or errors."""

    def __init__(self, size: int) -> None:
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcomes: list[Any] = [None] * size
        self._pending = set(range(size))
        if not size:
            self._done.set_result(None)

    def members(self) -> "list[Member]":
        return [Member(self, place) for place in range(len(self._outcomes))]

    def settle(self, place: int, outcome: T | SeqgateError) -> None:
        self._outcomes[place] = outcome
        if len(self._pending) == 1 and not self._done.done():
            self._done.set_result(None)
        self._pending.discard(place)  # last: a place that is not pending has been told

    def is_settled(self, place: int) -> bool:
        return place not in self._pending

    async def outcomes(self) -> list[T | SeqgateError]:
        """Wait for all of them. A cancelled wait may be repeated."""
        await asyncio.shield(self._done)
        return list(self._outcomes)

    async def results(self) -> list[T]:
        """Wait for all of them. Raises the first error, in the members' order."""
        outcomes = await self.outcomes()
        for outcome in outcomes:
            if isinstance(outcome, SeqgateError):
                raise outcome
        return outcomes  # type: ignore[return-value]


class Member:
    """In place of a future, where something is to be settled once."""

    __slots__ = ("_group", "_place")

    def __init__(self, group: Group[Any], place: int) -> None:
        self._group = group
        self._place = place

    def done(self) -> bool:
        return self._group.is_settled(self._place)

    def set_result(self, outcome: object) -> None:
        self._group.settle(self._place, outcome)

    def set_exception(self, error: SeqgateError) -> None:
        self._group.settle(self._place, error)

    def exception(self) -> None:
        """Nothing to retrieve: the group has it."""
