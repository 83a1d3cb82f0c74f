"""A producer without a client library: one Publish stream, driven by hand.

    async with publishing(stub, "public/default/t", "p") as publisher:
        await publisher.send(single(1, sequence_id=0), batch(2, [1, 2, 3]))
        assert (await publisher.receipt(1)).status == pb.RECEIPT_STATUS_STORED

Publications are sent as the test gives them: they are not checked, numbered, or resent.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb

WAIT_S = 60.0
"""The limit of every wait here."""

STATUS_LOST = "Internal error from Core"
"""gRPC's details of a write to a call that the service is just ending. The service's own error is
lost; only another call can tell."""


class Publisher:
    """An open stream, read in the background."""

    def __init__(self, call: Any, opened: pb.Opened) -> None:
        self.opened = opened
        self.producer = opened.producer_name
        self.receipts: dict[int, pb.Receipt] = {}
        """Receipts not returned yet, by request id."""
        self.runs: list[pb.ReceiptRun] = []
        """The receipts that came as runs."""
        self.draining = asyncio.Event()
        self.taken_over = asyncio.Event()
        self._call = call
        self._error: aio.AioRpcError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(self, *publications: pb.Publication, ledger_id: int = 0) -> None:
        """Send publications in one request. Entries without a producer get this stream's."""
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
        """Send a request. On an ended stream this does nothing; see `receipt` and `ended`."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(WAIT_S):
                await self._call.write(request)

    async def receipt(self, request_id: int) -> pb.Receipt:
        """Wait for the receipt of a publication, which is returned only once.

        Raises:
            AioRpcError: the stream ended first, with this error.
            AssertionError: the stream ended first, without an error.
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
        """Send one publication, and return its receipt."""
        await self.send(publication)
        return await self.receipt(publication.request_id)

    async def finish(self) -> None:
        """Close this side, and wait until the service closes its own.

        Raises:
            AioRpcError: the stream ended with this error.
        """
        if not self._ended:
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):  # the reader has the error
                await self._call.done_writing()
        if (error := await self.ended()) is not None:
            raise error

    async def ended(self) -> aio.AioRpcError | None:
        """Wait until the stream ends. Returns its error, or None."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self._reading)
        return self._error

    @property
    def has_ended(self) -> bool:
        """True once the stream has ended."""
        return self._ended

    async def cut(self) -> None:
        """Vanish, like a producer whose process is killed."""
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
                        for run in response.receipts.runs:
                            self.runs.append(run)
                            self.receipts |= {each.request_id: each for each in receipts_of(run)}
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
    """An open stream, finished at the end of the context unless the test failed or the stream has
    ended.

    Raises:
        AioRpcError: the service refused it.
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
            with suppress(asyncio.InvalidStateError):  # ended already: the read has the error
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


def receipts_of(run: pb.ReceiptRun) -> Iterator[pb.Receipt]:
    """The receipts that a run stands for."""
    first = run.position
    for place in range(run.count):
        yield pb.Receipt(
            request_id=run.request_id + place,
            status=pb.RECEIPT_STATUS_STORED,
            position=common_pb2.Position(
                ledger_id=first.ledger_id, entry_id=first.entry_id + place
            ),
        )


def single(
    request_id: int,
    sequence_id: int,
    payload: bytes = b"x",
    *,
    resume: bool = False,
    **metadata: Any,
) -> pb.Publication:
    """A publication of one single message. Further metadata is passed through."""
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
    """A publication of one batch with these ids, in this order."""
    return pb.Publication(
        request_id=request_id,
        entries=[batch_entry(sequence_ids, payload, **metadata)],
        resume=resume,
    )


def entry(sequence_id: int, payload: bytes = b"x", **metadata: Any) -> pb.Entry:
    """An entry with a single message."""
    return pb.Entry(
        metadata=entry_pb2.EntryMetadata(sequence_id=sequence_id, **metadata), payload=payload
    )


def batch_entry(
    sequence_ids: Sequence[int], payload: bytes = b"batch", **metadata: Any
) -> pb.Entry:
    """An entry with a batch."""
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
