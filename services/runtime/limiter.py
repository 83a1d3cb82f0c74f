"""A limit on the calls to one dependency at a time. The others wait, in order of arrival.

    a call ──▶ waiting ──a slot is free──▶ under way ──▶ answered: one more at a time, in a while
                  │                           │
                  │                           └────────▶ failed, or slow: half as many, and a pause
                  └──▶ NotSent: nobody waits any longer, or the dependency answers nobody

More work than a dependency serves makes callers wait, and no call fails: what it cannot serve now
is not sent, and a call's time limit begins when it is sent. A dependency that fails is asked by a
few calls at a time, however many wait, with pauses that grow.
"""

import asyncio
from collections import deque
from enum import Enum, auto
from random import Random
from types import TracebackType
from typing import Final, NamedTuple, Self

from seqgate.services.runtime import deadline

WAITING_MAX: Final = 10_000
"""The most calls that wait for one dependency, a few hundred bytes each besides their requests."""

AT_ONCE_MIN: Final = 4
"""The number of calls at a time to a dependency that fails."""

URGENT_AT_ONCE: Final = 64
"""The most urgent calls at a time, in slots of their own: they must not wait behind all others. It
does not fall with failures."""

SLOW_SHARE: Final = 0.25
"""An answer that takes more than this share of its time limit is slow: with more calls at a time,
they would fail."""

WATCH_S: Final = 0.25
"""The interval at which waits are looked at, while there are any."""

PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
"""The longest pause after a failure: a random part of a time that starts at PAUSE_FIRST_S and
doubles with each further failure."""


class NotSent(Exception):
    """A call was not sent, and nothing was done.

    Attributes:
        is_silent: whether the dependency answered no call for as long as one may take.
    """

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


class Concurrency:
    """How many calls may be under way at a time: at most `most`, fewer while some fail or are slow.

    Calls that were under way together are one sign of overload, however many of them fail.
    """

    def __init__(self, most: int) -> None:
        self.at_once = most
        self.failures = 0
        """The number of signs of failure since the last answer."""
        self._most = most
        self._least = min(AT_ONCE_MIN, most)
        self._begun = self._reduced_at = 0
        self._answers = 0

    def begin(self) -> int:
        """Number a call that begins."""
        self._begun += 1
        return self._begun

    def answered(self) -> None:
        """A call was answered in time. After as many as are under way at a time, one more is."""
        self.failures = 0
        self._answers += 1
        if self._answers >= self.at_once and self.at_once < self._most:
            self.at_once += 1
            self._answers = 0

    def slowed(self, number: int) -> bool:
        """The call of this number failed, or was slow. Returns whether it is a further sign."""
        if number <= self._reduced_at:
            return False
        self.at_once = max(self._least, self.at_once // 2)
        self._reduced_at, self._answers = self._begun, 0
        return True


class Limiter:
    """See the module.

    Attributes:
        waiting: the number of calls that wait.
        under_way: the number of calls that are under way, besides urgent ones.
    """

    def __init__(self, most: int, *, adapts: bool = True, random: Random | None = None) -> None:
        """
        Args:
            most: the most calls at a time, besides URGENT_AT_ONCE urgent ones.
            adapts: whether fewer are sent while calls fail or are slow.
        """
        self.waiting = 0
        self.under_way = 0
        self._urgent_under_way = 0
        self._concurrency = Concurrency(most)
        self._adapts = adapts
        self._random = random or Random()
        self._urgent: deque[_Queued] = deque()
        self._others: deque[_Queued] = deque()
        self._answered_s = float("-inf")
        self._pausing: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None

    @property
    def at_once(self) -> int:
        """The most calls at a time now."""
        return self._concurrency.at_once

    def slot(self, limit_s: float, *, urgent: bool = False) -> "Slot":
        """Wait for a slot, and hold it inside the context.

        Args:
            limit_s: the time limit of the call, which begins inside the context.
            urgent: has a slot of its own, as for leases.

        Raises:
            NotSent: the deadline of the call being served has passed; or the dependency has
                answered no call for `limit_s`; or WAITING_MAX calls wait.
        """
        return Slot(self, limit_s, urgent=urgent)

    async def enter(self, slot: "Slot") -> None:
        queue = self._urgent if slot.urgent else self._others
        self._serve()
        if not self._is_waited_for(queue) and self._has_room(slot.urgent):
            self._count(1, slot.urgent)
        else:
            await self._wait(slot, queue)
        slot.number = self._concurrency.begin()
        slot.began_s = asyncio.get_running_loop().time()

    def leave(self, slot: "Slot") -> None:
        now_s = asyncio.get_running_loop().time()
        self._count(-1, slot.urgent)
        if slot.outcome is Outcome.ANSWERED:
            self._answered_s = now_s
        if self._adapts:
            self._adapt(slot, now_s - slot.began_s)
        self._serve()

    def _adapt(self, slot: "Slot", took_s: float) -> None:
        match slot.outcome:
            case Outcome.ANSWERED if took_s <= SLOW_SHARE * slot.limit_s:
                self._concurrency.answered()
            case Outcome.ANSWERED:
                self._concurrency.slowed(slot.number)
            case Outcome.FAILED if self._concurrency.slowed(slot.number):
                self._pause()

    async def _wait(self, slot: "Slot", queue: "deque[_Queued]") -> None:
        if self.waiting >= WAITING_MAX:
            raise NotSent(f"too many calls wait (limit {WAITING_MAX:,})")
        loop = asyncio.get_running_loop()
        turn = _Queued(loop.create_future(), loop.time(), slot.limit_s)
        queue.append(turn)
        self.waiting += 1
        if self._watching is None:
            self._watching = loop.call_later(WATCH_S, self._watch)
        try:
            async with asyncio.timeout(deadline.remaining_s(None)):
                await turn.come
        except BaseException as error:
            if turn.has_come:
                self._count(-1, slot.urgent)
                self._serve()
            turn.come.cancel()
            if isinstance(error, TimeoutError):
                raise NotSent("the caller's deadline passed while it waited") from error
            raise
        finally:
            self.waiting -= 1

    def _watch(self) -> None:
        """End the waits during which the dependency answered nobody for the time of a call."""
        loop = asyncio.get_running_loop()
        for turn in [*self._urgent, *self._others]:
            silent_s = loop.time() - max(turn.began_s, self._answered_s)
            if silent_s >= turn.limit_s and not turn.come.done():
                turn.come.set_exception(
                    NotSent(f"no call was answered in {turn.limit_s:g} s", is_silent=True)
                )
        self._watching = loop.call_later(WATCH_S, self._watch) if self.waiting else None

    def _pause(self) -> None:
        longest_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(self._concurrency.failures, 10))
        self._concurrency.failures += 1
        if self._pausing is not None:
            self._pausing.cancel()
        pause_s = self._random.uniform(0, longest_s)
        self._pausing = asyncio.get_running_loop().call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._pausing = None
        self._serve()

    def _serve(self) -> None:
        """Give the free slots to those that wait."""
        for queue, is_urgent in ((self._urgent, True), (self._others, False)):
            while self._is_waited_for(queue) and self._has_room(is_urgent):
                self._count(1, is_urgent)
                queue.popleft().come.set_result(None)

    def _is_waited_for(self, queue: "deque[_Queued]") -> bool:
        while queue and queue[0].come.done():  # its caller gave up
            queue.popleft()
        return bool(queue)

    def _has_room(self, is_urgent: bool) -> bool:  # noqa: FBT001
        if self._pausing is not None:
            return False
        if is_urgent:
            return self._urgent_under_way < URGENT_AT_ONCE
        return self.under_way < self.at_once

    def _count(self, change: int, is_urgent: bool) -> None:  # noqa: FBT001
        if is_urgent:
            self._urgent_under_way += change
        else:
            self.under_way += change


class _Queued(NamedTuple):
    """A call that waits since `began_s`, with this time limit once it is sent."""

    come: "asyncio.Future[None]"
    began_s: float
    limit_s: float

    @property
    def has_come(self) -> bool:
        come = self.come
        return come.done() and not come.cancelled() and come.exception() is None


class Outcome(Enum):
    """What a call says about its dependency."""

    ANSWERED = auto()
    """It serves, or refuses this call alone."""
    FAILED = auto()
    """It does not answer, or is overloaded."""
    UNKNOWN = auto()
    """Nothing: the caller gave up first."""


class Slot:
    """One call's slot: see Limiter.slot.

    Attributes:
        outcome: ANSWERED, unless the caller sets it, or is cancelled.
    """

    __slots__ = ("_limiter", "began_s", "limit_s", "number", "outcome", "urgent")

    def __init__(self, limiter: Limiter, limit_s: float, *, urgent: bool) -> None:
        self._limiter = limiter
        self.limit_s = limit_s
        self.urgent = urgent
        self.number = 0
        self.began_s = 0.0
        self.outcome = Outcome.ANSWERED

    async def __aenter__(self) -> Self:
        await self._limiter.enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self.outcome = Outcome.UNKNOWN
        self._limiter.leave(self)
