"""The cursor service, wired by hand. The `async with` is the life of the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2, cursor_pb2_grpc
from seqgate.telemetry.metrics import CURSOR_STORE_FREE, CURSOR_STORE_SIZE
from services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from services.cursor.adapters.rows import CursorRows
from services.cursor.adapters.sqlite import open_sqlite_store
from services.cursor.config import CursorConfig
from services.cursor.metrics import Survey
from services.cursor.ports import CursorStore
from services.cursor.rights import RIGHTS
from services.cursor.service import ManagedCursors
from services.cursor.servicer import CURSORS_DEFAULT, CursorServicer
from services.placement.guard import Guarding, Listing
from services.placement.servicer import SERVICE as PLACEMENT
from services.placement.wiring import Placed, placed, settling
from services.runtime.drain import Drain
from services.runtime.metrics import OFF, Metrics, survey_forever, tell_store, telling
from services.runtime.server import grpc_server, told_to_stop
from services.runtime.tasks import end

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
        telling(config) as metrics,
        open_sqlite_store(
            config.store_path, readers=config.store_readers, size_max_bytes=config.store_bytes_max
        ) as store,
        placed(
            config, store.connections, CursorRows(store.now_ms), store.remove_deleted, metrics
        ) as places,
    ):
        tell_store(
            metrics,
            CURSOR_STORE_SIZE,
            CURSOR_STORE_FREE,
            config.store_path,
            config.store_bytes_max,
        )
        await serve(config, store, places, metrics)


async def serve(
    config: CursorConfig,
    store: CursorStore,
    places: Placed | None = None,
    metrics: Metrics = OFF,
) -> None:
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
        surveyed(config, store, metrics),
        grpc_server(
            config,
            Drain(),
            register=register,
            services=[SERVICE] if places is None else [SERVICE, PLACEMENT],
            checks={"store": store.check},
            rights=RIGHTS,
            metrics=metrics,
        ),
    ):
        await told_to_stop()


@asynccontextmanager
async def surveyed(
    config: CursorConfig, store: CursorStore, metrics: Metrics
) -> AsyncIterator[None]:
    """Meanwhile, the store is looked through for metrics, if anybody is told."""
    if not metrics.is_on:
        yield
        return
    looking = asyncio.create_task(
        survey_forever(Survey(store, metrics).look, config.metrics_survey_s)
    )
    try:
        yield
    finally:
        await end(looking)
