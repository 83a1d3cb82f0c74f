"""RabbitMQ streams: logs whose messages have publishing ids to deduplicate by.

They promise less than Seqgate: a confirmed message is in the memory of the operating system, which
no one syncs, and a consumer stores how far it is, in place of an acknowledgement of each message.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from rstream import Consumer, Producer
from rstream.exceptions import OffsetNotFound
from rstream.utils import RawMessage

from seqgate.dev.ports import free_ports
from tools.bench.clients import BURST_MESSAGES, PENDING_MAX, Workload
from tools.bench.rounds import CALLS_MAX, Meter, Round, check, one_round
from tools.bench.servers import server

STORED: Final = 500  # messages after which a consumer stores its offset
WITHIN_S: Final = 60.0  # how long a backlog may take
CONFIG: Final = """\
listeners.tcp = none
stream.listeners.tcp.1 = 127.0.0.1:{port}
stream.advertised_host = 127.0.0.1
stream.advertised_port = {port}
"""


@asynccontextmanager
async def rabbitmq_server(program: str, epmd: str, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """A server with streams alone, and an own epmd, which Erlang needs and would leave behind.
    Yields its address and process id."""
    port, epmd_port, dist_port = free_ports(3)
    config, plugins = folder / "rabbitmq.conf", folder / "enabled_plugins"
    config.write_text(CONFIG.format(port=port))
    plugins.write_text("[rabbitmq_stream].\n")
    environment = {
        "HOME": str(folder),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_NODENAME": f"bench-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(dist_port),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "config"),
        "RABBITMQ_MNESIA_BASE": str(folder / "rabbitmq"),
        "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "feature_flags"),
        "RABBITMQ_LOG_BASE": str(folder / "rabbitmq-logs"),
    }
    mapper = server([epmd], epmd_port, folder / "epmd.log", environment)
    broker = server([_script(program)], port, folder / "rabbitmq.log", environment)
    async with mapper, broker as pid:
        yield f"127.0.0.1:{port}", pid


def _script(program: str) -> str:
    """The server's own script: Debian's program on PATH becomes another user first."""
    return str(Path(program).resolve().with_name("rabbitmq-server"))


@dataclass(kw_only=True)
class RabbitPublish(Workload):
    """New messages, as many as may be pending. The topic is the name of the stream."""

    async def prepare(self) -> None:
        async with self.connected(Producer) as producer:
            await producer.create_stream(self.topic)

    async def round(self, meter: Meter) -> Round:
        async with self.connected(Producer) as producer:
            await self.pump(producer, until=0)  # a burst, to warm up
            with meter:
                count = await self.pump(producer, until=time.perf_counter() + self.seconds)
        return meter.round(count)

    def connected(self, kind: Any) -> Any:
        host, _, port = self.address.partition(":")
        return kind(host, int(port), username="guest", password="guest")  # noqa: S106 - the default

    async def pump(self, producer: Producer, *, until: float, count_max: int = CALLS_MAX) -> int:
        """Send bursts, as much as may be pending, until it is time or enough, and wait until all of
        it is confirmed."""
        payload, name = self.payload, uuid4().hex
        count = answered = refused = 0
        changed = asyncio.Event()

        def answer(status: Any) -> None:
            nonlocal answered, refused
            answered += 1
            refused += not status.is_confirmed
            changed.set()

        async def wait(pending_max: int) -> None:
            while count - answered > pending_max:
                changed.clear()
                await changed.wait()

        while not count or (count < count_max and time.perf_counter() < until):
            burst = [RawMessage(payload) for _ in range(BURST_MESSAGES)]
            how: dict[str, Any] = {"publisher_name": name, "on_publish_confirm": answer}
            await producer.send_batch(self.topic, burst, **how)
            count += BURST_MESSAGES
            await wait(PENDING_MAX - BURST_MESSAGES)
        await wait(0)
        check(refused, 0)
        return count


class RabbitOneAtATime(RabbitPublish):
    """Each message waits for the confirmation of the one before it."""

    async def round(self, meter: Meter) -> Round:
        payload, name = self.payload, uuid4().hex
        async with self.connected(Producer) as producer:

            async def send() -> None:
                await producer.send_wait(self.topic, RawMessage(payload), publisher_name=name)

            await send()
            return await one_round(send, self.seconds, meter)


@dataclass(kw_only=True)
class RabbitReceive(RabbitPublish):
    """A backlog, by a new consumer, until its offset is stored."""

    messages: int

    async def prepare(self) -> None:
        await super().prepare()
        async with self.connected(Producer) as producer:
            until = float("inf")
            self.messages = await self.pump(producer, until=until, count_max=self.messages)

    async def round(self, meter: Meter) -> Round:
        name = uuid4().hex
        count = 0
        done = asyncio.Event()
        async with self.connected(Consumer) as consumer:

            def take(payload: Any, context: Any) -> Awaitable[None] | None:
                nonlocal count
                check(len(payload), self.payload_bytes)
                count += 1
                if count == self.messages:
                    done.set()
                if count % STORED and count != self.messages:
                    return None
                stored: Awaitable[None] = consumer.store_offset(self.topic, name, context.offset)
                return stored

            with meter:
                async with asyncio.timeout(WITHIN_S):
                    how: dict[str, Any] = {"decoder": bytes, "subscriber_name": name}
                    await consumer.subscribe(self.topic, take, **how)
                    await done.wait()
                    while await self._offset(consumer, name) < self.messages - 1:
                        pass
        check(count, self.messages)
        return meter.round(count)

    async def _offset(self, consumer: Consumer, name: str) -> int:
        """The stored offset of a consumer; -1 if it has none yet."""
        try:
            return int(await consumer.query_offset(self.topic, name))
        except OffsetNotFound:
            return -1
