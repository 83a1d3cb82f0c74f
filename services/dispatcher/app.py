"""The dispatcher service, wired by hand. The `async with` is the life of the process."""

import asyncio

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc
from seqgate.services.dispatcher.adapters.audit import GrpcAudit
from seqgate.services.dispatcher.adapters.cursors import SubscriptionCursors
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.ledger import GrpcLog
from seqgate.services.dispatcher.adapters.letters import GrpcDeadLetters
from seqgate.services.dispatcher.auditing.publishing import Auditing
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.metrics import DispatcherMetrics, LagSurvey
from seqgate.services.dispatcher.ports import (
    AuditTopics,
    Cursors,
    DeadLetterTopics,
    Filters,
    Log,
    Ports,
)
from seqgate.services.dispatcher.rights import RIGHTS
from seqgate.services.dispatcher.service import Dispatcher
from seqgate.services.dispatcher.servicer import DispatcherServicer
from seqgate.services.runtime.channels import following_channel, peer_channel
from seqgate.services.runtime.clock import SteadyClock
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.metrics import OFF, Metrics, survey_forever, telling
from seqgate.services.runtime.server import grpc_server, told_to_stop
from seqgate.services.runtime.tasks import end

SERVICE = "seqgate.api.dispatcher.v1.DispatcherService"


async def run(config: DispatcherConfig) -> None:
    """Serve until told to stop."""
    async with (
        telling(config) as metrics,
        following_channel(
            config.ledger_target,
            keepalive_s=config.keepalive_s,
            as_caller=config,
            metrics=metrics,
        ) as ledger,
        following_channel(
            config.cursor_target,
            keepalive_s=config.keepalive_s,
            as_caller=config,
            metrics=metrics,
        ) as cursor,
        peer_channel(
            config.filter_target,
            keepalive_s=config.keepalive_s,
            as_caller=config,
            metrics=metrics,
        ) as filter_,
    ):
        await serve(
            config,
            GrpcLog(ledger, timeout_s=config.call_timeout_s),
            SubscriptionCursors(cursor, timeout_s=config.call_timeout_s),
            GrpcDeadLetters(ledger, timeout_s=config.call_timeout_s),
            GrpcFilters(filter_, timeout_s=config.filter_timeout_s),
            metrics,
            audit=GrpcAudit(ledger, timeout_s=config.call_timeout_s),
        )


async def serve(
    config: DispatcherConfig,
    log: Log,
    cursors: Cursors,
    dead_letters: DeadLetterTopics,
    filters: Filters,
    metrics: Metrics = OFF,
    *,
    audit: AuditTopics | None = None,
) -> None:
    """Serve over these ports until told to stop."""
    drain = Drain()
    ports = Ports(log, cursors, dead_letters, filters, config.owner, SteadyClock())
    async with asyncio.TaskGroup() as tasks:
        counts = DispatcherMetrics(metrics, ports.now_ms)
        auditing = None
        if audit is not None and config.audit_topics:
            auditing = Auditing(audit, config.audit_topics, config.owner)
        dispatcher = Dispatcher(config, ports, tasks, counts, auditing)

        def register(server: aio.Server) -> None:
            servicer = DispatcherServicer(dispatcher, drain, config)
            dispatcher_pb2_grpc.add_DispatcherServiceServicer_to_server(servicer, server)

        watching = [tasks.create_task(dispatcher.keep_forever())]
        if auditing is not None:
            watching.append(tasks.create_task(auditing.keep_forever()))
        if metrics.is_on:
            survey = LagSurvey(counts, ports.log)
            watching.append(tasks.create_task(survey_forever(survey.look, config.metrics_survey_s)))
        async with grpc_server(
            config,
            drain,
            register=register,
            services=[SERVICE],
            checks={"ledger": ports.log.check, "cursor": ports.cursors.check},
            rights=RIGHTS,
            metrics=metrics,
        ):
            await told_to_stop()
        await end(*watching)
        await dispatcher.finish(config.stop_grace_s)
        if auditing is not None:
            await auditing.close(config.stop_grace_s)
