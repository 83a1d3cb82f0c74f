"""Performs the effects of a subscription's machine.

    events ──▶ machine ──effects──▶ the log, the cursor, filters, the dead letter topic, consumers
                  ▲                                   │
                  └─────────── outcomes ◀─────────────┘

Outcomes go to the machine as they arrive, in one thread and without waiting, so they never
interleave. When a machine is replaced, outcomes of its effects are dropped: each machine has a
generation.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

import structlog

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.dispatcher.core.delays import DelayedBytes
from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    REJECT,
    Assigned,
    Because,
    DeadLetter,
    Deliver,
    Drain,
    Effect,
    ForgetKey,
    Judge,
    Options,
    Passed,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.history import History, What
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Placement, SlotRange, selector_of
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.cursor.tenure import Tenure, persist
from seqgate.services.dispatcher.entries import entry_of, position_of
from seqgate.services.dispatcher.filtering.applied import Filtering
from seqgate.services.dispatcher.letters.graveyard import Graveyard, held_key
from seqgate.services.dispatcher.letters.returns import Returns
from seqgate.services.dispatcher.ports import Fetched, Ports
from seqgate.services.dispatcher.shell.answers import Answers, Stream
from seqgate.services.dispatcher.shell.cache import EntryCache
from seqgate.services.dispatcher.shell.work import BACKOFF_FIRST_S, Work
from seqgate.services.runtime.metrics import Recorder, nowhere
from seqgate.telemetry import names, spans
from seqgate.types import Position

log = structlog.get_logger()

PASSED_MAX: Final = 10_000
"""The most passed entries whose cause is remembered, for Explain."""

FIRST_DELIVERY_BITS: Final = 56
"""The random bits of an owner's first delivery number. Two subscriptions with a billion deliveries
each share a number in one of 36 million pairs; see docs/decisions/tokens-fit-one-subscription.md.
"""

JUDGED_BYTES_MAX: Final = 4 * 1024 * 1024
"""The bytes of metadata fetched at a time to judge entries again; further ones are fetched next."""


class _Changing(asyncio.Lock):
    """Held during a change while the machine must not be called; `over` is called when the change
    ends, however it ends."""

    def __init__(self, over: Callable[[], None]) -> None:
        super().__init__()
        self._over = over

    def release(self) -> None:
        super().release()
        self._over()


class Performing:
    """A subscription's machine, and its effects.

    Attributes:
        options, placement: the machine's settings.
        generation: counts the machines; outcomes for an earlier one are dropped.
        answers: responses that wait until acknowledgements are durable.
        cache: entries that were read and are not sent yet.
        changing: held while the machine is replaced or the filters change.
        assignment_revision: how often the assignment of slots changed.
        passed: the latest skipped entries, and why.
        history: gets the events of messages; None: none are recorded.
    """

    def __init__(
        self,
        tenure: Tenure,
        ports: Ports,
        work: Work,
        streams: Mapping[int, Stream],
        graveyard: Graveyard,
        filtering: Filtering,
        returns: Returns,
        *,
        cache: EntryCache,
        delayed: DelayedBytes,
        read_entries_max: int,
        handed_over: Recorder = nowhere,
        history: History | None = None,
    ) -> None:
        """`streams` are the consumers' streams; `delayed` is the memory that all subscriptions
        share for delayed messages; the machine takes at most `read_entries_max` entries at a time;
        `handed_over` records how long keys drained, in seconds."""
        self.options = Options()
        self.placement = Placement.CONSISTENT_HASHING
        self.generation = 0
        self.answers = Answers()
        self.cache = cache
        self.changing = _Changing(self._changed)
        self.assignment_revision = 0
        self.passed: dict[Position, Because] = {}
        self.history = history
        self._topic = tenure.topic
        self._name = tenure.name
        self._tenure = tenure
        self._ports = ports
        self._work = work
        self._streams = streams
        self._graveyard = graveyard
        self._filtering = filtering
        self._returns = returns
        self._handed_over = handed_over
        self._delayed = delayed
        self._past: Counter[str] = Counter()
        self._persisting: dict[str, str] = {
            names.MESSAGING_SYSTEM: names.SEQGATE,
            names.MESSAGING_OPERATION_NAME: names.PERSIST,
            names.MESSAGING_DESTINATION_NAME: str(tenure.topic),
            names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: tenure.name,
        }
        self._news = asyncio.Event()
        self._reader: AsyncIterator[Sequence[ledger_pb2.StoredEntry]] | None = None
        self._reader_after: Position | None = None
        self._rest: Sequence[ledger_pb2.StoredEntry] = ()
        self._read_entries_max = read_entries_max
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        first = 1 + secrets.randbits(FIRST_DELIVERY_BITS)
        self.machine = self._machine(Durable(Acknowledged(None)), first_delivery=first)

    def begin(self, durable: Durable) -> None:
        """Replace the machine by one that starts from durable state."""
        self.generation += 1
        self._past.update(self.machine.totals)
        self._reader = None
        self.cache.clear()
        for position in [each for each in self.passed if each not in durable.acknowledged]:
            del self.passed[position]
        self.machine.end()
        self.machine = self._machine(durable, first_delivery=self.machine.next_delivery)

    @property
    def totals(self) -> Counter[str]:
        """The counters of all machines so far."""
        return self._past + Counter(self.machine.totals)

    def stop(self) -> None:
        """Stop performing effects."""
        self.generation += 1
        self._news.set()
        self.cache.clear()
        self.machine.end()
        if self._timer is not None:
            self._timer.cancel()

    async def all_durable(self) -> None:
        """Wait until nothing is left to make durable."""
        while not self.machine.is_idle:
            self._work.check()
            self._news.clear()
            await self._news.wait()

    async def until(self, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition on the machine is true, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_true():
                    self._work.check()
                    self._news.clear()
                    await self._news.wait()

    def now_ms(self) -> int:
        """The time in ms since 1970."""
        return self._ports.now_ms()

    def apply(self, effects: Iterable[Effect]) -> None:
        """Start performing effects."""
        do, generation = self._work.start_for_machine, self.generation
        for effect in effects:
            match effect:
                case Deliver(consumer, deliveries):
                    if (stream := self._streams.get(consumer)) is not None:
                        stream.deliver(deliveries)
                case Revoke(consumer, numbers):
                    self._put(consumer, pb.ConsumeResponse(revoked=pb.Revoked(deliveries=numbers)))
                case Drain(consumer, numbers):
                    self._put(consumer, pb.ConsumeResponse(moved=pb.Moved(deliveries=numbers)))
                case Assigned(consumer, ranges):
                    self._tell_ranges(consumer, ranges)
                case Read(after):
                    do(self._read, after, generation)
                case Scan(at, after, limit):
                    do(self._scan, at, after, limit, generation)
                case Persist():
                    do(self._persist, effect, generation)
                case Record():
                    do(self._record, effect, generation)
                case DeadLetter():
                    do(self._bury, effect, generation)
                case Judge(positions):
                    do(self._judge, positions, generation)
                case Passed(positions, because):
                    self._record_passed(positions, because)
                case ForgetKey(key):
                    do(self._work.repeated, self._graveyard.forgetting(key))
        if self.machine.flights.handed_over:
            self._tell_handed_over()
        self._news.set()
        self._set_timer()

    def _tell_handed_over(self) -> None:
        now_ms, since = self.now_ms(), self.machine.flights.handed_over
        for since_ms in since:
            self._handed_over(max(0, now_ms - since_ms) / 1000)
        since.clear()

    def _record_passed(self, positions: Sequence[Position], because: Because) -> None:
        log.warning(
            "entries skipped",
            topic=str(self._topic),
            subscription=self._name,
            count=len(positions),
            first=f"{positions[0].ledger_id}:{positions[0].entry_id}",
            because=because.value,
        )
        if self.history is not None:
            self.history.record(What.PASSED, self.now_ms(), positions, because.value)
        for position in positions:
            self.passed[position] = because
            if len(self.passed) > PASSED_MAX:
                del self.passed[next(iter(self.passed))]

    def _machine(self, durable: Durable, *, first_delivery: int) -> Subscription:
        is_keyed = self.options.kind is SubscriptionType.KEY_SHARED
        placement = self.placement if is_keyed else Placement.CONSISTENT_HASHING
        return Subscription(
            self.options,
            selector_of(placement),
            durable,
            first_delivery=first_delivery,
            is_filtered=self._filtering.chains.filters_any,
            delayed=self._delayed,
        )

    def _put(self, consumer: int, response: pb.ConsumeResponse) -> None:
        if (stream := self._streams.get(consumer)) is not None:
            stream.put(response)

    def _tell_ranges(self, consumer: int, ranges: Sequence[SlotRange]) -> None:
        self.assignment_revision += 1
        assigned = pb.Assigned(
            ranges=[pb.KeyRange(first=each.first, last=each.last) for each in ranges],
            revision=self.assignment_revision,
        )
        self._put(consumer, pb.ConsumeResponse(assigned=assigned))

    def contained(self) -> AbstractContextManager[None]:
        return self._work.contained()

    # ---- time

    def _set_timer(self) -> None:
        when_ms = self.machine.next_timer_ms
        if when_ms == self._timer_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = when_ms
        self._timer = None
        if when_ms is not None and self._work.stopped is None:
            delay_s = max(0.0, (when_ms - self.now_ms()) / 1000)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer_ms = None
        if self._work.stopped is None and not self.changing.locked():
            with self._work.contained():
                self.apply(self.machine.tick(self.now_ms()))

    def _changed(self) -> None:
        """A change ended. Timers may be due by now, and the machine may be another one."""
        self._set_timer()

    # ---- the log, and verdicts

    async def _read(self, after: Position | None, generation: int) -> None:
        entries = await self._work.repeated(lambda: self._next_entries(after))
        if generation != self.generation:
            return
        if self._filtering.has_a_say:
            verdicts = await self._filtering.page(entries, self.machine.acknowledged)
            if generation != self.generation:
                return
            known = list(map(entry_of, entries, verdicts))
        else:
            known = list(map(entry_of, entries))
        read = zip(known, entries, strict=True)
        returned = self.machine.settling.returned  # their content is that of their letters
        self.cache.put(
            (each.position, stored)
            for each, stored in read
            if each.verdict != REJECT and each.position not in returned
        )
        self.apply(self.machine.read(known, self.now_ms()))

    async def _next_entries(self, after: Position | None) -> Sequence[ledger_pb2.StoredEntry]:
        """The next entries of the log. The stream stays open between pages."""
        while True:
            if self._reader is None or self._reader_after != after:
                self._reader = self._ports.log.follow(self._topic, after)
                self._reader_after = after
                self._rest = ()
            reader = self._reader
            try:
                entries = self._rest or await anext(reader)
            except StopAsyncIteration:
                self._reader = None
                await asyncio.sleep(BACKOFF_FIRST_S)
                continue
            except BaseException:
                self._reader = None
                raise
            entries, self._rest = (
                entries[: self._read_entries_max],
                entries[self._read_entries_max :],
            )
            self._reader_after = position_of(entries[-1])
            return entries

    async def _scan(
        self, at: Position | None, after: Position | None, limit: int, generation: int
    ) -> None:
        entries = await self._work.repeated(
            lambda: self._ports.log.scan(self._topic, at, after, limit)
        )
        if generation != self.generation:
            return
        verdicts: Sequence[int] = [ACCEPT] * len(entries)
        if self._filtering.has_a_say:
            verdicts = await self._filtering.page(entries, self.machine.acknowledged)
            if generation != self.generation:
                return
        known = list(map(entry_of, entries, verdicts))
        self.apply(self.machine.scanned(known, self.now_ms()))

    async def _judge(self, positions: Sequence[Position], generation: int) -> None:
        kept = [each.entry for each in map(self.cache.get, positions) if each is not None]
        missing = sorted(each for each in positions if each not in self.cache)
        fetched = Fetched((), 0)
        if missing:
            fetched = await self._work.repeated(
                lambda: self._ports.log.fetch_some(
                    self._topic, missing, bytes_max=JUDGED_BYTES_MAX, metadata_only=True
                )
            )
        entries = [*kept, *fetched.entries]
        gone = set(missing[: fetched.answered]).difference(map(position_of, fetched.entries))
        verdicts = await self._filtering.again(entries)
        if generation != self.generation:
            return
        for position, verdict in verdicts.items():
            if verdict == REJECT:
                self.cache.drop((position,))
        verdicts.update(dict.fromkeys(gone, ACCEPT))  # the delivery reports it as gone
        self.apply(self.machine.judged(verdicts, self.now_ms()))

    # ---- durable effects

    async def _persist(self, what: Persist, generation: int) -> None:
        followed = self.answers.followed(what.number)
        with spans.shared(f"{names.PERSIST} {self._topic}", followed, self._persisting) as span:
            span.set_attribute(names.ENTRIES, sum(run.size for run in what.runs) + len(what.parts))
            await self._work.repeated(lambda: self._returns.persist(what, self._held_behind))
            mark_delete = await self._work.repeated(
                lambda: persist(self._tenure, self._ports.log, self._topic, what)
            )
        if self.history is not None:
            self._record_persisted(self.history, what)
        if generation != self.generation:
            return
        effects = self.machine.persisted(mark_delete, self.now_ms())
        self.answers.durable(what.number)
        self.apply(effects)
        self._graveyard.acknowledged(what.runs)
        if self._graveyard.has_done:
            self._work.start_for_machine(self._work.repeated, self._graveyard.tidy)

    def _record_persisted(self, history: History, what: Persist) -> None:
        now_ms = self.now_ms()
        history.record_acknowledged(now_ms, what.runs)
        for position, _, bits in what.parts:
            history.record(What.PARTLY_ACKNOWLEDGED, now_ms, (position,), f"{bits:x}")

    def _held_behind(self, position: Position) -> str | None:
        key = self.machine.held_behind(position)
        return None if key is None else held_key(key)

    async def _record(self, what: Record, generation: int) -> None:
        await self._work.repeated(lambda: self._returns.record(what.failed))
        await self._work.repeated(lambda: self._tenure.record(what.failed))
        if self.history is not None and generation == self.generation:
            self._record_failed(self.history, what)
        if generation == self.generation:
            self.apply(self.machine.recorded(self.now_ms()))

    def _record_failed(self, history: History, what: Record) -> None:
        for position, attempts, failures in what.failed:
            for how, at_ms, consumer, reason in failures[-1:]:
                details = [how.value, str(attempts), consumer, *([reason] if reason else [])]
                history.record(What.FAILED, at_ms, (position,), *details)

    async def _bury(self, what: DeadLetter, generation: int) -> None:
        because = await self._work.repeated(lambda: self._graveyard.bury(what))
        if self.history is not None and because is None:
            number, topic = self._graveyard.letter_of(what.position)
            details = str(number), str(what.attempts), str(topic), what.why.value
            self.history.record(What.DEAD_LETTERED, self.now_ms(), (what.position,), *details)
        if generation == self.generation:
            effects = self.machine.dead_lettered(what.position, what.key, self.now_ms(), because)
            self.apply(effects)
