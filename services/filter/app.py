"""The filter service, wired by hand. The `async with` is the life of the process."""

from grpc import aio

from seqgate.api.filter.v1 import filter_pb2_grpc
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.config import FilterConfig
from seqgate.services.filter.core.memo import Memo
from seqgate.services.filter.metrics import FilterMetrics, tell_caches
from seqgate.services.filter.rights import RIGHTS
from seqgate.services.filter.service import Filters
from seqgate.services.filter.servicer import FilterServicer
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.metrics import Metrics, telling
from seqgate.services.runtime.server import grpc_server, told_to_stop

SERVICE = "seqgate.api.filter.v1.FilterService"


async def run(config: FilterConfig) -> None:
    """Serve until the process is asked to stop."""
    async with telling(config) as metrics:
        await serve(config, metrics)


async def serve(config: FilterConfig, metrics: Metrics) -> None:
    drain = Drain()
    memo = Memo(config.decisions_max, config.decision_bytes_max)
    filters = Filters(
        CelEngine(),
        memo,
        programs_max=config.programs_max,
        program_bytes_max=config.program_bytes_max,
        chain_bytes_max=config.chain_bytes_max,
        metrics=FilterMetrics(metrics),
    )
    tell_caches(
        metrics,
        lambda: {"decisions": (len(memo), memo.size_bytes), "programs": filters.kept},
        {
            "decisions": (config.decisions_max, config.decision_bytes_max),
            "programs": (config.programs_max, config.program_bytes_max),
        },
    )

    def register(server: aio.Server) -> None:
        servicer = FilterServicer(filters, drain)
        filter_pb2_grpc.add_FilterServiceServicer_to_server(servicer, server)

    async with grpc_server(
        config,
        drain,
        register=register,
        services=[SERVICE],
        checks={},
        rights=RIGHTS,
        metrics=metrics,
    ):
        await told_to_stop()
