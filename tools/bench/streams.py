"""Consumers that are bare streams: they acknowledge what comes at once, and take as much again.

All of them are there before any of them takes something, so that the same keys go to the same ones
every time.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Final

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from tools.bench.measurement import BenchError

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

PERMITS: Final = 1_000
"""How many messages a consumer takes before it acknowledges: the client's own default."""

WITHIN_S: Final = 60.0
"""How long one delivery of a topic may take."""

STUCK: Final = "consumer-0"
"""Who takes messages and acknowledges none, where somebody does."""


class Consumers:
    """Streams of one subscription."""

    def __init__(self, stub: "DispatcherServiceAsyncStub", *, is_stuck: bool = False) -> None:
        self._stub = stub
        self._is_stuck = is_stuck
        self._streams: dict[str, tuple[Any, int]] = {}
        self._taken = Counter[str]()
        self._settled = 0

    @property
    def others(self) -> int:
        """How many messages all but the one got that is stuck, or could be."""
        return self._taken.total() - self._taken[STUCK]

    async def join(self, topic: str, subscription: str, number: int, start: pb.Start) -> None:
        """One more consumer, of a subscription that shares by key and, if it is new, starts
        there."""
        name = f"consumer-{number}"
        subscribe = pb.Subscribe(
            topic=topic,
            subscription=subscription,
            consumer_name=name,
            options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_KEY_SHARED),
            create_at=start,
        )
        call = self._stub.Consume()
        await call.write(pb.ConsumeRequest(subscribe=subscribe))
        response = await _next(call)
        self._streams[name] = (call, response.subscribed.epoch)

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
            count = sum(each.metadata.num_messages_in_batch or 1 for each in deliveries)
            self._taken[name] += count
            if not is_stuck:
                unsettled[request_id] = count
                await call.write(_acknowledge(request_id, epoch, deliveries))
                await call.write(_permit(count))

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
