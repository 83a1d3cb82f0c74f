"""A producer without a client library: one Publish stream, driven by hand.

    async with publishing(stub, "public/default/t", "p") as publisher:
        await publisher.send(single(1, sequence_id=0), batch(2, [1, 2, 3]))
        assert (await publisher.receipt(1)).status == pb.RECEIPT_STATUS_STORED

A publication is what the test makes of it: nothing is checked here, numbered, or sent again.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

from grpc import aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb

WAIT_S = 30.0
"""How long anything here waits before the test fails."""

STATUS_LOST = "Internal error from Core"
"""What gRPC makes of a write to a call that is just being ended by the service: with what it was
ended, only another call can tell."""


class Publisher:
    """An open stream. What arrives is collected in the background."""

    def __init__(self, call: Any, opened: pb.Opened) -> None:
        self.opened = opened
        self.producer = opened.producer_name
        self.receipts: dict[int, pb.Receipt] = {}
        """What nobody has asked for yet, by request id."""
        self.draining = asyncio.Event()
        self.taken_over = asyncio.Event()
        self._call = call
        self._error: aio.AioRpcError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(self, *publications: pb.Publication, ledger_id: int = 0) -> None:
        """Send these together. An entry that names no producer gets this stream's."""
        for publication in publications:
            for entry in publication.entries:
                if not entry.metadata.HasField("producer_name"):
                    entry.metadata.producer_name = self.producer
        await self.write(
            pb.PublishRequest(
                publications=pb.Publications(publications=publications, ledger_id=ledger_id)
            )
        )

    async def write(self, request: pb.PublishRequest) -> None:
        """Send anything. To a stream that has ended this does nothing: `receipt` and `ended` tell
        how it ended."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(WAIT_S):
                await self._call.write(request)

    async def receipt(self, request_id: int) -> pb.Receipt:
        """The answer to a publication; each is given out once.

        Raises:
            AioRpcError: the stream ended with this before the answer came.
            AssertionError: the stream ended well, without it.
        """
        async with asyncio.timeout(WAIT_S):
            while request_id not in self.receipts:
                if self._error is not None:
                    raise self._error
                assert not self._ended, f"the stream ended without the receipt of {request_id}"
                self._changed.clear()
                await self._changed.wait()
        return self.receipts.pop(request_id)

    async def store(self, publication: pb.Publication) -> pb.Receipt:
        """Send one publication; its answer."""
        await self.send(publication)
        return await self.receipt(publication.request_id)

    async def finish(self) -> None:
        """Close this side, and return when the service has closed its own.

        Raises:
            AioRpcError: the stream ended with this.
        """
        if not self._ended:
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):  # the reader knows better
                await self._call.done_writing()
        if (error := await self.ended()) is not None:
            raise error

    async def ended(self) -> aio.AioRpcError | None:
        """Wait for the end of the stream; the error it ended with, if any."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self._reading)
        return self._error

    @property
    def has_ended(self) -> bool:
        """Whether the stream has ended, however it did."""
        return self._ended

    async def cut(self) -> None:
        """Vanish, as a producer does whose process is killed."""
        self._call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not aio.EOF:
                match response.WhichOneof("response"):
                    case "receipts":
                        for receipt in response.receipts.receipts:
                            self.receipts[receipt.request_id] = receipt
                    case "draining":
                        self.draining.set()
                    case "taken_over":
                        self.taken_over.set()
                self._changed.set()
        except aio.AioRpcError as error:
            self._error = error
        finally:
            self._ended = True
            self._changed.set()


@asynccontextmanager
async def publishing(
    stub: Any, topic: str, producer: str = "", **open_fields: Any
) -> AsyncIterator[Publisher]:
    """A stream that is open. On the way out it is closed in good order, unless the test failed or
    the stream has already ended.

    Raises:
        AioRpcError: the stream was refused.
    """
    opening = pb.Open(topic=topic, producer_name=producer, **open_fields)
    async with asyncio.timeout(WAIT_S):
        publisher = await _opened(stub, opening)
    try:
        yield publisher
        if not publisher.has_ended:
            await publisher.finish()
    finally:
        await publisher.cut()


async def _opened(stub: Any, opening: pb.Open) -> Publisher:
    while True:
        call = stub.Publish()
        try:
            with suppress(asyncio.InvalidStateError):  # it has ended: the read says how
                await call.write(pb.PublishRequest(open=opening))
            first = await call.read()
        except aio.AioRpcError as error:
            if error.details() == STATUS_LOST:
                continue
            raise
        except BaseException:
            call.cancel()
            raise
        assert first is not aio.EOF
        return Publisher(call, first.opened)


def single(
    request_id: int,
    sequence_id: int,
    payload: bytes = b"x",
    *,
    resume: bool = False,
    **metadata: Any,
) -> pb.Publication:
    """A publication of one message that is no batch. More metadata is taken as given."""
    return pb.Publication(
        request_id=request_id,
        entries=[entry(sequence_id, payload, **metadata)],
        resume=resume,
    )


def batch(
    request_id: int,
    sequence_ids: Sequence[int],
    payload: bytes = b"batch",
    *,
    resume: bool = False,
    **metadata: Any,
) -> pb.Publication:
    """A publication of one batch with these ids, in their order."""
    return pb.Publication(
        request_id=request_id,
        entries=[batch_entry(sequence_ids, payload, **metadata)],
        resume=resume,
    )


def entry(sequence_id: int, payload: bytes = b"x", **metadata: Any) -> pb.Entry:
    """An entry that is no batch."""
    return pb.Entry(
        metadata=entry_pb2.EntryMetadata(sequence_id=sequence_id, **metadata), payload=payload
    )


def batch_entry(
    sequence_ids: Sequence[int], payload: bytes = b"batch", **metadata: Any
) -> pb.Entry:
    """An entry that is a batch."""
    steps = [later - earlier for earlier, later in pairwise(sequence_ids)]
    return pb.Entry(
        metadata=entry_pb2.EntryMetadata(
            sequence_id=sequence_ids[0],
            highest_sequence_id=sequence_ids[-1],
            num_messages_in_batch=len(sequence_ids),
            sequence_id_steps=[] if all(step == 1 for step in steps) else steps,
            **metadata,
        ),
        payload=payload,
    )
