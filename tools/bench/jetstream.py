"""NATS JetStream: streams on disk, whose messages have ids to deduplicate by.

Its promise is Seqgate's if it syncs always: a message that it acknowledged is on disk. By default
it syncs every two minutes, and forgets ids after two. It confirms no acknowledgement of a delivery
unless asked one by one, so a round lasts until it reports all of them.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import nats
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, PubAck, StorageType

from seqgate.dev.ports import free_ports
from tools.bench.clients import BURST_MESSAGES, PENDING_MAX, Workload
from tools.bench.rounds import CALLS_MAX, Meter, Round, check, one_round
from tools.bench.servers import server

FETCHED: Final = 500  # messages that a consumer asks for at a time
WITHIN_S: Final = 60.0  # how long one answer may take
MESSAGE_ID: Final = "Nats-Msg-Id"


@asynccontextmanager
async def nats_server(program: str, folder: Path, sync: str) -> AsyncIterator[tuple[str, int]]:
    """A server that syncs its files so often. Yields its address and process id."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    config = folder / f"nats-{port}.conf"
    store = f'{{ store_dir: "{folder / f"nats-{port}"}", sync_interval: "{sync}" }}'
    config.write_text(f'listen: "{address}"\njetstream: {store}\n')
    async with server([program, "-c", str(config)], port, config.with_suffix(".log")) as pid:
        yield address, pid


@dataclass(kw_only=True)
class JetStreamPublish(Workload):
    """New messages, as many as may be pending. The topic is the name of the stream."""

    async def prepare(self) -> None:
        async with self.connected() as stream:
            await stream.add_stream(
                name=self.topic, subjects=[self.topic], storage=StorageType.FILE
            )

    async def round(self, meter: Meter) -> Round:
        async with self.connected() as stream:
            await self.pump(stream, until=0)  # a burst, to warm up
            with meter:
                count = await self.pump(stream, until=time.perf_counter() + self.seconds)
        return meter.round(count)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[JetStreamContext]:
        connection = await nats.connect(f"nats://{self.address}", allow_reconnect=False)
        try:
            yield connection.jetstream(timeout=WITHIN_S, publish_async_max_pending=PENDING_MAX)
        finally:
            await connection.close()

    async def pump(
        self, stream: JetStreamContext, *, until: float, count_max: int = CALLS_MAX
    ) -> int:
        """Send bursts, as much as may be pending, until it is time or enough, and wait until all of
        it is stored."""
        payload, prefix = self.payload, uuid4().hex
        waiting: deque[asyncio.Future[PubAck]] = deque()
        count = 0
        while not count or (count < count_max and time.perf_counter() < until):
            for number in range(count, count + BURST_MESSAGES):
                headers = {MESSAGE_ID: f"{prefix}-{number}"}
                waiting.append(await stream.publish_async(self.topic, payload, headers=headers))
            count += BURST_MESSAGES
            await asyncio.sleep(0)
            while waiting and waiting[0].done():
                _stored(waiting.popleft().result())
        while waiting:
            _stored(await waiting.popleft())
        return count


class JetStreamOneAtATime(JetStreamPublish):
    """Each message waits for the acknowledgement of the one before it."""

    async def round(self, meter: Meter) -> Round:
        payload, prefix, numbers = self.payload, uuid4().hex, itertools.count()
        async with self.connected() as stream:

            async def send() -> None:
                headers = {MESSAGE_ID: f"{prefix}-{next(numbers)}"}
                _stored(await stream.publish(self.topic, payload, headers=headers))

            await send()
            return await one_round(send, self.seconds, meter)


@dataclass(kw_only=True)
class JetStreamReceive(JetStreamPublish):
    """A backlog, by a new consumer that pulls, until each message is acknowledged."""

    messages: int

    async def prepare(self) -> None:
        await super().prepare()
        async with self.connected() as stream:
            self.messages = await self.pump(stream, until=float("inf"), count_max=self.messages)

    async def round(self, meter: Meter) -> Round:
        name = f"consumer-{uuid4().hex}"
        async with self.connected() as stream:
            config = ConsumerConfig(durable_name=name, ack_policy=AckPolicy.EXPLICIT)
            await stream.add_consumer(self.topic, config)
            pulled = await stream.pull_subscribe_bind(name, stream=self.topic)
            with meter:
                count = 0
                while count < self.messages:
                    for message in await pulled.fetch(FETCHED, timeout=WITHIN_S):
                        check(len(message.data), self.payload_bytes)
                        await message.ack()
                        count += 1
                while await _acknowledged(pulled) < count:
                    pass
        check(count, self.messages)
        return meter.round(count)


async def _acknowledged(pulled: JetStreamContext.PullSubscription) -> int:
    """The number of messages from the start that are all acknowledged."""
    floor = (await pulled.consumer_info()).ack_floor
    return floor.stream_seq if floor else 0


def _stored(acknowledged: PubAck) -> None:
    check(bool(acknowledged.duplicate), expected=False)
