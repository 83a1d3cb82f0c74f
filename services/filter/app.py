"""The filter service, wired by hand. The `async with` is the life of the process."""

from grpc import aio

from seqgate.api.filter.v1 import filter_pb2_grpc
from services.filter.adapters.cel import CelEngine
from services.filter.config import FilterConfig
from services.filter.core.memo import Memo
from services.filter.rights import RIGHTS
from services.filter.service import Filters
from services.filter.servicer import FilterServicer
from services.runtime.drain import Drain
from services.runtime.server import grpc_server, told_to_stop

SERVICE = "seqgate.api.filter.v1.FilterService"


async def run(config: FilterConfig) -> None:
    """Serve until told to stop."""
    drain = Drain()
    filters = Filters(
        CelEngine(),
        Memo(config.decisions_max, config.decision_bytes_max),
        programs_max=config.programs_max,
        program_bytes_max=config.program_bytes_max,
    )

    def register(server: aio.Server) -> None:
        servicer = FilterServicer(filters, drain)
        filter_pb2_grpc.add_FilterServiceServicer_to_server(servicer, server)

    async with grpc_server(
        config, drain, register=register, services=[SERVICE], checks={}, rights=RIGHTS
    ):
        await told_to_stop()
