"""The effect that filters would have on a subscription's backlog: judges a bounded sample of it
without changing anything, and estimates the rest (estimate.py)."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import ACCEPT, REJECT
from seqgate.services.dispatcher.core.positions import Acknowledged, Run
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.estimate import (
    BLOCK_ENTRIES,
    Block,
    Estimate,
    after,
    estimate,
    position_at,
    size,
    starts,
)
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.ports import Cursor, Decision, Log
from seqgate.types import Position, TopicName


class Backlog(Protocol):
    """A subscription whose backlog is analyzed."""

    topic: TopicName

    @property
    def acknowledged(self) -> Acknowledged:
        """The entries acknowledged so far."""
        ...

    async def cursor(self) -> Cursor: ...


class Found(NamedTuple):
    """The entries with one verdict.

    Attributes:
        verdict: "ACCEPT", "REJECT", "RESCHEDULE", or the reason of a failure.
        messages_about: the estimated number of their messages in the whole backlog.
    """

    verdict: str
    is_failure: bool
    entries: int
    messages: int
    estimate: Estimate
    messages_about: int


class Analysis(NamedTuple):
    """See AnalyzeBacklogResponse in dispatcher.proto."""

    backlog_entries: int
    entries: int
    messages: int
    first: Position | None
    last: Position | None
    blocks: int
    is_complete: bool
    found: Sequence[Found]


class _Seen(NamedTuple):
    """The counts of a block by verdict: entries, and their messages."""

    entries: Counter[tuple[str, bool]]
    messages: Counter[tuple[str, bool]]


async def analyze(
    backlog: Backlog, log: Log, trial: Trial, *, entries_max: int, seconds_max: float
) -> Analysis:
    """Judge blocks of the backlog in random order, until none is left or the time is over."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds_max
    cursor = await backlog.cursor()
    runs = after(await log.ledgers(backlog.topic), cursor.mark_delete)
    there = size(runs)
    lots = [random.random() for _ in range(entries_max // BLOCK_ENTRIES + 1)]
    begins = starts(there, entries_max, lots)
    seen: list[_Seen] = []
    first: Position | None = None
    last: Position | None = None
    for number in random.sample(begins, len(begins)):
        if seen and loop.time() >= end_s:
            break
        some = await _block(backlog, log, runs, number, min(BLOCK_ENTRIES, entries_max))
        seen.append(_counted(some, await trial.judge(some)))
        if some:
            low, high = position_of(some[0]), position_of(some[-1])
            first = low if first is None else min(first, low)
            last = high if last is None else max(last, high)
    is_complete = there <= entries_max and len(seen) == len(begins)
    entries = sum(each.entries.total() for each in seen)
    total = entries if is_complete else max(entries, there - cursor.acknowledged_entries)
    return Analysis(
        total,
        entries,
        sum(each.messages.total() for each in seen),
        first,
        last,
        len(seen),
        is_complete,
        _found(seen, total, is_complete=is_complete),
    )


async def _block(
    backlog: Backlog, log: Log, runs: Sequence[Run], number: int, limit: int
) -> list[StoredEntry]:
    """The unacknowledged entries of a block, without markers."""
    acknowledged = backlog.acknowledged
    last = position_at(runs, min(number + limit, size(runs)) - 1)
    at: Position | None = position_at(runs, number)
    after: Position | None = None
    found: list[StoredEntry] = []
    while len(found) < limit:  # a page may be shorter than the block
        page = await log.scan(backlog.topic, at, after, limit - len(found))
        if not page:
            break
        found += page
        at, after = None, position_of(page[-1])
    return [
        each
        for each in found
        if position_of(each) <= last
        and position_of(each) not in acknowledged
        and not each.metadata.HasField("marker_type")
    ]


def _counted(entries: Sequence[StoredEntry], decisions: Sequence[Decision]) -> _Seen:
    seen = _Seen(Counter(), Counter())
    for entry, each in zip(entries, decisions, strict=True):
        what = _name(each)
        seen.entries[what] += 1
        seen.messages[what] += entry.metadata.num_messages_in_batch or 1
    return seen


def _found(seen: Sequence[_Seen], total: int, *, is_complete: bool) -> list[Found]:
    entries: Counter[tuple[str, bool]] = Counter()
    messages: Counter[tuple[str, bool]] = Counter()
    for each in seen:
        entries.update(each.entries)
        messages.update(each.messages)
    found = []
    for what in sorted(entries, key=lambda each: (each[1], each[0])):
        blocks = [Block(each.entries.total(), each.entries[what]) for each in seen]
        about = estimate(blocks, total, is_complete=is_complete)
        messages_about = round(about.about * messages[what] / entries[what])
        found.append(Found(*what, entries[what], messages[what], about, messages_about))
    return found


def _name(decision: Decision) -> tuple[str, bool]:
    if decision.failure is not None:
        return decision.failure.reason, True
    names = {ACCEPT: "ACCEPT", REJECT: "REJECT"}
    return names.get(decision.verdict, "RESCHEDULE"), False
