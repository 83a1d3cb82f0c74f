"""Subscriptions with filters: what judging costs of delivering, and what opening batches would.

    an entry     its verdict remembered by what a filter reads of it, beside its batch opened, and
                 each message looked at
    a backlog    with no filter; with a filter that accepts everything: the same messages are
                 delivered; with one that rejects half; and both by a dispatcher that does all the
                 same, but opens every batch to decide

Entries are batches of one key that have the property in their metadata, compressed by LZ4.
"""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.client import Compression
from seqgate.client._codec import OutgoingMessage, encode_batch
from seqgate.services.dispatcher.filtering.projection import Projection
from seqgate.services.dispatcher.ports import Reads
from tools.bench.bench import Bench, command
from tools.bench.delivery import BATCH_MESSAGES, PAYLOAD_BYTES, Backlog, Deliver
from tools.bench.figures import Measurement, computing, in_turn, rate
from tools.bench.opening import ANSWER, PROPERTY, WANTED, answer_of

BATCHES: Final = 4_000  # batches of a topic
TURNS: Final = 5  # rounds end to end, where they are as long as usual
OPENED_MESSAGES: Final = (BATCH_MESSAGES, 100, 1_000)
"""Messages of a batch that is opened; the client's own default is the last."""

PAGE_ENTRIES: Final = 20  # entries that are looked at again and again, in this process
KEYS: Final = 1_000
CONSUMERS: Final = 4

FEW: Final = 10  # property sets, where there are few
ACCEPTS_ALL: Final = "delivered, all accepted"
REJECTS_HALF: Final = "judged, half rejected"
NO_FILTER: Final = "delivered, no filter"
OPENED: Final = ", batches opened"

EXPRESSIONS: Final = {
    NO_FILTER: "",
    ACCEPTS_ALL: f"properties.{PROPERTY} != 'none'",
    f"{ACCEPTS_ALL}{OPENED}": f"properties.{ANSWER} != ''",
    REJECTS_HALF: f"properties.{PROPERTY}.startsWith('{WANTED}')",
    f"{REJECTS_HALF}{OPENED}": f"properties.{ANSWER} == 'all'",
}

BESIDE: Final = {
    ACCEPTS_ALL: NO_FILTER,
    f"{ACCEPTS_ALL}{OPENED}": ACCEPTS_ALL,
    REJECTS_HALF: NO_FILTER,
    f"{REJECTS_HALF}{OPENED}": REJECTS_HALF,
}
"""What each is held against."""


async def filtered(bench: Bench) -> list[Measurement]:
    """Everything."""
    return [*await _alone(bench), *await _end_to_end(bench)]


# ---- in this process


async def _alone(bench: Bench) -> list[Measurement]:
    entries = [_entry(number, BATCH_MESSAGES) for number in range(PAGE_ENTRIES)]
    key_of = Projection(Reads(frozenset({"properties"}), (PROPERTY,))).key_of
    remembered = {key_of(each.metadata): True for each in entries}

    async def by_metadata() -> None:
        for each in entries:
            assert remembered[key_of(each.metadata)]

    calls = [by_metadata, *(_opening(messages) for messages in OPENED_MESSAGES)]
    known, *opened = await in_turn(calls, bench.seconds)
    limit = rate("verdict remembered, by metadata", "entries", known, each=PAGE_ENTRIES)
    found = [limit]
    for messages, rounds in zip(OPENED_MESSAGES, opened, strict=True):
        name = f"batch of {messages:,} messages opened, each looked at"
        found.append(rate(name, "entries", rounds, limit, each=PAGE_ENTRIES, paired=True))
    return found


def _opening(messages: int) -> Callable[[], Awaitable[None]]:
    entries = [_entry(number, messages) for number in range(PAGE_ENTRIES)]

    async def by_opening() -> None:
        for each in entries:
            assert answer_of(each) == "all"

    return by_opening


def _entry(number: int, messages: int) -> StoredEntry:
    """A batch that is wanted, as it is read from the log."""
    random = Random(number)
    shown = {PROPERTY: f"{WANTED}{number}"}
    payloads = [random.randbytes(PAYLOAD_BYTES // 2).hex().encode() for _ in range(messages)]
    entry = encode_batch(
        "bench",
        [OutgoingMessage(*each, "key", None, shown) for each in enumerate(payloads)],
        compression=Compression.LZ4,
        publish_time_ms=1_700_000_000_000,
        keyed=True,
    )
    entry.metadata.properties.update(shown)
    return StoredEntry(metadata=entry.metadata, payload=entry.payload)


# ---- end to end


async def _end_to_end(bench: Bench) -> list[Measurement]:
    targets = {
        f"SEQGATE_DISPATCHER_{each.upper()}_TARGET": bench.stack.address(each)
        for each in ("ledger", "cursor", "filter")
    }
    async with bench.another(
        services=("dispatcher",), environment=targets, commands={"dispatcher": command("opening")}
    ) as opening:
        pids = {"opening": opening.pids("dispatcher")["dispatcher"]}
        pids |= bench.pids("dispatcher", "filter", "ledger", "cursor")
        batches = -(-bench.scaled(BATCHES) // 2) * 2
        workloads = [
            Deliver(
                name=f"{what}, {kind}",
                address=(opening if what.endswith(OPENED) else bench).stack.address("dispatcher"),
                topic=topic,
                pids=pids,
                backlog=Backlog(
                    bench.stack.address("ledger"), topic, batches * BATCH_MESSAGES, KEYS, sets
                ),
                consumers=CONSUMERS,
                expression=expression,
                share=0.5 if what.startswith(REJECTS_HALF) else 1,
            )
            for kind, topic, sets in (
                (f"{FEW} property sets", "bench/filtered/few", FEW),
                ("all distinct", "bench/filtered/distinct", batches),
            )
            for what, expression in EXPRESSIONS.items()
        ]
        rounds = await bench.load(workloads, rounds=bench.scaled(TURNS))
    found = []
    for kind in (f"{FEW} property sets", "all distinct"):
        delivered: dict[str, Measurement] = {}
        computed: dict[str, Measurement] = {}
        for what in EXPRESSIONS:
            name = f"{what}, {kind}"
            limits = [delivered[BESIDE[what]]] if what in BESIDE else []
            delivered[what] = rate(name, "messages", rounds[name], *limits, paired=bool(limits))
            process = "opening" if what.endswith(OPENED) else "dispatcher"
            limit = computed[BESIDE[what]] if what in BESIDE and what != REJECTS_HALF else None
            computed[what] = computing(
                f"dispatcher computes: {name}", "message", rounds[name], process, limit
            )
        found += [*delivered.values(), *computed.values()]
    return found
