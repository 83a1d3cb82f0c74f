"""Servers that keep what a client sends them, for tests of the client alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import (
    LedgerServiceServicer,
    add_LedgerServiceServicer_to_server,
)

ENTRY_BYTES_MAX = 1024 * 1024


class Recorder(grpc.GenericRpcHandler):
    """All methods of all services: each keeps its request, and returns an empty response.

    Attributes:
        requests: methods, and the bytes of their requests.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        def record(request: bytes, context: Any) -> bytes:
            self.requests.append((method, request))
            return b""

        return grpc.unary_unary_rpc_method_handler(record)

    def taken(self) -> list[tuple[str, bytes]]:
        """The requests since the last call."""
        requests, self.requests = self.requests, []
        return requests


class StoringLedger(LedgerServiceServicer):
    """A ledger that stores each entry that it is sent, and nothing else.

    Attributes:
        entries: in their order.
    """

    def __init__(self) -> None:
        self.entries: list[pb.Entry] = []

    def Publish(self, request_iterator: Any, context: Any) -> Iterator[pb.PublishResponse]:
        opening = next(request_iterator).open
        yield pb.PublishResponse(
            opened=pb.Opened(
                producer_name=opening.producer_name or "a-name",
                max_message_bytes=ENTRY_BYTES_MAX,
                max_large_message_bytes=2**31 - 1,
                max_chunks=1_000,
                window_messages=10_000,
                window_bytes=64 * ENTRY_BYTES_MAX,
            )
        )
        for request in request_iterator:
            receipts = [self._stored(each) for each in request.publications.publications]
            yield pb.PublishResponse(receipts=pb.Receipts(receipts=receipts))

    def _stored(self, publication: pb.Publication) -> pb.Receipt:
        position = common_pb2.Position(ledger_id=1, entry_id=len(self.entries))
        self.entries.extend(publication.entries)
        stored = pb.RECEIPT_STATUS_STORED
        return pb.Receipt(request_id=publication.request_id, status=stored, position=position)


@contextmanager
def recorder() -> Iterator[tuple[Recorder, str]]:
    """A running recorder, and its address."""
    it = Recorder()
    with _serving(lambda server: server.add_generic_rpc_handlers([it])) as address:
        yield it, address


@contextmanager
def storing_ledger() -> Iterator[tuple[StoringLedger, str]]:
    """A running ledger, and its address."""
    it = StoringLedger()  # type: ignore[abstract]  # implements only the method called
    with _serving(lambda server: add_LedgerServiceServicer_to_server(it, server)) as address:
        yield it, address


@contextmanager
def _serving(add: Any) -> Iterator[str]:
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
