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
from tools.bench.figures import Measurement, computing, figures
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

    expression: str = ""
    limit: str = ""
    share: float = 1
    opens: bool = False
    computes: bool = True


NO_FILTER: Final = "delivered, no filter"
ALL: Final = "delivered, all accepted"
HALF: Final = "judged, half rejected"
HALF_WANTED: Final = f"properties.{PROPERTY}.startsWith('{WANTED}')"
WAYS: Final = {
    NO_FILTER: Way(),
    ALL: Way(f"properties.{PROPERTY} != 'none'", NO_FILTER),
    f"{ALL}, batches opened": Way(f"properties.{ANSWER} != ''", ALL, opens=True),
    HALF: Way(HALF_WANTED, NO_FILTER, share=0.5, computes=False),
    f"{HALF}, batches opened": Way(f"properties.{ANSWER} == 'all'", HALF, share=0.5, opens=True),
}


async def filtered(bench: Bench) -> list[Measurement]:
    """A backlog in each way, of few and of many property sets."""
    targets = {
        f"SEQGATE_DISPATCHER_{each.upper()}_TARGET": bench.address(each)
        for each in ("ledger", "cursor", "filter")
    }
    command = (sys.executable, "-m", "tools.bench.opening")
    batches = -(-bench.scaled(BATCHES) // 2) * 2
    async with bench.another(
        services=("dispatcher",), environment=targets, commands={"dispatcher": command}
    ) as opening:
        cases = [
            _deliver(bench, opening, name, kind, batches, sets)
            for kind, sets in ((f"{FEW} property sets", FEW), ("all distinct", batches))
            for name in WAYS
        ]
        rounds = await bench.client_rounds(cases, rounds=bench.scaled(TURNS))
    computed: dict[str, Measurement] = {}
    for case in cases:
        way = WAYS[case.name.rpartition(", ")[0]]
        computed[case.name] = computing(
            f"dispatcher computes: {case.name}",
            "message",
            rounds[case.name],
            "opening" if way.opens else "dispatcher",
            computed[str(case.limits[0])] if way.limit and way.computes else None,
        )
    return [*figures(cases, rounds, paired=True), *computed.values()]


def _deliver(
    bench: Bench, opening: Bench, name: str, kind: str, batches: int, property_sets: int
) -> Deliver:
    way = WAYS[name]
    pids = {"opening": opening.pids("dispatcher")["dispatcher"]}
    topic = f"bench/filtered/{'few' if property_sets == FEW else 'distinct'}"
    messages = batches * BATCH_MESSAGES
    return Deliver(
        name=f"{name}, {kind}",
        address=(opening if way.opens else bench).address("dispatcher"),
        topic=topic,
        limits=[f"{way.limit}, {kind}"] if way.limit else [],
        pids=pids | bench.pids("dispatcher", "filter", "ledger", "cursor"),
        backlog=Backlog(bench.address("ledger"), topic, messages, KEYS, property_sets),
        consumers=CONSUMERS,
        expression=way.expression,
        share=way.share,
    )
