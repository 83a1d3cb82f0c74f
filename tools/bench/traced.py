"""What tracing costs: publishing without it, and with it at several shares of followed messages.

Each share has services of its own, one after the other, and the limit of each is the same load
without tracing. Who publishes and the services record alike; spans go to a receiver in this
process, whose time is not counted, but which needs a processor as well.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tools.bench.bench import Bench
from tools.bench.measurement import Limit, Measurement, rate
from tools.bench.publish import workload_of
from tools.stack.stack import Stack
from tools.trace.receiver import otlp_receiver

SERVICES: Final = ("cursor", "dedup", "ledger")
"""Those that publishing needs, in the order of their start."""

OFF: Final = "off"
"""OpenTelemetry is not asked for."""

SHARES: Final = {
    OFF: "no tracing",
    "0": "tracing at 0 percent",
    "0.01": "tracing at 1 percent",
    "1": "tracing at 100 percent",
}
"""How many messages are followed."""


async def traced(bench: Bench) -> list[Measurement]:
    """Unbatched and batched messages, at each share."""
    found = []
    without: dict[bool, Limit] = {}
    for share in SHARES:
        for is_batched, measured in (await _at(bench, share)).items():
            if share == OFF:
                without[is_batched] = Limit(measured.name, measured.value)
                found.append(measured)
            else:
                found.append(replace(measured, limit=without[is_batched]))
    return found


async def _at(bench: Bench, share: str) -> dict[bool, Measurement]:
    async with otlp_receiver() as received:
        environment = {} if share == OFF else _variables(received.endpoint, share)
        folder = bench.folder / f"traced-{share}"
        async with Stack(folder, services=SERVICES, environment=environment) as stack:
            own = Bench(stack, folder, bench.null_ledger, bench.seconds)
            workloads = {
                is_batched: workload_of(
                    own,
                    f"publish, {'batched' if is_batched else 'unbatched'}, {SHARES[share]}",
                    "publish",
                    batched=is_batched,
                )
                for is_batched in (False, True)
            }
            outcomes = await own.load(list(workloads.values()), environment=environment)
    return {
        is_batched: rate(
            each.name, "messages", outcomes[each.name].rounds, cpu=outcomes[each.name].cpu
        )
        for is_batched, each in workloads.items()
    }


def _variables(endpoint: str, share: str) -> Mapping[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": share,
    }
