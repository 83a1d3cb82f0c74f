"""A writer, as deduplication sees it: its log exists only as numbers.

One producer numbers its messages from 0 and each is an entry, so that sequence ids and entry ids
are the same. Each call claims the next group and confirms the group before it, as the ledger does,
and has to wait for the call before it: it needs that answer's revision.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from seqgate.services.dedup.ports import StateStore
from seqgate.services.deduplication import (
    Applied,
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerEntries,
    Verdict,
    Writer,
)
from seqgate.types import Position, TopicName
from tools.bench.rounds import BenchError, Call

CLAIMS: Final = {1: "1 claim", 100: "100 claims", 1_000: "1,000 claims"}  # in a call
PRODUCER: Final = "p"
LEDGER_ID: Final = 1
PRODUCERS_MAX: Final = 10_000

Align = Callable[[TopicName, Writer, None], Awaitable[object]]
Admit = Callable[[TopicName, Writer, Confirmation | None, list[ProducerClaims]], Awaitable[object]]


async def groups(topic: str, claims: int, align: Align, admit: Admit) -> Call:
    """A call that admits the next group of a writer's claims. The writer is aligned here."""
    name = TopicName.parse(topic)
    aligned = await align(name, Writer(1, LEDGER_ID, None), None)
    if not isinstance(aligned, Applied):
        raise BenchError(f"a rollback was answered with {aligned}")
    revision, stored = aligned.revision, range(0)

    async def call() -> None:
        nonlocal revision, stored
        confirmation, tail = None, _last(stored.stop)
        if tail is not None:
            entries = ProducerEntries(PRODUCER, tuple(stored), time.time_ns() // 1_000_000)
            confirmation = Confirmation(_last(stored.start), tail, (entries,), len(stored))
        writer = Writer(1, LEDGER_ID, tail, revision)
        group = range(stored.stop, stored.stop + claims)
        answer = await admit(
            name, writer, confirmation, [ProducerClaims(PRODUCER, tuple(map(Claim, group, group)))]
        )
        if not isinstance(answer, Judged) or answer.producers[0].verdicts[-1] is not Verdict.NEW:
            raise BenchError(f"an Admit was answered with {answer}")
        revision, stored = answer.revision, group

    return call


def _last(stop: int) -> Position | None:
    return Position(LEDGER_ID, stop - 1) if stop else None


async def admit_through(store: StateStore, topic: str, claims: int) -> Call:
    """The call straight through the adapter, without a service."""

    async def align(name: TopicName, writer: Writer, confirmation: None) -> object:
        return await store.rollback(name, writer, confirmation, [])

    async def admit(*group: Any) -> object:
        now_ms = time.time_ns() // 1_000_000
        return await store.admit(*group, now_ms=now_ms, max_producers=PRODUCERS_MAX)

    return await groups(topic, claims, align, admit)
