"""What Seqgate can do on this machine, beside what the machine allows.

python -m tools.bench [--only GROUP,...] [--seconds-per-measurement S] [--json] [--report FILE]

Starts services of its own, measures, and stops them. A ratio of 100 % reaches the limit; less does
not, for rates and for latencies.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from rich.console import Console

from seqgate.dev.stack import Stack, StackError
from tools.bench import clients, delivery, history, parts, peers, rebuild, recovery, spark, stores
from tools.bench.bench import SECONDS, Bench
from tools.bench.figures import Measurement, as_json, print_group
from tools.bench.page import page
from tools.bench.rounds import BenchError
from tools.stack.child import ChildFailed, cancel_on_sigterm

WIDTH: Final = 200  # of tables, without a terminal
REPORT: Final = Path("build/bench/report.json")
PAGE: Final = "index.html"  # beside the report
INTERRUPTED: Final = 130
NULL_LEDGER: Final = {"ledger": (sys.executable, "-m", "tools.bench.null_ledger")}


GROUPS: Final[dict[str, Callable[[Bench], Coroutine[Any, Any, list[Measurement]]]]] = {
    "disk": parts.disk,
    "redis": parts.redis,
    "grpc": parts.grpc,
    "admit": partial(parts.claims_by, name="Admit"),
    "exchange": partial(parts.claims_by, name="Exchange"),
    "store": parts.commits,
    "stores": stores.stores,
    "publish": clients.publish,
    "read": clients.read,
    "price": clients.price,
    "tracing": clients.tracing,
    "metrics": clients.metrics,
    "large": clients.large,
    "dispatch": delivery.dispatch,
    "history": history.history,
    "filter": parts.filtering,
    "filtered": delivery.filtered,
    "peers": peers.peers,
    "recovery": recovery.recovery,
    "rebuild": rebuild.rebuild,
    "spark": spark.spark,
}
ALL: Final = ",".join(GROUPS)
NEEDS: Final = {
    "admit": ("redis", "grpc"),
    "exchange": ("redis", "grpc"),
    "store": ("disk",),
    "publish": ("disk", "redis", "grpc"),
    "large": ("disk",),
    "rebuild": ("recovery",),
}
"""The groups that measure a group's limits."""


async def run(options: argparse.Namespace, console: Console) -> str:
    """Measure, and print each group when it is done, until terminated. Returns the report."""
    cancel_on_sigterm()
    load_before = round(os.getloadavg()[0], 1)  # of others: ours is what is measured
    scratch = options.report.resolve().parent
    scratch.mkdir(parents=True, exist_ok=True)
    # Beside the project: a temporary file system may be memory, where fdatasync costs nothing.
    with tempfile.TemporaryDirectory(dir=scratch, prefix="stack-") as name:
        stack = Stack(Path(name))
        stack.policy_file.write_text(clients.POLICIES)
        null = Stack(Path(name) / "null", services=("ledger",), commands=NULL_LEDGER)
        async with stack, null:
            bench = Bench(stack, null, options.seconds_per_measurement)
            done: list[tuple[str, Sequence[Measurement]]] = []
            for group in options.groups:
                measurements = await stack.while_running(GROUPS[group](bench))
                bench.note(measurements)
                done.append((group, measurements))
                print_group(console, group, measurements)
            for each in bench.left_out:
                console.print(f"left out: {each}")
            return as_json(
                done,
                command=_command(options),
                folder=scratch,
                load_before=load_before,
                left_out=bench.left_out,
            )


def _command(options: argparse.Namespace) -> str:
    """What measures the same again."""
    more = [] if options.only == ALL else [f"--only {options.only}"]
    if options.seconds_per_measurement != SECONDS:
        more.append(f"--seconds-per-measurement {options.seconds_per_measurement:g}")
    return " ".join(["python -m tools.bench", *more]) if more else "make bench"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        default=ALL,
        help=f"groups, separated by commas, of {', '.join(GROUPS)}; limits' groups are added",
    )
    parser.add_argument(
        "--seconds-per-measurement",
        type=float,
        default=SECONDS,
        help="how long each round takes (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON only")
    parser.add_argument(
        "--report",
        type=Path,
        default=REPORT,
        help="the report's file; beside it are index.html and, until the end, services' data "
        "(default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    asked = given.only.split(",")
    if unknown := sorted(set(asked) - set(GROUPS)):
        parser.error(f"no such group: {', '.join(unknown)}")
    if not 0 < given.seconds_per_measurement <= 60:
        parser.error("a round takes more than 0 and at most 60 seconds")
    wanted = {*asked, *(need for name in asked for need in NEEDS.get(name, ()))}
    given.groups = [name for name in GROUPS if name in wanted]
    return given


def main() -> int:
    options = parse()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(quiet=options.json, width=width)
    try:
        text = asyncio.run(run(options, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    except (BenchError, ChildFailed, StackError) as error:
        print(error, file=sys.stderr)
        return 1
    options.report.write_text(text + "\n")
    options.report.with_name(PAGE).write_text(page(json.loads(text)))
    if options.json:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
