"""The dedup service, wired by hand. The `async with` is the life of the process."""

import asyncio

from grpc import aio

from seqgate.api.dedup.v1 import dedup_pb2_grpc
from services.dedup.adapters.policy_file import PolicyFile
from services.dedup.adapters.redis import RedisStateStore, connect_redis
from services.dedup.config import DedupConfig
from services.dedup.ports import StateStore
from services.dedup.service import Deduplication
from services.dedup.servicer import DedupServicer
from services.runtime.drain import Drain
from services.runtime.server import grpc_server, told_to_stop
from services.runtime.tasks import end

SERVICE = "seqgate.api.dedup.v1.DedupService"


async def run(config: DedupConfig) -> None:
    """Serve until told to stop."""
    async with connect_redis(
        config.redis_url,
        timeout_s=config.redis_timeout_s,
        connections_max=config.redis_connections_max,
    ) as redis:
        await serve(config, RedisStateStore(redis))


async def serve(config: DedupConfig, store: StateStore) -> None:
    """Serve from any store until told to stop."""
    drain = Drain()
    policies = PolicyFile(config.policy_file)
    deduplication = Deduplication(store, policies)

    def register(server: aio.Server) -> None:
        dedup_pb2_grpc.add_DedupServiceServicer_to_server(
            DedupServicer(deduplication, drain), server
        )

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(policies.watch(config.policy_interval_s))
        purging = tasks.create_task(deduplication.purge_forever(config.purge_interval_s))
        async with grpc_server(
            config, drain, register=register, services=[SERVICE], checks={"redis": store.check}
        ):
            await told_to_stop()
        await end(watching, purging)
