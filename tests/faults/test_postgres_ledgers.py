"""Three ledgers and three cursor services on one PostgreSQL, as real processes under load: killed,
standing still, drained."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

TOPICS = [f"public/default/divided-{number}" for number in range(12)]
LEDGERS = ("ledger", "ledger-1", "ledger-2")

MOVED_WITHIN_S = 10.0
"""How long a killed ledger's topics may stand still, on a machine that keeps up."""

BUSY_FACTOR = 3
"""A busy machine is slower than that."""


PAUSE_S = 3.0
"""How long a ledger may stand still and keep its topics."""


class Load:
    """A producer for each topic, one message after the other."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.acknowledged: dict[str, list[int]] = {topic: [] for topic in TOPICS}
        self.last_s: dict[str, float] = {}
        self.longest_s = 0.0
        self._is_over = False

    async def publish(self, topic: str) -> None:
        async with self._client.producer(topic, name="p", send_timeout_s=120) as producer:
            number = 0
            self.last_s[topic] = time.monotonic()
            while not self._is_over:
                await producer.send(b"%d" % number, sequence_id=number)
                self.acknowledged[topic].append(number)
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, now_s - self.last_s[topic])
                self.last_s[topic] = now_s
                number += 1
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for topic in TOPICS:
                tasks.create_task(self.publish(topic))
            await self.progress()
            yield
            await self.progress()
            self._is_over = True

    async def progress(self, count: int = 10) -> None:
        """Wait until each topic has some more acknowledged messages."""
        least = {topic: len(its) + count for topic, its in self.acknowledged.items()}
        await eventually(
            lambda: all(len(self.acknowledged[topic]) >= least[topic] for topic in TOPICS),
            "every topic goes on",
            within_s=120,
        )

    async def check(self) -> None:
        """Every acknowledged message is in its topic once, in order, and nothing else is."""
        for topic in TOPICS:
            async with self._client.reader(topic, follow=False) as reader:
                found = [int(message.payload) async for message in reader]
            assert found == list(range(len(found))), topic
            assert len(found) - len(self.acknowledged[topic]) in (0, 1), topic


@asynccontextmanager
async def loaded(folder: Path) -> AsyncIterator[tuple[Stack, Load]]:
    async with (
        Stack(folder, on_postgres=True, instances=3) as stack,
        connect(stack.target("ledger"), dispatcher=stack.target("dispatcher")) as client,
    ):
        load = Load(client)
        async with load.running():
            yield stack, load
        await load.check()


def by_topics(stack: Stack) -> list[str]:
    """The ledgers, the one that took most topics first."""
    return sorted(LEDGERS, key=lambda name: -len(taken(stack, name)))


async def kill(stack: Stack, load: Load) -> None:
    await stack.kill(by_topics(stack)[0])
    await load.progress()
    assert load.longest_s < MOVED_WITHIN_S * BUSY_FACTOR


async def kill_and_start(stack: Stack, load: Load) -> None:
    """Its successor at the same address takes its topics at once."""
    first = by_topics(stack)[0]
    await stack.kill(first)
    await stack.run(first)
    await load.progress()
    assert load.longest_s < MOVED_WITHIN_S * BUSY_FACTOR


async def kill_a_cursor_service(stack: Stack, load: Load) -> None:
    await stack.kill("cursor")
    await load.progress()


async def drain(stack: Stack, load: Load) -> None:
    assert await stack.terminate(by_topics(stack)[0]) == 0
    await load.progress()
    assert load.longest_s < MOVED_WITHIN_S


async def stand_still(stack: Stack, load: Load) -> None:
    """Two of three stand still, and wake up when their topics are others'."""
    standing = by_topics(stack)[:2]
    for name in standing:
        stack.signal(name, SIGSTOP)
    await load.progress()
    for name in standing:
        stack.signal(name, SIGCONT)
    await load.progress(50)


async def pause(stack: Stack, load: Load) -> None:
    """A pause of three seconds moves nothing."""
    standing, *others = by_topics(stack)
    before = [taken(stack, name) for name in others]
    stack.signal(standing, SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    stack.signal(standing, SIGCONT)
    await load.progress()
    assert [taken(stack, name) for name in others] == before


def taken(stack: Stack, name: str) -> list[str]:
    """What a ledger has logged about topics that it took."""
    return [line for line in stack.log(name).read_text().splitlines() if "topic taken" in line]


@pytest.mark.parametrize(
    "act", [kill, kill_and_start, kill_a_cursor_service, drain, stand_still, pause]
)
async def test_nothing_is_lost_or_doubled(
    tmp_path: Path, act: Callable[[Stack, Load], Awaitable[None]]
) -> None:
    async with loaded(tmp_path) as (stack, load):
        await act(stack, load)
