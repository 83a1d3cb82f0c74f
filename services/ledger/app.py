"""The ledger service, wired by hand. The `async with` is the life of the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from grpc import aio

from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from seqgate.services.ledger.adapters.postgres import (
    PostgresLedgerStore,
    open_postgres_register,
    open_postgres_store,
)
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.owners import SharedOwner
from seqgate.services.ledger.ports import Cursors, Deduplicator, LedgerStore
from seqgate.services.ledger.rights import RIGHTS
from seqgate.services.ledger.service import Ledger
from seqgate.services.ledger.servicer import EntryLimits, LedgerServicer
from seqgate.services.runtime.channels import CALLS_AT_ONCE, following_channel, peer_channel
from seqgate.services.runtime.cursors import GrpcCursors, NoCursors
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.limiter import Limiter
from seqgate.services.runtime.metrics import OFF, Metrics, tables_surveyed, tell_store, telling
from seqgate.services.runtime.server import grpc_server, told_to_stop
from seqgate.services.runtime.tasks import end
from seqgate.telemetry.metrics import LEDGER_STORE_FREE, LEDGER_STORE_SIZE

SERVICE: Final = "seqgate.api.ledger.v1.LedgerService"


async def run(config: LedgerConfig) -> None:
    limiter = Limiter(CALLS_AT_ONCE)
    async with (
        telling(config) as metrics,
        open_store(config, metrics) as store,
        open_owner(config, store) as owner,
        peer_channel(
            config.dedup_target,
            keepalive_s=config.keepalive_s,
            as_caller=config,
            metrics=metrics,
            limiter=limiter,
        ) as channel,
        connect_cursors(config, metrics) as cursors,
    ):
        dedup = GrpcDeduplicator(channel, timeout_s=config.dedup_timeout_s, limiter=limiter)
        try:
            await serve(config, store, dedup, cursors, metrics, owner)
        finally:
            dedup.close()


@asynccontextmanager
async def open_store(config: LedgerConfig, metrics: Metrics = OFF) -> AsyncIterator[LedgerStore]:
    if config.postgres_url:
        opening = open_postgres_store(config.postgres, migrates=config.postgres_migrates)
        interval_s, size = config.metrics_survey_s, LEDGER_STORE_SIZE
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
        tell_store(metrics, LEDGER_STORE_SIZE, LEDGER_STORE_FREE, path, size_max_bytes)
        yield sqlite


@asynccontextmanager
async def open_owner(config: LedgerConfig, store: LedgerStore) -> AsyncIterator[SharedOwner | None]:
    """What this process owns beside others on its store; None: it is alone there."""
    if not isinstance(store, PostgresLedgerStore):
        yield None
        return
    async with open_postgres_register(config.postgres, store) as register:
        yield SharedOwner(register, config.advertise or config.listen)


async def migrate(config: LedgerConfig) -> None:
    """Bring the tables in PostgreSQL to the layout of this version."""
    async with open_postgres_store(config.postgres, migrates=True):
        pass


@asynccontextmanager
async def connect_cursors(config: LedgerConfig, metrics: Metrics = OFF) -> AsyncIterator[Cursors]:
    if not config.cursor_target:
        yield NoCursors()
        return
    async with following_channel(
        config.cursor_target, keepalive_s=config.keepalive_s, as_caller=config, metrics=metrics
    ) as channel:
        yield GrpcCursors(channel)


async def serve(
    config: LedgerConfig,
    store: LedgerStore,
    dedup: Deduplicator,
    cursors: Cursors,
    metrics: Metrics = OFF,
    owner: SharedOwner | None = None,
) -> None:
    drain = Drain()
    async with asyncio.TaskGroup() as tasks:
        ledger = Ledger(config, store, dedup, cursors, tasks, metrics, owner)

        def register(server: aio.Server) -> None:
            limits = EntryLimits(
                config.max_message_bytes, config.max_large_message_bytes, config.max_chunks
            )
            servicer = LedgerServicer(ledger, drain, limits)
            ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server)

        watching = [
            tasks.create_task(ledger.keep_forever()),
            tasks.create_task(ledger.sweep_forever()),
            tasks.create_task(ledger.trim_forever()),
            tasks.create_task(ledger.share_forever()),
            tasks.create_task(_drain(ledger, drain)),
        ]
        async with grpc_server(
            config,
            drain,
            register=register,
            services=[SERVICE],
            checks={config.store: store.check, "dedup": dedup.check},
            rights=RIGHTS,
            metrics=metrics,
        ):
            await told_to_stop()
        await ledger.finish(config.stop_grace_s)
        await end(*watching)


async def _drain(ledger: Ledger, drain: Drain) -> None:
    await drain.wait()
    ledger.drain()
    await ledger.leave()
    await drain.wait_over()
    ledger.cut()
