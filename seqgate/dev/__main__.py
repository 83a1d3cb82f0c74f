"""All of Seqgate on one machine, in the foreground.

python -m seqgate.dev [--data DIR] [--port-base N] [--store sqlite|postgres]
                      [--ready-timeout SECONDS] [--json]

Logs and cursors are kept in DIR across runs: in SQLite databases or, with --store postgres, in a
PostgreSQL server. Without --data they are in a temporary folder, which is deleted at the end. A
process that ends is started again. One that is alive and not ready is waited for, and named now and
then, up to the time-out.

Exit status: 0 after SIGTERM, SIGHUP or Ctrl-C; 1 if a process does not start; 2: invalid arguments.
"""

import argparse
import asyncio
import importlib.metadata
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.services.extra import require_services

try:
    from seqgate.cli._output import Fields, Format, Output
    from seqgate.cli._settings import SERVICES as DEFAULTS
    from seqgate.dev.keeping import NotStarted, keep_running
    from seqgate.dev.stack import CONSOLE, PORTS, READY_TIMEOUT_S, SERVICES, Stack, StackError
except ModuleNotFoundError as error:
    require_services(error, "server")

PORT_BASE: Final = 7700
"""The first port, by default: commands call the services there unless told otherwise."""

PORT_MAX: Final = 65_535

STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

FAILED: Final = 1


class Chosen(NamedTuple):
    """The arguments.

    Attributes:
        data: the folder of the data; None: a temporary one.
        port_base: the first of consecutive ports; 0: any free ports.
        on_postgres: whether logs and cursors are in PostgreSQL.
        ready_timeout_s: how long each process may take to become ready.
    """

    data: Path | None
    port_base: int
    on_postgres: bool
    ready_timeout_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the process's arguments. Returns its exit status."""
    given = _parser().parse_args(arguments)
    output = Output(Format.JSON if given.json else Format.TABLE)
    chosen = Chosen(given.data, given.port_base, given.store == "postgres", given.ready_timeout)
    try:
        with ExitStack() as exits:
            folder = chosen.data
            if folder is None:
                scratch = tempfile.TemporaryDirectory(prefix="seqgate-", ignore_cleanup_errors=True)
                folder = Path(exits.enter_context(scratch))
            asyncio.run(run(chosen, folder, output))
    except NotStarted as failure:
        output.error(failure)
        return FAILED
    return 0


async def run(chosen: Chosen, folder: Path, output: Output) -> None:
    """Run until a signal. Raises NotStarted."""
    base = chosen.port_base
    ports = {name: base + place for place, name in enumerate(PORTS)} if base else {}
    told = asyncio.Event()
    for number in STOPS:
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    stack = Stack(
        folder,
        services=(*SERVICES, CONSOLE),
        ports=ports,
        on_postgres=chosen.on_postgres,
        ready_timeout_s=chosen.ready_timeout_s,
        tell=lambda text: output.note("WAITING", text, {}),
    )
    try:
        _check_ports(stack)
        if await _started(stack, told):
            _show(stack, chosen, output)
            await keep_running(stack, told, lambda text: output.note("RESTARTED", text, {}))
    except (StackError, OSError) as error:
        raise NotStarted(str(error)) from error
    finally:
        await stack.stop()


async def _started(stack: Stack, told: asyncio.Event) -> bool:
    """Start everything. False: it was told to stop meanwhile. Raises StackError."""
    starting, stopping = asyncio.create_task(stack.start()), asyncio.create_task(told.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        starting.result()
        return True
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.wait({starting, stopping})


def _check_ports(stack: Stack) -> None:
    """Raises StackError if another process uses one of the ports."""
    for name in stack.names:
        port = stack.ports[name]
        with socket.socket() as listener:
            # Connections of a predecessor that are still closing do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                raise StackError(
                    f"port {port} for {name} cannot be used ({error.strerror}); Seqgate may be "
                    "running already: stop it, or choose other ports with --port-base"
                ) from None


def _show(stack: Stack, chosen: Chosen, output: Output) -> None:
    servers = {"redis": stack.redis_url, **dict.fromkeys(stack.databases, stack.postgres_url)}
    logs = stack.folder / "logs"
    found = {
        **stack.endpoints,
        "data": str(stack.folder),
        "data_is_kept": chosen.data is not None,
        "logs": str(logs),
    }
    kept = "" if chosen.data else " (deleted when this ends; --data DIR keeps it)"
    version = importlib.metadata.version("seqgate")
    places: Fields = [
        *(
            (name, f"{stack.address(name)}  (process {stack.pid(name)})")
            for name in PORTS
            if name in SERVICES
        ),
        (CONSOLE, f"http://{stack.address(CONSOLE)}  (process {stack.pid(CONSOLE)})"),
        *((name, f"{url}  (process {stack.pid(name)})") for name, url in servers.items()),
        ("data", f"{stack.folder}{kept}"),
        ("logs", logs),
    ]
    output.result(
        found,
        f"Seqgate {version} is running on this machine. Ctrl-C stops it.",
        places,
        "In another terminal:",
        "\n".join(f"  {line}" for line in _first_commands(stack)),
    )


def _first_commands(stack: Stack) -> list[str]:
    elsewhere = [
        f"SEQGATE_{service.upper()}={stack.address(service)}"
        for service, usual in DEFAULTS.items()
        if stack.address(service) != usual
    ]
    exported = [f"export {' '.join(elsewhere)}"] if elsewhere else []
    return [*exported, "seqgate publish greetings hello --key alice", "seqgate read greetings"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seqgate.dev",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data")
    parser.add_argument(
        "--port-base",
        type=_port_base,
        default=PORT_BASE,
        metavar="N",
        help=f"first of {len(PORTS)} consecutive ports; 0: free ones (default: {PORT_BASE})",
    )
    parser.add_argument(
        "--store", choices=("sqlite", "postgres"), default="sqlite", help="of logs and cursors"
    )
    parser.add_argument(
        "--ready-timeout",
        type=_seconds,
        default=READY_TIMEOUT_S,
        metavar="SECONDS",
        help="how long each process may take to become ready, while it is alive (default: "
        f"{READY_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser


def _port_base(text: str) -> int:
    highest = PORT_MAX - len(PORTS) + 1
    if not text.isascii() or not text.isdecimal() or int(text) > highest:
        raise argparse.ArgumentTypeError(f"must be 0 to {highest}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
