"""Services that only answer, in one process: python -m tools.bench.null_ledger

Publishing to this ledger, reading from it, consuming from this dispatcher and having entries judged
by this filter service cost what the client, the messages and gRPC cost, and nothing else. The
process writes its port to standard output, and ends when its standard input does.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import count, cycle, islice
from typing import Any, Final

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.dispatcher.shell.sending import RESPONSE_ENTRIES_MAX
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.service import READ_BYTES_MAX, READ_ENTRIES_MAX
from tools.stack.handlers import handlers

PAGES: Final = 20  # that a read gets: what is kept of a topic, repeated

Context = aio.ServicerContext[Any, Any]
Pages = list[pb.ReadResponse]


class NullLedger:
    """Answers every publication with STORED. Keeps only what one answer to a reader holds, or one
    large message."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self._pages: dict[str, Pages] = {}

    async def publish(self, _requests: object, context: Context) -> None:
        opening = (await context.read()).open
        opened = pb.Opened(
            producer_name=opening.producer_name or "p",
            ledger_id=1,
            window_messages=self._config.window_messages,
            window_bytes=self._config.window_bytes,
            max_message_bytes=self._config.max_message_bytes,
            max_large_message_bytes=self._config.max_large_message_bytes,
            max_chunks=self._config.max_chunks,
        )
        await context.write(pb.PublishResponse(opened=opened))
        entry_ids = count()
        while (request := await context.read()) is not aio.EOF:
            publications = request.publications.publications
            response = pb.PublishResponse()
            for publication in publications:
                response.receipts.receipts.add(
                    request_id=publication.request_id,
                    status=pb.RECEIPT_STATUS_STORED,
                    position=entry_pb2.Position(ledger_id=1, entry_id=next(entry_ids)),
                )
            pages = self._pages.setdefault(opening.topic, [])
            _keep(pages, [each.entries[0] for each in publications])
            await context.write(response)

    async def read(
        self, request: pb.ReadRequest, _context: Context
    ) -> AsyncIterator[pb.ReadResponse]:
        pages = self._pages[request.topic]
        yield pb.ReadResponse(started=pb.Started())
        for _ in range(PAGES):
            for page in pages:
                yield page

    async def consume(self, _requests: object, context: Context) -> None:
        """Answer each permit with as many of the messages that are kept, again and again."""
        topic = (await context.read()).subscribe.topic
        subscribed = dispatcher_pb2.Subscribed(epoch=1)
        await context.write(dispatcher_pb2.ConsumeResponse(subscribed=subscribed))
        kept = [entry for page in self._pages[topic] for entry in page.entries.entries]
        deliveries = [
            dispatcher_pb2.Delivery(
                delivery=number,
                position=each.position,
                metadata=each.metadata,
                payload=each.payload,
                append_time=each.append_time,
            )
            for number, each in enumerate(kept, start=1)
        ]
        while (request := await context.read()) is not aio.EOF:
            if request.HasField("acknowledge"):
                settled = dispatcher_pb2.Settled(request_id=request.acknowledge.request_id)
                await context.write(dispatcher_pb2.ConsumeResponse(settled=settled))
            for first in range(0, request.permit.messages, RESPONSE_ENTRIES_MAX):
                some = min(RESPONSE_ENTRIES_MAX, request.permit.messages - first)
                page = dispatcher_pb2.Deliveries(deliveries=islice(cycle(deliveries), some))
                await context.write(dispatcher_pb2.ConsumeResponse(deliveries=page))

    async def evaluate(self, _requests: object, context: Context) -> None:
        """Accept every entry."""
        accept = filter_pb2.Outcome(verdict=filter_pb2.VERDICT_ACCEPT)
        while (request := await context.read()) is not aio.EOF:
            batch = request.batch
            which = [0] * len(batch.which or batch.metadata)
            verdicts = filter_pb2.Verdicts(outcomes=[accept], which=which)
            await context.write(filter_pb2.EvaluateResponse(verdicts=verdicts))


def _keep(pages: Pages, entries: list[pb.Entry]) -> None:
    """Keep a topic's longest request, or the chunks of its first message."""
    if entries[0].metadata.num_chunks_from_msg > 1:
        for entry in entries:
            if entry.metadata.chunk_id != sum(len(page.entries.entries) for page in pages):
                continue  # the message is kept, and this is of another
            if not pages or pages[-1].ByteSize() + entry.ByteSize() > READ_BYTES_MAX:
                pages.append(pb.ReadResponse())
            _add(pages[-1], entry, entry.metadata.chunk_id)
        return
    longest = entries[:READ_ENTRIES_MAX]
    if pages and len(pages[0].entries.entries) >= len(longest):
        return
    page = pb.ReadResponse()
    size_bytes = 0
    for entry_id, entry in enumerate(longest):
        size_bytes += entry.ByteSize()
        if entry_id and size_bytes > READ_BYTES_MAX:
            break
        _add(page, entry, entry_id)
    pages[:] = [page]


def _add(page: pb.ReadResponse, entry: pb.Entry, entry_id: int) -> None:
    page.entries.entries.add(
        position=entry_pb2.Position(ledger_id=1, entry_id=entry_id),
        metadata=entry.metadata,
        payload=entry.payload,
        append_time=1,
    )


def _service(module: Any, name: str) -> Any:
    return module.DESCRIPTOR.services_by_name[name]


async def main() -> None:
    config = LedgerConfig()
    server = aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", config.message_bytes_max),
            ("grpc.max_send_message_length", config.message_bytes_max),
        ]
    )
    null = NullLedger(config)
    server.add_generic_rpc_handlers(
        [
            handlers(_service(pb, "LedgerService"), Publish=null.publish, Read=null.read),
            handlers(_service(dispatcher_pb2, "DispatcherService"), Consume=null.consume),
            handlers(_service(filter_pb2, "FilterService"), Evaluate=null.evaluate),
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
