"""The line between the weather stations and the ledger. It stops in the middle of messages.

A producer hands all chunks of a message over together, and the ledger stores them in one go: hardly
any crash would find a message half stored. The line passes on chunk by chunk, and stops once in
each attempt to publish a message, somewhere between its first and its last chunk:

    station  ->  c0 c1 c2 c3 c4 c5 c6  ->  line  ->  c0 c1 c2      ledger
                                                 |
                                           stands here until released

Then it is certain that c0 to c2 are durable and that the rest is nowhere, and whatever is to be
killed is killed. An attempt that was released passes, over any number of connections.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from random import Random
from typing import Any, NamedTuple, Self

from grpc import StatusCode, aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from tools.stack.handlers import handlers

RECONNECT_QUICKLY = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)
"""Options of a channel: the ledger is back soon."""


class Standing(NamedTuple):
    """An attempt to publish a large message, of which `chunks` are stored and no more was sent."""

    producer: str
    uuid: str
    chunks: int


class Gate:
    """Decides where attempts stop."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._stops: dict[str, int] = {}
        self._released: set[str] = set()
        self._open = False

    def stops(self, chunk: EntryMetadata) -> bool:
        """Whether this one has to wait."""
        if self._open or chunk.uuid in self._released or chunk.num_chunks_from_msg < 2:
            return False
        if chunk.uuid not in self._stops:
            self._stops[chunk.uuid] = self._random.randrange(1, chunk.num_chunks_from_msg)
        return chunk.chunk_id >= self._stops[chunk.uuid]

    def release(self, uuids: Collection[str]) -> None:
        """Let these attempts pass from now on."""
        self._released.update(uuids)

    def open(self) -> None:
        """Let everything pass from now on."""
        self._open = True


class Line:
    """A relay for Publish streams; `async with` is its life."""

    def __init__(self, ledger: str, random: Random) -> None:
        """
        Args:
            ledger: the address that it leads to.
            random: where messages stop.
        """
        self._channel = aio.insecure_channel(ledger, options=RECONNECT_QUICKLY)
        self._stub = pb_grpc.LedgerServiceStub(self._channel)
        self._server = aio.server()
        self._gate = Gate(random)
        self._streams: set[_Stream] = set()
        service = pb.DESCRIPTOR.services_by_name["LedgerService"]
        self._server.add_generic_rpc_handlers([handlers(service, Publish=self._publish)])
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def address(self) -> str:
        """Where it begins."""
        return f"127.0.0.1:{self._port}"

    @property
    def standing(self) -> list[Standing]:
        """What stands in the middle of a message now."""
        return [stream.standing for stream in self._streams if stream.standing is not None]

    def release(self, attempts: Collection[Standing]) -> None:
        """Let these go on."""
        self._gate.release({attempt.uuid for attempt in attempts})
        self._look()

    def open(self) -> None:
        """Let everything go on, and stop at nothing any more."""
        self._gate.open()
        self._look()

    def forget(self) -> None:
        """The sender is dead. The streams notice by themselves, a moment later."""
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
        """Relay one stream, with the status that it ends with."""
        call: Any = self._stub.Publish()
        stream = _Stream(self._gate, call)
        self._streams.add(stream)
        sending = asyncio.create_task(stream.send(requests))
        try:
            while (response := await call.read()) is not aio.EOF:
                stream.receive(response)
                await context.write(response)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # its status is passed on below
        finally:
            self._streams.discard(stream)
            sending.cancel()
            await asyncio.wait([sending])
            call.cancel()
        if (code := await call.code()) is not StatusCode.OK:
            trailing = tuple(await call.trailing_metadata() or ())
            await context.abort(code, await call.details(), trailing)

    def _look(self) -> None:
        for stream in self._streams:
            stream.changed.set()


class _Stream:
    """What one producer sends, and where it stands."""

    def __init__(self, gate: Gate, call: Any) -> None:
        self.standing: Standing | None = None
        self._gate = gate
        self._call = call
        self.changed = asyncio.Event()
        self._unanswered: set[int] = set()
        self._attempt = ""
        self._settled = False

    async def send(self, requests: AsyncIterator[pb.PublishRequest]) -> None:
        """Pass on what arrives, one publication at a time."""
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
        """Note an answer. A receipt without a position is of a message that is stored already, or
        cannot be for now: no message to stop in the middle of."""
        for receipt in response.receipts.receipts:
            self._unanswered.discard(receipt.request_id)
            if not receipt.HasField("position"):
                self._settled = True
        self.changed.set()

    async def _pass(self, publication: pb.Publication) -> None:
        """Return when a publication may go on."""
        chunk = publication.entries[0].metadata
        if publication.resume or chunk.uuid != self._attempt:
            self._attempt, self._settled = chunk.uuid, False
        while self._gate.stops(chunk) and not self._settled:
            if not self._unanswered:
                self.standing = Standing(chunk.producer_name, chunk.uuid, chunk.chunk_id)
            self.changed.clear()
            await self.changed.wait()
        self.standing = None
        self._unanswered.add(publication.request_id)


def one_by_one(request: pb.PublishRequest) -> Iterator[pb.PublishRequest]:
    """A request for each publication; one that has none stays as it is."""
    if not request.HasField("publications"):
        yield request
    for publication in request.publications.publications:
        alone = pb.Publications(
            publications=[publication], ledger_id=request.publications.ledger_id
        )
        yield pb.PublishRequest(publications=alone)
