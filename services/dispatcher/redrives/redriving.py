"""Redrives of many: carried out step by step by the subscription's owner.

    start ──▶ record: running ──step──step──step──▶ done
                        │ ▲                    └──▶ stopped, failed
               owner dies └ the next owner goes on after the record's position

A step reads some entries, and makes one change of the cursor's properties: their returns, and the
record behind them (record.py). So each message is redriven once, whatever dies in between. A step
waits while enough messages are on their way, and while the filter service or the source is away.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import structlog

from seqgate.services.dispatcher.core.effects import Entry
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.errors import RedriveNotFound, RedriveRunning, TooManyReturns
from seqgate.services.dispatcher.filtering.estimate import size
from seqgate.services.dispatcher.letters.record import (
    Extent,
    RedriveOutcome,
    RedriveRecord,
    Selection,
    State,
    forgotten,
    records_of,
)
from seqgate.services.dispatcher.letters.returns import RETURNS_MAX, Return
from seqgate.services.dispatcher.ports import Cursor, InvalidProperty, Log, TopicNotFound
from seqgate.services.dispatcher.redrives.estimating import runs_of
from seqgate.services.dispatcher.redrives.selecting import (
    Candidate,
    Redrivable,
    Selecting,
    outcome_now,
)
from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.backoff import Backoff
from seqgate.types import Position, TopicName

log = structlog.get_logger()

T = TypeVar("T")

PAGE_ENTRIES: Final = 1_000
"""The most entries read and judged at a time, without payloads."""

STEP_LETTERS: Final = 100
"""The most entries that a step redrives: one change of properties, during which consumers' requests
wait. A large message is not divided."""

ON_THEIR_WAY_MAX: Final = RETURNS_MAX - 100
"""The most entries of a subscription on their way at which a redrive of many goes on: the rest is
for letters that are redriven by name. A large message of more chunks goes once nothing else is on
its way."""

SETTLING_S: Final = 5.0
"""How long a redrive waits for a letter whose message is about to be acknowledged."""

LOOK_S: Final = 0.1
"""The interval of looks at such a letter, in seconds."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""The delay before a step is made again, doubling from the first to the longest."""

_ROOM: Final = "consumers: enough messages are on their way"


class Order(NamedTuple):
    """A redrive as it is requested. `stretch` returns its part of the source."""

    request_id: str
    caller: str
    source: TopicName
    selection: Selection
    letters_s: int
    stretch: Callable[[], Awaitable[Extent]]


class Tasks(Protocol):
    """See shell/work.py."""

    def check(self) -> None: ...

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]: ...

    async def repeated(
        self, do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None
    ) -> T: ...


class Owned(Redrivable, Protocol):
    """The subscription whose redrives are carried out."""

    name: str

    @property
    def begun(self) -> frozenset[Position]:
        """The messages on their way to the dead letter topic."""
        ...

    @property
    def changing(self) -> asyncio.Lock: ...

    async def check_cursor(self) -> None:
        """Raise unless the cursor service answers."""
        ...

    async def bring(
        self,
        found: Mapping[Position, tuple[Return, Entry]],
        make_durable: Callable[[Mapping[Position, Return]], Awaitable[T]],
    ) -> T:
        """Make returns durable, and deliver them; the caller holds `changing`."""
        ...


class _Step(NamedTuple):
    """The next entries of a redrive: how many, what is redriven of them, and the record behind
    them. `waits_s`: how long to wait before the next step."""

    read: int
    found: dict[Position, tuple[Return, Entry]]
    record: RedriveRecord
    waits_s: float = 0.0


class Redriving:
    """The redrives of many of one subscription.

    Attributes:
        records: by number, the oldest first.
        waits_for: what the running redrive waits for; empty: nothing.
        one_by_one: held while a redrive is made, or a step of one.
    """

    def __init__(self, of: Owned, work: Tasks, entries: Log, now_ms: Callable[[], int]) -> None:
        self.records: dict[int, RedriveRecord] = {}
        self.waits_for = ""
        self.one_by_one = asyncio.Lock()
        self._of = of
        self._work = work
        self._log = entries
        self._now_ms = now_ms
        self._names = {"topic": str(of.topic), "subscription": of.name}
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._read: deque[tuple[Position, Candidate | None]] = deque()
        self._read_from: tuple[int, Position | None] | None = None  # number, and where it begins
        self._read_all = False
        self._settling: tuple[Position, float] | None = None

    # ---- durable state

    def load(self, cursor: Cursor) -> None:
        """Replace the records by the cursor's."""
        self.records = records_of(cursor.properties)

    @property
    def running(self) -> RedriveRecord | None:
        return next((each for each in self.records.values() if each.state is State.RUNNING), None)

    @property
    def is_busy(self) -> bool:
        """Whether it makes progress without consumers."""
        return self.running is not None and self.waits_for != _ROOM

    def go_on(self) -> None:
        """Carry out the running redrive, if there is one."""
        if self.running is not None and (self._task is None or self._task.done()):
            self._task = self._work.start(self._run)

    def get(self, number: int) -> RedriveRecord:
        """Raises RedriveNotFound."""
        try:
            return self.records[number]
        except KeyError:
            raise RedriveNotFound(f"no redrive has the number {number:,}", number=number) from None

    # ---- calls

    async def start(self, order: Order) -> tuple[RedriveRecord, bool]:
        """Make a redrive durable, and begin it. Also returns whether a request with this id did so
        before. Raises RedriveRunning, TooManyReturns, InvalidStart, InvalidExpression,
        FiltersUnavailable, LedgerUnavailable: nothing changed."""
        async with self.one_by_one:
            for each in self.records.values():
                if each.request_id == order.request_id:
                    return each, True
            if (other := self.running) is not None:
                raise RedriveRunning(
                    f"redrive {other.number:,} runs on the subscription", redrive=other.number
                )
            selecting = Selecting(self._of, self._log, order.source, order.selection)
            try:
                await selecting.check()
            finally:
                await selecting.close()
            stretch = await order.stretch()
            total = size(await runs_of(self._log, order.source, stretch))
            async with self._of.changing:
                record = RedriveRecord(
                    self._of.returns.next_number,
                    order.request_id,
                    order.caller,
                    order.source,
                    order.selection,
                    stretch,
                    order.letters_s,
                    total,
                    self._now_ms(),
                    after=stretch.after,
                )
                await self._put(record)
            log.info("redrive started", **self._names, redrive=record.number, caller=order.caller)
            self.go_on()
            return record, False

    async def stop(self, number: int) -> RedriveRecord:
        """Stop a redrive. Raises RedriveNotFound."""
        async with self.one_by_one, self._of.changing:
            record = self.get(number)
            if record.state is State.RUNNING:
                record = await self._end(record, State.STOPPED)
            return record

    async def _end(self, record: RedriveRecord, state: State, failure: str = "") -> RedriveRecord:
        record = replace(record, state=state, failure=failure, ended_ms=self._now_ms())
        await self._put(record)
        self._tell_end(record)
        return record

    async def _put(self, record: RedriveRecord) -> None:
        """Make a record durable, and forget the oldest for a new one; the caller holds `changing`.
        Raises TooManyReturns."""
        gone = [] if record.number in self.records else forgotten(self.records.values())
        remove = [each.name for each in gone]
        try:
            await self._work.repeated(
                lambda: self._of.returns.bring({}, record, remove), unless=InvalidProperty
            )
        except InvalidProperty as error:
            raise TooManyReturns(
                "too many held keys, and letters on their way back, for the cursor's properties",
                retry_after_s=1.0,
            ) from error
        for each in gone:
            del self.records[each.number]
        self._keep(record)

    def _keep(self, record: RedriveRecord) -> None:
        self.records[record.number] = record
        self._news.set()

    def _tell_end(self, record: RedriveRecord) -> None:
        counts = {each.name.lower(): count for each, count in record.counts.items()}
        ended = {"redrive": record.number, "state": record.state.name, "failure": record.failure}
        log.info("redrive ended", **self._names, **ended, **counts)

    # ---- steps

    async def _run(self) -> None:
        """Make steps until no redrive runs."""
        loop, next_s = asyncio.get_running_loop(), 0.0
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        while (record := self.running) is not None:
            try:
                if (wait_s := next_s - loop.time()) > 0:
                    await self._pause(wait_s)
                    continue
                made = await self._step(record)
                next_s = loop.time() + made.waits_s
                backoff.reset()
            except DomainError as error:
                self._work.check()
                if error.kind is not Kind.UNAVAILABLE and error.kind is not Kind.EXHAUSTED:
                    with suppress(TooManyReturns):  # it fails again
                        await self._fail(record.number, error)
                self.waits_for = error.message
                next_s = loop.time() + backoff.next_s()
        self.waits_for = ""

    async def _pause(self, seconds: float) -> None:
        """Wait, or until a redrive starts or ends."""
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _fail(self, number: int, error: DomainError) -> None:
        async with self.one_by_one, self._of.changing:
            record = self.records.get(number)
            if record is not None and record.state is State.RUNNING:
                await self._end(record, State.FAILED, error.message)

    async def _step(self, record: RedriveRecord) -> _Step:
        """Make a step. Raises what reading and judging raise: nothing changed."""
        if self._read_from != (record.number, record.after) or not (self._read or self._read_all):
            await self._read_page(record)
        if not await self._has_room():
            return _Step(0, {}, record)
        await self._of.check_cursor()  # consumers wait during the change: it will not take long
        async with self.one_by_one, self._of.changing:
            if self.records.get(record.number) != record:  # stopped, or loaded again
                return _Step(0, {}, record)
            step = self._next(record)
            if step.record == record:
                return step
            if step.found:
                await self._of.bring(
                    step.found, lambda returns: self._of.returns.bring(returns, step.record)
                )
                self._keep(step.record)
            else:
                await self._put(step.record)
            for _ in range(step.read):
                self._read.popleft()
            self._read_from = (record.number, step.record.after)
            self.waits_for = ""
        if step.record.state is not State.RUNNING:
            self._tell_end(step.record)
        return step

    async def _read_page(self, record: RedriveRecord) -> None:
        """Read and judge the next entries."""
        through = record.stretch.through
        page = []
        if through is not None and (record.after is None or record.after < through):
            try:
                page = list(await self._log.scan(record.source, None, record.after, PAGE_ENTRIES))
            except TopicNotFound:
                page = []
        entries = [each for each in page if through is not None and position_of(each) <= through]
        selecting = Selecting(self._of, self._log, record.source, record.selection)
        try:
            judged = await selecting.judge(entries)
        finally:
            await selecting.close()
        candidates = {each.position: each for each in judged.candidates}
        places = map(position_of, entries[: judged.read])
        self._read = deque((each, candidates.get(each)) for each in places)
        is_last = len(entries) < len(page) or not page or position_of(page[-1]) == through
        self._read_all = is_last and judged.read == len(entries)
        self._read_from = (record.number, record.after)

    async def _has_room(self) -> bool:
        """Whether the next message may be on its way. If not, this waits until some are settled, or
        a redrive starts or ends."""
        returns = self._of.returns
        selected = (each for _, each in self._read if each is not None and each.outcome is None)
        following = next(selected, None)
        if following is None or self._takes(len(following.parts)):
            return True
        self.waits_for = _ROOM
        returns.settled.clear()
        self._news.clear()
        waits = [asyncio.ensure_future(each.wait()) for each in (returns.settled, self._news)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        return False

    def _takes(self, entries: int, found: int = 0) -> bool:
        """Whether a step takes a message of so many entries, after those that it found."""
        on_their_way = len(self._of.returns.open) + found
        if not on_their_way:
            return True
        if found and found + entries > STEP_LETTERS:
            return False
        return on_their_way + entries <= ON_THEIR_WAY_MAX

    def _next(self, record: RedriveRecord) -> _Step:
        """Decide about the next entries that were read."""
        of, found = self._of, dict[Position, tuple[Return, Entry]]()
        messages = 0
        counts, after, read = Counter(record.counts), record.after, 0
        waits_s = 0.0
        for position, each in self._read:
            if each is not None:
                outcome = outcome_now(of, record.source, each, found)
                if self._is_settling(each, outcome):
                    waits_s = LOOK_S
                    break
                if outcome is RedriveOutcome.REDRIVEN:
                    if messages and messages == record.letters_s:
                        break
                    if not self._takes(len(each.parts), len(found)):
                        break
                    *_, last = each.parts
                    for origin, part in each.parts.items():
                        back = of.returns.back(record.source, part, origin, last, record.number)
                        found[origin] = back
                    messages += 1
                counts[outcome] += 1
            after, read = position, read + 1
        if record.letters_s:
            waits_s = max(waits_s, messages / record.letters_s)
        behind = replace(record, after=after, scanned=record.scanned + read, counts=dict(counts))
        if found and not of.returns.has_pages(back for back, _ in found.values()):
            failure = "too many settled letters: see PAGES_MAX in docs/budgets.md"
            ended = replace(record, failure=failure, state=State.FAILED, ended_ms=self._now_ms())
            return _Step(0, {}, ended)
        if read == len(self._read) and self._read_all:
            behind = replace(behind, state=State.DONE, ended_ms=self._now_ms())
        return _Step(read, found, behind, waits_s)

    def _is_settling(self, each: Candidate, outcome: RedriveOutcome) -> bool:
        """Whether a letter is left out only because its message is not acknowledged yet, or an
        earlier letter of it is about to be settled: that takes a moment."""
        if outcome not in (RedriveOutcome.UNACKNOWLEDGED, RedriveOutcome.RETURNING):
            return False
        if self._of.begun.isdisjoint(each.parts):
            return False
        now_s = asyncio.get_running_loop().time()
        if self._settling is None or self._settling[0] != each.position:
            self._settling = (each.position, now_s)
        return now_s - self._settling[1] < SETTLING_S
