"""The foundation of the whole-system simulation: virtual time, processes, and a gRPC network.

    async def main() -> None:
        network = Network(virtual_loop(), virtual_loop().random)
        with installed(network):
            ledger = Process("ledger-0")
            ledger.start(lambda: run(config))
            ...

    run(main, seed=7)

Real services and the real client run on it. The Python part of grpc.aio is kept; Core and its
Cython bindings are replaced by streams over simulated connections.
"""

from tests.simulation.ground.clock import EPOCH_S, Clock
from tests.simulation.ground.loop import (
    Deadlock,
    OutOfTime,
    Shuffle,
    VirtualLoop,
    passes,
    run,
    virtual_loop,
)
from tests.simulation.ground.network import Connection, Link, Network, uniform, with_tail
from tests.simulation.ground.process import Process
from tests.simulation.ground.wiring import install, installed

__all__ = [
    "EPOCH_S",
    "Clock",
    "Connection",
    "Deadlock",
    "Link",
    "Network",
    "OutOfTime",
    "Process",
    "Shuffle",
    "VirtualLoop",
    "install",
    "installed",
    "passes",
    "run",
    "uniform",
    "virtual_loop",
    "with_tail",
]
