"""A consumer without a client library: one Consume stream, driven by hand.

    async with consuming(stub, topic, "s", name="a") as consumer:
        await consumer.permit(10)
        first, second = await consumer.received(2)
        settled = await consumer.acknowledge(first, second)

It records every response in order, and sends only what the test requests.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.times import duration
from tests.support.delivery_runs import each_delivery

WAIT_S = 60.0
"""The limit of every wait here."""

STATUS_LOST = "Internal error from Core"
"""gRPC's details of a write to a call that the service is just ending."""

EARLIEST = common_pb2.Start(earliest=common_pb2.Earliest())
LATEST = common_pb2.Start(latest=common_pb2.Latest())

KEY_SHARED = pb.SUBSCRIPTION_TYPE_KEY_SHARED
SHARED = pb.SUBSCRIPTION_TYPE_SHARED
EXCLUSIVE = pb.SUBSCRIPTION_TYPE_EXCLUSIVE


class RawConsumer:
    """An open stream, read in the background."""

    def __init__(self, call: Any, subscribed: pb.Subscribed) -> None:
        self.subscribed = subscribed
        self.name = subscribed.consumer_name
        self.epoch = subscribed.epoch
        self.responses: list[pb.ConsumeResponse] = []
        """All responses after Subscribed."""
        self.deliveries: list[pb.Delivery] = []
        """All deliveries, those in runs included."""
        self.runs: list[pb.DeliveryRun] = []
        self.revoked: set[int] = set()
        self.moved: set[int] = set()
        self.ranges: list[tuple[int, int]] = []
        """The slot ranges assigned last."""
        self.sought = 0
        self.draining = asyncio.Event()
        self._settled: dict[int, pb.Settled] = {}
        self._requests = 0
        self._taken = 0
        self._call = call
        self._error: aio.AioRpcError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    # ---- requests

    async def write(self, **request: Any) -> None:
        """Send a request. On an ended stream this does nothing; see `ended`."""
        try:
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(WAIT_S):
                    await self._call.write(pb.ConsumeRequest(**request))
        except asyncio.CancelledError:
            # gRPC raises it if the call, and not this task, was cancelled during the write. The
            # call may then have any status.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    async def permit(self, messages: int) -> None:
        """Grant permits."""
        await self.write(permit=pb.Permit(messages=messages))

    async def acknowledge(
        self, *deliveries: pb.Delivery | int, indexes: Sequence[int] = ()
    ) -> pb.Settled:
        """Acknowledge deliveries, and return the answer."""
        return await self.settled(await self.ask_acknowledge(*deliveries, indexes=indexes))

    async def ask_acknowledge(
        self, *deliveries: pb.Delivery | int, indexes: Sequence[int] = ()
    ) -> int:
        """Acknowledge without waiting. Returns the request's id."""
        items = [pb.Settlement(delivery=each, indexes=indexes) for each in map(_number, deliveries)]
        return await self.ask("acknowledge", pb.Acknowledge(settlements=items))

    async def acknowledge_runs(self, *runs: tuple[int, int]) -> pb.Settled:
        """Acknowledge so many deliveries from each number on, and return the answer."""
        numbers = [pb.DeliveryNumbers(first=first, count=count) for first, count in runs]
        return await self.settled(await self.ask("acknowledge", pb.Acknowledge(runs=numbers)))

    async def acknowledge_cumulative(
        self, delivery: pb.Delivery | int, indexes: Sequence[int] = ()
    ) -> pb.Settled:
        """Acknowledge cumulatively, and return the answer."""
        item = pb.Settlement(delivery=_number(delivery), indexes=indexes)
        request = pb.AcknowledgeCumulative(settlement=item)
        return await self.settled(await self.ask("acknowledge_cumulative", request))

    async def negative_acknowledge(
        self, *deliveries: pb.Delivery | int, delay_ms: int | None = None, reason: str = ""
    ) -> pb.Settled:
        """Refuse deliveries, and return the answer."""
        items = [
            pb.NegativeAcknowledgement(
                delivery=each,
                delay=None if delay_ms is None else duration(delay_ms),
                reason=reason,
            )
            for each in map(_number, deliveries)
        ]
        return await self.settled(
            await self.ask(
                "negative_acknowledge", pb.NegativeAcknowledge(negative_acknowledgements=items)
            )
        )

    async def give_back(self, *deliveries: pb.Delivery | int) -> pb.Settled:
        """Give deliveries back, and return the answer."""
        request = pb.GiveBack(deliveries=map(_number, deliveries))
        return await self.settled(await self.ask("give_back", request))

    async def renew(self, *deliveries: pb.Delivery | int) -> pb.Settled:
        """Renew deliveries, and return the answer."""
        request = pb.Renew(deliveries=map(_number, deliveries))
        return await self.settled(await self.ask("renew", request))

    async def seek(self, start: common_pb2.Start) -> pb.Settled:
        """Move the subscription, and return the answer."""
        return await self.settled(await self.ask("seek", pb.Seek(start=start)))

    async def ask(self, kind: str, request: Any) -> int:
        """Send a request under a new id, with this stream's epoch by default. Returns the id."""
        self._requests += 1
        request.request_id = self._requests
        if kind != "seek" and not request.epoch:
            request.epoch = self.epoch
        await self.write(**{kind: request})
        return self._requests

    async def leave(self) -> None:
        """Leave, and wait until the service closes its side.

        Raises:
            AioRpcError: the stream ended with this error.
        """
        await self.write(leave=pb.Leave())
        if (error := await self.ended()) is not None:
            raise error

    async def finish(self) -> aio.AioRpcError | None:
        """Close this side without Leave. Returns the error that ends the stream, or None."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        return await self.ended()

    async def crash(self) -> None:
        """Vanish, like a consumer whose process is killed."""
        self._call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    # ---- responses

    async def until(self, state: Any, what: str = "") -> None:
        """Wait until `state()` is true.

        Raises:
            AssertionError: the stream ended first, or WAIT_S passed.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                while not state():
                    assert not self._ended, f"{self.name} ended before {what}: {self._error}"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} waits for {what}: {self.responses[-5:]}") from None

    async def settled(self, request_id: int) -> pb.Settled:
        """Wait for the answer to a request, which is returned only once."""
        await self.until(lambda: request_id in self._settled, f"the answer to {request_id}")
        return self._settled.pop(request_id)

    def has_settled(self, request_id: int) -> bool:
        """True if the answer to a request has arrived."""
        return request_id in self._settled

    async def received(self, count: int) -> list[pb.Delivery]:
        """Wait for the next deliveries. Each is returned only once."""
        end = self._taken + count
        await self.until(lambda: len(self.deliveries) >= end, f"{count} more deliveries")
        some, self._taken = self.deliveries[self._taken : end], end
        return some

    @property
    def waiting(self) -> int:
        """The number of deliveries not returned by `received` yet."""
        return len(self.deliveries) - self._taken

    async def still(self) -> int:
        """`waiting`, once every request sent so far has been answered."""
        await self.renew(0)
        return self.waiting

    async def ended(self) -> aio.AioRpcError | None:
        """Wait until the stream ends. Returns its error, or None."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self._reading)
        return self._error

    @property
    def has_ended(self) -> bool:
        """True once the stream has ended."""
        return self._ended

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not aio.EOF:
                self.responses.append(response)
                self._take(response)
                self._changed.set()
        except aio.AioRpcError as error:
            self._error = error
        finally:
            self._ended = True
            self._changed.set()

    def _take(self, response: pb.ConsumeResponse) -> None:
        match response.WhichOneof("response"):
            case "deliveries":
                deliveries = [*each_delivery(response.deliveries)]
                assert deliveries
                self.deliveries += deliveries
                self.runs += response.deliveries.runs
            case "settled":
                self._settled[response.settled.request_id] = response.settled
            case "revoked":
                self.revoked.update(response.revoked.deliveries)
            case "moved":
                self.moved.update(response.moved.deliveries)
            case "assigned":
                self.ranges = [(each.first, each.last) for each in response.assigned.ranges]
            case "sought":
                self.sought += 1
                self._taken = len(self.deliveries)
            case "draining":
                self.draining.set()


def _number(delivery: pb.Delivery | int) -> int:
    return delivery if isinstance(delivery, int) else delivery.delivery


def subscribe(
    topic: str,
    subscription: str = "s",
    *,
    name: str = "",
    start: common_pb2.Start | None = EARLIEST,
    ranges: Sequence[tuple[int, int]] = (),
    weight: int = 0,
    ack_timeout_ms: int = 0,
    properties: dict[str, str] | None = None,
    delivery_runs: bool = False,
    **options: Any,
) -> pb.Subscribe:
    """A Subscribe request; by default KEY_SHARED, from the earliest message."""
    return pb.Subscribe(
        topic=topic,
        subscription=subscription,
        consumer_name=name,
        options=pb.SubscriptionOptions(**({"type": KEY_SHARED} | options)),
        create_at=start,
        properties=properties,
        ranges=[pb.KeyRange(first=first, last=last) for first, last in ranges],
        weight=weight,
        ack_timeout=duration(ack_timeout_ms) if ack_timeout_ms else None,
        delivery_runs=delivery_runs,
    )


async def connect(
    stub: Any,
    request: pb.Subscribe,
    made: Callable[[Any, pb.Subscribed], RawConsumer] = RawConsumer,
) -> RawConsumer:
    """Open a stream.

    Raises:
        AioRpcError: the service refused it.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            call = stub.Consume()
            try:
                with suppress(asyncio.InvalidStateError):  # ended already: the read has the error
                    await call.write(pb.ConsumeRequest(subscribe=request))
                first = await call.read()
            except aio.AioRpcError as error:
                if error.details() == STATUS_LOST:
                    continue
                raise
            except BaseException:
                call.cancel()
                raise
            assert first is not aio.EOF
            return made(call, first.subscribed)


@asynccontextmanager
async def consuming(
    stub: Any, topic: str, subscription: str = "s", *, permits: int = 0, **more: Any
) -> AsyncIterator[RawConsumer]:
    """An open stream, which vanishes at the end of the context.

    Raises:
        AioRpcError: the service refused it.
    """
    consumer = await connect(stub, subscribe(topic, subscription, **more))
    try:
        if permits:
            await consumer.permit(permits)
        yield consumer
    finally:
        await consumer.crash()
