"""Subscriptions with filters: what judging costs of delivering a backlog, and what opening batches
would.

It is delivered with no filter; with a filter that accepts everything: the same messages come; with
one that rejects half; and both by a dispatcher that does all the same, but opens every batch to
decide. Entries are batches of one key that have the property in their metadata, compressed by LZ4.
"""

import sys
from typing import Final, NamedTuple

from tools.bench.bench import Bench
from tools.bench.delivery import BATCH_MESSAGES, Backlog, Deliver
from tools.bench.figures import Measurement, computing
from tools.bench.load import figures
from tools.bench.opening import ANSWER, PROPERTY, WANTED

BATCHES: Final = 4_000  # batches of a topic
TURNS: Final = 5  # rounds end to end, where they are as long as usual
KEYS: Final = 1_000
CONSUMERS: Final = 4
FEW: Final = 10  # property sets, where there are few


class Way(NamedTuple):
    """A way to deliver a backlog.

    Attributes:
        limit: the way that it is held against.
        share: the part of the messages that the filter accepts.
        opens: whether batches are opened to decide.
        computes: whether the dispatcher's time is held against that of the limit.
    """

    name: str
    expression: str = ""
    limit: str = ""
    share: float = 1
    opens: bool = False
    computes: bool = True


NO_FILTER: Final = Way("delivered, no filter")
ALL: Final = Way("delivered, all accepted", f"properties.{PROPERTY} != 'none'", NO_FILTER.name)
HALF: Final = Way(
    "judged, half rejected",
    f"properties.{PROPERTY}.startsWith('{WANTED}')",
    NO_FILTER.name,
    share=0.5,
    computes=False,
)
WAYS: Final = (
    NO_FILTER,
    ALL,
    Way(f"{ALL.name}, batches opened", f"properties.{ANSWER} != ''", ALL.name, opens=True),
    HALF,
    Way(
        f"{HALF.name}, batches opened",
        f"properties.{ANSWER} == 'all'",
        HALF.name,
        share=0.5,
        opens=True,
    ),
)


async def filtered(bench: Bench) -> list[Measurement]:
    """A backlog in each way, of few and of many property sets."""
    targets = {
        f"SEQGATE_DISPATCHER_{each.upper()}_TARGET": bench.stack.address(each)
        for each in ("ledger", "cursor", "filter")
    }
    command = (sys.executable, "-m", "tools.bench.opening")
    batches = -(-bench.scaled(BATCHES) // 2) * 2
    kinds = {f"{FEW} property sets": FEW, "all distinct": batches}
    async with bench.another(
        services=("dispatcher",), environment=targets, commands={"dispatcher": command}
    ) as opening:
        workloads = {
            kind: [_deliver(bench, opening, way, kind, batches, sets) for way in WAYS]
            for kind, sets in kinds.items()
        }
        everything = [each for own in workloads.values() for each in own]
        rounds = await bench.load(everything, rounds=bench.scaled(TURNS))
    found: list[Measurement] = []
    for own in workloads.values():
        found += figures(own, rounds, paired=True).values()
        computed: dict[str, Measurement] = {}
        for way, each in zip(WAYS, own, strict=True):
            computed[way.name] = computing(
                f"dispatcher computes: {each.name}",
                "message",
                rounds[each.name],
                "opening" if way.opens else "dispatcher",
                computed.get(way.limit) if way.computes else None,
            )
        found += computed.values()
    return found


def _deliver(
    bench: Bench, opening: Bench, way: Way, kind: str, batches: int, property_sets: int
) -> Deliver:
    pids = {"opening": opening.pids("dispatcher")["dispatcher"]}
    topic = f"bench/filtered/{'few' if property_sets == FEW else 'distinct'}"
    ledger, messages = bench.stack.address("ledger"), batches * BATCH_MESSAGES
    return Deliver(
        name=f"{way.name}, {kind}",
        address=(opening if way.opens else bench).stack.address("dispatcher"),
        topic=topic,
        limits=[f"{way.limit}, {kind}"] if way.limit else [],
        pids=pids | bench.pids("dispatcher", "filter", "ledger", "cursor"),
        backlog=Backlog(ledger, topic, messages, KEYS, property_sets),
        consumers=CONSUMERS,
        expression=way.expression,
        share=way.share,
    )
