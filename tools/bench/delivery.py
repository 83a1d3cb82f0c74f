"""Workloads of consumers.

A backlog is delivered to bare streams, which acknowledge each response at once and grant as many
permits again. All streams of a subscription join before any grants permits, so that each key goes
to the same one in every round.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1.filter_pb2 import Filter
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Batching, Compression, Consumer, Reader, Received, connect
from seqgate.client._channel import open_channel
from tools.bench.load import Workload
from tools.bench.opening import PROPERTY, WANTED
from tools.bench.rounds import BenchError, Meter, Round, one_round

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

PAYLOAD_BYTES: Final = 100

BATCH_MESSAGES: Final = 10

PERMITS: Final = 1_000
"""Messages that a consumer takes before it acknowledges: the client's own default."""

PARCEL_MESSAGES: Final = 1_000
"""Messages that are published at a time: whole batches, so that none is cut by a clock."""

WITHIN_S: Final = 60.0  # how long one delivery of a topic may take
EARLIEST: Final = common_pb2.Start(earliest=common_pb2.Earliest())

_subscriptions = itertools.count()


class Backlog(NamedTuple):
    """Messages that are stored before they are delivered. Keys take turns.

    Attributes:
        address: of the ledger.
        property_sets: messages have the property PROPERTY, with this many values, of which every
            other one is wanted, in batches of one key and value; 0: no property, no batches.
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
        batching = Batching(
            messages_max=PARCEL_MESSAGES,
            bytes_max=1024 * 1024,
            delay_s=0.01,
            by_key=True,
            filter_properties=(PROPERTY,),
        )
        batched: dict[str, Any] = {"batching": batching, "compression": Compression.LZ4}
        payloads = Random(0)
        async with (
            connect(self.address) as client,
            client.producer(
                self.topic, name="p", **(batched if self.property_sets else {})
            ) as producer,
        ):
            for first in range(0, self.messages, PARCEL_MESSAGES):
                numbers = range(first, min(first + PARCEL_MESSAGES, self.messages))
                payload = partial(payloads.randbytes, PAYLOAD_BYTES // 2)
                await asyncio.gather(
                    *(
                        producer.send_nowait(payload().hex().encode(), **self._message(number))
                        for number in numbers
                    )
                )

    def _message(self, number: int) -> dict[str, Any]:
        if not self.property_sets:
            return {"key": f"key-{number % self.keys}"}
        batch = number // BATCH_MESSAGES
        value = f"{WANTED if batch % 2 else 'B'}{batch % self.property_sets}"
        return {"key": f"key-{batch % self.keys}", "properties": {PROPERTY: value}}


_filled: set[Backlog] = set()


@dataclass(kw_only=True)
class ReadLog(Workload):
    """The backlog, by a plain read of the log."""

    backlog: Backlog

    async def prepare(self) -> None:
        await self.backlog.fill()

    async def round(self, meter: Meter) -> Round:
        request = ledger_pb2.ReadRequest(topic=self.topic, start=EARLIEST, follow=False)
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
        of_others: count the messages of all consumers but the first, up to half the backlog.
        stuck: the first consumer acknowledges nothing.
    """

    backlog: Backlog
    consumers: int
    expression: str = ""
    share: float = 1
    of_others: bool = False
    stuck: bool = False

    async def prepare(self) -> None:
        await self.backlog.fill()

    async def round(self, meter: Meter) -> Round:
        wanted = round(self.backlog.messages * self.share)
        async with open_channel(self.address) as channel:
            consumers = _Consumers(DispatcherServiceStub(channel), self.topic)
            if self.expression:
                await consumers.filter(self.expression)
            for number in range(self.consumers):
                await consumers.join(number)
            with meter:
                if self.of_others:
                    settled = await consumers.take(wanted // 2, first=1, stuck=self.stuck)
                else:
                    settled = await consumers.take(wanted)
            if self.expression:
                totals = await consumers.totals()
                _check(totals.accepted.messages, wanted)
                _check(totals.rejected.messages, self.backlog.messages - wanted)
        return meter.round(round(settled / self.share))


@dataclass(kw_only=True)
class Arrive(Workload):
    """One message at a time: how long until a reader has it or, with a dispatcher, a consumer."""

    dispatcher: str | None = None

    async def round(self, meter: Meter) -> Round:
        payload = bytes(PAYLOAD_BYTES)
        async with (
            connect(self.address, self.dispatcher) as client,
            client.producer(self.topic) as producer,
        ):
            start = (await producer.send(payload)).message_id
            arriving: Reader | Consumer = client.reader(self.topic, start=start, inclusive=False)
            if self.dispatcher is not None:
                name = f"s{next(_subscriptions)}"
                arriving = client.consumer(self.topic, name, start=start)

            async def send() -> None:
                sent = producer.send_nowait(payload)
                async with asyncio.timeout(WITHIN_S):
                    message = await anext(arriving)
                    if isinstance(arriving, Consumer) and isinstance(message, Received):
                        arriving.ack_nowait(message)
                    await sent

            async with arriving:
                await send()
                return await one_round(send, self.seconds, meter)


class _Consumers:
    """Bare streams of a new subscription that shares by key. They end with their channel."""

    def __init__(self, stub: "DispatcherServiceAsyncStub", topic: str) -> None:
        self._stub = stub
        self._names: dict[str, Any] = {"topic": topic, "subscription": f"s{next(_subscriptions)}"}
        self._streams: list[tuple[Any, int]] = []

    async def filter(self, expression: str) -> None:
        create = pb.CreateSubscriptionRequest(**self._names, start=EARLIEST)
        await self._stub.CreateSubscription(create, timeout=WITHIN_S)
        filters = [Filter(name="bench", version=1, expression=expression)]
        request = pb.SetFiltersRequest(**self._names, filters=filters)
        await self._stub.SetFilters(request, timeout=WITHIN_S)

    async def totals(self) -> Any:
        request = pb.ReportRequest(**self._names)
        return (await self._stub.Report(request, timeout=WITHIN_S)).filtering.filters[0]

    async def join(self, number: int) -> None:
        subscribe = pb.Subscribe(
            **self._names,
            consumer_name=f"consumer-{number}",
            options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_KEY_SHARED),
            create_at=EARLIEST,
        )
        call = self._stub.Consume()
        await call.write(pb.ConsumeRequest(subscribe=subscribe))
        self._streams.append((call, (await _next(call)).subscribed.epoch))

    async def take(self, messages: int, *, first: int = 0, stuck: bool = False) -> int:
        """Have all consumers take messages, until those from number `first` on have this many
        acknowledged. Returns their number. `stuck`: consumer 0 acknowledges none."""
        settled = 0
        done = asyncio.Event()

        async def consume(number: int, call: Any, epoch: int) -> None:
            nonlocal settled
            async for count in _settled(call, epoch, stuck=stuck and number == 0):
                settled += count if number >= first else 0
                if settled >= messages:
                    done.set()

        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(consume(number, *stream))
                for number, stream in enumerate(self._streams)
            ]
            await done.wait()
            for task in tasks:
                task.cancel()
        return settled


async def _settled(call: Any, epoch: int, *, stuck: bool) -> AsyncIterator[int]:
    """Acknowledge a stream's deliveries. Yields the number of messages of each durable
    acknowledgement."""
    await call.write(_permit(PERMITS))
    unsettled: dict[int, int] = {}
    for request_id in itertools.count(1):
        response = await _next(call)
        if response.HasField("settled"):
            yield unsettled.pop(response.settled.request_id)
        elif (deliveries := response.deliveries.deliveries) and not stuck:
            count = sum(each.metadata.num_messages_in_batch or 1 for each in deliveries)
            unsettled[request_id] = count
            settlements = [pb.Settlement(delivery=each.delivery) for each in deliveries]
            acknowledge = pb.Acknowledge(
                request_id=request_id, epoch=epoch, settlements=settlements
            )
            await call.write(pb.ConsumeRequest(acknowledge=acknowledge))
            await call.write(_permit(count))


async def _next(call: Any) -> pb.ConsumeResponse:
    response = await call.read()
    if response is aio.EOF:
        raise BenchError(f"a consumer was cut off: {await call.details()}")
    assert isinstance(response, pb.ConsumeResponse)
    return response


def _permit(messages: int) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(permit=pb.Permit(messages=messages))


def _check(count: int, expected: int) -> None:
    if count != expected:
        raise BenchError(f"{count} messages came, not {expected}")
