"""The filter service, wired by hand. The `async with` is the life of the process."""

from grpc import aio

from seqgate.api.filter.v1 import filter_pb2_grpc
from services.filter.adapters.cel import CelEngine
from services.filter.config import FilterConfig
from services.filter.core.memo import Memo
from services.filter.metrics import FilterMetrics, tell_caches
from services.filter.rights import RIGHTS
from services.filter.service import Filters
from services.filter.servicer import FilterServicer
from services.runtime.drain import Drain
from services.runtime.metrics import Metrics, telling
from services.runtime.server import grpc_server, told_to_stop

SERVICE = "seqgate.api.filter.v1.FilterService"


async def run(config: FilterConfig) -> None:
    """Serve until told to stop."""
    async with telling(config) as metrics:
        await serve(config, metrics)


async def serve(config: FilterConfig, metrics: Metrics) -> None:
    """Serve until told to stop."""
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
