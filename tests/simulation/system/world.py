"""One history's world: network, stores, services, applications, and the record of them."""

import asyncio
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NoReturn

import structlog
from grpc import aio
from structlog.typing import EventDict

from seqgate.client import AfterDeadLetter, Client, SubscriptionType, connect
from seqgate.services.cursor.adapters.memory import MemoryCursorStore
from seqgate.services.cursor.adapters.sqlite import open_sqlite_store as open_cursors
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.dispatcher.core.effects import Because, Effect
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.service import Dispatcher
from seqgate.services.dispatcher.shell.performing import Performing
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore, MemoryRegister
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store as open_logs
from seqgate.services.runtime.refusal_log import RefusalLog
from seqgate.types import Position, TopicName
from tests.simulation.ground import EPOCH_S, Network, Process, VirtualLoop
from tests.simulation.system.budgets import HOLDERS, Budgets
from tests.simulation.system.checkers import Checker
from tests.simulation.system.seen import Seen
from tests.simulation.system.services import run_of, target
from tests.simulation.system.stores import (
    CURSOR_WRITES,
    LEDGER_WRITES,
    REGISTER_WRITES,
    STATE_WRITES,
    ForgetfulStates,
    SilentRegister,
    Stores,
    Unsteady,
    inline,
    state_refusal,
    store_refusal,
)
from tests.simulation.system.swarm import Swarm
from tests.simulation.system.workload import Publishing, Subscribed

REDELIVERIES_MAX: Final = 16
"""Redeliveries of a message by default: see SubscriptionOptions."""

PRODUCERS_MAX: Final = 1_000
"""Above the number of producers in any history."""

KEPT_BACK: Final = "seqgate.services.dispatcher.core.delivering.KEPT_BACK_MAX"

LETTERS_REFUSED_MAX_S: Final = 0.3
"""Retries of letters that a reduced limit refuses, in virtual seconds: short, since the letters of
a key are retried one after the other."""

LOOK_S: Final = 0.1
"""The interval of checks inside services, in virtual seconds."""

TOPICS: Final = ("sim/system/a", "sim/system/b")

Main = Callable[[], Coroutine[Any, Any, Any]]


class Unit:
    """A restartable process: an instance of a service, or an application."""

    def __init__(self, world: "World", name: str, main: Main, *, is_service: bool) -> None:
        self.name = name
        self.is_service = is_service
        self.process: Process | None = None
        self.is_wanted = True
        self._world = world
        self._main = main

    def start(self) -> None:
        """Start it, unless it is running."""
        if self.process is not None and self.process.is_alive:
            return
        world = self._world
        world.seen.note(f"start {self.name}")
        process = self.process = Process(self.name)
        process.at_end.append(lambda: world.ended(self, process))
        process.start(self._main)

    def kill(self) -> None:
        """Kill it, if it is running."""
        if self.process is not None:
            self.process.kill()

    @property
    def is_alive(self) -> bool:
        """True while its process runs."""
        return self.process is not None and self.process.is_alive


class World:
    """One history's processes and stores, with the checker that observes them."""

    def __init__(self, swarm: Swarm, loop: VirtualLoop, network: Network) -> None:
        self.swarm = swarm
        self.loop = loop
        self.network = network
        self.rng = Random(f"world {swarm.seed}")
        self.seen = Seen(lambda: loop.now)
        self.checker = Checker(self.seen)
        self.checker.terms.next_delivery = self._next_delivery
        self.checker.terms.clocks_agree = not swarm.fails("clocks")
        # With a tiny KEPT_BACK_MAX, a chunk without room fails until it is dead-lettered, each time
        # only after consumers have kept it until its expiry.
        self.is_cramped = KEPT_BACK in swarm.limits["constants"]
        fails = self.is_cramped or bool(swarm.faults) or swarm.has("limits shrink")
        self.checker.terms.is_exact = not fails
        self.checker.terms.import_s = 0.3 if self.checker.terms.is_exact else 30.0
        self.budgets = Budgets(self.seen)
        self.limits = {part: dict(of) for part, of in swarm.limits.items()}
        if swarm.has("limits shrink"):
            self.limits["dispatcher"]["dead_letter_refused_max_s"] = LETTERS_REFUSED_MAX_S
        self.topics = TOPICS if swarm.has("two topics") else TOPICS[:1]
        self.services: list[Unit] = []
        self.applications: list[Unit] = []
        self.publishings: list[Publishing] = []
        self.subscribeds: list[Subscribed] = []
        self.held: list[tuple[Process, Any]] = []
        """Objects with limits, each with the process that made it."""
        self.silent_streams: list[Process] = []
        """Processes with an open stream that sends nothing, which the service must end."""
        self.is_quiet = False
        self.is_over = False
        self._quiet = asyncio.Event()
        self.failed = asyncio.Event()
        self.seen.at_violation = self.failed.set
        chance = Random(f"stores {swarm.seed}")
        self.stores = Stores(
            MemoryLedgerStore(),
            MemoryCursorStore(),
            ForgetfulStates(
                lambda: int((EPOCH_S + loop.now) * 1000),
                lambda: f"{chance.getrandbits(128):032x}",
                lambda: chance.getrandbits(20),
            ),
            register=SilentRegister() if swarm.ignores_owners else MemoryRegister(),
        )
        for store in ("cursor", "state"):
            latency_s = swarm.one_of(f"{store}_latency_s", self.rng, (0.001,))
            self.stores.troubles[store].latency_s = latency_s
        self.databases: Path | None = None
        """The folder of the ledger's and the cursor service's databases, if on SQLite."""

    # ---- parts

    def start_services(self) -> None:
        """Start every instance of every service."""
        for service, number in self._instances():
            if number == 0:
                hosts = [f"{service}-{each}" for each in range(self.swarm.instances[service])]
                self.network.name(service, hosts)
            unit = Unit(
                self,
                f"{service}-{number}",
                self._main_of(service, number),
                is_service=True,
            )
            self.services.append(unit)
            unit.start()

    def _instances(self) -> Iterator[tuple[str, int]]:
        for service in ("cursor", "dedup", "ledger", "filter", "dispatcher"):
            for number in range(self.swarm.instances[service]):
                yield service, number

    def _main_of(self, service: str, number: int) -> Main:
        async def main() -> None:
            async with AsyncExitStack() as stack:
                store: Any = None
                if self.databases is not None and service in ("ledger", "cursor"):
                    open_ = open_logs if service == "ledger" else open_cursors
                    store = await stack.enter_async_context(
                        open_(self.databases / f"{service}.db", readers=1)
                    )
                elif service == "ledger":
                    store = self.stores.ledger
                elif service == "cursor":
                    process = self.loop.process
                    if self.swarm.fails("clocks"):  # it starts on a machine whose clock is off
                        chance = Random(f"clock {self.swarm.seed} {process.name} {self.loop.now}")
                        process.clock.jump(chance.choice((-3600.0, 0.0, 3600.0)))
                    store = self.stores.cursor.beside(_steady_ms(process))
                await run_of(
                    service,
                    number,
                    limits=self.limits[service],
                    instances=self.swarm.instances,
                    store=self._unsteady(service, store),
                    register=self._register() if service == "ledger" else None,
                )()

        return main

    def _register(self) -> Any:
        """The register of ledgers that divide topics."""
        if self.databases is not None or not self.swarm.divides_topics:
            return None
        return Unsteady(
            self.stores.register,
            self.stores.troubles["register"],
            Random(self.rng.getrandbits(64)),
            writes=REGISTER_WRITES,
            refusal=store_refusal,
            observe=lambda *_: None,
            later=self._later,
            count=self._count,
        )

    def _unsteady(self, service: str, store: Any) -> Any:
        chance = Random(self.rng.getrandbits(64))
        is_memory = self.databases is None or service == "dedup"
        common: dict[str, Any] = {
            "rng": chance,
            "later": self._later if is_memory else None,
            "count": self._count,
        }
        troubles = self.stores.troubles
        match service:
            case "ledger":
                return Unsteady(
                    store,
                    troubles["ledger"],
                    writes=LEDGER_WRITES,
                    refusal=store_refusal,
                    observe=self._at_ledger,
                    **common,
                )
            case "cursor":
                return Unsteady(
                    WatchedCursors(store, self.checker),
                    troubles["cursor"],
                    writes=CURSOR_WRITES,
                    refusal=store_refusal,
                    observe=lambda *_: None,
                    **common,
                )
            case "dedup":
                return Unsteady(
                    self.stores.state,
                    troubles["state"],
                    writes=STATE_WRITES,
                    refusal=state_refusal,
                    observe=self._at_state,
                    **common,
                )
            case _:
                return None

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        with self.loop.world:
            self.loop.call_later(delay_s, do)

    def _count(self, what: str) -> None:
        self.seen.counts[f"fault: {what}"] += 1
        self.seen.note(what)

    def _at_ledger(
        self, method: str, args: tuple[Any, ...], named: dict[str, Any], answer: Any
    ) -> None:
        self.checker.logs.at_ledger(method, args, named, answer)
        if (
            method == "trim"
            and self.databases is None
            and not self.seen.log(args[0]).deleted_ledger
        ):
            entries = self.stores.ledger.logs[args[0]].entries
            first = entries[0].position if entries else None
            listed = inline(self.stores.ledger.trimmed_producers(args[0], limit=PRODUCERS_MAX))
            self.checker.logs.trimmed_are(str(args[0]), first, dict(listed))

    def _at_state(
        self, method: str, args: tuple[Any, ...], named: dict[str, Any], answer: Any
    ) -> None:
        topic = str(args[0]) if args else ""
        state = self.stores.state.states.get(args[0]) if args else None
        if method == "forget_producers":
            for kind in ("purge", "evict"):
                for name, _ in named[kind]:
                    if state is None or name not in state.producers:
                        self.checker.dedup.forgot(
                            topic,
                            name,
                            is_inactive=kind == "purge",
                            connected_s=self._connected_s(topic, name),
                        )
        elif method in ("admit", "confirm", "load") and state is not None:
            self.checker.folds.check(topic, state, is_all=method == "load")

    def _connected_s(self, topic: str, producer: str) -> float:
        """Seconds for which a producer has certainly been connected; negative if it may not be."""
        if self.swarm.faults:
            return -1.0
        since_s = [
            each.open_since_s
            for each in self.publishings
            if (each.topic, each.name) == (topic, producer) and each.open_since_s is not None
        ]
        return self.loop.now - min(since_s) if since_s else -1.0

    # ---- applications

    def connect(self) -> Client:
        """A client of the current process."""
        instances = self.swarm.instances
        return connect(
            target("ledger", instances["ledger"]), target("dispatcher", instances["dispatcher"])
        )

    def run(self, name: str, main: Main) -> Unit:
        """Start an application."""
        unit = Unit(self, name, main, is_service=False)
        self.applications.append(unit)
        unit.start()
        return unit

    def ended(self, unit: Unit, process: Process) -> None:
        """A process ended."""
        failure = process.failure
        self.seen.note(f"ended {unit.name}: {failure!r}")
        if failure is not None and not self.is_over:
            self.seen.violate("SURPRISE", f"{unit.name} ended with {_said(failure)}")
        elif self.is_quiet and unit.is_service and unit.is_wanted and not self.is_over:
            with self.loop.world:  # it was told to stop before the faults ended
                self.loop.call_soon(unit.start)

    def may_be_missing(self, topic: str) -> bool:
        """True if a topic may have been deleted."""
        return self.swarm.has("deletions")

    def superseded(self, application: Publishing, error: Exception) -> None:
        """A producer without ids of its own was fenced: a violation unless a fault, a restart or a
        shared name explains it."""
        is_alone = not self.swarm.has("producers restart") and not self.swarm.has("shared names")
        if not self.swarm.faults and is_alone:
            self.seen.violate("SURPRISE", f"{application.name} is alone, but got {error!r}")

    def describe(self, of: Subscribed) -> None:
        """Record a subscription's options for the checkers."""
        known = self.seen.subscription(of.topic, of.name)
        known.kind = of.type.name
        known.dead_letter_topic = of.options.dead_letter_topic
        known.is_ordered = of.type is not SubscriptionType.SHARED
        known.holds = of.options.after_dead_letter is AfterDeadLetter.HOLD
        known.delays_hold = of.options.delay_holds_key
        known.letters_tail = of.options.after_dead_letter is AfterDeadLetter.TAIL
        if of.ack_timeout_s is None:
            most = of.options.max_redeliveries
            known.redeliveries_max = REDELIVERIES_MAX if most is None else most

    def dispatchers(self) -> Iterator[Dispatcher]:
        """Running dispatchers."""
        for process, holder in self.held:
            if isinstance(holder, Dispatcher) and process.is_alive:
                yield holder

    def _next_delivery(self, topic: str, name: str, epoch: int) -> tuple[int, int] | None:
        for dispatcher in self.dispatchers():
            for live in dispatcher._live.values():
                if (str(live.topic), live.name, live._tenure.epoch) == (topic, name, epoch):
                    return live.epoch, live.machine.next_delivery
        return None

    async def look_inside(self) -> None:
        """Check services' limits and in-flight deliveries, every LOOK_S."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.held = [each for each in self.held if each[0].is_alive]
            for process, holder in self.held:
                self.budgets.look(process.name, holder)
            for dispatcher in self.dispatchers():
                for live in dispatcher._live.values():
                    self.checker.administration.look(live)

    async def until_quiet(self) -> None:
        """Wait until faults have stopped."""
        await self._quiet.wait()

    def calm_down(self) -> None:
        """Declare that faults have stopped."""
        self.seen.note("all is quiet")
        self.is_quiet = True
        self._quiet.set()


class WatchedCursors:
    """A cursor store that reports every change to a checker, within the change."""

    def __init__(self, store: Any, checker: Checker) -> None:
        self._store = store
        self._checker = checker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def change(self, topic: TopicName, name: str, step: Any) -> Any:
        """Change a cursor, and report its new state."""

        def watched(state: CursorState, now_ms: int) -> Any:
            answer = step(state, now_ms)
            self._checker.cursors.changed(topic, name, state)
            return answer

        return await self._store.change(topic, name, watched)

    async def create(self, topic: TopicName, name: str, **how: Any) -> Any:
        """Create a cursor, and report it."""
        answer = await self._store.create(topic, name, **how)
        if answer[1]:
            self._checker.cursors.created(topic, name, how["mark_delete"])
        return answer

    async def delete(self, topic: TopicName, name: str, **how: Any) -> None:
        """Delete a cursor, and report it before and after."""
        self._checker.cursors.deleting(topic, name)
        await self._store.delete(topic, name, **how)
        self._checker.cursors.deleted(topic, name)


def _steady_ms(process: Process) -> Callable[[], int]:
    """The process's SteadyClock, also in what takes effect after the end of the process."""
    offset_s = process.clock.time() - process.clock.monotonic()
    return lambda: int((process.clock.monotonic() + offset_s) * 1000)


def _said(failure: BaseException) -> str:
    if isinstance(failure, BaseExceptionGroup):
        return "; ".join(_said(each) for each in failure.exceptions)
    return f"{failure!r} {_where(failure)}"


@contextmanager
def patched(world: World) -> Iterator[None]:
    """Apply tiny constants, record unexpected errors, and observe the insides of services."""
    with ExitStack() as stack:

        def put(holder: Any, name: str, value: Any) -> None:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)

        for path, value in world.swarm.limits["constants"].items():
            for holder in _holders(path, len(sys.modules)):
                put(holder, path.rpartition(".")[2], value)

        recorded = RefusalLog.record

        def record(self: RefusalLog, event: str, group: Any, **fields: Any) -> None:
            if event == "unexpected":
                error = fields.get("exc_info")
                world.seen.violate("SURPRISE", f"{group}: {error!r} {_where(error)}")
            recorded(self, event, group, **fields)

        put(RefusalLog, "record", record)

        for kind in HOLDERS:
            put(kind, "__init__", _noting(kind, world))

        begun = Tenure.__init__

        def begin(self: Tenure, *args: Any) -> None:
            begun(self, *args)
            world.checker.cursors.taken(*self._names, self.epoch)

        put(Tenure, "__init__", begin)

        noted_passed = Performing._record_passed

        def record_passed(
            self: Performing, positions: Sequence[Position], because: Because
        ) -> None:
            world.checker.cursors.passed(self._topic, self._name, positions, because)
            noted_passed(self, positions, because)

        put(Performing, "_record_passed", record_passed)

        applied = Performing.apply

        def apply(self: Performing, effects: Iterable[Effect]) -> None:
            applied(self, effects)
            for consumer in self.machine.consumers.values():
                if consumer.permits < 0:
                    topic, name = str(self._topic), self._name
                    world.checker.administration.permits(
                        topic, name, consumer.name, consumer.permits
                    )

        put(Performing, "apply", apply)

        _LISTENING.append(world)
        stack.callback(_LISTENING.clear)
        yield


def _noting(kind: type, world: World) -> Callable[..., None]:
    begun = kind.__init__  # type: ignore[misc]

    def begin(self: Any, *args: Any, **named: Any) -> None:
        begun(self, *args, **named)
        if world.budgets.note(self):
            world.held.append((world.loop.process, self))

    return begin


@functools.lru_cache(maxsize=1_000)
def _holders(path: str, modules: int) -> list[Any]:
    """The modules that hold a constant: its own, and those that import it."""
    del modules  # the cache key: search again once more modules are loaded
    own, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(own), name)
    return [
        module
        for of, module in list(sys.modules.items())
        if of.partition(".")[0] == "seqgate" and vars(module).get(name) is value
    ]


_LISTENING: Final[list[World]] = []
"""The world that records log lines; none once a history is over and its remains are discarded."""


def _said_by_service(_: Any, method: str, event: EventDict) -> NoReturn:
    for world in _LISTENING:
        said = " ".join(f"{name}={value}" for name, value in event.items() if name != "exc_info")
        if "INSECURE" not in said:
            world.seen.note(f"{world.loop.process.name} says ({method}) {said}"[:400])
    raise structlog.DropEvent


def _no_logger(*_: Any) -> None:
    """A logger factory whose loggers are never reached."""


@contextmanager
def listening_to_services() -> Iterator[None]:
    """Inside the context, services log into the world's record instead of the console, and
    OpenTelemetry's messages about discarded objects are silenced."""
    before = structlog.get_config()
    libraries = logging.getLogger("opentelemetry")
    level = libraries.level
    structlog.configure(
        processors=[_said_by_service],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=_no_logger,
        cache_logger_on_first_use=False,
    )
    libraries.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        structlog.configure(**before)
        libraries.setLevel(level)


def _where(error: BaseException | None) -> str:
    traceback = getattr(error, "__traceback__", None)
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    return " < ".join(reversed(places))


def channel_to(world: World, service: str) -> aio.Channel:
    """A channel for administrators."""
    from seqgate.client._channel import open_channel

    return open_channel(target(service, world.swarm.instances[service]))
