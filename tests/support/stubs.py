"""Stubs of services with public methods and methods for other services."""

from types import SimpleNamespace
from typing import Any

from grpc import aio

from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dedup.v1.dedup_pb2_grpc import DedupServiceStub
from seqgate.api.internal.cursor.v1.lease_pb2_grpc import CursorLeaseServiceStub
from seqgate.api.internal.dedup.v1.writer_pb2_grpc import DedupWriterServiceStub


def dedup_stub(channel: aio.Channel) -> Any:
    """All methods of the dedup service."""
    return SimpleNamespace(
        **vars(DedupServiceStub(channel)), **vars(DedupWriterServiceStub(channel))
    )


def cursor_stub(channel: aio.Channel) -> Any:
    """All methods of the cursor service."""
    return SimpleNamespace(
        **vars(CursorServiceStub(channel)), **vars(CursorLeaseServiceStub(channel))
    )
