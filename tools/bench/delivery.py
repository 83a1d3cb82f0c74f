"""Workloads of consumers, which are bare streams: they acknowledge at once what comes, and take as
much again.

All consumers of a subscription are there before any of them takes something, so that the same keys
go to the same ones every time.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1.filter_pb2 import Filter
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Batching, Compression, connect
from seqgate.client._channel import open_channel
from tools.bench.figures import BenchError, Round
from tools.bench.load import Workload
from tools.bench.opening import PROPERTY, WANTED
from tools.bench.worker import Meter

PAYLOAD_BYTES: Final = 100

BATCH_MESSAGES: Final = 10

PERMITS: Final = 1_000
"""Messages that a consumer takes before it acknowledges: the client's own default."""

PARCEL_MESSAGES: Final = 1_000
"""Messages that are published at a time: whole batches, so that none is cut by a clock."""

WITHIN_S: Final = 60.0  # how long one delivery of a topic may take
STUCK: Final = "consumer-0"  # the consumer that acknowledges nothing, where one is stuck
EARLIEST: Final = pb.Start(earliest=pb.Earliest())
LATEST: Final = pb.Start(latest=pb.Latest())

_subscriptions = itertools.count()


class Backlog(NamedTuple):
    """Messages that are stored before they are delivered. Keys take turns.

    Attributes:
        address: of the ledger.
        property_sets: messages have the property PROPERTY, with so many values, of which every
            other one is wanted, and are in batches of one key and value; 0: neither.
    """

    address: str
    topic: str
    messages: int
    keys: int
    property_sets: int = 0

    async def fill(self) -> None:
        """Publish it, unless that is done. The last batch is wanted, so that everything was judged
        when everything wanted has come."""
        if self in _filled:
            return
        _filled.add(self)
        payloads = Random(0)
        batching, compression = None, Compression.NONE
        if self.property_sets:
            batching = Batching(
                messages_max=PARCEL_MESSAGES,
                bytes_max=1024 * 1024,
                delay_s=0.01,
                by_key=True,
                filter_properties=(PROPERTY,),
            )
            compression = Compression.LZ4
        async with (
            connect(self.address) as client,
            client.producer(
                self.topic, name="p", batching=batching, compression=compression
            ) as producer,
        ):
            for first in range(0, self.messages, PARCEL_MESSAGES):
                sending = []
                for number in range(first, min(first + PARCEL_MESSAGES, self.messages)):
                    turn, properties = number, None
                    if self.property_sets:
                        turn = number // BATCH_MESSAGES
                        letter = WANTED if turn % 2 else "B"
                        properties = {PROPERTY: f"{letter}{turn % self.property_sets}"}
                    payload = payloads.randbytes(PAYLOAD_BYTES // 2).hex().encode()
                    key = f"key-{turn % self.keys}"
                    sending.append(producer.send_nowait(payload, key=key, properties=properties))
                await asyncio.gather(*sending)


_filled: set[Backlog] = set()


@dataclass(kw_only=True)
class ReadLog(Workload):
    """The backlog, by a plain read of the log."""

    backlog: Backlog

    async def prepare(self) -> None:
        await self.backlog.fill()

    async def round(self, meter: Meter) -> Round:
        request = ledger_pb2.ReadRequest(
            topic=self.topic, earliest=ledger_pb2.Earliest(), follow=False
        )
        count = 0
        async with open_channel(self.address) as channel:
            stub = LedgerServiceStub(channel)
            with meter:
                async for response in stub.Read(request, timeout=WITHIN_S):
                    count += len(response.entries.entries)
        _check(count, self.backlog.messages)
        return meter.round(count)


@dataclass(kw_only=True)
class Deliver(Workload):
    """The backlog, by the dispatcher at `address` to a new subscription, until all that the filter
    accepts is acknowledged, durably.

    Attributes:
        share: the part of the messages that the filter accepts.
        stuck: whether one consumer is stuck. What counts then is what all others get; None: what
            all get.
    """

    backlog: Backlog
    consumers: int
    expression: str = ""
    share: float = 1
    stuck: bool | None = None

    async def prepare(self) -> None:
        await self.backlog.fill()
        self._others = 0
        if self.stuck:
            async with self._joined() as consumers:
                await consumers.take(self.backlog.messages)
                self._others = consumers.others

    async def round(self, meter: Meter) -> Round:
        messages = self.backlog.messages
        async with self._joined(self.expression, stuck=bool(self.stuck)) as consumers:
            with meter:
                settled = await consumers.take(self._others or round(messages * self.share))
            if self.expression:
                await self._check_filter(consumers)
        if self.stuck is False:
            return meter.round(consumers.others)
        return meter.round(round(settled / self.share))

    async def _check_filter(self, consumers: "Consumers") -> None:
        """See that the filter rejected the rest."""
        messages = self.backlog.messages
        wanted = round(messages * self.share)
        request = pb.ReportRequest(**consumers.names)
        report = await consumers.stub.Report(request, timeout=WITHIN_S)
        totals = report.filtering.filters[0]
        _check(totals.accepted.messages, wanted)
        _check(totals.rejected.messages, messages - wanted)

    @asynccontextmanager
    async def _joined(
        self, expression: str = "", *, stuck: bool = False
    ) -> AsyncIterator["Consumers"]:
        async with open_channel(self.address) as channel:
            consumers = Consumers(DispatcherServiceStub(channel), self.topic, is_stuck=stuck)
            if expression:
                await consumers.filter(expression)
            for number in range(self.consumers):
                await consumers.join(number, EARLIEST)
            yield consumers


@dataclass(kw_only=True)
class Arrive(Workload):
    """One message at a time: how long until a plain read has it or, with a dispatcher, a
    consumer."""

    dispatcher: str = ""

    async def round(self, meter: Meter) -> Round:
        latencies_s: list[float] = []
        payload = bytes(PAYLOAD_BYTES)
        async with connect(self.address) as client, client.producer(self.topic) as producer:
            await producer.send(payload)
            async with aclosing(self._delivered() if self.dispatcher else self._read()) as arriving:
                await anext(arriving)
                until = time.perf_counter() + self.seconds
                with meter:
                    while not latencies_s or time.perf_counter() < until:
                        began = time.perf_counter()
                        sent = producer.send_nowait(payload)
                        async with asyncio.timeout(WITHIN_S):
                            await anext(arriving)
                            latencies_s.append(time.perf_counter() - began)
                            await sent
        return meter.round(len(latencies_s), latencies_s)

    async def _read(self) -> AsyncGenerator[None, None]:
        """When the read has begun, and whenever it gets a message."""
        request = ledger_pb2.ReadRequest(topic=self.topic, latest=ledger_pb2.Latest(), follow=True)
        async with open_channel(self.address) as channel:
            stub = LedgerServiceStub(channel)
            reading: Any = stub.Read(request)
            await reading.read()
            yield
            while True:
                for _ in (await reading.read()).entries.entries:
                    yield

    async def _delivered(self) -> AsyncGenerator[None, None]:
        """When the consumer is there, and whenever it gets a message."""
        async with open_channel(self.dispatcher) as channel:
            consumers = Consumers(DispatcherServiceStub(channel), self.topic)
            await consumers.join(0, LATEST)
            async with aclosing(consumers.arriving()) as arriving:
                async for _ in arriving:
                    yield


class Consumers:
    """Streams of a new subscription that shares by key. They end with their channel."""

    def __init__(self, stub: Any, topic: str, *, is_stuck: bool = False) -> None:
        self.stub = stub
        self.names: dict[str, Any] = {"topic": topic, "subscription": f"s{next(_subscriptions)}"}
        self._is_stuck = is_stuck
        self._streams: dict[str, tuple[Any, int]] = {}
        self._taken = Counter[str]()
        self._settled = 0

    @property
    def others(self) -> int:
        """Messages that all got but the consumer that is stuck, or could be."""
        return self._taken.total() - self._taken[STUCK]

    async def filter(self, expression: str) -> None:
        """Create the subscription, with a filter."""
        create = pb.CreateSubscriptionRequest(**self.names, start=EARLIEST)
        await self.stub.CreateSubscription(create, timeout=WITHIN_S)
        filters = [Filter(name="bench", version=1, expression=expression)]
        request = pb.SetFiltersRequest(**self.names, filters=filters)
        await self.stub.SetFilters(request, timeout=WITHIN_S)

    async def join(self, number: int, start: pb.Start) -> None:
        """One more consumer."""
        name = f"consumer-{number}"
        subscribe = pb.Subscribe(
            **self.names,
            consumer_name=name,
            options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_KEY_SHARED),
            create_at=start,
        )
        call = self.stub.Consume()
        await call.write(pb.ConsumeRequest(subscribe=subscribe))
        self._streams[name] = (call, (await _next(call)).subscribed.epoch)

    async def take(self, messages: int) -> int:
        """Take messages until so many are acknowledged. Returns how many are."""
        done = asyncio.Event()
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._take(name, messages, done)) for name in self._streams]
            await done.wait()
            for task in tasks:
                task.cancel()
        return self._settled

    async def _take(self, name: str, messages: int, done: asyncio.Event) -> None:
        call, epoch = self._streams[name]
        is_stuck = self._is_stuck and name == STUCK
        await call.write(_permit(PERMITS))
        unsettled: dict[int, int] = {}
        for request_id in itertools.count(1):
            response = await _next(call)
            while response.HasField("settled"):
                self._settled += unsettled.pop(response.settled.request_id)
                if self._settled >= messages:
                    done.set()
                response = await _next(call)
            deliveries = response.deliveries.deliveries
            if not deliveries:
                continue
            count = sum(each.metadata.num_messages_in_batch or 1 for each in deliveries)
            self._taken[name] += count
            if not is_stuck:
                unsettled[request_id] = count
                await call.write(_acknowledge(request_id, epoch, deliveries))
                await call.write(_permit(count))

    async def arriving(self) -> AsyncGenerator[None, None]:
        """When the one consumer has begun, and whenever it gets a message."""
        ((call, epoch),) = self._streams.values()
        await call.write(_permit(PERMITS))
        yield
        for request_id in itertools.count(1):
            deliveries = (await _next(call)).deliveries.deliveries
            if deliveries:
                yield
                await call.write(_acknowledge(request_id, epoch, deliveries))
                await call.write(_permit(len(deliveries)))


async def _next(call: Any) -> pb.ConsumeResponse:
    response = await call.read()
    if response is aio.EOF:
        raise BenchError(f"a consumer was cut off: {await call.details()}")
    assert isinstance(response, pb.ConsumeResponse)
    return response


def _permit(messages: int) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(permit=pb.Permit(messages=messages))


def _acknowledge(
    request_id: int, epoch: int, deliveries: Sequence[pb.Delivery]
) -> pb.ConsumeRequest:
    settlements = [pb.Settlement(delivery=each.delivery) for each in deliveries]
    acknowledge = pb.Acknowledge(request_id=request_id, epoch=epoch, settlements=settlements)
    return pb.ConsumeRequest(acknowledge=acknowledge)


def _check(count: int, expected: int) -> None:
    if count != expected:
        raise BenchError(f"{count} messages came, not {expected}")
