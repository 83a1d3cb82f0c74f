"""Defects of the ledger."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from seqgate.services.deduplication import Mark
from seqgate.services.ledger import live, servicer
from seqgate.services.ledger.adapters import memory, producers, tables, trims
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.core.marks import Remembered, remembered
from seqgate.services.ledger.service import Ledger, TopicLocks
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.room import Room
from seqgate.services.runtime.sqlite import Connections
from seqgate.types import TopicName
from tests.simulation.defects import defect


@defect("A2", "the rest of a message is stored after its start was trimmed")
def pass_over_cuts(patch: Any) -> None:
    def uncut(mark: Mark, left: Iterable[Entry]) -> Remembered:
        return Remembered(remembered(mark, left).decided)

    for module in (memory, producers):
        patch.setattr(module, "is_cut", lambda *_: False)
    for module in (memory, trims):
        patch.setattr(module, "remembered", uncut)


@defect("A3", "a producer's highest id ever is used in place of its last one")
def take_the_highest(patch: Any) -> None:
    def highest(mark: Mark, entries: Iterable[Entry]) -> Mark:
        ids = [each.highest - each.unfinished for each in entries if not each.marker]
        return Mark(max([mark.highest, *ids]))

    for module in (memory, trims):
        patch.setattr(module, "folded", highest)
    for store in (producers, tables):
        patch.setattr(store, "last_mark", highest)


@defect("A5", "a connected producer is forgotten as inactive")
def mark_nobody_alive(patch: Any) -> None:
    async def pass_over(*_: object) -> None:
        return None

    patch.setattr(live.LiveTopic, "_mark_alive", pass_over)
    patch.setattr(live.LiveTopic, "_keep_connected", pass_over)
    patch.setattr(live.LiveTopic, "_alive", lambda _, logged: logged)
    patch.setattr(Ledger, "_keep_within_s", lambda ledger: ledger._config.keep_interval_s)


@defect("A14", "append times decrease with the clock after a restart")
def follow_the_clock(patch: Any) -> None:
    patch.setattr(live.LiveTopic, "_next_append_ms", lambda _: time.time_ns() // 1_000_000)


@defect("A17", "a refused publication does not end a hold")
def hold_on_after_refusals(patch: Any) -> None:
    patch.setattr(servicer, "_ends_hold", lambda *_: False)


@defect("B3", "a look-up opens all blocks between the requested ids")
def look_at_all_between(patch: Any) -> None:
    patch.setattr(producers, "_is_in", lambda *_: True)
    patch.setattr(producers, "CLUSTERS_MAX", 1)


@defect("B4", "the write-ahead log grows for as long as reads overlap")
def let_the_log_grow(patch: Any) -> None:
    patch.setattr(Connections, "_bound_log", lambda *_: None)


@defect("B5", "a trim or a deletion locks every topic")
def lock_all_topics(patch: Any) -> None:
    of = TopicLocks.of

    def of_all(locks: TopicLocks, _: TopicName) -> Any:
        return of(locks, TopicName("all", "topics", "together"))

    patch.setattr(TopicLocks, "of", of_all)


@defect("B6", "windows add up without a limit; an unexpected error in a topic ends the process")
def budget_nothing(patch: Any) -> None:
    @contextmanager
    def open_to_all(_: live.LiveTopic) -> Iterator[None]:
        yield

    patch.setattr(Budget, "fits", lambda *_: True)
    patch.setattr(Room, "fits", lambda *_: True)
    patch.setattr(live.Session, "_is_unread", lambda _: False)
    patch.setattr(live.LiveTopic, "_contained", open_to_all)


@defect("F1", "a replay continues across a trim of entries that it has not read yet")
def go_on_across_trims(patch: Any) -> None:
    patch.setattr(live, "_follows", lambda *_: True)


@defect("F12", "a ledger that lost a topic denies what its successor stored")
def deny_successors(patch: Any) -> None:
    async def told(_: Ledger, live: object, found: object, told: object) -> object:
        return told

    patch.setattr(Ledger, "_told", told)
