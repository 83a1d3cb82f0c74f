"""What the ledger may expect of cursors, over the wire and in memory."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc
from seqgate.types import Position, TopicName
from services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from services.cursor.adapters.sqlite import open_sqlite_store
from services.cursor.config import CursorConfig
from services.cursor.service import ManagedCursors
from services.cursor.servicer import CursorServicer
from services.ledger.adapters import cursors as adapter
from services.ledger.adapters.cursors import GrpcCursors, NoCursors
from services.ledger.adapters.memory import MemoryCursors
from services.ledger.ports import Cursors, CursorsUnavailable
from services.runtime.channels import peer_channel
from services.runtime.drain import Drain
from services.runtime.server import grpc_server
from tools.stack.ports import free_ports

TOPIC = TopicName.parse("test/cursors/topic")
OTHER = TopicName.parse("test/cursors/topic2")

Cursor = Callable[[TopicName, str, Position | None], Awaitable[None]]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    """A cursor service; the port on which it listens."""
    config = CursorConfig(listen="127.0.0.1:0", store_path=folder / "cursor.db")
    async with open_sqlite_store(config.store_path) as store:

        def register(server: aio.Server) -> None:
            managed = ManagedCursors(store, import_managed_cursor, export_managed_cursor)
            servicer = CursorServicer(store, managed)
            cursor_pb2_grpc.add_CursorServiceServicer_to_server(servicer, server)

        async with grpc_server(config, Drain(), register=register, services=[], checks={}) as port:
            yield port


@asynccontextmanager
async def over(port: int) -> AsyncIterator[tuple[Cursors, Cursor]]:
    """The adapter, and what makes a cursor."""
    async with peer_channel(f"127.0.0.1:{port}", keepalive_s=5) as channel:
        stub: Any = cursor_pb2_grpc.CursorServiceStub(channel)

        async def make(topic: TopicName, name: str, mark_delete: Position | None) -> None:
            request = pb.CreateCursorRequest(topic=str(topic), name=name)
            if mark_delete is not None:
                request.mark_delete.ledger_id, request.mark_delete.entry_id = mark_delete
            await stub.CreateCursor(request)

        yield GrpcCursors(channel), make


@pytest_asyncio.fixture(params=["memory", "grpc"])
async def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Cursors, Cursor]]:
    """Pages are small, so that a few cursors are many."""
    if request.param == "memory":
        memory = MemoryCursors()

        async def make(topic: TopicName, name: str, mark_delete: Position | None) -> None:
            memory.cursors.setdefault(topic, {})[name] = mark_delete

        yield memory, make
        return
    monkeypatch.setattr(adapter, "PAGE_SIZE", 3)
    async with serving(tmp_path) as port, over(port) as both:
        yield both


CURSORS: Mapping[str, Position | None] = {
    "b": Position(1, 4),
    "a": None,
    "seqgate.dedup": Position(2, 0),
    "ü/ %": Position(2**63 - 1, 2**63 - 1),
    "Z": Position(0, 0),
    "c": Position(1, 4),
    "d": None,
}


async def test_a_topic_without_cursors_has_none(made: tuple[Cursors, Cursor]) -> None:
    cursors, make = made
    await make(OTHER, "other", None)
    assert await cursors.mark_deletes(TOPIC) == {}
    await cursors.delete_all(TOPIC)


async def test_every_cursor_of_a_topic_tells_its_position(made: tuple[Cursors, Cursor]) -> None:
    cursors, make = made
    await make(OTHER, "other", Position(9, 9))
    for name, mark_delete in CURSORS.items():
        await make(TOPIC, name, mark_delete)
    told = await cursors.mark_deletes(TOPIC)
    assert told == CURSORS
    assert list(told) == sorted(CURSORS)


async def test_all_cursors_of_a_topic_are_deleted_and_no_others(
    made: tuple[Cursors, Cursor],
) -> None:
    cursors, make = made
    await make(OTHER, "other", Position(9, 9))
    for name, mark_delete in CURSORS.items():
        await make(TOPIC, name, mark_delete)
    for _ in range(2):
        await cursors.delete_all(TOPIC)
        assert await cursors.mark_deletes(TOPIC) == {}
    assert await cursors.mark_deletes(OTHER) == {"other": Position(9, 9)}


async def test_a_service_that_does_not_answer_is_unavailable() -> None:
    (port,) = free_ports(1)
    memory = MemoryCursors()
    memory.available = False
    async with over(port) as (unreachable, _):
        for cursors in (unreachable, memory):
            for call in (cursors.mark_deletes, cursors.delete_all):
                with pytest.raises(CursorsUnavailable) as caught:
                    await call(TOPIC)
                assert caught.value.retry_after_s


async def test_without_a_cursor_service_there_are_no_cursors() -> None:
    cursors = NoCursors()
    assert await cursors.mark_deletes(TOPIC) == {}
    await cursors.delete_all(TOPIC)
