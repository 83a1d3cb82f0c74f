"""A subscription gets the flights of one airport only, while the filter service comes and goes.

The flights are published in batches, each of flights from one airport. The filter service is away
when the subscription begins: everything waits. Then it is killed on the way: what was judged before
is known, and goes on. What was delivered is held against the data set.

Nobody opens a batch to judge it. The dispatcher, which has the batches, counts those that its
process opened. The filter service need not be asked: its API has no field for a payload.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.api.filter.v1 import filter_pb2
from seqgate.client import Batching, Client, Consumer, MessageId, connect
from seqgate.errors import StaleTokenError
from tools.demo.delivering import IN_FLIGHT_MAX
from tools.demo.flights import Flight
from tools.demo.screen import Screen, Step
from tools.stack.stack import Stack

TOPIC: Final = "nyc/2013/departures"
SUBSCRIPTION: Final = "newark"
ORIGIN: Final = "EWR"  # the airport whose flights are wanted
FLIGHTS_MAX: Final = 20_000  # flights that are published for it
OUTAGE_S: Final = 2.0  # of the filter service
PATIENCE_S: Final = 15.0  # without a flight: then none is left


class Filtered(NamedTuple):
    """What was filtered.

    Attributes:
        filtered_expected: flights of that airport, by the data set.
        filtered_actual: flights that were delivered, each counted once.
        wrong: flights that were delivered and are not wanted, or the other way round, or were
            delivered again after they were acknowledged.
        waited: entries that were known to wait while there were no verdicts.
        early: flights that were delivered meanwhile.
        entries: how many entries all flights took.
        rejected: how many of them the filter rejected.
        payloads_opened: batches that the dispatcher's process opened since it began.
        outages: how often the filter service was away.
        seconds: how long it took.
    """

    filtered_expected: int
    filtered_actual: int
    wrong: int
    waited: int
    early: int
    entries: int
    rejected: int
    payloads_opened: int
    outages: int
    seconds: float

    @property
    def broken(self) -> bool:
        """Whether a promise is."""
        return bool(self.wrong or self.early or self.payloads_opened)


async def filter_flights(stack: Stack, flights: Sequence[Flight], screen: Screen) -> Filtered:
    """Publish flights, have them filtered, and judge how."""
    started = time.monotonic()
    flights = flights[:FLIGHTS_MAX]
    wanted = Counter(each.payload for each in flights if each.origin == ORIGIN)
    step = screen.step("filtering", wanted.total())
    names: dict[str, Any] = {"topic": TOPIC, "subscription": SUBSCRIPTION}
    async with (
        aio.insecure_channel(stack.address("dispatcher")) as channel,
        connect(stack.address("ledger"), stack.address("dispatcher")) as client,
    ):
        entries = await _publish(client, flights)
        stub = pb_grpc.DispatcherServiceStub(channel)
        await stub.CreateSubscription(
            pb.CreateSubscriptionRequest(**names, start=pb.Start(earliest=pb.Earliest()))
        )
        origin = filter_pb2.Filter(
            name="origin", version=1, expression=f"properties.origin == '{ORIGIN}'"
        )
        await stub.SetFilters(pb.SetFiltersRequest(**names, filters=[origin]))
        screen.tell(
            f"{len(flights):,} flights are in {entries:,} entries; only those from {ORIGIN} are "
            "wanted; the filter service is away"
        )
        await stack.terminate("filter")
        async with client.consumer(TOPIC, SUBSCRIPTION, name="gate") as consumer:
            gate = _Gate(consumer, step)
            early = await gate.receive(within_s=OUTAGE_S)
            report = await stub.Report(pb.ReportRequest(**names))
            waited = report.unjudged_entries
            await stack.run("filter")
            await gate.receive(wanted.total() // 2)
            screen.tell("kill -9 of the filter service")
            await stack.kill("filter")
            await gate.receive(wanted.total() // 4)
            await stack.run("filter")
            await gate.receive(wanted.total() - len(gate.arrived))
            await gate.receive(within_s=OUTAGE_S)
            report = await stub.Report(pb.ReportRequest(**names))
    actual = Counter(gate.arrived.values())
    return Filtered(
        filtered_expected=wanted.total(),
        filtered_actual=actual.total(),
        wrong=(wanted - actual).total() + (actual - wanted).total() + gate.again,
        waited=waited,
        early=early,
        entries=entries,
        rejected=report.totals.rejected_entries,
        payloads_opened=report.payloads_opened,
        outages=2,
        seconds=round(time.monotonic() - started, 1),
    )


async def _publish(client: Client, flights: Sequence[Flight]) -> int:
    """Publish flights in their order, in batches that end where the airport changes. Returns how
    many entries that made."""
    producer = client.producer(
        TOPIC,
        name="tower",
        batching=Batching(filter_properties=("origin",)),
        max_pending_messages=IN_FLIGHT_MAX,
    )
    async with producer:
        receipts = await asyncio.gather(
            *(producer.send_nowait(each.payload, properties=each.properties) for each in flights)
        )
    return len({receipt.message_id.position for receipt in receipts})


class _Gate:
    """Where the flights arrive."""

    def __init__(self, consumer: Consumer, step: Step) -> None:
        self.arrived: dict[MessageId, bytes] = {}
        """Each once, however often it was delivered."""
        self.again = 0
        """How many were delivered again after they were acknowledged."""
        self._acknowledged: set[MessageId] = set()
        self._consumer = consumer
        self._step = step

    async def receive(self, at_most: int | None = None, within_s: float = PATIENCE_S) -> int:
        """Receive so many flights, or what comes until none did for so long. Returns how many."""
        before = len(self.arrived)
        settling: list[tuple[MessageId, asyncio.Future[None]]] = []
        while at_most is None or len(self.arrived) - before < at_most:
            try:
                flight = await self._consumer.receive(within_s)
            except TimeoutError:
                break
            self.again += flight.id in self._acknowledged
            self.arrived[flight.id] = flight.payload
            settling.append((flight.id, self._consumer.ack_nowait(flight)))
            self._step(len(self.arrived))
        for message_id, settled in settling:
            with suppress(StaleTokenError):  # its delivery was cut off: it comes again
                await settled
                self._acknowledged.add(message_id)
        return len(self.arrived) - before
