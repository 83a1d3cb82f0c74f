"""What metrics cost: publishing without them, and with them while they are scraped.

Two sets of services, of which one tells metrics; loads go to the one and to the other in turn. All
that tell are scraped every SCRAPE_INTERVAL_S, from this process. The processor that this takes is
taken from both loads: what the figures differ by is what the services do.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import Final

from tools.bench.bench import Bench
from tools.bench.measurement import BenchError, Measured, Measurement, rate
from tools.bench.publish import workload_of
from tools.bench.workload import Workload
from tools.stack.ports import free_ports
from tools.stack.stack import Stack

SERVICES: Final = ("cursor", "dedup", "ledger")
"""Those that publishing needs, in the order of their start."""

SCRAPE_INTERVAL_S: Final = 1.0
"""More often than anybody does: Prometheus asks every 15 seconds or every minute."""

SCRAPE_TIMEOUT_S: Final = 10.0

LENGTH: Final = 3
"""A round takes so many times as long as others: one without a scrape would tell nothing."""

PREFIX: Final = "telling "
TELLING: Final = tuple(f"{PREFIX}{name}" for name in ("ledger", "dedup", "redis"))
"""The processes of those that tell metrics, as the report has them."""

WITHOUT: Final = "no metrics"
WITH: Final = "metrics, scraped every second"


async def scraped(bench: Bench) -> list[Measurement]:
    """Unbatched and batched messages, without metrics and with them."""
    ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
    async with (
        _services(bench, "untold", {}) as plain,
        _services(bench, "told", _variables(ports)) as telling,
    ):
        pairs = [
            (_workload(plain, kind, WITHOUT), _workload(telling, kind, WITH))
            for kind in ("unbatched", "batched")
        ]
        pairs = [(one, other._replace(processes=TELLING)) for one, other in pairs]
        pids = {name: telling.pid(name.removeprefix(PREFIX)) for name in TELLING}
        async with _scraping(ports):
            outcomes = await plain.load(
                [each for pair in pairs for each in pair],
                seconds=bench.seconds * LENGTH,
                others=pids,
            )
    found = []
    for pair in pairs:
        without, told = (outcomes[each.name] for each in pair)
        names = [each.name for each in pair]
        found.append(rate(names[0], "messages", without.rounds, cpu=without.cpu))
        beside = Measured(names[0], without.rounds)
        found.append(rate(names[1], "messages", told.rounds, cpu=told.cpu, beside=beside))
    return found


@asynccontextmanager
async def _services(
    bench: Bench, name: str, environment: Mapping[str, str]
) -> AsyncIterator[Bench]:
    folder = bench.folder / name
    async with Stack(folder, services=SERVICES, environment=environment) as stack:
        yield Bench(stack, folder, bench.null_ledger, bench.seconds)


def _variables(ports: Mapping[str, int]) -> Mapping[str, str]:
    found = {}
    for service, port in ports.items():
        prefix = f"SEQGATE_{service.upper()}_METRICS"
        found[f"{prefix}_LISTEN"] = f"127.0.0.1:{port}"
        found[f"{prefix}_TOPICS"] = '["bench/*/*"]'  # each is told apart
    return found


def _workload(bench: Bench, kind: str, which: str) -> Workload:
    return workload_of(bench, f"publish, {kind}, {which}", "publish", batched=kind == "batched")


@asynccontextmanager
async def _scraping(ports: Mapping[str, int]) -> AsyncIterator[None]:
    """Scrape these ports meanwhile.

    Raises:
        BenchError: one did not answer: then nothing was measured.
    """
    over = asyncio.Event()
    scraping = [asyncio.create_task(_scrape(port, over)) for port in ports.values()]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*scraping)


async def _scrape(port: int, over: asyncio.Event) -> None:
    """Once at least, and every SCRAPE_INTERVAL_S until it is over."""
    while not over.is_set():
        try:
            await asyncio.to_thread(_ask, port)
        except (OSError, HTTPException) as error:
            raise BenchError(f"nobody answers a scrape at port {port}: {error}") from error
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), SCRAPE_INTERVAL_S)


def _ask(port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
        answer.read()
