"""The state that outlives processes: logs, cursors and dedup state; and its failures.

A faulty layer stands between a service and its store. A call may be slow, be refused, find the
store full, succeed with its reply lost, or take effect only after its caller was told that it
failed. Several processes may share a store. An observer learns of each effect when it takes place.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeVar

from seqgate.services.cursor.adapters.memory import MemoryCursorStore
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.ports import StateUnavailable
from seqgate.services.deduplication import Applied
from seqgate.services.errors import DomainError, StoreFull, StoreUnavailable
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore, MemoryRegister
from seqgate.types import TopicName

T = TypeVar("T")

RETRY_AFTER_S: Final = 0.5
"""The retry delay that errors advise."""

WELL_S: Final = 0.001
"""The longest call of a healthy store."""

WAITING_SHARES: Final = (0.0, 0.2, 1.0)
"""Shares of a healthy store's calls that take time; each process draws one. Calls that take none
halve the cost of a history."""

LATE_MAX_S: Final = 1.5
"""The longest delay of an effect after its call failed."""

COPIES_MAX: Final = 4
"""Older states of Redis kept for a rollback."""

LEDGER_WRITES: Final = frozenset({"create", "take", "append", "trim", "renew", "delete", "left"})
REGISTER_WRITES: Final = frozenset({"beat", "leave", "own", "disown"})
CURSOR_WRITES: Final = frozenset({"create", "change", "delete"})
STATE_WRITES: Final = frozenset(
    {
        "admit",
        "confirm",
        "rollback",
        "keep",
        "record_snapshot",
        "load",
        "forget_producers",
        "forget_topic",
        "set_policy_token",
    }
)


@dataclass
class Trouble:
    """The present behaviour of a store.

    Attributes:
        latency_s: the most that a call takes, half before its effect and half after.
        failing: the share of calls that fail.
        full: writes are refused.
        fail_at: the number of calls until one fails; 0 for none.
    """

    latency_s: float = WELL_S
    failing: float = 0.0
    full: bool = False
    fail_at: int = 0

    def calm(self) -> None:
        """Become healthy."""
        self.latency_s, self.failing, self.full, self.fail_at = WELL_S, 0.0, False, 0


Observe = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with each call's method, arguments and answer, once it took effect."""


class Unsteady:
    """One process's view of a store, with faults. It has all methods of the store's port."""

    def __init__(
        self,
        store: Any,
        trouble: Trouble,
        rng: Random,
        *,
        writes: frozenset[str],
        refusal: Callable[[], DomainError],
        observe: Observe,
        later: Callable[[float, Callable[[], None]], None] | None,
        count: Callable[[str], None],
    ) -> None:
        """`later` delays work, even beyond the end of the process; None if the store has its own
        timing, so that no effect can be late."""
        self._store = store
        self._trouble = trouble
        self._rng = rng
        self._waiting_share = rng.choice(WAITING_SHARES)
        self._writes = writes
        self._refusal = refusal
        self._observe = observe
        self._later = later
        self._count = count

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("topics",) and isinstance(self._store, MemoryStateStore):
            return method

        async def call(*args: Any, **named: Any) -> Any:
            return await self._call(name, method, args, named)

        self.__dict__[name] = call
        return call

    async def _call(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        trouble, rng = self._trouble, self._rng
        await self._takes_time()
        is_write = name in self._writes
        if trouble.full and is_write:
            self._count("store full")
            raise StoreFull("the store is full", retry_after_s=RETRY_AFTER_S)
        if trouble.fail_at:
            trouble.fail_at -= 1
            fails = trouble.fail_at == 0
        else:
            fails = trouble.failing > 0 and rng.random() < trouble.failing

        if name == "trim" and self._later is None:  # it may be interrupted halfway
            self._observe("trim", args, named, None)
        if name == "delete":  # the process may die before it can report
            self._observe("deleting", args, named, None)

        async def do() -> Any:
            answer = await method(*args, **named)
            self._observe(name, args, named, answer)
            return answer

        if not fails:
            answer = await do()
            await self._takes_time()
            return answer
        ways = ["refused"]
        if is_write:
            ways += ["reply lost"] if self._later is None else ["reply lost", "late"]
        way = rng.choice(ways)
        self._count(f"store {way}")
        if way == "reply lost":
            await do()
            await self._takes_time()
        elif way == "late" and self._later is not None:
            self._later(rng.random() * LATE_MAX_S, lambda: _quietly(do))
        raise self._refusal()

    async def _takes_time(self) -> None:
        """Wait for half of a call's latency."""
        latency_s = self._trouble.latency_s
        if latency_s > WELL_S or self._rng.random() < self._waiting_share:
            await asyncio.sleep(self._rng.random() * latency_s / 2)


def _quietly(do: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        inline(do())
    except DomainError:
        return


def inline(awaitable: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        awaitable.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a store must not wait")


def store_refusal() -> DomainError:
    """The error of a failing ledger or cursor store."""
    return StoreUnavailable("the store failed", retry_after_s=RETRY_AFTER_S)


def state_refusal() -> DomainError:
    """The error of a failing state store."""
    return StateUnavailable("Redis does not answer", retry_after_s=RETRY_AFTER_S)


@dataclass
class Stores:
    """All stores, and their faults."""

    ledger: MemoryLedgerStore
    cursor: MemoryCursorStore
    state: "ForgetfulStates"
    register: MemoryRegister
    troubles: dict[str, Trouble] = field(
        default_factory=lambda: {
            "ledger": Trouble(),
            "register": Trouble(),
            "cursor": Trouble(),
            "state": Trouble(),
        }
    )

    def calm(self) -> None:
        """Make all stores healthy."""
        for trouble in self.troubles.values():
            trouble.calm()


class SilentRegister(MemoryRegister):
    """A register that names no owner: ledgers take topics from one another at any time, as if each
    were a zombie."""

    async def owner(self, topic: TopicName) -> str | None:
        return None


class ForgetfulStates(MemoryStateStore):
    """A Redis that can lose data."""

    def __init__(
        self, now_ms: Callable[[], int], token: Callable[[], str], leap: Callable[[], int]
    ) -> None:
        super().__init__(now_ms)
        self._leap = leap
        self._new_token = token
        self._policy_token = token()
        self._copies: deque[Any] = deque(maxlen=COPIES_MAX)

    async def rollback(self, topic: TopicName, *rest: Any) -> Any:
        """Roll back as Redis does: the revision leaps."""
        answer = await super().rollback(topic, *rest)
        if isinstance(answer, Applied):
            state = self.states[topic]
            state.revision += self._leap()
            answer = answer._replace(revision=state.revision)
        return answer

    def copy(self) -> None:
        """Copy the state for a rollback, as a lagging replica holds it."""
        self._copies.append(copy.deepcopy(self.states))

    def go_back(self, rng: Random) -> bool:
        """Restore an older state. The policy token is replaced, since it is never restored."""
        if not self._copies:
            return False
        at = rng.randrange(len(self._copies))
        self.states = copy.deepcopy(self._copies[at])
        self._policy_token = self._new_token()
        return True

    def lose_all(self) -> None:
        """Lose everything."""
        self.states = {}
        self._policy_token = self._new_token()

    def lose_one(self, rng: Random) -> bool:
        """Lose one topic's state."""
        if not self.states:
            return False
        del self.states[rng.choice(sorted(self.states))]
        return True
