"""All services on one machine, in the foreground.

python -m tools.stack run --dir DIR [--endpoints FILE] [--port-base N]

Keeps its data in DIR and goes on from it. Writes all addresses to FILE as JSON when everything is
healthy. Ends on SIGTERM or Ctrl-C, with 0; with 1 when a process ended by itself.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from tools.stack.stack import PORTS, SERVICES, Stack, StackError


async def run(folder: Path, endpoints: Path | None, port_base: int | None) -> int:
    """Run until told to stop, or until a process ends."""
    ports = {} if port_base is None else {name: port_base + i for i, name in enumerate(PORTS)}
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    try:
        async with Stack(folder, ports=ports) as stack:
            if endpoints is not None:
                stack.write_endpoints(endpoints)
            for service in SERVICES:
                print(f"{service:10} {stack.address(service)}")
            print(f"{'redis':10} {stack.redis_url}", flush=True)
            stopping = asyncio.create_task(told.wait())
            ending = asyncio.create_task(stack.wait())
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            ending.cancel()
            if told.is_set():
                return 0
            print(f"{ending.result()} ended:\n{stack.log_tail(ending.result())}", file=sys.stderr)
            return 1
    except StackError as error:
        print(error, file=sys.stderr)
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.stack", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run all services in the foreground")
    runs.add_argument("--dir", type=Path, required=True, help="where data is kept")
    runs.add_argument("--endpoints", type=Path, help="where to write the addresses as JSON")
    runs.add_argument("--port-base", type=int, help="the first of the ports; default: free ones")
    given = parser.parse_args()
    try:
        return asyncio.run(run(given.dir, given.endpoints, given.port_base))
    finally:
        if given.endpoints is not None:
            given.endpoints.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
