"""What a redrive would redrive, and what it would leave out: counted in blocks spread evenly over
its stretch, and estimated for the rest (filtering/estimate.py). Changes nothing."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.positions import Run
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
from seqgate.services.dispatcher.letters.record import Extent, RedriveOutcome, Selection
from seqgate.services.dispatcher.ports import Log, TopicNotFound
from seqgate.services.dispatcher.redrives.selecting import Redrivable, Selecting, outcome_now
from seqgate.types import Position, TopicName


class Expected(NamedTuple):
    """The entries with one outcome, their messages, and the estimated number in all."""

    outcome: RedriveOutcome
    entries: int
    messages: int
    estimate: Estimate


class Estimated(NamedTuple):
    """See EstimateRedriveResponse in dispatcher.proto."""

    total: int
    scanned: int
    blocks: int
    is_complete: bool
    found: Sequence[Expected]


class _Looked(NamedTuple):
    """The counts of a block: its entries, and by outcome entries and messages."""

    scanned: int
    entries: Counter[RedriveOutcome]
    messages: Counter[RedriveOutcome]


async def estimate_redrive(
    of: Redrivable,
    log: Log,
    source: TopicName,
    selection: Selection,
    stretch: Extent,
    *,
    entries_max: int,
    seconds_max: float,
) -> Estimated:
    """Look at blocks in random order, until none is left or the time is over. Raises
    InvalidExpression, FiltersUnavailable, LedgerUnavailable, EntryCorrupt."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds_max
    runs = await runs_of(log, source, stretch)
    total = size(runs)
    lots = [random.random() for _ in range(entries_max // BLOCK_ENTRIES + 1)]
    begins = starts(total, entries_max, lots)
    order = begins if total <= entries_max else random.sample(begins, len(begins))
    seen: list[_Looked] = []
    taken: set[Position] = set()
    selecting = Selecting(of, log, source, selection)
    try:
        await selecting.check()
        for number in order:
            if seen and loop.time() >= end_s:
                break
            some = await _block(log, source, runs, number, min(BLOCK_ENTRIES, entries_max))
            seen.append(await _judged(of, source, selecting, some, taken))
    finally:
        await selecting.close()
    is_complete = total <= entries_max and len(seen) == len(begins)
    scanned = sum(each.scanned for each in seen)
    return Estimated(
        scanned if is_complete else total,
        scanned,
        len(seen),
        is_complete,
        _found(seen, total, is_complete=is_complete),
    )


async def runs_of(log: Log, source: TopicName, stretch: Extent) -> list[Run]:
    """The entries that the source has in a stretch."""
    through = stretch.through
    if through is None:
        return []
    try:
        runs = after(await log.ledgers(source), stretch.after)
    except TopicNotFound:
        return []
    cut = []
    for first, last_entry_id in runs:
        if first.ledger_id == through.ledger_id:
            last_entry_id = min(last_entry_id, through.entry_id)
        if first.ledger_id <= through.ledger_id and first.entry_id <= last_entry_id:
            cut.append(Run(first, last_entry_id))
    return cut


async def _block(
    log: Log, source: TopicName, runs: Sequence[Run], number: int, limit: int
) -> list[StoredEntry]:
    """The entries of a block, without payloads."""
    last = position_at(runs, min(number + limit, size(runs)) - 1)
    at: Position | None = position_at(runs, number)
    behind: Position | None = None
    found: list[StoredEntry] = []
    while len(found) < limit:  # a page may be shorter than the block
        page = await log.scan(source, at, behind, limit - len(found))
        if not page:
            break
        found += page
        at, behind = None, position_of(page[-1])
    return [each for each in found if position_of(each) <= last]


async def _judged(
    of: Redrivable,
    source: TopicName,
    selecting: Selecting,
    entries: Sequence[StoredEntry],
    taken: set[Position],
) -> _Looked:
    seen = _Looked(len(entries), Counter(), Counter())
    while entries:
        judged = await selecting.judge(entries)
        for each in judged.candidates:
            outcome = outcome_now(of, source, each, taken)
            if outcome is RedriveOutcome.REDRIVEN:
                taken.update(each.parts)
            seen.entries[outcome] += 1
            seen.messages[outcome] += each.entry.metadata.num_messages_in_batch or 1
        entries = entries[judged.read :]
    return seen


def _found(seen: Sequence[_Looked], total: int, *, is_complete: bool) -> list[Expected]:
    found = []
    for outcome in RedriveOutcome:
        entries = sum(each.entries[outcome] for each in seen)
        if entries:
            blocks = [Block(each.scanned, each.entries[outcome]) for each in seen]
            about = estimate(blocks, total, is_complete=is_complete)
            messages = sum(each.messages[outcome] for each in seen)
            found.append(Expected(outcome, entries, messages, about))
    return found
