"""The wire of placement: check, translate, call, translate back."""

from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any, Final

import msgpack
from grpc import aio

from seqgate.api.placement.v1 import placement_pb2 as pb
from seqgate.api.placement.v1 import placement_pb2_grpc as pb_grpc
from seqgate.types import SEQUENCE_ID_MAX, InvalidNameError, TopicName
from services.errors import InvalidPage, InvalidTopicName
from services.placement.adapters.peers import DIGEST_BYTES
from services.placement.core.placing import Placement
from services.placement.ports import (
    InvalidInstance,
    InvalidMove,
    Keeper,
    NotKeeper,
    Row,
    Staging,
)
from services.placement.service import Places
from services.runtime.load import busy

SERVICE: Final = "seqgate.api.placement.v1.PlacementService"

PAGE_DEFAULT: Final = 1_000
PAGE_MAX: Final = 10_000
"""How many records a page holds, unless asked otherwise, and at most."""

ROW_BYTES_MAX: Final = 512 * 1024 * 1024
"""The largest row that is taken in, in bytes: a block holds at most as much."""

RECEIVING_MAX: Final = 4
"""How many topics this instance takes in at a time; a move beyond that fails with SERVICE_BUSY, and
its topic stays where it was."""

MOVE_BYTES_MAX: Final = 64
"""The longest name of a move, in bytes."""

Context = aio.ServicerContext[Any, Any]


class PlacementServicer(pb_grpc.PlacementServiceServicer):
    """See placement.proto."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._receiving = 0

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        record = await self._places.locate(_topic(request.topic))
        return pb.LocateResponse(placement=_to_placement(record))

    async def ListPlacements(
        self, request: pb.ListPlacementsRequest, context: Context
    ) -> pb.ListPlacementsResponse:
        if not 0 <= request.page_size <= PAGE_MAX:
            raise InvalidPage(f"a page holds 1 to {PAGE_MAX:,}", field="page_size")
        limit = request.page_size or PAGE_DEFAULT
        records = await self._places.keeper.page(
            prefix=request.prefix, after=request.page_token, limit=limit
        )
        return pb.ListPlacementsResponse(
            placements=[pb.Placement(**each._asdict()) for each in records],
            next_page_token=records[-1].topic if len(records) == limit else "",
        )

    async def MoveTopic(
        self, request: pb.MoveTopicRequest, context: Context
    ) -> pb.MoveTopicResponse:
        record, moved = await self._places.move(_topic(request.topic), request.to)
        return pb.MoveTopicResponse(placement=_to_placement(record), moved=moved)

    async def Record(self, request: pb.RecordRequest, context: Context) -> pb.RecordResponse:
        topic, keeper = _topic(request.topic), self._keeper()
        if not request.HasField("change"):
            return pb.RecordResponse(placement=_to_placement(await keeper.find(topic)))
        change = request.change
        if not 0 <= change.version < SEQUENCE_ID_MAX or len(change.move) > MOVE_BYTES_MAX:
            raise InvalidMove("a record has no such version or move", field="change")
        if change.owner not in self._places.instances and (change.owner or change.version):
            raise InvalidInstance("there is no such instance", field="change.owner")
        record, changed = await keeper.place(
            topic, version=change.version, owner=change.owner, move=change.move
        )
        return pb.RecordResponse(placement=_to_placement(record), changed=changed)

    async def ReceiveTopic(
        self, request_iterator: AsyncIterator[pb.ReceiveTopicRequest], context: Context
    ) -> pb.ReceiveTopicResponse:
        if self._receiving >= RECEIVING_MAX:
            raise busy("as many topics move here as may at a time", limit="RECEIVING_MAX")
        self._receiving += 1
        try:
            return await self._received(request_iterator)
        finally:
            self._receiving -= 1

    async def _received(
        self, request_iterator: AsyncIterator[pb.ReceiveTopicRequest]
    ) -> pb.ReceiveTopicResponse:
        begin = (await anext(request_iterator, pb.ReceiveTopicRequest())).begin
        topic, move, version = _topic(begin.topic), begin.move, begin.version
        if not 0 < len(move) <= MOVE_BYTES_MAX:
            raise InvalidMove("a move has a name", field="begin.move")
        staging = await self._places.receive(topic, move, version, begin.layout)
        try:
            await _taken_in(staging, request_iterator)
        except BaseException:
            await self._places.shelf.drop(move)
            raise
        await self._places.received(staging, topic, move, version)
        return pb.ReceiveTopicResponse()

    def _keeper(self) -> Keeper:
        places = self._places
        if places.own != places.instances[0]:
            raise NotKeeper("another instance keeps the records", owner=places.instances[0])
        return places.keeper


async def _taken_in(staging: Staging, requests: AsyncIterator[pb.ReceiveTopicRequest]) -> None:
    """Keep all rows of a topic.

    Raises:
        InvalidMove: they are not all, or not what was sent.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=ROW_BYTES_MAX)
    count, digest = 0, blake2b(digest_size=DIGEST_BYTES)
    async for request in requests:
        if request.HasField("end"):
            end = request.end
            if (end.row_count, end.digest) != (count, digest.digest()):
                raise InvalidMove("what came is not what was sent", field="end", rows=count)
            return
        digest.update(request.rows)
        rows = _unpacked(unpacker, request.rows)
        count += len(rows)
        if rows:
            await staging.add(rows)
    raise InvalidMove("the end is missing", field="end", rows=count)


def _unpacked(unpacker: Any, piece: bytes) -> list[Row]:
    """The rows that end with a piece."""
    try:
        unpacker.feed(piece)
        rows: list[Row] = list(unpacker)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMove("rows cannot be read", field="rows") from error
    if not all(isinstance(row, list) and row for row in rows):
        raise InvalidMove("a row is an array that begins with its kind", field="rows")
    return rows


def _topic(text: str) -> str:
    try:
        return str(TopicName.parse(text))
    except InvalidNameError as error:
        raise InvalidTopicName(str(error), field="topic") from error


def _to_placement(record: Placement | None) -> pb.Placement | None:
    if record is None:
        return None
    return pb.Placement(**record._asdict())
