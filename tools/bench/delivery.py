"""The process that acts as consumers: python -m tools.bench.delivery

Takes a DeliveryJob as JSON on standard input, and writes the outcomes as JSON to standard output.
Consumers are bare streams: they acknowledge what comes at once, and take as much again. All of them
are there before any of them takes something, so that the same keys go to the same ones every time.
"""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Self

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Producer, connect
from seqgate.client._channel import open_channel
from tools.bench.load import Meter
from tools.bench.measurement import BenchError
from tools.bench.rounds import Round
from tools.bench.workload import Outcome, outcomes_to_json

PERMITS: Final = 1_000
"""How many messages a consumer takes before it acknowledges: the client's own default."""

PAYLOAD_BYTES: Final = 100

WITHIN_S: Final = 60.0
"""How long one delivery of a topic may take."""

READ: Final = "plain read of the log, metadata and payloads"
FOLLOWED: Final = "published until a plain read has it"
DELIVERED: Final = "published until it is delivered"

STUCK: Final = "consumer-0"
"""Who takes messages and acknowledges none, where somebody does."""


class Consuming(NamedTuple):
    """One thing to measure: so many consumers of a topic with so many keys."""

    consumers: int
    keys: int
    is_stuck: bool = False

    def name(self, *, bare: bool = False, is_stuck: bool | None = None) -> str:
        """Of the figure; `bare`: where the dispatcher only answers. `is_stuck`: of what all but one
        get, where that one is stuck, or nobody is; None: as it is, and of what all get if nobody
        is."""
        noun = "1 consumer" if self.consumers == 1 else f"{self.consumers} consumers"
        noun += f", {self.keys:,} keys"
        if bare:
            return f"bare stream, {noun}"
        if is_stuck is None and not self.is_stuck:
            return f"delivered, {noun}"
        word = "none" if is_stuck is False else "one"
        return f"delivered, what {self.consumers - 1} of {noun} get, {word} stuck"


class DeliveryJob(NamedTuple):
    """What the process is told: where everything is, how many messages each topic gets, and whose
    computing is measured."""

    ledger: str
    dispatcher: str
    null: str
    prefix: str
    messages: int
    consuming: list[Consuming]
    rounds: int
    seconds: float
    pids: dict[str, int]

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The opposite of to_json."""
        job = cls(*json.loads(text))
        return job._replace(consuming=[Consuming(*each) for each in job.consuming])


async def run(job: DeliveryJob) -> dict[str, Outcome]:
    """Everything, round by round."""
    async with (
        open_channel(job.ledger) as ledger,
        open_channel(job.dispatcher) as dispatcher,
        open_channel(job.null) as null,
    ):
        work = _Work(job, LedgerServiceStub(ledger), DispatcherServiceStub(dispatcher), null)
        await work.prepare()
        for _ in range(job.rounds):
            await work.read()
            for each in job.consuming:
                if each.is_stuck:
                    await work.deliver_around_stuck(each)
                else:
                    await work.deliver_bare(each)
                    await work.deliver(each)
            await work.follow()
        return work.outcomes


class _Work:
    """What is measured, and what came of it."""

    def __init__(self, job: DeliveryJob, ledger: Any, dispatcher: Any, null: aio.Channel) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._job = job
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._null: Any = DispatcherServiceStub(null)
        self._numbers = itertools.count()

    async def prepare(self) -> None:
        """Publish what is consumed; the null ledger keeps a page of it."""
        for keys in sorted({each.keys for each in self._job.consuming}):
            for address in (self._job.ledger, self._job.null):
                async with (
                    connect(address) as client,
                    client.producer(self._topic(keys), name="p") as producer,
                ):
                    sending = [_send(producer, each, keys) for each in range(self._job.messages)]
                    await asyncio.gather(*sending)

    async def read(self) -> None:
        """The log, as the ledger service gives it to anybody."""
        keys = self._job.consuming[0].keys
        request = ledger_pb2.ReadRequest(
            topic=self._topic(keys), earliest=ledger_pb2.Earliest(), follow=False
        )
        meter = self._meter()
        count = 0
        with meter:
            async for response in self._ledger.Read(request, timeout=WITHIN_S):
                count += len(response.entries.entries)
        self._check(count, self._job.messages)
        self._note(READ, count, meter)

    async def deliver(self, consuming: Consuming) -> None:
        """A new subscription, until all of it is acknowledged, durably."""
        name, meter = consuming.name(), self._meter()
        async with self._consumers(consuming) as consumers:
            with meter:
                await consumers.take(self._job.messages)
        self._note(name, self._job.messages, meter)

    async def deliver_bare(self, consuming: Consuming) -> None:
        """The same messages over the same streams, from a dispatcher that only answers."""
        meter = self._meter()
        async with self._consumers(consuming, stub=self._null) as consumers:
            with meter:
                count = await consumers.take(self._job.messages)
        self._note(consuming.name(bare=True), count, meter)

    async def deliver_around_stuck(self, consuming: Consuming) -> None:
        """What all but one consumer get, when that one is stuck, and when it is not."""
        meter = self._meter()
        async with self._consumers(consuming) as consumers:
            with meter:
                await consumers.take(self._job.messages)
            others = consumers.others
        self._note(consuming.name(is_stuck=False), others, meter)
        meter = self._meter()
        async with self._consumers(consuming, is_stuck=True) as consumers:
            with meter:
                await consumers.take(others)
        self._note(consuming.name(), others, meter)

    async def follow(self) -> None:
        """One message at a time: how long until a plain read has it, and until a consumer has."""
        async with connect(self._job.ledger) as client:
            topic = self._topic(0)
            async with client.producer(topic) as producer:
                await producer.send(b"")
                request = ledger_pb2.ReadRequest(
                    topic=topic, latest=ledger_pb2.Latest(), follow=True
                )
                reading = self._ledger.Read(request)
                await reading.read()  # it has started
                self._note_latencies(FOLLOWED, await self._one_by_one(producer, _reads(reading)))
                reading.cancel()
                one = Consuming(1, 0)
                async with self._consumers(one, start=pb.Start(latest=pb.Latest())) as consumers:
                    arriving = consumers.arriving()
                    latencies_s = await self._one_by_one(producer, arriving)
                    await arriving.aclose()
                self._note_latencies(DELIVERED, latencies_s)

    async def _one_by_one(self, producer: Producer, arriving: AsyncIterator[None]) -> list[float]:
        latencies_s: list[float] = []
        until = time.perf_counter() + self._job.seconds
        payload = bytes(PAYLOAD_BYTES)
        while not latencies_s or time.perf_counter() < until:
            began = time.perf_counter()
            sent = producer.send_nowait(payload)
            async with asyncio.timeout(WITHIN_S):
                await anext(arriving)
                latencies_s.append(time.perf_counter() - began)
                await sent
        return latencies_s

    # ---- around it

    @asynccontextmanager
    async def _consumers(
        self,
        consuming: Consuming,
        *,
        stub: Any = None,
        is_stuck: bool = False,
        start: pb.Start | None = None,
    ) -> AsyncIterator["_Consumers"]:
        topic = self._topic(consuming.keys)
        subscription = f"s{next(self._numbers)}"
        consumers = _Consumers(stub or self._dispatcher, is_stuck=is_stuck)
        try:
            for number in range(consuming.consumers):
                await consumers.join(
                    pb.Subscribe(
                        topic=topic,
                        subscription=subscription,
                        consumer_name=f"consumer-{number}",
                        options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_KEY_SHARED),
                        create_at=start or pb.Start(earliest=pb.Earliest()),
                    )
                )
            yield consumers
        finally:
            await consumers.close()

    def _topic(self, keys: int) -> str:
        return f"{self._job.prefix}/{keys}-keys"

    def _meter(self) -> Meter:
        return Meter(self._job.pids)

    def _check(self, count: int, expected: int) -> None:
        if count != expected:
            raise BenchError(f"{count} messages came, and not {expected}")

    def _note(self, name: str, messages: int, meter: Meter) -> None:
        outcome = self.outcomes.setdefault(name, Outcome([], {}))
        outcome.rounds.append(Round(messages, meter.elapsed_s, []))
        for process, seconds in meter.computed_s.items():
            outcome.cpu_s[process] = outcome.cpu_s.get(process, 0.0) + seconds

    def _note_latencies(self, name: str, latencies_s: list[float]) -> None:
        outcome = self.outcomes.setdefault(name, Outcome([], {}))
        outcome.rounds.append(Round(len(latencies_s), sum(latencies_s), latencies_s))


class _Consumers:
    """Streams of one subscription."""

    def __init__(self, stub: Any, *, is_stuck: bool) -> None:
        self._stub = stub
        self._is_stuck = is_stuck
        self._streams: dict[str, tuple[Any, int]] = {}
        self._taken = Counter[str]()
        self._settled = 0

    @property
    def others(self) -> int:
        """How many messages all but the one got that is stuck, or could be."""
        return self._taken.total() - self._taken[STUCK]

    async def join(self, subscribe: pb.Subscribe) -> None:
        """One more consumer."""
        call = self._stub.Consume()
        await call.write(pb.ConsumeRequest(subscribe=subscribe))
        response = await _next(call)
        self._streams[subscribe.consumer_name] = (call, response.subscribed.epoch)

    async def take(self, messages: int) -> int:
        """Take messages, until so many are acknowledged. Returns how many are."""
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
            self._taken[name] += len(deliveries)
            if not is_stuck:
                unsettled[request_id] = len(deliveries)
                await call.write(_acknowledge(request_id, epoch, deliveries))
                await call.write(_permit(len(deliveries)))

    async def arriving(self) -> AsyncGenerator[None, None]:
        """Whenever a message is delivered to the one consumer; it is acknowledged then."""
        ((call, epoch),) = self._streams.values()
        await call.write(_permit(PERMITS))
        for request_id in itertools.count(1):
            deliveries = (await _next(call)).deliveries.deliveries
            if deliveries:
                yield
                await call.write(_acknowledge(request_id, epoch, deliveries))
                await call.write(_permit(len(deliveries)))

    async def close(self) -> None:
        """Cut the streams."""
        for call, _ in self._streams.values():
            call.cancel()


async def _next(call: Any) -> pb.ConsumeResponse:
    response = await call.read()
    if response is aio.EOF:
        raise BenchError(f"a consumer was cut off: {await call.details()}")
    assert isinstance(response, pb.ConsumeResponse)
    return response


async def _send(producer: Producer, number: int, keys: int) -> None:
    await producer.send(bytes(PAYLOAD_BYTES), key=f"key-{number % keys}")


async def _reads(reading: Any) -> AsyncIterator[None]:
    """Whenever a plain read gets a message."""
    while True:
        response = await reading.read()
        for _ in response.entries.entries:
            yield


def _permit(messages: int) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(permit=pb.Permit(messages=messages))


def _acknowledge(
    request_id: int, epoch: int, deliveries: Sequence[pb.Delivery]
) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(
        acknowledge=pb.Acknowledge(
            request_id=request_id,
            epoch=epoch,
            settlements=[pb.Settlement(delivery=each.delivery) for each in deliveries],
        )
    )


def main() -> int:
    job = DeliveryJob.from_json(sys.stdin.read())
    print(outcomes_to_json(asyncio.run(run(job))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
