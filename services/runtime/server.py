"""The gRPC server of any service, from start to drain."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
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
from seqgate.services.runtime.startup import listening
from seqgate.services.runtime.tasks import end
from seqgate.services.runtime.windows import WINDOWS
from seqgate.services.runtime.worker import LISTENING, WORKER, tell_supervisor
from seqgate.telemetry import TracingServerInterceptor
from seqgate.telemetry.metrics import BUSY, BUSY_LIMIT, DENIALS, STREAMS
from seqgate.telemetry.setup import NONE, exporter_asked_for

log = structlog.get_logger()

SPARE_CALLS: Final = 1_000
"""The most calls beyond those being served: health checks, and calls whose request is arriving or
being refused. gRPC itself refuses further calls, before it reads their requests."""


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
    """A listening server; the context's value is its port. On exit it drains.

    Args:
        config: the service's settings.
        drain: begun on exit; servicers with streams must watch it.
        register: adds the servicers to a server.
        services: their full names, for health and reflection.
        checks: the dependencies that must answer before the service is ready.
        rights: the rights that each method needs, if callers are authenticated.
        metrics: records calls, streams and denials.

    Raises:
        UnusableSetting: a port is in use, or an address is none of this machine.
        OSError, ValueError: a certificate, key or access file cannot be used.
    """
    refusals = RefusalLog()
    traced = [TracingServerInterceptor()] if exporter_asked_for("TRACES") != NONE else []
    server = aio.server(
        interceptors=[*traced, _interceptor(config, drain, refusals, rights or {}, metrics)],
        options=_options(config),
        maximum_concurrent_rpcs=config.calls_max + config.streams_max + SPARE_CALLS,
    )
    readiness = Readiness(checks, services, config.health_interval_s)
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    if config.reflection:
        names = [*services, "grpc.health.v1.Health", reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
    port, is_secure = _add_port(config, server)
    probed = _health_server(config, readiness)
    await server.start()
    await probed.start()
    log.info("listening", address=config.listen, port=port, tls=is_secure)
    tell_supervisor(LISTENING)
    for danger in exposure(config):
        log.warning("INSECURE: " + danger, address=config.listen)
    watching = asyncio.create_task(readiness.watch())
    try:
        yield port
    finally:
        log.info("draining")
        await readiness.stop()
        await _drained(config, drain)
        await server.stop(config.stop_grace_s)
        await probed.stop(None)
        await end(watching)
        refusals.flush()


def _interceptor(
    config: ServiceConfig, drain: Drain, refusals: RefusalLog, rights: Rights, metrics: Metrics
) -> Interceptor:
    arounds = [logged(refusals), translated(refusals), drained(drain), deadlined]
    guard = guard_of(config, rights)
    if metrics.is_on:
        arounds.insert(0, server_calls(metrics))
        tell_calls(metrics, drain, refusals, None if guard is None else guard.denials)
    load = Load(config.calls_max, config.streams_max, config.calls_bytes_max)
    return Interceptor(
        arounds,
        drain,
        guard,
        load,
        config.first_message_timeout_s,
        config.message_bytes_max,
    )


def _add_port(config: ServiceConfig, server: aio.Server) -> tuple[int, bool]:
    """Add the listen address. Returns its port, and whether it uses TLS."""
    credentials = server_credentials(config)
    with listening(config, "listen"):
        if credentials is None:
            return server.add_insecure_port(config.listen), False
        return server.add_secure_port(config.listen, credentials), True


async def _drained(config: ServiceConfig, drain: Drain) -> None:
    """Wait for streams to close, and cut the rest."""
    drain.begin()
    if not await drain.emptied(config.drain_timeout_s):
        log.warning("streams cut at the end of drain_timeout_s", seconds=config.drain_timeout_s)
        drain.cut()
        await drain.emptied(config.stop_grace_s)


def tell_calls(
    metrics: Metrics, drain: Drain, refusals: RefusalLog, denials: RefusalLog | None
) -> None:
    """Register the metrics of open streams, of calls refused as busy, and of denials."""
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
    """A server for health probes without TLS; it listens only if `health_listen` is set."""
    server = aio.server(options=_options(config), maximum_concurrent_rpcs=SPARE_CALLS)
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    if config.health_listen:
        with listening(config, "health_listen"):
            port = server.add_insecure_port(config.health_listen)
        log.info("serving health probes", address=config.health_listen, port=port)
    return server


async def told_to_stop() -> None:
    """Wait for SIGTERM or SIGINT, or for the end of this process's supervisor, if it has one. A
    second signal ends the process at once."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    worker = WORKER.get()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        with nullcontext() if worker is None else worker.watched(told.set):
            await told.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _options(config: ServiceConfig) -> list[tuple[str, int]]:
    keepalive_ms = int(config.keepalive_s * 1000)
    options = [
        # Two processes on one port split the callers: silently, unless they are meant to.
        ("grpc.so_reuseport", int(config.shares_port)),
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
