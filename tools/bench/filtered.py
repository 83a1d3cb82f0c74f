"""Subscriptions with filters: what judging costs of delivering, and what opening batches would.

    an entry     its verdict remembered by what a filter reads of it, beside its batch opened, and
                 each message looked at
    a backlog    with no filter; with a filter that accepts everything: the same messages are
                 delivered; with one that rejects half; and both by a dispatcher that does all the
                 same, but opens every batch to decide

Entries are batches of one key that have the property in their metadata, compressed by LZ4. What is
compared is measured in turn, and compared turn by turn.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.client import Compression
from seqgate.client._codec import OutgoingMessage, encode_batch
from services.dispatcher.filtering.projection import Projection
from services.dispatcher.ports import Reads
from tools.bench.bench import STOP_TIMEOUT_S, Bench, converse
from tools.bench.measurement import Limit, Measured, Measurement, computing, rate
from tools.bench.opening import PROPERTY, WANTED, answer_of
from tools.bench.rounds import ROUNDS, Round
from tools.bench.sifting import (
    ALL,
    ALL_OPENED,
    BATCH_MESSAGES,
    DISPATCHER,
    HALF,
    HALF_OPENED,
    KINDS,
    OPENING,
    PAYLOAD_BYTES,
    UNFILTERED,
    Kind,
    Sieve,
    SiftingJob,
)
from tools.bench.workload import Outcome, outcomes_from_json
from tools.stack.child import start_process, tell
from tools.stack.ports import free_ports

BATCHES: Final = 4_000
"""How many batches a topic has."""

TURNS: Final = 5
"""How often everything is delivered, unless there is less time than usual."""

GRACE_S: Final = 300.0
"""How long everything end to end may take."""

SERVICES: Final = (DISPATCHER, "filter", "ledger", "cursor")

OPENED_MESSAGES: Final = (BATCH_MESSAGES, 100, 1_000)
"""How many messages batches have that are opened; the client's own default is the last."""

PAGE_ENTRIES: Final = 20
"""How many entries are looked at again and again, in this process."""


async def filtered(bench: Bench) -> list[Measurement]:
    """Everything."""
    return [*await _alone(bench), *await _end_to_end(bench)]


# ---- in this process


async def _alone(bench: Bench) -> list[Measurement]:
    entries = [_entry(number, BATCH_MESSAGES) for number in range(PAGE_ENTRIES)]
    key_of = Projection(Reads(frozenset({"properties"}), (PROPERTY,))).key_of
    remembered = {key_of(each.metadata): True for each in entries}

    def by_metadata() -> None:
        for each in entries:
            assert remembered[key_of(each.metadata)]

    calls = [by_metadata, *(_opening(messages) for messages in OPENED_MESSAGES)]
    turns = [[await _turn(call, bench.seconds) for call in calls] for _ in range(ROUNDS)]
    known, *opened = zip(*turns, strict=True)
    found = [rate("verdict remembered, by metadata", "entries", known)]
    for messages, rounds in zip(OPENED_MESSAGES, opened, strict=True):
        name = f"batch of {messages:,} messages opened, each looked at"
        found.append(rate(name, "entries", rounds, beside=Measured(found[0].name, known)))
    return found


def _opening(messages: int) -> Callable[[], None]:
    entries = [_entry(number, messages) for number in range(PAGE_ENTRIES)]

    def by_opening() -> None:
        for each in entries:
            assert answer_of(each) == "all"

    return by_opening


async def _turn(call: Callable[[], None], seconds: float) -> Round:
    """Pages for so long."""
    count = 0
    began = now = time.perf_counter()
    while not count or now < began + seconds:
        await asyncio.sleep(0)  # a signal is to be heard
        call()
        count += PAGE_ENTRIES
        now = time.perf_counter()
    return Round(count, now - began, [])


def _entry(number: int, messages: int) -> StoredEntry:
    """A batch that is wanted, as it is read from the log."""
    payloads = Random(number)
    shown = {PROPERTY: f"{WANTED}{number}"}
    entry = encode_batch(
        "bench",
        [
            OutgoingMessage(
                each, payloads.randbytes(PAYLOAD_BYTES // 2).hex().encode(), "key", None, shown
            )
            for each in range(messages)
        ],
        compression=Compression.LZ4,
        publish_time_ms=1_700_000_000_000,
        keyed=True,
    )
    entry.metadata.properties.update(shown)
    return StoredEntry(metadata=entry.metadata, payload=entry.payload)


# ---- end to end


async def _end_to_end(bench: Bench) -> list[Measurement]:
    async with _opening_dispatcher(bench) as (address, pid):
        job = SiftingJob(
            bench.stack.address("ledger"),
            {DISPATCHER: bench.stack.address(DISPATCHER), OPENING: address},
            "bench/filtered",
            -(-bench.scaled(BATCHES) // 2) * 2,
            bench.scaled(TURNS),
            {OPENING: pid} | {name: bench.pid(name) for name in SERVICES},
        )
        answer = await converse("tools.bench.sifting", job.to_json(), GRACE_S)
    outcomes = outcomes_from_json(answer)
    return [each for kind in KINDS for each in _compared(kind, outcomes)]


def _compared(kind: Kind, outcomes: dict[str, Outcome]) -> list[Measurement]:
    """Filters beside none, and what opens batches beside what does not."""

    def measured(sieve: Sieve, limit: Sieve | None = None) -> Measurement:
        name = sieve.figure(kind)
        rounds, cpu = outcomes[name].rounds, outcomes[name].cpu
        if limit is None:
            return rate(name, "messages", rounds, cpu=cpu)
        other = limit.figure(kind)
        beside = Measured(other, outcomes[other].rounds)
        return rate(name, "messages", rounds, beside=beside, cpu=cpu)

    def computed(sieve: Sieve, limit: Measurement | None = None) -> Measurement:
        outcome = outcomes[sieve.figure(kind)]
        name = f"dispatcher computes: {sieve.figure(kind)}"
        beside = None if limit is None else Limit(limit.name, limit.value)
        return computing(name, "message", outcome.rounds, outcome.cpu_s[sieve.by], beside)

    return [
        measured(UNFILTERED),
        measured(ALL, UNFILTERED),
        measured(ALL_OPENED, ALL),
        measured(HALF, UNFILTERED),
        measured(HALF_OPENED, HALF),
        none := computed(UNFILTERED),
        all_ := computed(ALL, none),
        computed(ALL_OPENED, all_),
        half := computed(HALF),
        computed(HALF_OPENED, half),
    ]


@asynccontextmanager
async def _opening_dispatcher(bench: Bench) -> AsyncIterator[tuple[str, int]]:
    """The dispatcher that opens every batch: where it listens, and its process."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    environment = os.environ | bench.stack.settings | {"SEQGATE_DISPATCHER_LISTEN": address}
    command = [sys.executable, "-m", "tools.bench.opening"]
    with (bench.folder / "opening.log").open("ab") as log:
        process = await start_process(command, log.fileno(), environment)
    try:
        yield address, process.pid
        tell(process, signal.SIGTERM)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    finally:
        tell(process, signal.SIGKILL)
        await process.wait()
