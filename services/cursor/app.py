"""The cursor service, wired by hand. The `async with` is the life of the process."""

from typing import Any, Final

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2, cursor_pb2_grpc
from services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from services.cursor.adapters.rows import CursorRows
from services.cursor.adapters.sqlite import open_sqlite_store
from services.cursor.config import CursorConfig
from services.cursor.ports import CursorStore
from services.cursor.rights import RIGHTS
from services.cursor.service import ManagedCursors
from services.cursor.servicer import CURSORS_DEFAULT, CursorServicer
from services.placement.guard import Guarding, Listing
from services.placement.servicer import SERVICE as PLACEMENT
from services.placement.wiring import Placed, placed, settling
from services.runtime.drain import Drain
from services.runtime.server import grpc_server, told_to_stop

SERVICE: Final = "seqgate.api.cursor.v1.CursorService"
DESCRIPTOR: Final = cursor_pb2.DESCRIPTOR.services_by_name["CursorService"]

GUARDING: Final = Guarding(
    reads=frozenset(
        {"GetCursor", "ListCursors", "ReadAcknowledged", "ListAttempts", "ExportManagedCursor"}
    ),
    creates=lambda request: isinstance(
        request, cursor_pb2.CreateCursorRequest | cursor_pb2.ImportManagedCursorRequest
    ),
    lists={
        "ListCursors": Listing(
            "cursors", lambda cursor: (cursor.topic, cursor.name), CURSORS_DEFAULT
        )
    },
)


async def run(config: CursorConfig) -> None:
    """Serve until told to stop."""
    async with (
        open_sqlite_store(
            config.store_path, readers=config.store_readers, size_max_bytes=config.store_bytes_max
        ) as store,
        placed(config, store.connections, CursorRows(), store.remove_deleted) as places,
    ):
        await serve(config, store, places)


async def serve(config: CursorConfig, store: CursorStore, places: Placed | None = None) -> None:
    """Serve from any store until told to stop."""

    def register(server: aio.Server) -> None:
        managed = ManagedCursors(store, import_managed_cursor, export_managed_cursor)
        servicer: Any = CursorServicer(store, managed)
        if places is not None:
            places.register(server)
            stub = cursor_pb2_grpc.CursorServiceStub
            servicer = places.guard(servicer, DESCRIPTOR, GUARDING, stub)
        cursor_pb2_grpc.add_CursorServiceServicer_to_server(servicer, server)

    async with (
        settling(places),
        grpc_server(
            config,
            Drain(),
            register=register,
            services=[SERVICE] if places is None else [SERVICE, PLACEMENT],
            checks={"store": store.check},
            rights=RIGHTS,
        ),
    ):
        await told_to_stop()
