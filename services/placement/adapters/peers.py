"""The other instances of the service, over the wire; one of them is the keeper.

No call is retried here. After a lost answer nobody knows whether a call did what it was asked; each
may be made again.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NoReturn

import msgpack
from grpc import aio

from seqgate.api.placement.v1 import placement_pb2 as pb
from seqgate.api.placement.v1 import placement_pb2_grpc as pb_grpc
from services.placement.core.placing import Holding, Placement
from services.placement.ports import MoveFailed, PlacementUnavailable, Row
from services.runtime.refused import Refused, answer, refused

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when an instance does not answer."""

CALL_TIMEOUT_S: Final = 5.0
"""How long one answer may take."""

PIECE_TIMEOUT_S: Final = 30.0
"""How long the other side may take to take in a piece of a topic, or the end of it."""

PIECE_BYTES: Final = 1024 * 1024
"""How many bytes of rows one request holds at most."""

DIGEST_BYTES: Final = 16


class GrpcKeeper:
    """See services.placement.ports.Keeper."""

    def __init__(self, channel: aio.Channel) -> None:
        self._stub: Any = pb_grpc.PlacementServiceStub(channel)

    async def find(self, topic: str) -> Placement | None:
        reply = await self._call(self._stub.Record, pb.RecordRequest(topic=topic))
        return _placement(reply.placement) if reply.HasField("placement") else None

    async def place(
        self, topic: str, *, version: int, owner: str, move: str
    ) -> tuple[Placement, bool]:
        change = pb.Change(version=version, owner=owner, move=move)
        request = pb.RecordRequest(topic=topic, change=change)
        reply = await self._call(self._stub.Record, request)
        return _placement(reply.placement), reply.changed

    async def page(self, *, prefix: str, after: str, limit: int) -> list[Placement]:
        request = pb.ListPlacementsRequest(page_size=limit, page_token=after, prefix=prefix)
        reply = await self._call(self._stub.ListPlacements, request)
        return [_placement(each) for each in reply.placements]

    async def _call(self, method: Any, request: object) -> Any:
        try:
            return await answer(method(request, timeout=CALL_TIMEOUT_S))
        except Refused as error:
            _give_up(error)


class GrpcPeers:
    """See services.placement.ports.Peers."""

    def __init__(self, channels: Mapping[str, aio.Channel]) -> None:
        self._stubs: dict[str, Any] = {
            address: pb_grpc.PlacementServiceStub(channel) for address, channel in channels.items()
        }

    async def send(
        self, to: str, holding: Holding, layout: int, rows: AsyncIterator[Sequence[Row]]
    ) -> None:
        topic, _, version, move, _ = holding
        begin = pb.BeginTopic(topic=topic, move=move, version=version, layout=layout)
        call = self._stub(to).ReceiveTopic()
        try:
            await _written(call, pb.ReceiveTopicRequest(begin=begin))
            count, digest = 0, blake2b(digest_size=DIGEST_BYTES)
            async for some in rows:
                packed = b"".join(map(_packed, some))
                count += len(some)
                digest.update(packed)
                for start in range(0, len(packed), PIECE_BYTES):
                    piece = packed[start : start + PIECE_BYTES]
                    await _written(call, pb.ReceiveTopicRequest(rows=piece))
            end = pb.EndTopic(row_count=count, digest=digest.digest())
            await _written(call, pb.ReceiveTopicRequest(end=end))
            await call.done_writing()
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                await call
        except aio.AioRpcError as error:
            said = refused(error)
            if not said.reason:
                _give_up(said)
            raise MoveFailed(
                "the other instance refuses the topic",
                retry_after_s=RETRY_AFTER_S,
                because=said.reason,
            ) from error
        except TimeoutError as error:
            raise PlacementUnavailable(
                "the other instance does not answer in time", retry_after_s=RETRY_AFTER_S
            ) from error
        finally:
            call.cancel()

    async def locate(self, at: str, topic: str) -> Placement | None:
        request = pb.LocateRequest(topic=topic)
        try:
            call = self._stub(at).Locate(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True)
            reply = await answer(call)
        except Refused as error:
            _give_up(error)
        return _placement(reply.placement) if reply.HasField("placement") else None

    def _stub(self, address: str) -> Any:
        try:
            return self._stubs[address]
        except KeyError:  # it was one of the instances when the move began
            raise PlacementUnavailable(
                "there is no such instance any more", retry_after_s=RETRY_AFTER_S, instance=address
            ) from None


def _packed(row: Row) -> bytes:
    packed: bytes = msgpack.packb(row)
    return packed


async def _written(call: Any, request: pb.ReceiveTopicRequest) -> None:
    """Write a request; if the call has ended, raise what it ended with."""
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            await call.write(request)
    except asyncio.InvalidStateError:
        await call
        raise


def _placement(given: pb.Placement) -> Placement:
    return Placement(given.topic, given.owner, given.version, given.move)


def _give_up(error: Refused) -> NoReturn:
    because = {"because": error.reason} if error.reason else {}
    raise PlacementUnavailable(
        "the instance that must be asked does not answer", retry_after_s=RETRY_AFTER_S, **because
    ) from error
