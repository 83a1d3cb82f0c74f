"""A consumer without a client library: one Consume stream, driven by hand.

    async with consuming(stub, topic, "s", name="a") as consumer:
        await consumer.permit(10)
        first, second = await consumer.received(2)
        settled = await consumer.acknowledge(first, second)

Everything that arrives is recorded, in its order; nothing is done by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb

WAIT_S = 30.0
"""How long anything here waits before the test fails."""

STATUS_LOST = "Internal error from Core"
"""What gRPC makes of a write to a call that is just being ended by the service."""

EARLIEST = pb.Start(earliest=pb.Earliest())
LATEST = pb.Start(latest=pb.Latest())

KEY_SHARED = pb.SUBSCRIPTION_TYPE_KEY_SHARED
SHARED = pb.SUBSCRIPTION_TYPE_SHARED
EXCLUSIVE = pb.SUBSCRIPTION_TYPE_EXCLUSIVE


class RawConsumer:
    """An open stream. What arrives is collected in the background."""

    def __init__(self, call: Any, subscribed: pb.Subscribed) -> None:
        self.subscribed = subscribed
        self.name = subscribed.consumer_name
        self.epoch = subscribed.epoch
        self.responses: list[pb.ConsumeResponse] = []
        """All that came after Subscribed."""
        self.deliveries: list[pb.Delivery] = []
        """All that were delivered."""
        self.revoked: set[int] = set()
        self.moved: set[int] = set()
        self.ranges: list[tuple[int, int]] = []
        """The slots that it was told of last."""
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

    # ---- what it says

    async def write(self, **request: Any) -> None:
        """Send anything. To a stream that has ended this does nothing: `ended` tells how."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(WAIT_S):
                await self._call.write(pb.ConsumeRequest(**request))

    async def permit(self, messages: int) -> None:
        """Take so many more messages."""
        await self.write(permit=pb.Permit(messages=messages))

    async def acknowledge(
        self, *deliveries: pb.Delivery | int, indexes: Sequence[int] = ()
    ) -> pb.Settled:
        """Be done with deliveries; what became of that."""
        return await self.settled(await self.ask_acknowledge(*deliveries, indexes=indexes))

    async def ask_acknowledge(
        self, *deliveries: pb.Delivery | int, indexes: Sequence[int] = ()
    ) -> int:
        """The same, without waiting; the request's id."""
        items = [pb.Settlement(delivery=each, indexes=indexes) for each in map(_number, deliveries)]
        return await self.ask("acknowledge", pb.Acknowledge(settlements=items))

    async def acknowledge_through(
        self, delivery: pb.Delivery | int, indexes: Sequence[int] = ()
    ) -> pb.Settled:
        """Be done with a delivery and everything before it; what became of that."""
        item = pb.Settlement(delivery=_number(delivery), indexes=indexes)
        request = pb.AcknowledgeThrough(settlement=item)
        return await self.settled(await self.ask("acknowledge_through", request))

    async def refuse(
        self, *deliveries: pb.Delivery | int, delay_ms: int | None = None
    ) -> pb.Settled:
        """Fail to process deliveries; what became of that."""
        items = [pb.Refusal(delivery=each, delay_ms=delay_ms) for each in map(_number, deliveries)]
        return await self.settled(await self.ask("refuse", pb.Refuse(refusals=items)))

    async def give_back(self, *deliveries: pb.Delivery | int) -> pb.Settled:
        """Return deliveries; what became of that."""
        request = pb.GiveBack(deliveries=map(_number, deliveries))
        return await self.settled(await self.ask("give_back", request))

    async def renew(self, *deliveries: pb.Delivery | int) -> pb.Settled:
        """Need more time for deliveries; what became of that."""
        request = pb.Renew(deliveries=map(_number, deliveries))
        return await self.settled(await self.ask("renew", request))

    async def seek(self, start: pb.Start) -> pb.Settled:
        """Move the subscription; what became of that."""
        return await self.settled(await self.ask("seek", pb.Seek(start=start)))

    async def ask(self, kind: str, request: Any) -> int:
        """Send a request with an id of its own, and this stream's epoch unless it has another."""
        self._requests += 1
        request.request_id = self._requests
        if kind != "seek" and not request.epoch:
            request.epoch = self.epoch
        await self.write(**{kind: request})
        return self._requests

    async def leave(self) -> None:
        """Say goodbye, and return when the service has closed its side.

        Raises:
            AioRpcError: the stream ended with this.
        """
        await self.write(leave=pb.Leave())
        if (error := await self.ended()) is not None:
            raise error

    async def finish(self) -> aio.AioRpcError | None:
        """Close this side without a word; the error that the stream ends with, if any."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        return await self.ended()

    async def crash(self) -> None:
        """Vanish, as a consumer does whose process is killed."""
        self._call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    # ---- what it is told

    async def until(self, state: Any, what: str = "") -> None:
        """Return when `state()` is true.

        Raises:
            AssertionError: the stream ended before.
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
        """The answer to a request; each is given out once."""
        await self.until(lambda: request_id in self._settled, f"the answer to {request_id}")
        return self._settled.pop(request_id)

    def has_settled(self, request_id: int) -> bool:
        """Whether there is an answer to a request."""
        return request_id in self._settled

    async def received(self, count: int) -> list[pb.Delivery]:
        """The next deliveries; each is given out once."""
        end = self._taken + count
        await self.until(lambda: len(self.deliveries) >= end, f"{count} more deliveries")
        some, self._taken = self.deliveries[self._taken : end], end
        return some

    @property
    def waiting(self) -> int:
        """How many deliveries nobody has asked for yet."""
        return len(self.deliveries) - self._taken

    async def still(self) -> int:
        """How many deliveries are waiting when all that was said so far has been answered."""
        await self.renew(0)
        return self.waiting

    async def ended(self) -> aio.AioRpcError | None:
        """Wait for the end of the stream; the error it ended with, if any."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self._reading)
        return self._error

    @property
    def has_ended(self) -> bool:
        """Whether the stream has ended, however it did."""
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
                assert response.deliveries.deliveries
                self.deliveries += response.deliveries.deliveries
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
    start: pb.Start | None = EARLIEST,
    ranges: Sequence[tuple[int, int]] = (),
    weight: int = 0,
    ack_timeout_ms: int = 0,
    properties: dict[str, str] | None = None,
    **options: Any,
) -> pb.Subscribe:
    """How to open a stream: KEY_SHARED from the earliest message, unless told otherwise."""
    return pb.Subscribe(
        topic=topic,
        subscription=subscription,
        consumer_name=name,
        options=pb.SubscriptionOptions(**({"type": KEY_SHARED} | options)),
        create_at=start,
        properties=properties,
        ranges=[pb.KeyRange(first=first, last=last) for first, last in ranges],
        weight=weight,
        ack_timeout_ms=ack_timeout_ms,
    )


async def connect(
    stub: Any,
    request: pb.Subscribe,
    made: Callable[[Any, pb.Subscribed], RawConsumer] = RawConsumer,
) -> RawConsumer:
    """A stream that is open.

    Raises:
        AioRpcError: it was refused.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            call = stub.Consume()
            try:
                with suppress(asyncio.InvalidStateError):  # it has ended: the read says how
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
    """A stream that is open. On the way out it vanishes.

    Raises:
        AioRpcError: it was refused.
    """
    consumer = await connect(stub, subscribe(topic, subscription, **more))
    try:
        if permits:
            await consumer.permit(permits)
        yield consumer
    finally:
        await consumer.crash()
