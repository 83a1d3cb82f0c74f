"""What outlives processes: logs, cursors, and the state of deduplication; and how they fail.

Between a service and its store stands a layer of trouble. A call may take its time, be refused,
find the store full, be done while its reply is lost, or be done only after somebody was told that
it failed. Several processes may stand on one store. What the store really does is told to an
observer, at the moment when it is done.
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
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.types import TopicName

T = TypeVar("T")

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait."""

WELL_S: Final = 0.001
"""How long a call of a store that is well takes at most."""

WAITING_SHARES: Final = (0.0, 0.2, 1.0)
"""Of a store that is well, which share of calls takes any time: one is drawn for each process. What
takes none costs a history half as much."""

LATE_MAX_S: Final = 1.5
"""How long after its failure was told a call may still be done."""

COPIES_MAX: Final = 4
"""How many older states of Redis are kept, to go back to."""

LEDGER_WRITES: Final = frozenset({"create", "take", "append", "trim", "renew", "delete", "left"})
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
    """How a store behaves now.

    Attributes:
        latency_s: how long a call takes at most, half before it is done and half after.
        failing: the share of calls that fail in one of the ways.
        full: whether nothing can be written.
        fail_at: in how many calls one fails; 0: none.
    """

    latency_s: float = WELL_S
    failing: float = 0.0
    full: bool = False
    fail_at: int = 0

    def calm(self) -> None:
        """Be a good store from now on."""
        self.latency_s, self.failing, self.full, self.fail_at = WELL_S, 0.0, False, 0


Observe = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Is told of a call that was done: its method, arguments and answer."""


class Unsteady:
    """A store as one process has it: see the module. It has all methods of the store's port."""

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
        """`later` does something after a while, whatever becomes of the process; None: a store that
        takes its own time, of which nothing is done late."""
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

        if name == "trim" and self._later is None:  # it may be cut off in the middle
            self._observe("trim", args, named, None)
        if name == "delete":  # of which nobody may be left to tell
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
        """Half of what a call takes."""
        latency_s = self._trouble.latency_s
        if latency_s > WELL_S or self._rng.random() < self._waiting_share:
            await asyncio.sleep(self._rng.random() * latency_s / 2)


def _quietly(do: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        inline(do())
    except DomainError:
        return


def inline(awaitable: Coroutine[Any, Any, T]) -> T:
    """What comes of something that never really waits."""
    try:
        awaitable.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a store must not wait")


def store_refusal() -> DomainError:
    """What a store of logs or cursors says when it fails."""
    return StoreUnavailable("the store failed", retry_after_s=RETRY_AFTER_S)


def state_refusal() -> DomainError:
    """What a store of states says."""
    return StateUnavailable("Redis does not answer", retry_after_s=RETRY_AFTER_S)


@dataclass
class Stores:
    """All of them, and their troubles."""

    ledger: MemoryLedgerStore
    cursor: MemoryCursorStore
    state: "ForgetfulStates"
    troubles: dict[str, Trouble] = field(
        default_factory=lambda: {"ledger": Trouble(), "cursor": Trouble(), "state": Trouble()}
    )

    def calm(self) -> None:
        """Good stores from now on."""
        for trouble in self.troubles.values():
            trouble.calm()


class ForgetfulStates(MemoryStateStore):
    """A Redis that can lose what it has."""

    def __init__(
        self, now_ms: Callable[[], int], token: Callable[[], str], leap: Callable[[], int]
    ) -> None:
        super().__init__(now_ms)
        self._leap = leap
        self._new_token = token
        self._policy_token = token()
        self._copies: deque[Any] = deque(maxlen=COPIES_MAX)

    async def rollback(self, topic: TopicName, *rest: Any) -> Any:
        """As Redis does it: the revision leaps."""
        answer = await super().rollback(topic, *rest)
        if isinstance(answer, Applied):
            state = self.states[topic]
            state.revision += self._leap()
            answer = answer._replace(revision=state.revision)
        return answer

    def copy(self) -> None:
        """Remember this state, to go back to it: what a lagging replica has."""
        self._copies.append(copy.deepcopy(self.states))

    def go_back(self, rng: Random) -> bool:
        """Be what it was, a while ago. What tells policies apart is lost: it never comes back."""
        if not self._copies:
            return False
        at = rng.randrange(len(self._copies))
        self.states = copy.deepcopy(self._copies[at])
        self._policy_token = self._new_token()
        return True

    def lose_all(self) -> None:
        """Be empty."""
        self.states = {}
        self._policy_token = self._new_token()

    def lose_one(self, rng: Random) -> bool:
        """Evict one topic's key."""
        if not self.states:
            return False
        del self.states[rng.choice(sorted(self.states))]
        return True
