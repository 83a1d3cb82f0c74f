"""A subscription as the dispatcher has it, with all of its shells, over a log that is as slow and
as stingy as one likes: for what happens between a decision and what is done about it."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import Options
from seqgate.services.dispatcher.core.selectors import Placement
from seqgate.services.dispatcher.core.subscription import Ack, Nack
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.ports import (
    Ends,
    Fetched,
    LedgerUnavailable,
    Letter,
    Ports,
    Run,
)
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.shell.session import Joining, Session
from seqgate.services.errors import Draining
from seqgate.services.runtime.tasks import end
from seqgate.types import Position, TopicName
from tests.simulation.ground import run

TOPIC = TopicName.parse("test/shells/topic")
NAME = "s"


@dataclass
class Stingy:
    """See seqgate.services.dispatcher.ports.Log. What is asked of it takes a while, and may fail.

    Attributes:
        page_entries: how many entries a page has at most.
        fails: how likely a call is to fail, at its begin or in its middle.
        longest_s: how long a step of a call takes at most.
        fetched: for each look-up, how many entries it was asked for and how many bytes came.
    """

    random: Random
    page_entries: int = 500
    fails: float = 0.0
    longest_s: float = 0.0
    entries: list[StoredEntry] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, key: bytes, payload: bytes = b"", **metadata: Any) -> Position:
        """Store an entry; where it is."""
        last = position_of(self.entries[-1]).entry_id if self.entries else -1
        entry = StoredEntry(
            position=entry_pb2.Position(ledger_id=1, entry_id=last + 1),
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
        """The log has the first of its entries no more."""
        del self.entries[:entries]

    async def _step(self) -> None:
        await asyncio.sleep(self.random.random() * self.longest_s)
        if self.random.random() < self.fails:
            raise LedgerUnavailable("it does not answer", retry_after_s=0.01)

    async def ends(self, topic: TopicName) -> Ends:
        await self._step()
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
    """Cursors that take a while, and may fail when what they were asked is done, or is not."""

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
    """See seqgate.services.dispatcher.ports.DeadLetters."""

    def __init__(self) -> None:
        self.put_: list[Position] = []

    async def put(self, letter: Letter) -> bool:
        self.put_.append(position_of(letter.entry))
        return True


class NoFilters:
    """See seqgate.services.dispatcher.ports.Filters: there are none."""

    def line(self) -> Any:
        return self

    async def close(self) -> None:
        pass


class Peer:
    """A consumer, as it sees its stream.

    Attributes:
        session: its stream.
        got: what it received.
        reading: cleared while it does not read deliveries.
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
                for each in response.deliveries.deliveries:
                    self.got.append(each)
                    self.waiting[each.delivery] = each
                for number in response.revoked.deliveries:
                    self.waiting.pop(number, None)
                self.news.set()

    def vanish(self) -> None:
        """Be gone without a word."""
        self.live.leave(self.session)
        self.session.finish(Draining("it is gone", retry_after_s=0.0))

    def acknowledge(self, *deliveries: pb.Delivery) -> None:
        """Be done with deliveries."""
        self._requests += 1
        for each in deliveries:
            self.waiting.pop(each.delivery, None)
        items = [Ack(each.delivery) for each in deliveries]
        self.session.count_request()
        self.session.acknowledge(self._requests, items)

    def refuse(self, *deliveries: pb.Delivery, delay_ms: int = 0) -> None:
        """Fail to process deliveries; they come again so soon."""
        self._requests += 1
        for each in deliveries:
            self.waiting.pop(each.delivery, None)
        self.session.count_request()
        items = [Nack(each.delivery, delay_ms) for each in deliveries]
        self.session.refuse(self._requests, items)


@dataclass
class Shell:
    """A subscription and its world."""

    log: Stingy
    cursors: Slow
    letters: Letters
    live: Live
    tasks: asyncio.TaskGroup
    config: DispatcherConfig

    async def join(self, **options: Any) -> Peer:
        """Somebody connects."""
        limits = {
            "key_parked_max": self.config.key_parked_max,
            "consumer_parked_max": self.config.consumer_parked_max,
        }
        joining = Joining(
            "c", Options(**(limits | options)), Placement.CONSISTENT_HASHING, TOPIC, (), 1, 0
        )
        peer = Peer(self.live, await self.live.subscribe(joining))
        self.tasks.create_task(peer.run())
        return peer

    async def mark_delete(self) -> Position | None:
        """Up to where everything is acknowledged, durably."""
        return (await self.cursors.get(TOPIC, NAME)).mark_delete


@asynccontextmanager
async def shell(
    random: Random, start: Position | None = None, **settings: Any
) -> AsyncIterator[Shell]:
    """A subscription that was just taken."""
    config = DispatcherConfig(**settings)
    log, cursors, letters = Stingy(random), Slow(random), Letters()
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
    """The entry ids of what was delivered."""
    return [each.position.entry_id for each in deliveries]


async def until(peer: Peer, wanted: Callable[[], bool]) -> None:
    """Wait until something is true of what a consumer received; its stream goes on as long."""
    while not wanted():
        assert not peer.has_ended
        peer.news.clear()
        await peer.news.wait()


def virtually(
    main: Callable[[], Coroutine[Any, Any, None]], seed: int = 7, limit_s: float = 60.0
) -> None:
    """Run it in virtual time, for so long at most.

    Raises:
        AssertionError: what was the first to fail, or that it does not end.
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
