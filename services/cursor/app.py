"""The cursor service, wired by hand. The `async with` is the life of the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2_grpc
from seqgate.api.internal.cursor.v1 import lease_pb2_grpc
from seqgate.services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from seqgate.services.cursor.adapters.postgres import open_postgres_store
from seqgate.services.cursor.adapters.sqlite import open_sqlite_store
from seqgate.services.cursor.config import CursorConfig
from seqgate.services.cursor.lease_servicer import CursorLeaseServicer
from seqgate.services.cursor.metrics import Survey
from seqgate.services.cursor.ports import CursorStore
from seqgate.services.cursor.rights import RIGHTS
from seqgate.services.cursor.service import ManagedCursors
from seqgate.services.cursor.servicer import CursorServicer
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.metrics import (
    OFF,
    Metrics,
    surveyed,
    tables_surveyed,
    tell_store,
    telling,
)
from seqgate.services.runtime.server import grpc_server, told_to_stop
from seqgate.telemetry.metrics import CURSOR_STORE_FREE, CURSOR_STORE_SIZE

SERVICES: Final = (
    "seqgate.api.cursor.v1.CursorService",
    "seqgate.api.internal.cursor.v1.CursorLeaseService",
)


async def run(config: CursorConfig) -> None:
    async with telling(config) as metrics, open_store(config, metrics) as store:
        await serve(config, store, metrics)


@asynccontextmanager
async def open_store(config: CursorConfig, metrics: Metrics = OFF) -> AsyncIterator[CursorStore]:
    if config.postgres_url:
        opening = open_postgres_store(config.postgres, migrates=config.postgres_migrates)
        interval_s, size = config.metrics_survey_s, CURSOR_STORE_SIZE
        async with (
            opening as postgres,
            tables_surveyed(postgres.size_bytes, interval_s, metrics, size),
        ):
            yield postgres
        return
    path, size_max_bytes = config.store_path, config.store_bytes_max
    async with open_sqlite_store(
        path, readers=config.store_readers, size_max_bytes=size_max_bytes
    ) as sqlite:
        tell_store(metrics, CURSOR_STORE_SIZE, CURSOR_STORE_FREE, path, size_max_bytes)
        yield sqlite


async def migrate(config: CursorConfig) -> None:
    """Bring the tables in PostgreSQL to the layout of this version."""
    async with open_postgres_store(config.postgres, migrates=True):
        pass


async def serve(
    config: CursorConfig,
    store: CursorStore,
    metrics: Metrics = OFF,
) -> None:
    def register(server: aio.Server) -> None:
        managed = ManagedCursors(store, import_managed_cursor, export_managed_cursor)
        servicer = CursorServicer(store, managed)
        cursor_pb2_grpc.add_CursorServiceServicer_to_server(servicer, server)
        leases = CursorLeaseServicer(store)
        lease_pb2_grpc.add_CursorLeaseServiceServicer_to_server(leases, server)

    async with (
        surveyed(Survey(store, metrics).look, config.metrics_survey_s, metrics),
        grpc_server(
            config,
            Drain(),
            register=register,
            services=SERVICES,
            checks={config.store: store.check},
            rights=RIGHTS,
            metrics=metrics,
        ),
    ):
        await told_to_stop()
