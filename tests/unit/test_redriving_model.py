"""Redrives and returns against a model of a few sets (services/dispatcher/redrives/redriving.py,
services/dispatcher/letters/returns.py)."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.core.effects import (
    Entry,
    FailedDelivery,
    FailedEntry,
    How,
    Persist,
)
from seqgate.services.dispatcher.core.positions import Acknowledged, Run, runs_of
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.errors import LetterNotRedrivable, RedriveRunning
from seqgate.services.dispatcher.filtering.chains import NO_FILTERS, Chain
from seqgate.services.dispatcher.filtering.trial import Trial
from seqgate.services.dispatcher.letters.listing import Listing
from seqgate.services.dispatcher.letters.marks import Fate
from seqgate.services.dispatcher.letters.record import Extent, RedriveOutcome, Selection, State
from seqgate.services.dispatcher.letters.returns import Return, Returns
from seqgate.services.dispatcher.ports import ORIGIN, PRODUCER, Cursor, Log
from seqgate.services.dispatcher.redrives.redriving import Order, Redriving
from seqgate.services.errors import DomainError
from seqgate.types import Position, TopicName
from tests.support.depth import times

T = TypeVar("T")

TOPIC, LETTERS = TopicName.parse("a/b/c"), TopicName.parse("a/b/c-s-DLQ")
NAME, KEYS = "s", (b"a", b"b")
ORIGINS = [Position(1, each) for each in (3, 0, 1, 0, 2, 4, 3, 5, 6, 7)]
"""Of each letter, its message: two were dead-lettered again after a reset."""

LAST = Position(1, len(ORIGINS) - 1)
ROOM, STEP, PAGE = 4, 2, 3
"""ON_THEIR_WAY_MAX, STEP_LETTERS and PAGE_ENTRIES."""


def key_of(letter: int) -> bytes:
    return KEYS[ORIGINS[letter].entry_id % 2]


def stored(letter: int) -> StoredEntry:
    origin = ORIGINS[letter]
    properties = {
        f"{ORIGIN}topic": str(TOPIC),
        f"{ORIGIN}subscription": NAME,
        f"{ORIGIN}id": f"{origin.ledger_id}:{origin.entry_id}",
    }
    return StoredEntry(
        position=common_pb2.Position(ledger_id=1, entry_id=letter),
        metadata=entry_pb2.EntryMetadata(
            producer_name=f"{PRODUCER}{TOPIC}/{NAME}",
            partition_key=key_of(letter).decode(),
            properties=properties,
        ),
    )


class Topic:
    """The dead letter topic: see seqgate.services.dispatcher.ports.Log."""

    def __init__(self) -> None:
        self.entries = [stored(each) for each in range(len(ORIGINS))]

    async def scan(
        self, topic: TopicName, at: Position | None, after: Position | None, limit: int
    ) -> Sequence[StoredEntry]:
        return self.entries[0 if after is None else after.entry_id + 1 :][:limit]

    async def fetch(
        self, topic: TopicName, positions: Sequence[Position], *, metadata_only: bool = False
    ) -> Sequence[StoredEntry]:
        return [each for each in self.entries if position_of(each) in positions]

    async def ledgers(self, topic: TopicName) -> Sequence[Run]:
        return [Run(Position(1, 0), LAST.entry_id)]


class Dying(MemoryCursors):
    """The process dies at the next change of properties, before it or after; empty: it lives."""

    dies = ""

    async def set_properties(self, *given: Any, **more: Any) -> Cursor:
        if self.dies == "before":
            raise Died
        cursor = await super().set_properties(*given, **more)
        if self.dies:
            raise Died
        return cursor


class Died(Exception):
    """The process died."""


class Owner:
    """The subscription, without a machine, and its tasks: none is started."""

    topic, name, chain = TOPIC, NAME, NO_FILTERS
    begun: frozenset[Position] = frozenset()

    def __init__(self, tenure: Tenure, acknowledged: Acknowledged) -> None:
        self.acknowledged = acknowledged
        self.changing = asyncio.Lock()
        self.log = cast("Log", Topic())
        self.returns = Returns(tenure, self.log)

    def letters(self, dead_letter_topic: TopicName | None) -> Listing:
        return Listing(self.log, LETTERS, TOPIC, NAME)

    def trial(self, chain: Chain) -> Trial:
        raise AssertionError("nothing is filtered")

    async def check_cursor(self) -> None:
        """It answers."""

    async def bring(
        self,
        found: Mapping[Position, tuple[Return, Entry]],
        make_durable: Callable[[Mapping[Position, Return]], Awaitable[T]],
    ) -> T:
        return await make_durable({each: back for each, (back, _) in found.items()})

    def check(self) -> None:
        """It has not stopped."""

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Any:
        return asyncio.get_running_loop().create_future()

    async def repeated(
        self, do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None
    ) -> T:
        return await do()


class Redrives(RuleBasedStateMachine):
    """The model: which messages are acknowledged, which letter of a message is on its way back,
    and how often that failed, and which letters are settled."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in (
            ("ON_THEIR_WAY_MAX", ROOM),
            ("STEP_LETTERS", STEP),
            ("PAGE_ENTRIES", PAGE),
        ):
            self.patch.setattr(f"seqgate.services.dispatcher.redrives.redriving.{name}", value)
        self.runner = asyncio.Runner()
        self.cursors = Dying()
        self.done = set(ORIGINS)
        self.back: dict[Position, int] = {}
        self.failed: Counter[Position] = Counter()
        self.settled: set[int] = set()
        self.requests = 0
        self.runner.run(self._create())
        self.take()

    def teardown(self) -> None:
        self.runner.close()
        self.patch.undo()

    async def _create(self) -> None:
        await self.cursors.create(TOPIC, NAME, None, {})

    @rule()
    def take(self) -> None:
        """Another instance takes the subscription, or the same one starts from durable state."""
        self.runner.run(self._take())

    async def _take(self) -> None:
        lease = await self.cursors.acquire(TOPIC, NAME, "me", 60_000)
        tenure = Tenure(self.cursors, TOPIC, NAME, "me", lease.epoch, 60_000)
        acknowledged = Acknowledged(None)
        for each in self.done:
            acknowledged.add(each)
        self.owner = Owner(tenure, acknowledged)
        cursor = await tenure.get()
        await self.owner.returns.load(cursor, acknowledged)
        self.redriving = Redriving(self.owner, self.owner, self.owner.log, lambda: 1)
        self.redriving.load(cursor)

    @rule(origin=st.sampled_from(ORIGINS))
    def reset(self, origin: Position) -> None:
        """The log delivers a message again, and its return is void."""
        self.done.discard(origin)
        if self.back.pop(origin, None) is not None:
            self.failed.pop(origin, None)
        self.take()

    @rule(origin=st.sampled_from(ORIGINS))
    def deliver(self, origin: Position) -> None:
        """A message that the log delivered again is acknowledged."""
        self.done.add(origin)
        self.owner.acknowledged.add(origin)

    @rule(origin=st.sampled_from(ORIGINS))
    def acknowledge(self, origin: Position) -> None:
        what = Persist(1, runs_of([origin]), (), ())
        self.runner.run(self.owner.returns.persist(what, lambda _: None))
        if origin in self.back:
            self.settled.add(self.back.pop(origin))
            self.failed.pop(origin, None)

    @rule(origin=st.sampled_from(ORIGINS))
    def fail(self, origin: Position) -> None:
        if origin in self.back:
            self.failed[origin] += 1
        failures = (FailedDelivery(How.REFUSED, 5, "c"),) * self.failed[origin]
        failed = FailedEntry(origin, self.failed[origin], failures)
        self.runner.run(self.owner.returns.record([failed]))

    @rule(letters=st.lists(st.integers(0, LAST.entry_id), min_size=1, max_size=3, unique=True))
    def redrive(self, letters: list[int]) -> None:
        """All or none."""
        origins = [ORIGINS[each] for each in letters]
        can = (
            self.settled.isdisjoint(letters)
            and self.done.issuperset(origins)
            and not self.back.keys() & origins
            and len(set(origins)) == len(origins)
        )
        try:
            self.runner.run(self._redrive([Position(1, each) for each in letters]))
        except LetterNotRedrivable:
            assert not can
        else:
            assert can
            self.back |= dict(zip(origins, letters, strict=True))

    async def _redrive(self, letters: Sequence[Position]) -> None:
        returns, self.requests = self.owner.returns, self.requests + 1
        found = await returns.check(self.owner.letters(None), letters, self.owner.acknowledged)
        made = await returns.begin({each: back for each, (back, _) in found.items()}, "n")
        assert (made.letters, returns.latest[-1]) == (len(letters), made)

    @rule(key=st.sampled_from([None, *KEYS]), rate=st.sampled_from([0, 1]))
    def start(self, key: bytes | None, rate: int) -> None:
        async def stretch() -> Extent:
            return Extent(None, LAST)

        self.requests += 1
        order = Order(f"{self.requests}", "me", LETTERS, Selection(key), rate, stretch)
        is_running = self.redriving.running is not None
        try:
            record, is_repeated = self.runner.run(self.redriving.start(order))
        except RedriveRunning:
            assert is_running
        else:
            assert not is_running
            assert not is_repeated
            assert record.total == len(ORIGINS)
            assert self.runner.run(self.redriving.start(order)) == (record, True)

    @precondition(lambda self: self.redriving.running is not None)
    @rule()
    def stop(self) -> None:
        record = self.redriving.running
        assert record is not None
        self.runner.run(self.redriving.stop(record.number))
        assert self.redriving.get(record.number).state is State.STOPPED

    @precondition(lambda self: self.redriving.running is not None and len(self.back) < ROOM)
    @rule(dies=st.sampled_from(["", "", "before", "after"]))
    def step(self, dies: str) -> None:
        """A step examines the next letters, and says of each what the model does."""
        before = self.redriving.running
        assert before is not None
        room = min(STEP, before.letters_s or STEP, ROOM - len(self.back))
        self.cursors.dies = dies
        try:
            self.runner.run(self.redriving._step(before))
        except Died:
            self.cursors.dies = ""
            self.take()
        after = self.redriving.get(before.number)
        expected = Counter(before.counts)
        for letter in range(_end(before.after), _end(after.after)):
            outcome = self._outcome(letter, before.selection.key)
            expected[outcome] += 1
            if outcome is RedriveOutcome.REDRIVEN:
                room -= 1
                self.back[ORIGINS[letter]] = letter
        assert room >= 0
        assert after.counts == expected
        assert after.scanned == _end(after.after)
        assert after.state is (State.DONE if after.after == LAST else State.RUNNING)
        assert (after.after == before.after) is (dies == "before")

    def _outcome(self, letter: int, key: bytes | None) -> RedriveOutcome:
        if key not in (None, key_of(letter)):
            return RedriveOutcome.NOT_SELECTED
        if letter in self.settled:
            return RedriveOutcome.SETTLED
        if ORIGINS[letter] in self.back:
            return RedriveOutcome.RETURNING
        if ORIGINS[letter] not in self.done:
            return RedriveOutcome.UNACKNOWLEDGED
        return RedriveOutcome.REDRIVEN

    @invariant()
    def what_is_known_is_what_the_model_says(self) -> None:
        returns = self.owner.returns
        assert {each: back.letter.entry_id for each, back in returns.open.items()} == self.back
        assert returns.attempts == +self.failed
        assert {each: len(known) for each, known in returns.failures.items()} == +self.failed
        for letter in range(len(ORIGINS)):
            place = Position(1, letter)
            fate = Fate.REDRIVEN if letter in self.settled else None
            assert returns.marks.fate(LETTERS, place) is fate
            is_back = self.back.get(ORIGINS[letter]) == letter
            assert returns.is_redriven(LETTERS, place) is (is_back or letter in self.settled)


def _end(after: Position | None) -> int:
    return 0 if after is None else after.entry_id + 1


TestRedrives = Redrives.TestCase
TestRedrives.settings = settings(
    max_examples=times(quick=30, full=1_000), stateful_step_count=40, deadline=None
)
