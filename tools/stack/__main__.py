"""All services on one machine, in the foreground.

python -m tools.stack run --dir DIR [--endpoints FILE] [--port-base N] [--store postgres]

Data is kept in DIR across runs: logs and cursors in SQLite databases, or, with --store postgres, in
a PostgreSQL server. Once everything is healthy, all addresses are written to FILE as JSON. Exit
status: 0 after SIGTERM or Ctrl-C, 1 after a process ended unexpectedly.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from tools.stack.stack import PORTS, SERVICES, Stack, StackError


async def run(
    folder: Path, endpoints: Path | None, port_base: int | None, *, on_postgres: bool
) -> int:
    """Run until a signal, or until a process ends."""
    ports = {} if port_base is None else {name: port_base + i for i, name in enumerate(PORTS)}
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    try:
        async with Stack(folder, ports=ports, on_postgres=on_postgres) as stack:
            if endpoints is not None:
                stack.write_endpoints(endpoints)
            for service in SERVICES:
                print(f"{service:10} {stack.address(service)}")
            print(f"{'redis':10} {stack.redis_url}")
            for database in stack.databases:
                print(f"{database:10} {stack.postgres_url}")
            sys.stdout.flush()
            await stack.while_running(told.wait())
            return 0
    except StackError as error:
        print(error, file=sys.stderr)
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.stack", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run all services in the foreground")
    runs.add_argument("--dir", type=Path, required=True, help="folder of the data")
    runs.add_argument("--endpoints", type=Path, help="file for the addresses, as JSON")
    runs.add_argument("--port-base", type=int, help="first of consecutive ports (default: free)")
    runs.add_argument(
        "--store", choices=("sqlite", "postgres"), default="sqlite", help="of logs and cursors"
    )
    given = parser.parse_args()
    on_postgres = given.store == "postgres"
    try:
        return asyncio.run(
            run(given.dir, given.endpoints, given.port_base, on_postgres=on_postgres)
        )
    finally:
        if given.endpoints is not None:
            given.endpoints.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
