"""A subscription with all of its shells, as in the dispatcher, over a log with small pages and
arbitrary delays: for events between a decision and its effect."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2 import Entry, StoredEntry
from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import Options
from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.core.selectors import Placement
from seqgate.services.dispatcher.core.subscription import Ack, Nack
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.ports import (
    Added,
    Ends,
    Fetched,
    LedgerUnavailable,
    Letter,
    Ports,
    TopicNotFound,
)
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.shell.session import Joining, Session
from seqgate.services.errors import Draining
from seqgate.services.runtime.tasks import end
from seqgate.types import Position, TopicName
from tests.simulation.ground import run
from tests.support.delivery_runs import each_delivery

TOPIC = TopicName.parse("test/shells/topic")
NAME = "s"


@dataclass
class Stingy:
    """A seqgate.services.dispatcher.ports.Log that is slow and may fail.

    Attributes:
        page_entries: the most entries of a page.
        fails: the probability that a step of a call fails; most calls have one before their work
            and one after.
        longest_s: the longest delay of a step.
        is_missing: whether the topic does not exist.
        fetched: for each look-up, the number of entries requested and of bytes returned.
    """

    random: Random
    page_entries: int = 500
    fails: float = 0.0
    longest_s: float = 0.0
    is_missing: bool = False
    entries: list[StoredEntry] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, key: bytes, payload: bytes = b"", **metadata: Any) -> Position:
        """Store an entry, and return its position."""
        last = position_of(self.entries[-1]).entry_id if self.entries else -1
        entry = StoredEntry(
            position=common_pb2.Position(ledger_id=1, entry_id=last + 1),
            metadata=entry_pb2.EntryMetadata(
                producer_name="p", sequence_id=last + 1, ordering_key=key, **metadata
            ),
            payload=payload,
        )
        self.entries.append(entry)
        self.grown.set()
        self.grown = asyncio.Event()
        return position_of(entry)

    def trim(self, entries: int) -> None:
        """Remove the first entries of the log."""
        del self.entries[:entries]

    async def _step(self) -> None:
        await asyncio.sleep(self.random.random() * self.longest_s)
        if self.random.random() < self.fails:
            raise LedgerUnavailable("it does not answer", retry_after_s=0.01)

    async def ends(self, topic: TopicName) -> Ends:
        await self._step()
        if self.is_missing:
            raise TopicNotFound("topic not found")
        found = [position_of(each) for each in self.entries]
        return Ends(found[0], found[-1]) if found else Ends(None, None)

    async def follow(
        self, topic: TopicName, after: Position | None
    ) -> AsyncIterator[Sequence[StoredEntry]]:
        while True:
            grown = self.grown
            await self._step()
            page = self._after(after)[: self.random.randint(1, self.page_entries)]
            if page:
                yield page
                after = position_of(page[-1])
            else:
                await grown.wait()

    async def scan(
        self, topic: TopicName, at: Position | None, after: Position | None, limit: int
    ) -> Sequence[StoredEntry]:
        await self._step()
        page = self._after(after) if at is None else self.entries[self._index(at) :]
        found = page[: min(limit, self.random.randint(1, self.page_entries))]
        await self._step()
        return found

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], *, metadata_only: bool = False
    ) -> Sequence[StoredEntry]:
        await self._step()
        return [each for each in self.entries if position_of(each) in positions]

    async def fetch_some(
        self,
        topic: TopicName,
        positions: Sequence[Position],
        *,
        bytes_max: int,
        metadata_only: bool = False,
    ) -> Fetched:
        assert list(positions) == sorted(positions)
        await self._step()
        by_position = {position_of(each): each for each in self.entries}
        found: list[StoredEntry] = []
        size_bytes = answered = 0
        for position in positions[: self.page_entries]:
            entry = by_position.get(position)
            if entry is not None:
                added = entry.metadata.ByteSize() if metadata_only else entry.ByteSize()
                if found and size_bytes + added > bytes_max:
                    break
                size_bytes += added
                found.append(entry)
            answered += 1
        self.fetched.append((len(positions), size_bytes))
        await self._step()
        return Fetched(found, answered)

    async def ledgers(self, topic: TopicName) -> Sequence[Run]:
        return []

    async def last_before(self, topic: TopicName, ledger_id: int) -> Position | None:
        return None

    async def find(self, topic: TopicName, append_ms: int) -> Position | None:
        return None

    async def check(self) -> None:
        pass

    def _index(self, at: Position) -> int:
        return bisect_left(self.entries, at, key=position_of)

    def _after(self, after: Position | None) -> list[StoredEntry]:
        start = 0 if after is None else bisect_right(self.entries, after, key=position_of)
        return self.entries[start:]


class Slow(MemoryCursors):
    """Cursors that are slow, and may fail before or after they take effect."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.fails = 0.0
        self.longest_s = 0.0

    async def _step(self) -> None:
        await asyncio.sleep(self.random.random() * self.longest_s)
        if self.random.random() < self.fails:
            raise CursorsUnavailable("it does not answer", retry_after_s=0.01)

    async def persist(self, *asked: Any) -> Position | None:
        await self._step()
        made = await super().persist(*asked)
        await self._step()
        return made

    async def record(self, *asked: Any) -> None:
        await self._step()
        await super().record(*asked)


class Letters:
    """A seqgate.services.dispatcher.ports.DeadLetters that records positions."""

    def __init__(self) -> None:
        self.put_: list[Position] = []

    async def put(self, letter: Letter) -> bool:
        self.put_.append(position_of(letter.entry))
        return True

    async def add(self, topic: TopicName, entry: Entry) -> Added:
        raise AssertionError(f"nothing is mended in {topic}")


class NoFilters:
    """A seqgate.services.dispatcher.ports.Filters without filters."""

    def line(self) -> Any:
        return self

    async def close(self) -> None:
        pass


class Peer:
    """A consumer, at its end of the stream.

    Attributes:
        session: its stream.
        got: all deliveries received.
        reading: clear it to stop reading deliveries.
    """

    def __init__(self, live: Live, session: Session) -> None:
        self.live = live
        self.session = session
        self.got: list[pb.Delivery] = []
        self.waiting: dict[int, pb.Delivery] = {}
        self.reading = asyncio.Event()
        self.reading.set()
        self.news = asyncio.Event()
        self.has_ended = False
        self.responses: list[pb.ConsumeResponse] = []
        self._requests = 0

    async def run(self) -> None:
        """Read until the stream ends, as the servicer would."""
        reading = asyncio.create_task(self._read())
        failing = asyncio.create_task(self.session.failure())
        try:
            await asyncio.wait({reading, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.has_ended = True
            self.news.set()
            self.live.leave(self.session)
            await end(reading, failing)

    async def _read(self) -> None:
        async with aclosing(self.session.responses()) as responses:
            async for response in responses:
                if response.HasField("deliveries"):
                    await self.reading.wait()
                self.responses.append(response)
                for each in each_delivery(response.deliveries):
                    self.got.append(each)
                    self.waiting[each.delivery] = each
                for number in response.revoked.deliveries:
                    self.waiting.pop(number, None)
                self.news.set()

    def vanish(self) -> None:
        """Disconnect without Leave."""
        self.live.leave(self.session)
        self.session.finish(Draining("it is gone", retry_after_s=0.0))

    def acknowledge(self, *deliveries: pb.Delivery) -> None:
        """Acknowledge deliveries."""
        self._requests += 1
        for each in deliveries:
            self.waiting.pop(each.delivery, None)
        numbers = [each.delivery for each in deliveries]
        self.session.count_request()
        if self.session.joining.delivery_runs:
            self.session.acknowledge(self._requests, [], numbers)
        else:
            self.session.acknowledge(self._requests, [*map(Ack, numbers)], [])

    def negative_acknowledge(self, *deliveries: pb.Delivery, delay_ms: int = 0) -> None:
        """Refuse deliveries, to be redelivered after a delay."""
        self._requests += 1
        for each in deliveries:
            self.waiting.pop(each.delivery, None)
        self.session.count_request()
        items = [Nack(each.delivery, delay_ms) for each in deliveries]
        self.session.negative_acknowledge(self._requests, items)


@dataclass
class Shell:
    """A subscription with its log, cursors and dead letters."""

    log: Stingy
    cursors: Slow
    letters: Letters
    live: Live
    tasks: asyncio.TaskGroup
    config: DispatcherConfig

    async def join(self, **options: Any) -> Peer:
        """Connect a consumer."""
        limits = {
            "key_parked_max": self.config.key_parked_max,
            "consumer_parked_max": self.config.consumer_parked_max,
        }
        joining = Joining(
            "c",
            Options(**(limits | options)),
            Placement.CONSISTENT_HASHING,
            TOPIC,
            (),
            1,
            0,
            delivery_runs=len(self.live.sessions) % 2 == 0,
        )
        peer = Peer(self.live, await self.live.subscribe(joining))
        self.tasks.create_task(peer.run())
        return peer

    async def mark_delete(self) -> Position | None:
        """The durable mark-delete position."""
        return (await self.cursors.get(TOPIC, NAME)).mark_delete


@asynccontextmanager
async def shell(
    random: Random, start: Position | None = None, log: Stingy | None = None, **settings: Any
) -> AsyncIterator[Shell]:
    """A subscription that was just taken. `log` None: an empty one."""
    config = DispatcherConfig(**settings)
    log, cursors, letters = log or Stingy(random), Slow(random), Letters()
    loop = asyncio.get_running_loop()
    ports = Ports(log, cursors, letters, NoFilters(), "me", lambda: int(loop.time() * 1000))
    await cursors.create(TOPIC, NAME, start, {})
    async with asyncio.TaskGroup() as tasks:
        lease = await cursors.acquire(TOPIC, NAME, "me", 1_000_000_000)
        live = Live(config, TOPIC, NAME, lease.epoch, ports, tasks)
        made = Shell(log, cursors, letters, live, tasks, config)
        await live.load()
        try:
            yield made
        finally:
            live.stop(Draining("the test is over", retry_after_s=1.0))
            await live.close(1)


def positions(deliveries: Sequence[pb.Delivery]) -> list[int]:
    """The entry ids of deliveries."""
    return [each.position.entry_id for each in deliveries]


async def until(peer: Peer, wanted: Callable[[], bool]) -> None:
    """Wait until a condition on a consumer holds; fail if its stream ends first."""
    while not wanted():
        assert not peer.has_ended
        peer.news.clear()
        await peer.news.wait()


def virtually(
    main: Callable[[], Coroutine[Any, Any, None]], seed: int = 7, limit_s: float = 60.0
) -> None:
    """Run a coroutine in virtual time, within a limit.

    Raises:
        AssertionError: the first assertion that failed, or the limit passed.
    """

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await main()

    try:
        run(bounded, seed=seed)
    except* AssertionError as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    except* TimeoutError as group:
        raise AssertionError(f"not over after {limit_s} s") from group
