"""A gRPC server with everything that all of ours have, from the first call to the last."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from seqgate.services.runtime.calls import server_calls
from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.health import Check, Readiness
from seqgate.services.runtime.interceptors import (
    Interceptor,
    deadlined,
    drained,
    logged,
    translated,
)
from seqgate.services.runtime.load import Load
from seqgate.services.runtime.metrics import OFF, Metrics
from seqgate.services.runtime.refusal_log import RefusalLog
from seqgate.services.runtime.rights import Rights
from seqgate.services.runtime.security import exposure, guard_of, server_credentials
from seqgate.services.runtime.tasks import end
from seqgate.services.runtime.windows import WINDOWS
from seqgate.telemetry import TracingServerInterceptor
from seqgate.telemetry.metrics import BUSY, BUSY_LIMIT, DENIALS, STREAMS
from seqgate.telemetry.setup import NONE, exporter_asked_for

log = structlog.get_logger()

SPARE_CALLS: Final = 1_000
"""How many calls a server takes beyond those that it serves: health checks, and calls whose request
is on its way or refused. gRPC itself refuses what exceeds that, before it reads the request."""


@asynccontextmanager
async def grpc_server(
    config: ServiceConfig,
    drain: Drain,
    *,
    register: Callable[[aio.Server], None],
    services: Sequence[str],
    checks: Mapping[str, Check],
    rights: Rights | None = None,
    metrics: Metrics = OFF,
) -> AsyncIterator[int]:
    """A server that is listening; its port is what the context gives. On the way out it drains.

    Args:
        config: the service's settings.
        drain: begun here; servicers with streams watch it.
        register: adds the servicers.
        services: their full names, for health and reflection.
        checks: what must answer before the service is ready.
        rights: what each method needs, where callers must show who they are.
        metrics: where its calls are told, its streams and denials.

    Raises:
        OSError, ValueError: a certificate, or another file that says who may do what, cannot be
            used.
    """
    refusals = RefusalLog()
    arounds = [logged(refusals), translated(refusals), drained(drain), deadlined]
    guard = guard_of(config, rights or {})
    if metrics.is_on:
        arounds.insert(0, server_calls(metrics))
        tell_calls(metrics, drain, refusals, None if guard is None else guard.denials)
    load = Load(config.calls_max, config.streams_max, config.calls_bytes_max)
    interceptor = Interceptor(
        arounds,
        drain,
        guard,
        load,
        config.first_message_timeout_s,
        config.message_bytes_max,
    )
    traced = [TracingServerInterceptor()] if exporter_asked_for("TRACES") != NONE else []
    server = aio.server(
        interceptors=[*traced, interceptor],
        options=_options(config),
        maximum_concurrent_rpcs=config.calls_max + config.streams_max + SPARE_CALLS,
    )
    readiness = Readiness(checks, services, config.health_interval_s)
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    if config.reflection:
        names = [*services, "grpc.health.v1.Health", reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
    credentials = server_credentials(config)
    if credentials is None:
        port = server.add_insecure_port(config.listen)
    else:
        port = server.add_secure_port(config.listen, credentials)
    probed = _health_server(config, readiness)
    await server.start()
    await probed.start()
    log.info("listening", address=config.listen, port=port, tls=credentials is not None)
    for danger in exposure(config):
        log.warning("INSECURE: " + danger, address=config.listen)
    watching = asyncio.create_task(readiness.watch())
    try:
        yield port
    finally:
        log.info("draining")
        await readiness.stop()
        drain.begin()
        if not await drain.emptied(config.drain_timeout_s):
            log.warning("streams cut at the end of drain_timeout_s", seconds=config.drain_timeout_s)
            drain.cut()
            await drain.emptied(config.stop_grace_s)
        await server.stop(config.stop_grace_s)
        await probed.stop(None)
        await end(watching)
        refusals.flush()


def tell_calls(
    metrics: Metrics, drain: Drain, refusals: RefusalLog, denials: RefusalLog | None
) -> None:
    """Tell how many streams are open, what there was no room for, and who was denied what."""
    metrics.tell(STREAMS, lambda: [((), drain.streams)])
    metrics.tell(BUSY, lambda: [((each,), refusals.busy[each]) for each in BUSY_LIMIT.values])
    if denials is None:
        return
    counts = denials.counts
    metrics.tell(
        DENIALS,
        lambda: [((why, method.removeprefix("/")), n) for (why, method), n in counts.items()],
    )


def _health_server(config: ServiceConfig, readiness: Readiness) -> aio.Server:
    """A server for probes that know no TLS; without a port unless one is asked for."""
    server = aio.server(options=_options(config), maximum_concurrent_rpcs=SPARE_CALLS)
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    if config.health_listen:
        port = server.add_insecure_port(config.health_listen)
        log.info("serving health probes", address=config.health_listen, port=port)
    return server


async def told_to_stop() -> None:
    """Wait for SIGTERM or SIGINT."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _options(config: ServiceConfig) -> list[tuple[str, int]]:
    keepalive_ms = int(config.keepalive_s * 1000)
    options = [
        ("grpc.so_reuseport", 0),  # two processes on one port would split the callers silently
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        ("grpc.max_metadata_size", config.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", config.metadata_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        *WINDOWS,
    ]
    if config.connection_age_max_s:
        options.append(("grpc.max_connection_age_ms", int(config.connection_age_max_s * 1000)))
    return options
