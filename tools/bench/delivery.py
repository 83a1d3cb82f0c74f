"""Subscriptions: the rate of delivery, the cost of a stuck consumer to others, and that of filters.

A backlog is delivered to bare streams, which acknowledge each response at once and grant as many
permits again. All streams of a subscription join before any grants permits, so that each key goes
to the same one in every round.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1.filter_pb2 import Filter
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Compression, connect
from seqgate.client._channel import open_channel
from tools.bench import machines
from tools.bench.bench import Bench
from tools.bench.clients import BATCHING, Workload
from tools.bench.figures import MEDIAN, Measurement, computing, figures
from tools.bench.opening import ANSWER, PROPERTY, WANTED
from tools.bench.rounds import BenchError, Meter, Round, check, one_round

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

L = TypeVar("L", bound="ReadLog")

MESSAGES: Final = 20_000  # of a backlog
SHAPES: Final = ((1, 10_000), (4, 10_000), (16, 10_000), (4, 10), (4, 1_000_000))
"""Consumers, and the keys that they share; a million are more than there are messages."""

BATCHES: Final = 4_000  # of a backlog of batches, each of one key
BATCH_MESSAGES: Final = 10
BATCHES_SHAPE: Final = (4, 1_000)
BY_KEY: Final = replace(BATCHING, by_key=True, filter_properties=(PROPERTY,))
FEW: Final = 10  # property sets, where there are few
TURNS: Final = 5  # rounds of subscriptions with filters, where they are as long as usual

PERMITS: Final = 1_000  # that a consumer grants at first: the client's own default
WITHIN_S: Final = 60.0  # how long one delivery of a topic may take
EARLIEST: Final = common_pb2.Start(earliest=common_pb2.Earliest())

_subscriptions = itertools.count()


# ---- without filters, beside a plain read of the log, and a stream on which a dispatcher that only
# answers sends the same


async def dispatch(bench: Bench) -> list[Measurement]:
    found = await machines.machine(bench)
    plain = _of_backlog(bench, ReadLog, "plain read of the log, metadata and payloads", 10_000)
    cases: list[Workload] = [plain]
    for consumers, keys in SHAPES:
        noun = f"{consumers} consumer{'s' if consumers > 1 else ''}, {keys:,} keys"
        bare, name = f"bare stream, {noun}", f"delivered, {noun}"
        cases.append(_of_backlog(bench, Deliver, bare, keys, null=True, consumers=consumers))
        limits = [plain.name, bare]
        cases.append(_of_backlog(bench, Deliver, name, keys, consumers=consumers, limits=limits))

    noun = "delivered, what 3 of 4 consumers, 10,000 keys get"
    none, stuck = f"{noun}, none stuck", f"{noun}, one stuck"
    others: dict[str, Any] = {"consumers": 4, "of_others": True}
    cases.append(_of_backlog(bench, Deliver, none, 10_000, **others))
    cases.append(_of_backlog(bench, Deliver, stuck, 10_000, **others, stuck=True, limits=[none]))

    followed = Arrive(
        "published until a plain read has it",
        address=bench.address("ledger"),
        dispatcher=bench.address("dispatcher"),
        topic="bench/dispatch/arriving",
        reads=True,
        units={},
        shares=(MEDIAN, 0.99),
    )
    arrived = replace(
        followed,
        name="published until it is delivered",
        reads=False,
        limits=[followed.name],
    )
    return [*found, *await bench.measure([*cases, followed, arrived])]


def _of_backlog(
    bench: Bench, kind: type[L], name: str, keys: int, *, null: bool = False, **more: Any
) -> L:
    service = "dispatcher" if kind is Deliver else "ledger"
    return kind(
        name,
        address=bench.address("null" if null else service),
        ledger=bench.address("null" if null else "ledger"),
        topic=f"bench/dispatch/{keys}-keys",
        messages=bench.scaled(MESSAGES),
        keys=keys,
        pids=bench.pids("dispatcher", "ledger", "cursor"),
        **more,
    )


# ---- with filters: what judging costs, and what opening batches would


class Way(NamedTuple):
    """A filter that accepts a share of the messages, and the way that it is held against."""

    name: str
    expression: str = ""
    limit: str = ""
    share: float = 1


NONE: Final = Way("delivered, no filter")
ALL: Final = Way("delivered, all accepted", f"properties.{PROPERTY} != 'none'", NONE.name)
HALF: Final = Way(
    "judged, half rejected", f"properties.{PROPERTY}.startsWith('{WANTED}')", NONE.name, 0.5
)
OPENED: Final = (
    Way(f"{ALL.name}, batches opened", f"properties.{ANSWER} != ''", ALL.name),
    Way(f"{HALF.name}, batches opened", f"properties.{ANSWER} == 'all'", HALF.name, 0.5),
)


async def filtered(bench: Bench) -> list[Measurement]:
    """Batches in each way, of few and of many property sets."""
    targets = {
        f"SEQGATE_DISPATCHER_{each.upper()}_TARGET": bench.address(each)
        for each in ("ledger", "cursor", "filter")
    }
    command = (sys.executable, "-m", "tools.bench.opening")
    batches = -(-bench.scaled(BATCHES) // 2) * 2
    consumers, keys = BATCHES_SHAPE
    cases: list[tuple[Way, Deliver]] = []
    async with bench.another(
        services=("dispatcher",), environment=targets, commands={"dispatcher": command}
    ) as opening:
        pids = {"opening": opening.pids("dispatcher")["dispatcher"]}
        pids |= bench.pids("dispatcher", "filter", "ledger", "cursor")
        for kind, sets in ((f"{FEW} property sets", FEW), ("all distinct", batches)):
            for way in (NONE, ALL, OPENED[0], HALF, OPENED[1]):
                case = Deliver(
                    f"{way.name}, {kind}",
                    address=(opening if way in OPENED else bench).address("dispatcher"),
                    ledger=bench.address("ledger"),
                    topic=f"bench/filtered/{kind.replace(' ', '-')}",
                    limits=[f"{way.limit}, {kind}"] if way.limit else [],
                    pids=pids,
                    messages=batches * BATCH_MESSAGES,
                    keys=keys,
                    property_sets=sets,
                    consumers=consumers,
                    expression=way.expression,
                    share=way.share,
                )
                cases.append((way, case))
        workloads = [case for _, case in cases]
        rounds = await bench.rounds(workloads, rounds=bench.scaled(TURNS))
    computed: dict[str, Measurement] = {}
    for way, case in cases:
        # That of half the messages is not comparable with that of all of them.
        held = case.limits and way is not HALF
        limit = computed[str(case.limits[0])] if held else None
        process = "opening" if way in OPENED else "dispatcher"
        name, own = f"dispatcher computes: {case.name}", rounds[case.name]
        computed[case.name] = computing(name, "message", own, process, limit)
    return [*figures(workloads, rounds, paired=True), *computed.values()]


# ---- workloads


@dataclass(kw_only=True)
class ReadLog(Workload):
    """A backlog, by a plain read of the log. Its keys take turns.

    Attributes:
        ledger: the address of the ledger.
        property_sets: messages have the property PROPERTY, with this many values, of which every
            other one is wanted, in batches of one key and value, compressed by LZ4; 0: no property,
            no batches.
    """

    ledger: str
    messages: int
    keys: int
    property_sets: int = 0

    async def prepare(self) -> None:
        """Publish the backlog, unless that is done. The last batch is wanted, so that everything
        was judged when everything wanted has come."""
        if (self.ledger, self.topic) in _published:
            return
        _published.add((self.ledger, self.topic))
        batched: dict[str, Any] = {"batching": BY_KEY, "compression": Compression.LZ4}
        payloads = Random(0)
        async with (
            connect(self.ledger) as client,
            client.producer(
                self.topic,
                name="p",
                max_pending_messages=self.messages,
                **(batched if self.property_sets else {}),
            ) as producer,
        ):
            sends = []
            for number in range(self.messages):
                batch = number // BATCH_MESSAGES if self.property_sets else number
                value = f"{WANTED if batch % 2 else 'B'}{batch % (self.property_sets or 1)}"
                send = producer.send_nowait(
                    payloads.randbytes(self.payload_bytes // 2).hex().encode(),
                    key=f"key-{batch % self.keys}",
                    properties={PROPERTY: value} if self.property_sets else None,
                )
                sends.append(send)
            await asyncio.gather(*sends)

    async def round(self, meter: Meter) -> Round:
        request = ledger_pb2.ReadRequest(topic=self.topic, start=EARLIEST, follow=False)
        count = 0
        async with open_channel(self.address) as channel:
            stub = LedgerServiceStub(channel)
            with meter:
                async for response in stub.Read(request, timeout=WITHIN_S):
                    count += len(response.entries.entries)
        check(count, self.messages)
        return meter.round(count)


_published: set[tuple[str, str]] = set()  # ledgers and topics of backlogs


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
        wanted = round(self.messages * self.share)
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
                check(totals.rejected.messages, self.messages - wanted)
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
    """One message at a time: how long until a consumer has it or, if it `reads`, a reader."""

    dispatcher: str
    reads: bool = False

    async def round(self, meter: Meter) -> Round:
        payload = bytes(self.payload_bytes)
        async with (
            connect(self.address, self.dispatcher) as client,
            client.producer(self.topic) as producer,
        ):
            start = (await producer.send(payload)).message_id
            reader = client.reader(self.topic, start=start, inclusive=False)
            consumer = client.consumer(self.topic, f"s{next(_subscriptions)}", start=start)

            async def send() -> None:
                sent = producer.send_nowait(payload)
                async with asyncio.timeout(WITHIN_S):
                    if self.reads:
                        await anext(reader)
                    else:
                        consumer.ack_nowait(await anext(consumer))
                    await sent

            async with reader if self.reads else consumer:
                await send()
                return await one_round(send, self.seconds, meter)


# ---- a consumer's bare stream, which ends with its channel

Stream = tuple[Any, int]  # the call, and the subscription's epoch


async def _joined(stub: "DispatcherServiceAsyncStub", names: dict[str, Any], number: int) -> Stream:
    subscribe = pb.Subscribe(
        **names,
        consumer_name=f"consumer-{number}",
        options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_KEY_SHARED),
        create_at=EARLIEST,
        delivery_runs=True,
    )
    call = stub.Consume()
    await call.write(pb.ConsumeRequest(subscribe=subscribe))
    return call, (await _next(call)).subscribed.epoch


async def _settled(stream: Stream, *, stuck: bool) -> AsyncIterator[int]:
    """Acknowledge a stream's deliveries. Yields the number of messages of each durable
    acknowledgement."""
    call, epoch = stream
    await call.write(pb.ConsumeRequest(permit=pb.Permit(messages=PERMITS)))
    unsettled: dict[int, int] = {}
    for request_id in itertools.count(1):
        response = await _next(call)
        if response.HasField("settled"):
            yield unsettled.pop(response.settled.request_id)
        elif response.HasField("deliveries") and not stuck:
            count = 0
            request = pb.ConsumeRequest()
            request.acknowledge.request_id, request.acknowledge.epoch = request_id, epoch
            for each in response.deliveries.deliveries:
                request.acknowledge.settlements.add(delivery=each.delivery)
                count += each.metadata.num_messages_in_batch or 1
            for run in response.deliveries.runs:
                request.acknowledge.runs.add(first=run.first, count=len(run.entries))
                count += sum(each.metadata.num_messages_in_batch or 1 for each in run.entries)
            unsettled[request_id] = count
            await call.write(request)
            await call.write(pb.ConsumeRequest(permit=pb.Permit(messages=count)))


async def _next(call: Any) -> pb.ConsumeResponse:
    response = await call.read()
    if response is aio.EOF:
        raise BenchError(f"a consumer was cut off: {await call.details()}")
    assert isinstance(response, pb.ConsumeResponse)
    return response
