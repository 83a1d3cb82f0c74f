"""A subscription gets the flights of one airport only, while the filter service goes down twice.

The flights are published in batches, each of flights from one airport. The filter service is down
when the subscription begins: everything waits. Later it is killed: entries with a verdict are still
delivered. The deliveries are compared with the data set.

No service opens a batch to judge it. The dispatcher, which has the batches, counts those that its
process opened. The filter service cannot open any: its API has no field for a payload.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.api.filter.v1 import filter_pb2
from seqgate.client import Batching, Consumer, MessageId, connect
from seqgate.dev.stack import Stack
from seqgate.errors import StaleTokenError
from tools.demo.dataset import Original
from tools.demo.delivery import publish_all
from tools.demo.report import Screen, Step

TOPIC: Final = "nyc/2013/departures"
NAMES: Final[dict[str, Any]] = {"topic": TOPIC, "subscription": "newark"}
ORIGIN: Final = "EWR"  # the airport whose flights are wanted
EXPRESSION: Final = f"properties.origin == '{ORIGIN}'"
FLIGHTS_MAX: Final = 20_000  # flights that are published for it
OUTAGE_S: Final = 2.0  # of the filter service
PATIENCE_S: Final = 15.0  # without a flight: then none is left


async def filter_flights(
    stack: Stack, flights: Sequence[Original], screen: Screen
) -> dict[str, Any]:
    """Publish flights, have them filtered, and return the figures.

    Returns:
        Among others: `wrong` flights were delivered but not wanted, wanted but not delivered, or
        delivered again after they were acknowledged. `waited` entries were seen to wait while there
        were no verdicts, and `early` flights were delivered meanwhile.
    """
    started = time.monotonic()
    flights = flights[:FLIGHTS_MAX]
    wanted = Counter(each.payload for each in flights if each.properties["origin"] == ORIGIN)
    step = screen.step("filtering", wanted.total())
    async with (
        aio.insecure_channel(stack.address("dispatcher")) as channel,
        connect(stack.target("ledger"), stack.target("dispatcher")) as client,
    ):
        batching = Batching(filter_properties=("origin",))  # batches end where the airport changes
        receipts = await publish_all(client, TOPIC, flights, batching)
        entries = len({receipt.message_id.position for receipt in receipts})
        stub = pb_grpc.DispatcherServiceStub(channel)
        start = common_pb2.Start(earliest=common_pb2.Earliest())
        await stub.CreateSubscription(pb.CreateSubscriptionRequest(**NAMES, start=start))
        origin = filter_pb2.Filter(name="origin", version=1, expression=EXPRESSION)
        await stub.SetFilters(pb.SetFiltersRequest(**NAMES, filters=[origin]))
        screen.tell(
            f"{len(flights):,} flights are in {entries:,} entries; only those from {ORIGIN} are "
            "wanted; the filter service is away"
        )
        await stack.terminate("filter")
        async with client.consumer(TOPIC, NAMES["subscription"], name="gate") as consumer:
            arrivals = _Arrivals(consumer, step)
            early = await arrivals.receive(within_s=OUTAGE_S)
            waited = (await stub.Report(pb.ReportRequest(**NAMES))).unjudged_entries
            await stack.run("filter")
            await arrivals.receive(wanted.total() // 2)
            screen.tell("kill -9 of the filter service")
            await stack.kill("filter")
            await arrivals.receive(wanted.total() // 4)
            await stack.run("filter")
            await arrivals.receive(wanted.total() - len(arrivals.payloads))
            await arrivals.receive(within_s=OUTAGE_S)
            report = await stub.Report(pb.ReportRequest(**NAMES))
    actual = Counter(arrivals.payloads.values())
    return {
        "filtered_expected": wanted.total(),
        "filtered_actual": actual.total(),
        "wrong": (wanted - actual).total() + (actual - wanted).total() + arrivals.again,
        "waited": waited,
        "early": early,
        "entries": entries,
        "rejected": report.totals.rejected_entries,
        "payloads_opened": report.payloads_opened,
        "outages": 2,
        "seconds": round(time.monotonic() - started, 1),
    }


class _Arrivals:
    """The flights that a consumer received."""

    def __init__(self, consumer: Consumer, step: Step) -> None:
        self.payloads: dict[MessageId, bytes] = {}
        self.again = 0  # delivered again after they were acknowledged
        self._acknowledged: set[MessageId] = set()
        self._consumer = consumer
        self._step = step

    async def receive(self, at_most: int | None = None, within_s: float = PATIENCE_S) -> int:
        """Receive up to `at_most` flights, until none comes within `within_s`. Returns their
        number."""
        before = len(self.payloads)
        settling: dict[MessageId, asyncio.Future[None]] = {}
        with suppress(TimeoutError):
            while at_most is None or len(self.payloads) - before < at_most:
                flight = await self._consumer.receive(within_s)
                self.again += flight.id in self._acknowledged
                self.payloads[flight.id] = flight.payload
                settling[flight.id] = self._consumer.ack_nowait(flight)
                self._step(len(self.payloads))
        for message_id, settled in settling.items():
            with suppress(StaleTokenError):  # its delivery was cut off: it comes again
                await settled
                self._acknowledged.add(message_id)
        return len(self.payloads) - before
