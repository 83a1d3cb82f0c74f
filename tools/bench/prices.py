"""What features cost of publishing: the same load without them, beside it.

deduplication   off in a namespace of the same services
tracing         services of their own for each share of traced messages, one after the other
metrics         two sets of services, whose loads take turns
"""

import asyncio
import urllib.request
from collections.abc import Iterable, Sequence
from http.client import HTTPException
from typing import Final

from tools.bench.bench import Bench
from tools.bench.clients import OneAtATime, Publish, workload
from tools.bench.figures import Measurement
from tools.bench.rounds import BenchError, Limit
from tools.stack.ports import free_ports
from tools.trace.receiver import otlp_receiver

UNDEDUPLICATED: Final = "bench/off"
POLICIES: Final = f'[namespace."{UNDEDUPLICATED}"]\nenabled = false\n'
"""Policies that switch deduplication off in one namespace."""

SERVICES: Final = ("cursor", "dedup", "ledger")
"""What publishing needs, in the order of their start."""

SHAPES: Final = ("unbatched", "batched")

SAMPLED: Final = {"0": "0 percent", "0.01": "1 percent", "1": "100 percent"}
"""Shares of messages that are traced."""

SCRAPE_INTERVAL_S: Final = 1.0  # Prometheus scrapes every 15 seconds or every minute
SCRAPE_TIMEOUT_S: Final = 10.0
SCRAPED_LENGTH: Final = 3  # times the length of other rounds, so that each has a scrape in it


async def price(bench: Bench) -> list[Measurement]:
    workloads: list[Publish] = []
    for text, kind in (("unbatched", Publish), ("batched", Publish), ("one at a time", OneAtATime)):
        off = workload(bench, kind, f"{text}, deduplication off", namespace=UNDEDUPLICATED)
        on = workload(bench, kind, f"{text}, deduplication on", limits=[off.name])
        workloads += [off, on]
    return await bench.measure_client(workloads)


async def tracing(bench: Bench) -> list[Measurement]:
    """What tracing costs, at several shares of traced messages. Clients and services record alike;
    spans go to a receiver in this process, whose time is not counted, but which needs a processor
    as well."""
    without = found = await _traced(bench, "no tracing", {})
    for share, percent in SAMPLED.items():
        async with otlp_receiver() as received:
            environment = received.environment(share)
            found = [*found, *await _traced(bench, f"tracing at {percent}", environment, without)]
    return found


async def _traced(
    bench: Bench, text: str, environment: dict[str, str], without: Iterable[Measurement] = ()
) -> list[Measurement]:
    async with bench.another(services=SERVICES, environment=environment) as own:
        workloads = [workload(own, Publish, f"{shape}, {text}") for shape in SHAPES]
        for each, limit in zip(workloads, without, strict=False):
            each.limits = [Limit(limit.name, limit.value)]
        return await own.measure_client(workloads, environment=environment)


async def metrics(bench: Bench) -> list[Measurement]:
    """What metrics cost. Of two sets of services one has metrics, which this process scrapes. The
    loads take turns, so that the processor time of a scrape is taken from both: what the figures
    differ by is what the services do."""
    ports = free_ports(len(SERVICES))
    environment = {}
    for service, port in zip(SERVICES, ports, strict=True):
        prefix = f"SEQGATE_{service.upper()}_METRICS"
        environment[f"{prefix}_LISTEN"] = f"127.0.0.1:{port}"
        environment[f"{prefix}_TOPICS"] = '["bench/*/*"]'  # a time series for each
    async with (
        bench.another(services=SERVICES) as plain,
        bench.another(services=SERVICES, environment=environment) as telling,
    ):
        workloads: list[Publish] = []
        for shape in SHAPES:
            without = workload(plain, Publish, f"{shape}, no metrics")
            text = f"{shape}, metrics, scraped every second"
            scraped = workload(telling, Publish, text, limits=[without.name])
            scraped.pids = {f"telling {name}": pid for name, pid in scraped.pids.items()}
            workloads += [without, scraped]
        scraping = asyncio.create_task(_scrape(ports))
        try:
            seconds = bench.seconds * SCRAPED_LENGTH
            found = await plain.measure_client(workloads, seconds=seconds, paired=True)
            if scraping.done():
                await scraping  # raises what ended it
            return found
        finally:
            scraping.cancel()


async def _scrape(ports: Sequence[int]) -> None:
    while True:
        await asyncio.gather(*(asyncio.to_thread(_get_metrics, port) for port in ports))
        await asyncio.sleep(SCRAPE_INTERVAL_S)


def _get_metrics(port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
            answer.read()
    except (OSError, HTTPException) as error:
        raise BenchError(f"no metrics at port {port}: {error}") from error
