"""Subscriptions: the rate of delivery, and the cost of a stuck consumer for the others.

Beside a plain read of the log, and a stream on which a dispatcher that only answers sends the same.

A backlog is delivered to bare streams, which acknowledge each response at once and grant as many
permits again. All streams of a subscription join before any grants permits, so that each key goes
to the same one in every round.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
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
from tools.bench.bench import Bench
from tools.bench.clients import Workload
from tools.bench.figures import MEDIAN, Measurement
from tools.bench.opening import PROPERTY, WANTED
from tools.bench.rounds import BenchError, Meter, Round, check, one_round

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

MESSAGES: Final = 20_000  # of a backlog
PAYLOAD_BYTES: Final = 100
BATCH_MESSAGES: Final = 10

USUAL_KEYS: Final = 10_000
MANY_KEYS: Final = 1_000_000  # more than there are messages
SHAPES: Final = (
    *((consumers, USUAL_KEYS) for consumers in (1, 4, 16)),
    *((4, keys) for keys in (10, MANY_KEYS)),
)
"""Consumers, and the keys that they share."""

STUCK_SHAPE: Final = (4, USUAL_KEYS)  # where one consumer is stuck

PERMITS: Final = 1_000
"""Messages that a consumer takes before it acknowledges: the client's own default."""

PARCEL_MESSAGES: Final = 1_000
"""Messages that are published at a time: whole batches, so that none is cut by a clock."""

WITHIN_S: Final = 60.0  # how long one delivery of a topic may take
EARLIEST: Final = common_pb2.Start(earliest=common_pb2.Earliest())

_subscriptions = itertools.count()


async def end_to_end(bench: Bench) -> list[Measurement]:
    plain = ReadLog(
        name="plain read of the log, metadata and payloads",
        address=bench.address("ledger"),
        topic=_topic(USUAL_KEYS),
        pids=bench.pids("dispatcher", "ledger", "cursor"),
        backlog=_backlog(bench, USUAL_KEYS, "ledger"),
    )
    workloads: list[Workload] = [plain]
    for shape in SHAPES:
        answered = _deliver(bench, f"bare stream, {_noun(*shape)}", *shape, null=True)
        delivered = _deliver(bench, f"delivered, {_noun(*shape)}", *shape)
        delivered.limits = [plain.name, answered.name]
        workloads += [answered, delivered]

    noun = f"delivered, what {STUCK_SHAPE[0] - 1} of {_noun(*STUCK_SHAPE)} get"
    none = _deliver(bench, f"{noun}, none stuck", *STUCK_SHAPE)
    one = _deliver(bench, f"{noun}, one stuck", *STUCK_SHAPE)
    none.of_others = one.of_others = one.stuck = True
    one.limits = [none.name]

    followed = Arrive(
        name="published until a plain read has it",
        address=bench.address("ledger"),
        topic=_topic(0),
        units={},
        shares=(MEDIAN, 0.99),
    )
    arrived = replace(
        followed,
        name="published until it is delivered",
        dispatcher=bench.address("dispatcher"),
        limits=[followed.name],
    )
    return await bench.measure_client([*workloads, none, one, followed, arrived])


def _deliver(
    bench: Bench, name: str, consumers: int, keys: int, *, null: bool = False
) -> "Deliver":
    return Deliver(
        name=name,
        address=bench.address("null" if null else "dispatcher"),
        topic=_topic(keys),
        pids=bench.pids("dispatcher", "ledger", "cursor"),
        backlog=_backlog(bench, keys, "null" if null else "ledger"),
        consumers=consumers,
    )


def _backlog(bench: Bench, keys: int, ledger: str) -> "Backlog":
    return Backlog(bench.address(ledger), _topic(keys), bench.scaled(MESSAGES), keys)


def _topic(keys: int) -> str:
    return f"bench/dispatch/{keys}-keys"


def _noun(consumers: int, keys: int) -> str:
    return f"{consumers} consumer{'s' if consumers > 1 else ''}, {keys:,} keys"


# ---- workloads


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
        payload = partial(Random(0).randbytes, PAYLOAD_BYTES // 2)
        async with (
            connect(self.address) as client,
            client.producer(
                self.topic, name="p", **(batched if self.property_sets else {})
            ) as producer,
        ):
            for first in range(0, self.messages, PARCEL_MESSAGES):
                sends = [
                    producer.send_nowait(payload().hex().encode(), **self._message(number))
                    for number in range(first, min(first + PARCEL_MESSAGES, self.messages))
                ]
                await asyncio.gather(*sends)

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
        check(count, self.backlog.messages)
        return meter.round(count)


@dataclass(kw_only=True)
class Deliver(ReadLog):
    """The backlog, by the dispatcher at `address` to a new subscription that shares by key, until
    all that the filter accepts is acknowledged, durably.

    Attributes:
        share: the part of the messages that the filter accepts.
        of_others: count the messages of all consumers but the first, up to half the backlog.
        stuck: the first consumer acknowledges nothing.
    """

    consumers: int
    expression: str = ""
    share: float = 1
    of_others: bool = False
    stuck: bool = False

    async def round(self, meter: Meter) -> Round:
        wanted = round(self.backlog.messages * self.share)
        names: dict[str, Any] = {"topic": self.topic, "subscription": f"s{next(_subscriptions)}"}
        async with open_channel(self.address) as channel:
            stub = DispatcherServiceStub(channel)
            if self.expression:
                create = pb.CreateSubscriptionRequest(**names, start=EARLIEST)
                await stub.CreateSubscription(create, timeout=WITHIN_S)
                filters = [Filter(name="bench", version=1, expression=self.expression)]
                chain = pb.SetFiltersRequest(**names, filters=filters)
                await stub.SetFilters(chain, timeout=WITHIN_S)
            streams = [await _joined(stub, names, number) for number in range(self.consumers)]
            with meter:
                settled = await self._take(streams, wanted // 2 if self.of_others else wanted)
            if self.expression:
                report = await stub.Report(pb.ReportRequest(**names), timeout=WITHIN_S)
                totals = report.filtering.filters[0]
                check(totals.accepted.messages, wanted)
                check(totals.rejected.messages, self.backlog.messages - wanted)
        return meter.round(round(settled / self.share))

    async def _take(self, streams: list["Stream"], messages: int) -> int:
        """Have all consumers take messages, until those that count have this many acknowledged.
        Returns their number."""
        settled = 0
        done = asyncio.Event()

        async def consume(number: int, stream: Stream) -> None:
            nonlocal settled
            async for count in _settled(stream, stuck=self.stuck and number == 0):
                settled += 0 if self.of_others and number == 0 else count
                if settled >= messages:
                    done.set()

        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume(*each)) for each in enumerate(streams)]
            await done.wait()
            for task in tasks:
                task.cancel()
        return settled


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


# ---- a consumer's bare stream, which ends with its channel


class Stream(NamedTuple):
    call: Any
    epoch: int


async def _joined(stub: "DispatcherServiceAsyncStub", names: dict[str, Any], number: int) -> Stream:
    subscribe = pb.Subscribe(
        **names,
        consumer_name=f"consumer-{number}",
        options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_KEY_SHARED),
        create_at=EARLIEST,
    )
    call = stub.Consume()
    await call.write(pb.ConsumeRequest(subscribe=subscribe))
    return Stream(call, (await _next(call)).subscribed.epoch)


async def _settled(stream: Stream, *, stuck: bool) -> AsyncIterator[int]:
    """Acknowledge a stream's deliveries. Yields the number of messages of each durable
    acknowledgement."""
    call, epoch = stream
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
