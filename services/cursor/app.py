"""The cursor service, wired by hand. The `async with` is the life of the process."""

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2_grpc
from services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from services.cursor.adapters.sqlite import open_sqlite_store
from services.cursor.config import CursorConfig
from services.cursor.ports import CursorStore
from services.cursor.service import ManagedCursors
from services.cursor.servicer import CursorServicer
from services.runtime.drain import Drain
from services.runtime.server import grpc_server, told_to_stop

SERVICE = "seqgate.api.cursor.v1.CursorService"


async def run(config: CursorConfig) -> None:
    """Serve until told to stop."""
    async with open_sqlite_store(
        config.store_path, readers=config.store_readers, size_max_bytes=config.store_bytes_max
    ) as store:
        await serve(config, store)


async def serve(config: CursorConfig, store: CursorStore) -> None:
    """Serve from any store until told to stop."""

    def register(server: aio.Server) -> None:
        managed = ManagedCursors(store, import_managed_cursor, export_managed_cursor)
        servicer = CursorServicer(store, managed)
        cursor_pb2_grpc.add_CursorServiceServicer_to_server(servicer, server)

    async with grpc_server(
        config, Drain(), register=register, services=[SERVICE], checks={"store": store.check}
    ):
        await told_to_stop()
