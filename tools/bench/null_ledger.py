"""A ledger service that only answers: python -m tools.bench.null_ledger

Publishing to it and reading from it costs what the client, the messages and gRPC cost, and nothing
else. It writes its port to standard output, and ends when its standard input does.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc import aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from services.ledger.config import LedgerConfig
from services.ledger.service import READ_BYTES_MAX, READ_ENTRIES_MAX

PAGES: Final = 20
"""How many pages one read gives."""

Context = aio.ServicerContext[Any, Any]


class NullLedger:
    """Says STORED to everything, and keeps only what one answer to a reader holds."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self._pages: dict[str, pb.ReadResponse] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """What it answers; everything else of the service is UNIMPLEMENTED."""
        return grpc.method_handlers_generic_handler(
            "seqgate.api.ledger.v1.LedgerService",
            {
                "Publish": grpc.stream_stream_rpc_method_handler(
                    self._publish,
                    request_deserializer=pb.PublishRequest.FromString,
                    response_serializer=pb.PublishResponse.SerializeToString,
                ),
                "Read": grpc.unary_stream_rpc_method_handler(
                    self._read,
                    request_deserializer=pb.ReadRequest.FromString,
                    response_serializer=pb.ReadResponse.SerializeToString,
                ),
            },
        )

    async def _publish(self, _requests: object, context: Context) -> None:
        opening = (await context.read()).open
        opened = pb.Opened(
            producer_name=opening.producer_name or "p",
            ledger_id=1,
            window_messages=self._config.window_messages,
            window_bytes=self._config.window_bytes,
            max_message_bytes=self._config.max_message_bytes,
        )
        await context.write(pb.PublishResponse(opened=opened))
        entry_id = 0
        while (request := await context.read()) is not aio.EOF:
            response = pb.PublishResponse()
            for publication in request.publications.publications:
                response.receipts.receipts.add(
                    request_id=publication.request_id,
                    status=pb.RECEIPT_STATUS_STORED,
                    position=entry_pb2.Position(ledger_id=1, entry_id=entry_id),
                )
                entry_id += 1
            self._keep(opening.topic, request.publications)
            await context.write(response)

    async def _read(
        self, request: pb.ReadRequest, _context: Context
    ) -> AsyncIterator[pb.ReadResponse]:
        """The same page, again and again."""
        page = self._pages[request.topic]
        yield pb.ReadResponse(started=pb.Started())
        for _ in range(PAGES):
            yield page

    def _keep(self, topic: str, publications: pb.Publications) -> None:
        """Keep the entries of a topic's longest request, if it is longer than a page so far."""
        kept = self._pages.setdefault(topic, pb.ReadResponse()).entries.entries
        longest = publications.publications[:READ_ENTRIES_MAX]
        if len(kept) >= len(longest):
            return
        del kept[:]
        size_bytes = 0
        for entry_id, publication in enumerate(longest):
            entry = publication.entries[0]
            size_bytes += entry.ByteSize()
            if kept and size_bytes > READ_BYTES_MAX:
                return
            kept.add(
                position=entry_pb2.Position(ledger_id=1, entry_id=entry_id),
                metadata=entry.metadata,
                payload=entry.payload,
                append_time=1,
            )


async def main() -> None:
    config = LedgerConfig()
    server = aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", config.message_bytes_max),
            ("grpc.max_send_message_length", config.message_bytes_max),
        ]
    )
    server.add_generic_rpc_handlers([NullLedger(config).handlers()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
