"""A relay between the weather stations and the ledger, which stops within large messages.

A producer sends all chunks of a message at once, and the ledger stores them together: hardly any
crash would find a message half stored. The relay passes on chunk by chunk, and stops once in each
attempt to publish a message, somewhere between its first and its last chunk:

    station  ->  c0 c1 c2 c3 c4 c5 c6  ->  relay  ->  c0 c1 c2      ledger
                                                  |
                                           stalls here until released

Then c0 to c2 are known to be durable and the rest was not sent, and whatever is to be killed is
killed. A released attempt passes, over any number of connections.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple, Self

from grpc import StatusCode, aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.owners import FollowingChannel
from tools.stack.handlers import handlers

POLL_S: Final = 0.01


class Stalled(NamedTuple):
    """An attempt to publish a large message, of which `chunks` are stored and no more was sent."""

    producer: str
    uuid: str
    chunks: int


Crashes = list[list[Stalled]]
"""The large messages that each crash interrupted."""


class Gate:
    """Decides where attempts stop."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._stops: dict[str, int] = {}
        self._released: set[str] = set()
        self._open = False

    def stops(self, chunk: EntryMetadata) -> bool:
        if self._open or chunk.uuid in self._released or chunk.num_chunks_from_msg < 2:
            return False
        if chunk.uuid not in self._stops:
            self._stops[chunk.uuid] = self._random.randrange(1, chunk.num_chunks_from_msg)
        return chunk.chunk_id >= self._stops[chunk.uuid]

    def release(self, uuids: Iterable[str]) -> None:
        self._released.update(uuids)

    def open(self) -> None:
        self._open = True


class Relay:
    def __init__(self, ledger: str, random: Random) -> None:
        self.gate = Gate(random)
        # A killed ledger is back soon.
        backoff = [(f"grpc.{each}_reconnect_backoff_ms", 100) for each in ("initial", "max")]
        self._channel = FollowingChannel(ledger, partial(aio.insecure_channel, options=backoff))
        self._stub = pb_grpc.LedgerServiceStub(self._channel)
        self._server = aio.server()
        self._streams: dict[_Stream, asyncio.Task[None]] = {}
        service = pb.DESCRIPTOR.services_by_name["LedgerService"]
        self._server.add_generic_rpc_handlers([handlers(service, Publish=self._publish)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    @property
    def stalled(self) -> list[Stalled]:
        return [stream.stalled for stream in self._streams if stream.stalled is not None]

    def drop_streams(self) -> None:
        """Pass on no more of what a killed process sent; its streams end a moment later."""
        for sending in self._streams.values():
            sending.cancel()
        self._streams.clear()

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    async def _publish(
        self,
        requests: AsyncIterator[pb.PublishRequest],
        context: aio.ServicerContext[pb.PublishRequest, pb.PublishResponse],
    ) -> None:
        call: Any = self._stub.Publish()
        async for opening in requests:
            await call.write(opening)  # it names the topic, and so its owner
            break
        stream = _Stream(self.gate, call)
        sending = self._streams[stream] = asyncio.create_task(stream.send(requests))
        try:
            while (response := await call.read()) is not aio.EOF:
                stream.receive(response)
                await context.write(response)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # its status is passed on below
        finally:
            self._streams.pop(stream, None)
            sending.cancel()
            await asyncio.wait([sending])
            call.cancel()
        if (code := await call.code()) is not StatusCode.OK:
            trailing = tuple(await call.trailing_metadata() or ())
            await context.abort(code, await call.details(), trailing)


class _Stream:
    """What one producer sends, and where it stalls."""

    def __init__(self, gate: Gate, call: Any) -> None:
        self.stalled: Stalled | None = None
        self._gate = gate
        self._call = call
        self._unanswered: set[int] = set()
        self._attempt = ""
        self._settled = False

    async def send(self, requests: AsyncIterator[pb.PublishRequest]) -> None:
        try:
            async for request in requests:
                for each in one_by_one(request):
                    for publication in each.publications.publications:
                        await self._pass(publication)
                    await self._call.write(each)
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader of responses gets the status

    def receive(self, response: pb.PublishResponse) -> None:
        """Note which publications are answered. A receipt without a position means that a message
        is stored already, or cannot be stored now: the relay does not stop within it."""
        for run in response.receipts.runs:
            self._unanswered -= {*range(run.request_id, run.request_id + run.count)}
        for receipt in response.receipts.receipts:
            self._unanswered.discard(receipt.request_id)
            if not receipt.HasField("position"):
                self._settled = True

    async def _pass(self, publication: pb.Publication) -> None:
        chunk = publication.entries[0].metadata
        if publication.resume or chunk.uuid != self._attempt:
            self._attempt, self._settled = chunk.uuid, False
        while self._gate.stops(chunk) and not self._settled:
            if not self._unanswered:
                self.stalled = Stalled(chunk.producer_name, chunk.uuid, chunk.chunk_id)
            await asyncio.sleep(POLL_S)
        self.stalled = None
        self._unanswered.add(publication.request_id)


def one_by_one(request: pb.PublishRequest) -> Iterator[pb.PublishRequest]:
    """Split a request by publication; a request that has none stays as it is."""
    if not request.HasField("publications"):
        yield request
    ledger_id = request.publications.ledger_id
    for each in request.publications.publications:
        alone = pb.Publications(publications=[each], ledger_id=ledger_id)
        yield pb.PublishRequest(publications=alone)
