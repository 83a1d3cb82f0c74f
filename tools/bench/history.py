"""What it costs to remember what becomes of messages: delivery by dispatchers without a history,
with one, and with one that is published to an audit topic, too."""

from contextlib import AsyncExitStack
from typing import Final

from tools.bench.bench import Bench
from tools.bench.delivery import Deliver
from tools.bench.figures import Measurement, computing, figures

WAYS: Final = {
    "no history": {"SEQGATE_DISPATCHER_HISTORY_BYTES_MAX": "0"},
    "history": {},
    "history and audit topic": {"SEQGATE_DISPATCHER_AUDIT_TOPICS": '["bench/*/*"]'},
}
"""The first is what the others are held against."""

SHAPES: Final = ((1, 10_000), (4, 10_000))
"""Consumers, and the keys that they share: with several, their deliveries are no runs."""

MESSAGES: Final = 60_000
"""Of a backlog: audit topics are published to by time, so a round takes a few seconds."""

TURNS: Final = 7
"""Rounds, where they are as long as usual: the difference is small."""


async def history(bench: Bench) -> list[Measurement]:
    targets = {
        f"SEQGATE_DISPATCHER_{each.upper()}_TARGET": bench.address(each)
        for each in ("ledger", "cursor", "filter")
    }
    cases: list[Deliver] = []
    async with AsyncExitStack() as stack:
        for way, settings in WAYS.items():
            environment = targets | settings
            another = bench.another(services=("dispatcher",), environment=environment)
            own = await stack.enter_async_context(another)
            cases += [_case(bench, own, way, *shape) for shape in SHAPES]
        rounds = await bench.rounds(cases, rounds=bench.scaled(TURNS))
    computed: dict[str, Measurement] = {}
    for case in cases:
        limit = computed[str(case.limits[0])] if case.limits else None
        name, own_rounds = f"dispatcher computes: {case.name}", rounds[case.name]
        computed[case.name] = computing(name, "message", own_rounds, "dispatcher", limit)
    return [*figures(cases, rounds, paired=True), *computed.values()]


def _case(bench: Bench, own: Bench, way: str, consumers: int, keys: int) -> Deliver:
    shape = f"{consumers} consumer{'s' if consumers > 1 else ''}, {keys:,} keys"
    first = next(iter(WAYS))
    return Deliver(
        f"delivered, {way}, {shape}",
        address=own.address("dispatcher"),
        ledger=bench.address("ledger"),
        topic=f"bench/history/{keys}-keys",
        limits=[] if way == first else [f"delivered, {first}, {shape}"],
        pids=own.pids("dispatcher") | bench.pids("ledger", "cursor"),
        messages=bench.scaled(MESSAGES),
        keys=keys,
        consumers=consumers,
    )
