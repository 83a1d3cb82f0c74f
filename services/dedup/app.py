"""The dedup service, wired by hand. The `async with` is the life of the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc import aio

from seqgate.api.dedup.v1 import dedup_pb2_grpc
from seqgate.api.internal.dedup.v1 import writer_pb2_grpc
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.policy_file import PolicyFile
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.config import DedupConfig
from seqgate.services.dedup.metrics import DedupMetrics, Survey
from seqgate.services.dedup.policies import DurablePolicies
from seqgate.services.dedup.ports import Cursors, StateStore
from seqgate.services.dedup.rights import RIGHTS
from seqgate.services.dedup.service import Deduplication
from seqgate.services.dedup.servicer import DedupServicer
from seqgate.services.dedup.snapshots import Snapshots
from seqgate.services.dedup.writer_servicer import DedupWriterServicer
from seqgate.services.runtime.channels import following_channel
from seqgate.services.runtime.cursors import GrpcCursors, NoCursors
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.metrics import OFF, Metrics, survey_forever, telling
from seqgate.services.runtime.server import grpc_server, told_to_stop
from seqgate.services.runtime.tasks import end

SERVICES = "seqgate.api.dedup.v1.DedupService", "seqgate.api.internal.dedup.v1.DedupWriterService"


def check(config: DedupConfig) -> None:
    """Check the policy file. Raises UnusableSetting."""
    try:
        PolicyFile(config.policy_file)
    except (OSError, ValueError) as error:
        raise config.unusable("policy_file", f"{config.policy_file}: {error}") from error


async def run(config: DedupConfig) -> None:
    async with (
        telling(config) as metrics,
        connect_redis(
            config.redis_url,
            timeout_s=config.redis_timeout_s,
            connections_max=config.redis_connections_max,
            password_file=config.redis_password_file,
        ) as redis,
        connect_cursors(config, metrics) as cursors,
    ):
        await serve(config, RedisStateStore(redis), cursors, metrics)


@asynccontextmanager
async def connect_cursors(config: DedupConfig, metrics: Metrics = OFF) -> AsyncIterator[Cursors]:
    if not config.cursor_target:
        yield NoCursors()
        return
    async with following_channel(
        config.cursor_target, keepalive_s=config.keepalive_s, as_caller=config, metrics=metrics
    ) as channel:
        yield GrpcCursors(channel, timeout_s=config.cursor_timeout_s)


async def serve(
    config: DedupConfig, store: StateStore, cursors: Cursors, metrics: Metrics = OFF
) -> None:
    drain = Drain()
    file = PolicyFile(config.policy_file, config.policy_interval_s)
    counts = DedupMetrics(metrics)
    policies = DurablePolicies(file, cursors, store, counts)
    async with asyncio.TaskGroup() as tasks:
        snapshots = Snapshots(store, cursors, policies, tasks, counts)
        deduplication = Deduplication(store, policies, snapshots, counts)
        survey = Survey(store, policies, metrics)
        survey.tell()

        def register(server: aio.Server) -> None:
            servicer, writer = (
                DedupServicer(deduplication, policies),
                DedupWriterServicer(deduplication, drain),
            )
            dedup_pb2_grpc.add_DedupServiceServicer_to_server(servicer, server)
            writer_pb2_grpc.add_DedupWriterServiceServicer_to_server(writer, server)

        watching = [
            tasks.create_task(policies.reread_forever()),
            tasks.create_task(deduplication.purge_forever(config.purge_interval_s)),
            tasks.create_task(snapshots.by_time_forever(config.snapshot_check_interval_s)),
        ]
        if metrics.is_on:
            watching.append(tasks.create_task(survey_forever(survey.look, config.metrics_survey_s)))
        async with grpc_server(
            config,
            drain,
            register=register,
            services=SERVICES,
            checks={"redis": store.check},
            rights=RIGHTS,
            metrics=metrics,
        ):
            await told_to_stop()
        await end(*watching)
        await snapshots.finish(config.drain_timeout_s)
