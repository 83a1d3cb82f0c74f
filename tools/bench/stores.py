"""The stores of logs and cursors side by side: SQLite, one PostgreSQL server, and one whose commits
wait for a standby, too. Their rounds take turns, and SQLite's figure is the limit of the others'.

All databases lie on one disk, and each server flushes to it: a primary and two standbys, each for
itself. Messages are published by one client process.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.client import Client, Producer, connect
from seqgate.dev.stack import POSTGRES
from seqgate.services.cursor.adapters import postgres as cursor_postgres
from seqgate.services.cursor.adapters import sqlite as cursor_sqlite
from seqgate.services.cursor.core.cursor import Caller, CursorState, Range
from seqgate.services.cursor.ports import CursorStore
from seqgate.services.ledger.adapters import postgres as ledger_postgres
from seqgate.services.ledger.adapters import sqlite as ledger_sqlite
from seqgate.services.ledger.ports import LedgerStore
from seqgate.services.ledger.readers import PAGE_BYTES_MAX, PAGE_ENTRIES_MAX
from seqgate.services.ledger.service import READ_BYTES_MAX, READ_RUNS_MAX
from seqgate.services.runtime.postgres import Server
from seqgate.types import Position, TopicName
from tools.bench.bench import Bench
from tools.bench.clients import SERVICES, SHAPES, Publish, workload
from tools.bench.figures import MEDIAN, Measurement, computing, figures
from tools.bench.parts import appender
from tools.bench.rounds import Call, Limit, Repeated, Round, check
from tools.stack.postgres_cluster import NAMES, PostgresCluster

PAYLOAD_BYTES: Final = 100
APPENDED: Final = {1: "append, 1 entry", 100: "append, 100 entries", 1_000: "append, 1,000 entries"}

AT_ONCE: Final = 8  # topics that are appended to at once, cursors that step at once, producers
IN_TURN: Final = 5  # what a call does to each of them, one after the other

READ_BLOCKS: Final = 200  # of the log that is read
BLOCK_ENTRIES: Final = 100

ACKNOWLEDGED: Final = 50  # entries of a step
BEHIND: Final = 20  # steps until the entries in between are acknowledged: all of it in one page

SQLITE: Final = "SQLite"
ALL: Final = "client and servers"


class Store(NamedTuple):
    """A database of logs and cursors. `pids`: its servers; SQLite's is one that is idle."""

    name: str
    ledger: LedgerStore
    cursor: CursorStore
    pids: Mapping[str, int]


class Kind(NamedTuple):
    """Something that each store does: a call of it does so many of `units`; with `computes`, the
    processor time of one, of client and servers together, is a figure."""

    text: str
    units: Mapping[str, float]
    make: Callable[[Store], Awaitable[Call]]
    shares: Sequence[float] = ()
    computes: str = ""


async def stores(bench: Bench) -> list[Measurement]:
    async with _opened(bench) as opened:
        found = await _alone(bench, opened)
    return [*found, *await _published(bench)]


# ---- the stores alone


@asynccontextmanager
async def _opened(bench: Bench) -> AsyncIterator[list[Store]]:
    async with AsyncExitStack() as used:
        name = used.enter_context(tempfile.TemporaryDirectory(dir=bench.stack.folder))
        folder = Path(name)
        single = await used.enter_async_context(bench.another(services=(), on_postgres=True))
        cluster = await used.enter_async_context(PostgresCluster(folder / "cluster"))
        pids = single.pids(POSTGRES)
        found = [
            Store(
                SQLITE,
                await used.enter_async_context(ledger_sqlite.open_sqlite_store(folder / "ledger")),
                await used.enter_async_context(cursor_sqlite.open_sqlite_store(folder / "cursor")),
                pids,
            )
        ]
        of_cluster = {each: pid for each in NAMES if (pid := cluster.pid(each)) is not None}
        for name, url, servers in (
            ("PostgreSQL", single.stack.postgres_url, pids),
            ("PostgreSQL with standbys", cluster.url(cluster.primary), of_cluster),
        ):
            server = Server(url)
            ledger = ledger_postgres.open_postgres_store(server, migrates=True)
            cursor = cursor_postgres.open_postgres_store(server, migrates=True)
            stores = (
                await used.enter_async_context(ledger),
                await used.enter_async_context(cursor),
            )
            found.append(Store(name, *stores, servers))
        yield found


async def _alone(bench: Bench, opened: Sequence[Store]) -> list[Measurement]:
    kinds = [
        Kind(text, {"entries": count}, partial(_appends, count), (MEDIAN,), "append")
        for count, text in APPENDED.items()
    ]
    together, blocks = AT_ONCE * IN_TURN, bench.scaled(READ_BLOCKS)
    units = {"entries": together * BLOCK_ENTRIES}
    text = f"append, {BLOCK_ENTRIES} entries, {AT_ONCE} topics at once"
    kinds.append(Kind(text, units, _appends_at_once))
    units = {"entries": blocks * BLOCK_ENTRIES}
    kinds.append(Kind("read columns", units, partial(_columns, blocks)))
    kinds.append(Kind("read with payloads", units, partial(_payloads, blocks)))
    text = f"step, {ACKNOWLEDGED} acknowledgements, {AT_ONCE} cursors at once"
    kinds.append(Kind(text, {"steps": together}, _steps_at_once, computes="step"))

    cases: list[Repeated] = []
    for kind in kinds:
        for store in opened:
            limits = [] if store.name == SQLITE else [f"{kind.text}, {SQLITE}"]
            case = Repeated(
                f"{kind.text}, {store.name}",
                await kind.make(store),
                units=kind.units,
                shares=kind.shares,
                limits=limits,
                pids=store.pids,
            )
            cases.append(case)
    rounds = await bench.rounds(cases)
    found = figures(cases, rounds, paired=True)
    for kind in (each for each in kinds if each.computes):
        least: Measurement | None = None
        for store in opened:
            own = [_all_of(one, kind) for one in rounds[f"{kind.text}, {store.name}"]]
            name = f"computed: {kind.text}, {store.name}"
            found.append(computing(name, kind.computes, own, ALL, least))
            least = least or found[-1]
    return found


def _all_of(one: Round, kind: Kind) -> Round:
    """A round by what its calls do, with the time of client and servers together."""
    each = kind.units.get(f"{kind.computes}s", 1)
    all_s = sum(seconds for name, seconds in one.cpu_s.items() if name != "others")
    return one._replace(calls=round(one.calls * each), cpu_s={ALL: all_s})


async def _appends(count: int, store: Store) -> Call:
    topic = TopicName.parse(f"bench/stores/{count}")
    return await appender(store.ledger, topic, count, PAYLOAD_BYTES)


async def _appends_at_once(store: Store) -> Call:
    topics = [TopicName.parse(f"bench/stores/at-once-{number}") for number in range(AT_ONCE)]
    return _at_once(
        [await appender(store.ledger, each, BLOCK_ENTRIES, PAYLOAD_BYTES) for each in topics]
    )


def _at_once(calls: Sequence[Call]) -> Call:
    async def in_turn(call: Call) -> None:
        for _ in range(IN_TURN):
            await call()

    async def call() -> None:
        await asyncio.gather(*map(in_turn, calls))

    return call


async def _filled(store: LedgerStore, topic: TopicName, blocks: int) -> Position:
    """Append so many blocks. Returns the last entry's position."""
    append = await appender(store, topic, BLOCK_ENTRIES, PAYLOAD_BYTES)
    for _ in range(blocks):
        await append()
    tail = (await store.get(topic)).tail
    assert tail is not None
    return tail


async def _columns(blocks: int, store: Store) -> Call:
    """What Spark's source asks for, page by page as the service asks for it."""
    topic = TopicName.parse("bench/stores/columns")
    tail = await _filled(store.ledger, topic, blocks)

    async def read() -> None:
        after: Position | None = None
        count = 0
        while after != tail:
            runs = await store.ledger.columns(
                topic,
                after,
                through=tail,
                metadata=False,
                runs_max=READ_RUNS_MAX,
                bytes_max=READ_BYTES_MAX,
            )
            count += sum(run.size for run in runs)
            after = runs[-1].last
        check(count, blocks * BLOCK_ENTRIES)

    return read


async def _payloads(blocks: int, store: Store) -> Call:
    """What readers ask for, page by page as the service asks for it."""
    topic = TopicName.parse("bench/stores/payloads")
    tail = await _filled(store.ledger, topic, blocks)

    async def read() -> None:
        after: Position | None = None
        count = 0
        while after != tail:
            page = await store.ledger.read(
                topic,
                after,
                entries_max=PAGE_ENTRIES_MAX,
                bytes_max=PAGE_BYTES_MAX,
                payloads=True,
            )
            count += len(page)
            after = page[-1].position
        check(count, blocks * BLOCK_ENTRIES)

    return read


async def _steps_at_once(store: Store) -> Call:
    topic = TopicName.parse("bench/stores/steps")
    names = [f"cursor-{number}" for number in range(AT_ONCE)]
    for name in names:
        await store.cursor.create(topic, name, mark_delete=None, properties={})
    return _at_once([_steps(store.cursor, topic, name) for name in names])


def _steps(store: CursorStore, topic: TopicName, name: str) -> Call:
    """A call that acknowledges every other entry of a new stretch, and the entries in between of a
    stretch further back, so that the mark-delete position moves and leaves holes."""
    numbers = itertools.count()

    async def step() -> None:
        number = next(numbers)
        ahead = range(number * ACKNOWLEDGED, (number + 1) * ACKNOWLEDGED, 2)
        behind = range(
            (number - BEHIND) * ACKNOWLEDGED + 1, (number - BEHIND + 1) * ACKNOWLEDGED, 2
        )
        entries = [*(each for each in behind if each > 0), *ahead]
        ranges = [Range(Position(1, each), each) for each in entries]

        def acknowledge(state: CursorState, _: int) -> None:
            state.acknowledge(ranges, (), Caller())

        await store.change(topic, name, acknowledge)

    return step


# ---- published


@dataclass(kw_only=True)
class Divided(Publish):
    """New messages, on a topic for each producer; `ledgers` divide the topics among themselves."""

    ledgers: Sequence[str]
    producers: int = AT_ONCE

    async def prepare(self) -> None:
        for number, each in enumerate(self._each()):
            # Whoever is asked first takes a topic.
            address = self.ledgers[number % len(self.ledgers)]
            async with connect(address) as client, each.producer(client):
                pass

    def all_producers(self, client: Client) -> list[Producer]:
        return [each.producer(client) for each in self._each()]

    def _each(self) -> list["Divided"]:
        topics = (f"{self.topic}-{number}" for number in range(self.producers))
        return [replace(self, topic=topic) for topic in topics]


async def _published(bench: Bench) -> list[Measurement]:
    """Messages of one client process, through the services."""
    async with (
        bench.another(services=SERVICES, on_postgres=True) as one,
        bench.another(services=SERVICES, on_postgres=True, instances=2) as two,
    ):
        cases: list[Divided] = []
        for shape in SHAPES:
            limits: list[Limit | str] = []
            for bench_of, text in (
                (bench, f"a ledger on {SQLITE}"),
                (one, "a ledger on PostgreSQL"),
                (two, "two ledgers on PostgreSQL"),
            ):
                stack = bench_of.stack
                names = stack.instances["ledger"]
                case = workload(
                    bench_of,
                    Divided,
                    f"{shape}, {AT_ONCE} topics, {text}",
                    namespace="bench/stores",
                    ledgers=[stack.address(each) for each in names],
                    limits=limits,
                )
                case.address = stack.target("ledger")
                case.pids = bench_of.pids(*names, "dedup", "redis", *stack.databases)
                cases.append(case)
                limits = limits or [case.name]
        return await bench.measure(cases, paired=True)
