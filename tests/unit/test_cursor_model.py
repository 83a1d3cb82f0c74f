"""Cursors against the simplest model: a set of entries, walked one by one.

Pages are four entries long here, so that every run crosses some.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from seqgate.services.cursor.adapters import memory
from seqgate.services.cursor.core import cursor
from seqgate.services.cursor.core.cursor import (
    BEFORE_FIRST,
    AlreadyMarkDeleted,
    BatchAck,
    Caller,
    CursorState,
    InvalidPosition,
    Range,
    RevisionConflict,
    Succession,
)
from seqgate.services.cursor.core.state import Head
from seqgate.services.errors import DomainError, Fenced
from seqgate.types import Position, TopicName
from tests.support.depth import times

LEDGERS = {1: 11, 2: 4, 4: 9, 5: 30}  # entries by ledger; ledger 3 has none
ENTRIES = [Position(ledger, entry) for ledger, size in LEDGERS.items() for entry in range(size)]
ENDS = [
    Succession(Position(1, 10), Position(2, 0)),
    Succession(Position(2, 3), Position(4, 0)),
    Succession(Position(4, 8), Position(5, 0)),
]
TRIMMED = [
    Succession(BEFORE_FIRST, Position(1, 2)),
    Succession(BEFORE_FIRST, Position(2, 0)),
    Succession(BEFORE_FIRST, Position(4, 0)),
]
CONTRADICTIONS = [
    Succession(Position(1, 10), Position(4, 0)),
    Succession(Position(4, 8), Position(4, 9)),
]


def size_of(position: Position) -> int:
    return 1 + (position.ledger_id + position.entry_id) % 4


@dataclass
class Model:
    mark_delete: Position | None = None
    done: set[Position] = field(default_factory=set)
    batches: dict[Position, set[int]] = field(default_factory=dict)
    attempts: dict[Position, int] = field(default_factory=dict)
    following: dict[Position, Position] = field(default_factory=dict)
    attached: dict[str, str] = field(default_factory=dict)
    revision: int = 0
    epoch: int = 0

    def covers(self, position: Position) -> bool:
        passed = self.mark_delete is not None and position <= self.mark_delete
        return passed or position in self.done

    def learn(self, successions: tuple[Succession, ...]) -> None:
        for last, following in successions:
            self.following[last] = max(following, self.following.get(last, following))

    def next(self) -> Iterator[Position]:
        if self.mark_delete is None:
            yield self.following.get(BEFORE_FIRST, Position(1, 0))
            return
        yield Position(self.mark_delete.ledger_id, self.mark_delete.entry_id + 1)
        if self.mark_delete in self.following:
            yield self.following[self.mark_delete]

    def settle(self) -> None:
        while found := [each for each in self.next() if each in self.done]:
            self.mark_delete = found[0]
        self.done = {each for each in self.done if not self.passed(each)}
        for kept in (self.batches, self.attempts):
            for position in [each for each in kept if self.covers(each)]:
                del kept[position]

    def passed(self, position: Position) -> bool:
        return self.mark_delete is not None and position <= self.mark_delete


positions = st.sampled_from(ENTRIES)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    first = draw(positions)
    length = draw(st.one_of(st.integers(1, 3), st.integers(1, 30)))
    return Range(first, min(first.entry_id + length, LEDGERS[first.ledger_id]) - 1)


@st.composite
def batch_acks(draw: st.DrawFn) -> BatchAck:
    position = draw(positions)
    size = size_of(position)
    indexes = draw(st.lists(st.integers(0, size - 1), max_size=5))
    wrong = draw(st.integers(0, 19))
    if wrong == 0:
        return BatchAck(position, size, (*indexes, size))
    return BatchAck(position, size + (wrong == 1), tuple(indexes))


successions = st.one_of(
    st.just(()),
    st.lists(st.sampled_from(ENDS), max_size=3).map(tuple),
    st.lists(st.sampled_from(ENDS + TRIMMED), max_size=2).map(tuple),
    st.lists(st.sampled_from(ENDS + CONTRADICTIONS), max_size=2).map(tuple),
)
epochs = st.sampled_from([None, None, 0, 0, -1, 1])  # below or above the current one
log_ends = st.one_of(st.none(), st.none(), st.just(ENTRIES[-1]), positions)


class Cursors(RuleBasedStateMachine):
    @initialize(mark_delete=st.one_of(st.none(), positions))
    def create(self, mark_delete: Position | None) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cursor, "PAGE_ENTRIES", 4)
        self.patch.setattr(memory, "PAGE_ENTRIES", 4)
        self.holes = memory.MemoryHoles()
        head = Head(TopicName.parse("a/b/c"), "n", 0, mark_delete)
        self.state = CursorState(head, self.holes)
        self.model = Model(mark_delete)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    # A caller's parameters, and the refusals that they cause.

    def caller(
        self,
        epoch: int | None,
        log_end: Position | None,
        revision: int | None,
        said: tuple[Succession, ...] = (),
    ) -> Caller:
        return Caller(
            None if epoch is None else self.model.epoch + epoch,
            log_end,
            None if revision is None else self.model.revision + revision,
            said,
        )

    def refusals(self, caller: Caller, reached: list[Position]) -> set[type[DomainError]]:
        expected: set[type[DomainError]] = set()
        if caller.epoch is not None and caller.epoch != (self.model.epoch or None):
            expected.add(Fenced)
        if caller.revision not in (None, self.model.revision):
            expected.add(RevisionConflict)
        if caller.log_end is not None and any(each > caller.log_end for each in reached):
            expected.add(InvalidPosition)
        known = dict(self.model.following)
        told = [following for last, following in caller.successions if last == BEFORE_FIRST]
        first = max([known.get(BEFORE_FIRST, Position(1, 0)), *told])
        for last, following in caller.successions:
            backwards = following.ledger_id == last.ledger_id
            before = known.get(last, following)
            known[last] = max(before, following)
            other = last != BEFORE_FIRST and before != following and known[last] > first
            if backwards or other:
                expected.add(InvalidPosition)
        return expected

    def attempt(self, expected: set[type[DomainError]], call: Callable[[], Any]) -> bool:
        """Whether the call succeeded; an expected refusal is checked, and that it changes
        nothing."""
        if not expected:
            call()
            return True
        before = self.picture()
        with pytest.raises(tuple(expected)):
            call()
        assert self.picture() == before
        return False

    def picture(self) -> Any:
        holes = self.holes
        return (
            replace(self.state.head),
            dict(holes.successions),
            [dict(each.values) for each in (holes._pages, holes._batches, holes._attempts)],
        )

    # Steps.

    @rule(
        given=st.lists(ranges(), max_size=6),
        batches=st.lists(batch_acks(), max_size=6),
        epoch=epochs,
        log_end=log_ends,
        said=successions,
    )
    def acknowledge(
        self,
        given: list[Range],
        batches: list[BatchAck],
        epoch: int | None,
        log_end: Position | None,
        said: tuple[Succession, ...],
    ) -> None:
        model, caller = self.model, self.caller(epoch, log_end, None, said)
        reached = [each.last for each in given] + [each.position for each in batches]
        expected = self.refusals(caller, reached)
        sizes: dict[Position, int] = {each: size_of(each) for each in model.batches}
        for position, size, indexes, _ in batches:
            if not model.covers(position):
                same = sizes.setdefault(position, size) == size
                if not same or max(indexes, default=0) >= size:
                    expected.add(InvalidPosition)
        wrong = any(size != size_of(each) for each, size, _, _ in batches if not model.covers(each))
        if wrong and not expected:
            return  # no refusal can be expected
        if not self.attempt(expected, lambda: self.state.acknowledge(given, batches, caller)):
            return

        before = model.mark_delete
        model.learn(said)
        for (ledger_id, first), last in given:
            model.done |= {Position(ledger_id, entry) for entry in range(first, last + 1)}
        for position, size, indexes, _ in batches:
            if indexes and not model.covers(position):
                model.batches.setdefault(position, set()).update(indexes)
                if len(model.batches[position]) == size:
                    model.done.add(position)
        model.settle()
        model.revision += model.mark_delete != before

    @rule(
        position=positions,
        attached=st.dictionaries(st.sampled_from("ab"), st.just("1")),
        epoch=epochs,
        log_end=log_ends,
        revision=epochs,
        said=successions,
    )
    def mark_deletes(
        self,
        position: Position,
        attached: dict[str, str],
        epoch: int | None,
        log_end: Position | None,
        revision: int | None,
        said: tuple[Succession, ...],
    ) -> None:
        model, caller = self.model, self.caller(epoch, log_end, revision, said)
        expected = self.refusals(caller, [position])
        if model.mark_delete is not None and position < model.mark_delete:
            expected.add(AlreadyMarkDeleted)
        if self.attempt(expected, lambda: self.state.mark_delete(position, attached, caller)):
            model.learn(said)
            model.mark_delete, model.attached = position, attached
            model.settle()
            model.revision += 1

    @rule(mark_delete=st.one_of(st.none(), positions), epoch=epochs)
    def resets(self, mark_delete: Position | None, epoch: int | None) -> None:
        caller = self.caller(epoch, None, None)
        expected = self.refusals(caller, [])
        if self.attempt(expected, lambda: self.state.reset(mark_delete, caller)):
            following, revision = self.model.following, self.model.revision + 1
            epoch = self.model.epoch
            epoch += 2 if epoch and caller.epoch is None else 0
            self.model = Model(mark_delete, following=following, revision=revision, epoch=epoch)

    @rule(
        given=st.lists(st.tuples(positions, st.integers(1, 9)), max_size=8),
        counted=st.booleans(),
        epoch=epochs,
    )
    def deliver(self, given: list[tuple[Position, int]], counted: bool, epoch: int | None) -> None:
        counts: list[int] = []
        caller = self.caller(epoch, None, None)
        places = [position for position, _ in given]
        at_least = [least for _, least in given] if counted else []
        if not self.attempt(
            self.refusals(caller, []),
            lambda: counts.extend(self.state.record_attempts(places, caller, at_least)),
        ):
            return
        expected = []
        for position, least in given:
            known = self.model.attempts.get(position, 0)
            if not self.model.covers(position):
                self.model.attempts[position] = max(known, least) if counted else known + 1
            expected.append(self.model.attempts.get(position, 0))
        assert counts == expected

    @rule()
    def change_hands(self) -> None:
        self.model.epoch += 2 if self.model.epoch else 1
        now_ms = 1_000 * self.model.epoch
        lease = self.state.acquire_lease(f"owner {self.model.epoch}", now_ms, 1_000)
        assert lease.epoch == self.model.epoch

    # Invariants.

    @rule(after=st.one_of(st.none(), positions), limit=st.integers(1, 5))
    def read(self, after: Position | None, limit: int) -> None:
        """Page by page, nothing is lost, repeated, or out of order."""
        entries: list[Position] = []
        batches: dict[Position, set[int]] = {}
        start: Position | None = after
        while True:
            page = self.state.acknowledged(start, limit)
            assert len(page.ranges) + len(page.batches) <= limit
            for (ledger_id, first), last in page.ranges:
                entries += [Position(ledger_id, entry) for entry in range(first, last + 1)]
            for position, size, indexes, _ in page.batches:
                assert size == size_of(position)
                assert position not in batches
                batches[position] = set(indexes)
            if page.next_after is None:
                break
            assert len(page.ranges) + len(page.batches) == limit
            assert start is None or page.next_after > start
            start = page.next_after

        beyond = [each for each in self.model.done if after is None or each > after]
        assert entries == sorted(beyond)
        assert batches == {
            each: indexes
            for each, indexes in self.model.batches.items()
            if after is None or each > after
        }

    @invariant()
    def the_same(self) -> None:
        if not hasattr(self, "model"):
            return
        head, model = self.state.head, self.model
        assert head.mark_delete == model.mark_delete
        assert head.mark_delete_properties == model.attached
        assert (head.acknowledged, head.partial) == (len(model.done), len(model.batches))
        assert head.revision == model.revision
        counts = [
            (each.position, each.attempts) for each in self.state.attempts(None, 1_000).counts
        ]
        assert counts == sorted(model.attempts.items())
        assert set(self.holes._batches.values) == set(model.batches)
        assert self.holes.successions == model.following
        ranges = self.state.acknowledged(None, 1_000).ranges
        assert all(
            (before.first.ledger_id, before.last_entry + 1) != after.first
            for before, after in pairwise(ranges)
        ), "a run is one range, also where pages meet"
        kept = sum(bits.bit_count() for bits in self.holes._pages.values.values())
        assert kept == len(model.done)


TestCursors = Cursors.TestCase
TestCursors.settings = settings(
    max_examples=times(quick=25, full=60), stateful_step_count=30, deadline=None
)
