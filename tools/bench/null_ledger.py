"""Services that only answer, in one process: python -m tools.bench.null_ledger

Publishing to this ledger, reading from it, consuming from this dispatcher and having entries judged
by this filter service cost what the client, the messages and gRPC cost, and nothing else. A
stack starts the process as its ledger.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import count, cycle, islice
from typing import Any, Final

from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.dispatcher.shell.sending import RESPONSE_ENTRIES_MAX
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.service import READ_BYTES_MAX, READ_ENTRIES_MAX
from seqgate.times import timestamp
from tools.stack.handlers import handlers

KEPT_BYTES_MAX: Final = 4 * 1024 * 1024  # of a topic: one large message
PAGES: Final = 20  # times that a read repeats a topic's kept entries

Context = aio.ServicerContext[Any, Any]


class Kept:
    """The first entries of a topic, up to READ_ENTRIES_MAX or KEPT_BYTES_MAX of payload: of large
    messages the chunks of the first."""

    def __init__(self) -> None:
        self.pages: list[pb.ReadResponse] = []
        self._entries = 0
        self._bytes = 0

    def add(self, entry: pb.Entry) -> None:
        """Keep an entry, if there is room."""
        size_bytes = len(entry.payload)
        if self._entries == READ_ENTRIES_MAX or self._bytes + size_bytes > KEPT_BYTES_MAX:
            return
        if not self.pages or self.pages[-1].ByteSize() + entry.ByteSize() > READ_BYTES_MAX:
            self.pages.append(pb.ReadResponse())
        self.pages[-1].entries.entries.add(
            position=common_pb2.Position(ledger_id=1, entry_id=self._entries),
            metadata=entry.metadata,
            payload=entry.payload,
            append_time=timestamp(1),
        )
        self._entries += 1
        self._bytes += size_bytes

    def deliveries(self) -> list[dispatcher_pb2.Delivery]:
        kept = [entry for page in self.pages for entry in page.entries.entries]
        return [
            dispatcher_pb2.Delivery(
                delivery=number,
                position=each.position,
                metadata=each.metadata,
                payload=each.payload,
                append_time=each.append_time,
            )
            for number, each in enumerate(kept, start=1)
        ]


class NullServices:
    """Answers every publication with STORED and every permit with the topic's kept entries, and
    accepts every entry."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self._kept: defaultdict[str, Kept] = defaultdict(Kept)

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
        kept = self._kept[opening.topic]
        entry_ids = count()
        while (request := await context.read()) is not aio.EOF:
            response = pb.PublishResponse()
            for publication in request.publications.publications:
                kept.add(publication.entries[0])
                response.receipts.receipts.add(
                    request_id=publication.request_id,
                    status=pb.RECEIPT_STATUS_STORED,
                    position=common_pb2.Position(ledger_id=1, entry_id=next(entry_ids)),
                )
            await context.write(response)

    async def read(
        self, request: pb.ReadRequest, _context: Context
    ) -> AsyncIterator[pb.ReadResponse]:
        yield pb.ReadResponse(started=pb.Started())
        for _ in range(PAGES):
            for page in self._kept[request.topic].pages:
                yield page

    async def consume(self, _requests: object, context: Context) -> None:
        deliveries = self._kept[(await context.read()).subscribe.topic].deliveries()
        subscribed = dispatcher_pb2.Subscribed(epoch=1)
        await context.write(dispatcher_pb2.ConsumeResponse(subscribed=subscribed))
        while (request := await context.read()) is not aio.EOF:
            if request.HasField("acknowledge"):
                settled = dispatcher_pb2.Settled(request_id=request.acknowledge.request_id)
                await context.write(dispatcher_pb2.ConsumeResponse(settled=settled))
            for first in range(0, request.permit.messages, RESPONSE_ENTRIES_MAX):
                some = min(RESPONSE_ENTRIES_MAX, request.permit.messages - first)
                page = dispatcher_pb2.Deliveries(deliveries=islice(cycle(deliveries), some))
                await context.write(dispatcher_pb2.ConsumeResponse(deliveries=page))

    async def evaluate(self, _requests: object, context: Context) -> None:
        accept = filter_pb2.FilterOutcome(verdict=filter_pb2.FILTER_VERDICT_ACCEPT)
        while (request := await context.read()) is not aio.EOF:
            which = [0] * len(request.batch.which or request.batch.metadata)
            verdicts = filter_pb2.Verdicts(outcomes=[accept], which=which)
            await context.write(filter_pb2.EvaluateResponse(verdicts=verdicts))


async def main() -> None:
    config = LedgerConfig()
    null = NullServices(config)
    bytes_max = config.message_bytes_max
    options = [
        ("grpc.max_receive_message_length", bytes_max),
        ("grpc.max_send_message_length", bytes_max),
    ]
    ledger = pb.DESCRIPTOR.services_by_name["LedgerService"]
    dispatcher = dispatcher_pb2.DESCRIPTOR.services_by_name["DispatcherService"]
    filters = filter_pb2.DESCRIPTOR.services_by_name["FilterService"]
    served = [
        handlers(ledger, Publish=null.publish, Read=null.read),
        handlers(dispatcher, Consume=null.consume),
        handlers(filters, Evaluate=null.evaluate),
    ]
    server = aio.server(handlers=served, options=options)
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    server.add_insecure_port(config.listen)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
