"""Topics written by this process: the shell around core/writer.py, and its Publish streams.

Publish stream ──Session.submit──▶ TopicWriter ──effects──▶ store, dedup
               ◀─Session.news────      ▲ ──Answer──▶ Session      │
                                       └──────── events ──────────┘
"""

import asyncio
import contextvars
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final, NamedTuple

import structlog
from opentelemetry.trace import Span

from seqgate.services.deduplication import Applied, Behind, Changed, Disabled, Judged, Writer
from seqgate.services.errors import DomainError, Fenced, Kind, StoreUnavailable
from seqgate.services.ledger.comparing import Resent, comparisons, told
from seqgate.services.ledger.core.entry import Entry, StoredEntry, Unit
from seqgate.services.ledger.core.receipt import Receipt, Repeated, Status, receipt_of, repeated_ids
from seqgate.services.ledger.core.writer import (
    BACKOFF_MAX_S,
    CONFIRM_AFTER_S,
    Admit,
    Answer,
    Append,
    Confirm,
    Effect,
    Limits,
    Logged,
    LookUp,
    Pause,
    Phase,
    ReadLog,
    Reopen,
    Rest,
    Rollback,
    Stop,
    TopicWriter,
    claims_of,
)
from seqgate.services.ledger.metrics import FAILED, LedgerMetrics, Recovery
from seqgate.services.ledger.ports import (
    DedupBusy,
    Deduplicator,
    DedupUnavailable,
    EntryCorrupt,
    LedgerStore,
    LogState,
    ReplayPage,
    TopicNotFound,
    following,
)
from seqgate.services.ledger.tracing import TopicTracing
from seqgate.services.runtime.access import SYSTEM_PRODUCER
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.cutting import Cut
from seqgate.telemetry import names
from seqgate.types import Position

log = structlog.get_logger()

OPEN_RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a producer whose topic is not ready."""


UNREAD_RECEIPTS_MAX: Final = 10_000
"""The most unread receipts of a producer beyond its window, about 400 bytes each. A producer that
keeps to its window and reads its receipts stays below."""

LOOK_UP_IDS_MAX: Final = 1_000
"""The approximate number of a producer's ids per look-up in the log."""


class Recovering(DomainError):
    """The topic's deduplication state is being rebuilt, or waits for a rebuild."""

    kind = Kind.UNAVAILABLE
    reason = "RECOVERING"


class ProducerBusy(DomainError):
    """Another stream is publishing under this producer name."""

    kind = Kind.IN_USE
    reason = "PRODUCER_BUSY"


class ProducerTakenOver(DomainError):
    """Another stream took over this producer name."""

    kind = Kind.FENCED
    reason = "PRODUCER_TAKEN_OVER"


class WindowExceeded(DomainError):
    """A producer exceeds its window of unanswered publications."""

    kind = Kind.EXHAUSTED
    reason = "WINDOW_EXCEEDED"


class LedgerBusy(DomainError):
    """All producers together have reached the ledger's limit of unanswered bytes."""

    kind = Kind.EXHAUSTED
    reason = "LEDGER_BUSY"


class TopicFailed(DomainError):
    """A bug in the ledger stopped this topic; it is being reopened."""

    kind = Kind.UNAVAILABLE
    reason = "TOPIC_FAILED"


class ReceiptsUnread(DomainError):
    """A producer keeps sending without reading its receipts."""

    kind = Kind.EXHAUSTED
    reason = "RECEIPTS_UNREAD"


class Window(NamedTuple):
    """A producer's limits on unanswered publications."""

    messages: int
    size_bytes: int


class Pulse:
    """Wakes every waiter at each beat."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def beat(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    @property
    def next(self) -> asyncio.Event:
        """The event that the next beat sets. Take it before checking the state, or a beat between
        the check and the wait is missed."""
        if self._next is None:
            self._next = asyncio.Event()
        return self._next


class LastStored(NamedTuple):
    """The last entry stored under a producer's name. `by_another`: whether an instance other than
    the caller's stored it; None: the entry predates the recording of instances. `whole`: the id of
    the last complete message, if known."""

    sequence_id: int
    by_another: bool | None
    whole: int | None


class Standing(NamedTuple):
    """A new connection's view of its log; `last_sequence_id` is None without deduplication."""

    last_sequence_id: int | None = None
    last_stored: LastStored | None = None


class Answered(NamedTuple):
    """The receipt of a publication, or of each of a run: at consecutive positions, if STORED."""

    request_ids: range
    receipt: Receipt


class News(NamedTuple):
    """The responses of a stream to its producer."""

    receipts: list[Answered]
    draining: bool
    taken_over: bool


class Session:
    """One Publish stream of one producer."""

    def __init__(
        self,
        number: int,
        producer: str,
        instance: bytes,
        window: Window,
        budget: Budget,
        *,
        refuses_conflicts: bool = False,
    ) -> None:
        """
        Args:
            refuses_conflicts: refuse messages whose id is stored with other content.
        """
        self._budget = budget
        self.number = number
        self.producer = producer
        self.instance = instance
        self.refuses_conflicts = refuses_conflicts
        self._window = window
        self._unanswered: set[int] = set()
        self._messages = self._size_bytes = 0
        self._receipts: list[Answered] = []
        self._unread = 0
        self._draining = self._taken_over = False
        self._closing = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._is_cut = False
        self.cut: Cut = lambda _: None
        """Ends the stream even while it waits for its producer to read."""

    def accept(self, units: Sequence[Unit]) -> None:
        """Count publications against the window.

        Raises:
            WindowExceeded: at least one exceeds the window; those before it are counted.
        """
        for unit in units:
            if (self._unanswered or unit.publications > 1) and (
                self._messages + unit.message_count > self._window.messages
                or self._size_bytes + unit.size_bytes > self._window.size_bytes
            ):
                raise WindowExceeded(
                    "too much is unanswered for the window",
                    window_messages=self._window.messages,
                    window_bytes=self._window.size_bytes,
                )
            self._unanswered.update(unit.request_ids)
            self._messages += unit.message_count
            self._size_bytes += unit.size_bytes
            self._budget.take(unit.size_bytes)

    def answer(self, unit: Unit, receipt: Receipt) -> None:
        """Queue the receipt of a publication, or of each of a run."""
        self.forget(unit)
        self._queue(Answered(unit.request_ids, receipt))

    def refuse(self, request_id: int, receipt: Receipt) -> None:
        """Queue the receipt of a publication that was not accepted."""
        self._queue(Answered(range(request_id, request_id + 1), receipt))

    def _queue(self, answered: Answered) -> None:
        self._changed.set()
        if self._is_cut:
            return
        self._receipts.append(answered)
        self._unread += len(answered.request_ids)
        if self._is_unread():
            self._cut_off()

    def _cut_off(self) -> None:
        """End the stream of a producer that does not read, and drop its receipts."""
        error = ReceiptsUnread(
            "too many unread receipts",
            retry_after_s=OPEN_RETRY_AFTER_S,
            receipts_max=self._window.messages + UNREAD_RECEIPTS_MAX,
        )
        self._is_cut = True
        self._receipts, self._unread = [], 0
        self.fail(error)
        self.cut(error)

    def _is_unread(self) -> bool:
        return self._unread > self._window.messages + UNREAD_RECEIPTS_MAX

    def forget(self, unit: Unit) -> None:
        """Release a unit's share of the window and of the budget, without a receipt."""
        if unit.request_id in self._unanswered:
            self._unanswered.difference_update(unit.request_ids)
            self._messages -= unit.message_count
            self._size_bytes -= unit.size_bytes
            self._budget.give(unit.size_bytes)
        self._changed.set()

    def forget_all(self) -> None:
        """Release all publications: none gets a receipt any more."""
        self._unanswered.clear()
        self._budget.give(self._size_bytes)
        self._messages = self._size_bytes = 0

    def are_answered(self, request_ids: Iterable[int]) -> bool:
        """Whether none of these publications awaits a receipt."""
        return self._unanswered.isdisjoint(request_ids)

    @property
    def unanswered_messages(self) -> int:
        return self._messages

    def drain(self) -> None:
        self._draining = True
        self._changed.set()

    def take_over(self) -> None:
        self._taken_over = True
        self.finish(ProducerTakenOver("another stream took over the producer name"))

    def finish(self, error: Exception | None = None) -> None:
        """End the stream once every publication is answered; with `error`, if one is given."""
        self._closing = True
        self._error = self._error or error
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, without answering pending publications."""
        self.forget_all()
        self.finish(error)

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def error(self) -> Exception | None:
        """The error that ends the stream; None: the stream is open, or ends without an error."""
        return self._error

    async def news(self) -> News | None:
        """Wait for the next responses; None: the stream ends.

        Raises:
            DomainError: the error that ends the stream.
        """
        while True:
            if self._receipts or self._draining or self._taken_over:
                news = News(self._receipts, self._draining, self._taken_over)
                self._receipts, self._unread = [], 0
                self._draining = self._taken_over = False
                return news
            if self._closing and not self._unanswered:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()


class LiveTopic:
    """A topic that this process writes."""

    def __init__(
        self,
        state: LogState,
        store: LedgerStore,
        dedup: Deduplicator,
        tasks: asyncio.TaskGroup,
        *,
        limits: Limits,
        replay_entries_max: int,
        metrics: LedgerMetrics,
        last_append_ms: int,
        budget: Budget,
        replays: asyncio.Semaphore,
        is_shared: bool = False,
    ) -> None:
        """
        Args:
            is_shared: whether other instances on the store may take the topic, and are to be found
                by whoever loses it here.
            replays: bounds the replay pages in memory, for the whole process.
            budget: bounds the unanswered bytes of all producers of the process.
            last_append_ms: the time of the last append, read after the topic was taken; later
                entries never get an earlier time.
            replay_entries_max: the most missing entries that this process replays; beyond that, the
                topic waits for a rebuild. 0: no limit.
        """
        self.topic = state.topic
        self.grown = Pulse()
        self.progress = Pulse()
        self.stopped = False
        self.limits = limits
        self.keep_within_s: float | None = None
        """The seconds until connected producers must be reported as alive again; None: no limit."""
        self._store = store
        self._dedup = dedup
        self._tasks = tasks
        self._random = Random()
        # Work for the topic belongs to no call and must not inherit a caller's deadline.
        self._context = contextvars.Context()
        self._writer = TopicWriter(state.incarnation, state.ledger_id, state.tail, limits)
        self._sessions: dict[int, Session] = {}
        self._names: dict[str, Session] = {}
        self._unstored_instances: dict[str, bytes] = {}
        """The instances to store with the next entries of their producers."""
        self._last_append_ms = last_append_ms
        self._budget = budget
        self._replays = replays
        self._is_shared = is_shared
        self.taken_s = time.monotonic()
        """When the topic was taken, by the monotonic clock."""
        self.readers = 0
        """The streams that read the topic here."""
        self._replay_entries_max = replay_entries_max
        self._replay: _Replay | None = None
        """The progress of the replay; None: none is running."""
        self._trimmed_pages = itertools.count()
        self._postponed: _Postponed | None = None
        self._lacking_entries = 0
        self._lacks_since_s: float | None = None
        self._asking_since_s: float | None = None
        self._metrics = metrics
        self._counts = metrics.of(state.topic)
        self.tracing = TopicTracing(state.topic)
        self._recovery = Recovery(metrics)
        self._cause = "takeover"
        self._perform(self._writer.start())

    @property
    def ledger_id(self) -> int:
        return self._writer.ledger_id

    @property
    def tail(self) -> Position | None:
        """The last entry that is known to be durable: found when the topic was taken, or
        acknowledged by the store since."""
        return self._writer.tail

    @property
    def reopening(self) -> bool:
        """Whether the topic is being taken again, which changes its ledger_id."""
        return self._writer.reopening

    @property
    def incarnation(self) -> int:
        return self._writer.incarnation

    @property
    def entries_to_replay(self) -> int:
        """The approximate number of entries that deduplication lacks, if known; 0 while LIVE."""
        return 0 if self._writer.phase is Phase.LIVE else self._lacking_entries

    @property
    def state(self) -> str:
        """The value of the `state` label in the topic's metric."""
        if self._writer.phase is Phase.LIVE:
            return "live"
        waits = isinstance(self._writer.last_error, Recovering)
        return "waiting_for_rebuild" if waits else "aligning"

    @property
    def unanswered_messages(self) -> int:
        return sum(session.unanswered_messages for session in self._sessions.values())

    @property
    def producers(self) -> list[str]:
        return list(self._names)

    @property
    def idle(self) -> bool:
        return not (self._sessions or self.readers) and self._writer.idle

    async def open(
        self,
        producer: str,
        instance: bytes,
        *,
        takeover: bool,
        window: Window,
        timeout_s: float,
        refuses_conflicts: bool = False,
    ) -> tuple[Session, Standing]:
        """Connect a producer. Returns its session, and its last stored entry.

        Raises:
            ProducerBusy: the name is in use, and `takeover` is false.
            ProducerTakenOver: another stream took over the name meanwhile.
            Recovering, EntryCorrupt: the log is not, or cannot be, replayed here.
            Recovering, DedupUnavailable, StoreUnavailable: the topic was not ready in time.
            Fenced: another writer owns the topic.
        """
        session = Session(
            next(_numbers),
            producer,
            instance,
            window,
            self._budget,
            refuses_conflicts=refuses_conflicts,
        )
        self._register(session, takeover=takeover)
        try:
            number, effects = self._writer.ask_policy()
            self._perform(effects)
            await self._until_ready(producer, number, timeout_s)
            # Read from the log: deduplication may have lost or forgotten the producer, and a used
            # id must never be given to a new message.
            await self._mark_alive(producer)
            with _owned():
                newest = await self._store.newest(self.topic, producer)
                last = await self._store.highest(self.topic, self.ledger_id, producer)
        except Fenced as error:
            self.close(session)
            raise self.lose(error) from error
        except BaseException:
            self.close(session)
            raise
        if session.error is not None:
            self.close(session)
            raise session.error
        if newest.unfinished is not None:
            self._writer.left_unfinished(session.number, newest.unfinished)
        self._record_instance(producer, instance, newest.instance)
        if last is None:
            return session, Standing()
        stored = LastStored(last, _is_another(newest.instance, instance), newest.whole)
        return session, Standing(last if self._writer.deduplicating else None, stored)

    def submit(self, session: Session, units: Sequence[Unit]) -> None:
        """Accept publications; ignored if the stream is closing."""
        if session.closing:
            return
        fits = self._budget.fits(sum(unit.size_bytes for unit in units))
        session.accept(units)
        self.tracing.arrived(units)
        with self._contained():
            if fits:
                self._perform(self._writer.submit(units))
            else:
                self._perform(self._writer.refuse(units, self._busy()))

    def _busy(self) -> DomainError:
        return LedgerBusy(
            f"too many unanswered bytes (limit {self._budget.bytes_max:,} for all producers)",
            retry_after_s=OPEN_RETRY_AFTER_S,
            unanswered_bytes_max=self._budget.bytes_max,
        )

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Contain an unexpected exception in this topic: drop the machine, whose state is unknown,
        and end the streams. The next Open takes the topic again, which aligns it with its log."""
        try:
            yield
        except Exception:
            self._counts.failures += 1
            log.exception("topic failed", topic=str(self.topic))
            self.stop(
                TopicFailed(
                    "the topic failed unexpectedly and is opened again",
                    retry_after_s=OPEN_RETRY_AFTER_S,
                )
            )

    def resume(self, session: Session) -> None:
        self._writer.resume(session.number)

    def close(self, session: Session) -> None:
        """Disconnect a producer. Units already admitted are still stored."""
        self._forget(session)
        session.forget_all()
        self._sessions.pop(session.number, None)
        if self._names.get(session.producer) is session:
            del self._names[session.producer]
            self._drop_instance(session.producer)

    async def _mark_alive(self, producer: str) -> None:
        """Keep a producer from being forgotten for inactivity before it learns that it is
        connected."""
        await self.keep([producer], only_due=True)

    async def keep(self, producers: Sequence[str], *, only_due: bool = False) -> None:
        """Report producers to deduplication as alive.

        Raises:
            DedupUnavailable: the outcome is unknown.
        """
        if producers and self._writer.deduplicating:
            self.keep_within_s = await self._dedup.keep(self.topic, producers, only_due=only_due)

    async def quiet(self) -> None:
        """Wait until no unit is pending and every entry is confirmed to deduplication."""
        while not (self.stopped or self._writer.idle):
            await self.progress.next.wait()

    def drain(self) -> None:
        for session in self._sessions.values():
            session.drain()

    def stop(self, error: DomainError) -> None:
        """End all streams with this error, and stop the topic."""
        self.stopped = True
        for session in list(self._sessions.values()):
            session.fail(error)
        self.tracing.stopped(error.reason)
        self.progress.beat()

    def _register(self, session: Session, *, takeover: bool) -> None:
        producer = session.producer
        before = self._names.get(producer)
        if before is not None and not before.closing:
            same = session.instance and session.instance == before.instance
            if not (takeover or same):
                raise ProducerBusy(
                    "producer_name is in use by another stream", producer_name=producer
                )
            self._forget(before)
            before.take_over()
        self._sessions[session.number] = self._names[producer] = session
        self._writer.open_session(session.number)

    def _forget(self, session: Session) -> None:
        """Close a session in the machine. Units not yet admitted get no receipt."""
        for unit in self._writer.close_session(session.number):
            session.forget(unit)
            self.tracing.dropped(unit, _CLOSED)

    def _record_instance(self, producer: str, instance: bytes, noted: bytes | None) -> None:
        """Store this instance with the producer's next entry. No unit of the previous instance is
        pending by now, so no entry is attributed to the wrong one."""
        if noted != instance:
            self._unstored_instances[producer] = instance
        else:
            self._unstored_instances.pop(producer, None)

    def _drop_instance(self, producer: str) -> None:
        """Forget the instance of a disconnected producer without pending units."""
        if producer not in self._names and not self._writer.busy(producer):
            self._unstored_instances.pop(producer, None)

    async def _until_ready(self, producer: str, number: int, timeout_s: float) -> None:
        """Wait until the topic is live, the producer idle, and policy query `number` answered."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    progress = self.progress.next
                    if self.stopped:
                        raise StoreUnavailable(
                            "the topic has a new owner", retry_after_s=OPEN_RETRY_AFTER_S
                        )
                    writer = self._writer
                    if isinstance(writer.last_error, Recovering | EntryCorrupt):
                        raise writer.last_error  # no short wait helps
                    if (
                        writer.phase is Phase.LIVE
                        and writer.knows_policy(number)
                        and not writer.busy(producer)
                    ):
                        return
                    await progress.wait()
        except TimeoutError:
            raise self._writer.last_error or self._waits_for(timeout_s) from None

    def _waits_for(self, waited_s: float) -> DomainError:
        """The reason that a topic is not ready in time although nothing has failed."""
        asked_s = self._asking_since_s
        if asked_s is not None and time.monotonic() - asked_s >= waited_s / 2:
            return DedupUnavailable(
                "the dedup service has not answered yet", retry_after_s=OPEN_RETRY_AFTER_S
            )
        if self._writer.phase is Phase.LIVE:
            return StoreUnavailable(
                "earlier messages of the producer are still being stored",
                retry_after_s=OPEN_RETRY_AFTER_S,
            )
        return Recovering(
            "the topic's deduplication state is being rebuilt", retry_after_s=OPEN_RETRY_AFTER_S
        )

    # ---- effects

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(unit, receipt):
                    self._answer(unit, receipt)
                case Stop(error):
                    self.lose(error)
                case _:
                    self._tasks.create_task(self._do(effect), context=self._context.copy())
        self._progressed()

    def _progressed(self) -> None:
        if not self.stopped:
            is_aligning = self._writer.phase is Phase.ALIGNING
            self._recovery.record(self._cause, is_aligning=is_aligning)
            self.tracing.aligned(self._cause, is_aligning=is_aligning)
        self.progress.beat()

    def lose(self, error: DomainError) -> DomainError:
        """Stop a topic that another writer has taken. Returns the error that its streams end
        with."""
        log.warning("topic lost", topic=str(self.topic), reason=error.reason)
        if self._is_shared and isinstance(error, Fenced):
            error = StoreUnavailable("the topic has a new owner", retry_after_s=OPEN_RETRY_AFTER_S)
        self.stop(error)
        return error

    def _answer(self, unit: Unit, receipt: Receipt) -> None:
        if receipt.status is _STORED:
            self._counts.stored += unit.publications
        else:
            self._counts.receipts[receipt.status] += unit.publications
        self.tracing.answered(unit, receipt.status.name)
        session = self._sessions.get(unit.session)
        if session is not None:
            session.answer(unit, receipt)

    async def _do(self, effect: Effect) -> None:
        with self._contained():
            while True:
                with self.tracing.recovering():
                    effects = await self._done(effect)
                match effects:
                    case [Append() as effect]:  # in this task: for one message, tasks cost time
                        self._progressed()
                    case _:
                        self._perform(effects)
                        return

    async def _done(self, effect: Effect) -> list[Effect]:
        """Perform an effect. Returns the effects that follow from its outcome."""
        match effect:
            case Admit() | Confirm() | Rollback():
                return await self._ask(effect)
            case Append():
                return await self._append(effect)
            case LookUp(units):
                with self.tracing.looking_up([each.unit for each in units]):
                    await self._look_up(effect)
                return []
            case ReadLog():
                async with self._replays:
                    return await self._replay_page(effect)
            case Reopen():
                return await self._reopen()
            case Pause(seconds):
                await asyncio.sleep(self._random.uniform(seconds / 2, seconds))
                return [] if self.stopped else self._writer.pause_over()
            case Rest():
                await asyncio.sleep(CONFIRM_AFTER_S)
                return [] if self.stopped else self._writer.rested()
            case _:
                raise AssertionError(f"unexpected effect {effect}")

    async def _ask(self, call: Admit | Confirm | Rollback) -> list[Effect]:
        writer = self._writer
        began_s, answered = time.monotonic(), "failed"
        operation = type(call).__name__.lower()
        units = call.units if isinstance(call, Admit) else ()
        confirms = call.confirmation is not None
        self._asking_since_s = began_s
        try:
            with self.tracing.asking(operation, units, confirms=confirms) as span:
                outcome = await self._outcome(call)
                if span.is_recording():
                    span.set_attributes(_described(outcome))
            answered = "answered"
        except DomainError as error:
            if self.stopped:
                return []
            log.warning("deduplication failed", topic=str(self.topic), reason=error.reason)
            self._cause = "dedup_failed"
            return writer.dedup_failed(error, outcome_known=isinstance(error, DedupBusy))
        finally:
            self._asking_since_s = None
            self._metrics.judge_duration(time.monotonic() - began_s, operation, answered)
        if self.stopped:
            return []
        match outcome:
            case Judged():
                self._cause = "lost_claim" if writer.deduplicating else "switched_on"
                return writer.judged(outcome)
            case Applied() if isinstance(call, Confirm):
                return writer.confirmed()
            case Applied(revision):
                await self._keep_connected()
                return self._aligned(revision)
            case Behind(confirmed):
                if self._postponed is None or confirmed != self._postponed.after:
                    log.warning(
                        "deduplication state is behind the log",
                        topic=str(self.topic),
                        after=str(confirmed),
                    )
                self._lacks_since_s = self._lacks_since_s or time.monotonic()
                self._cause = "behind"
                return writer.behind(confirmed)
            case Changed():
                log.warning("deduplication state changed", topic=str(self.topic))
                self._cause = "changed"
                return writer.changed()
            case Disabled():
                self._has_all()
                return writer.disabled()

    async def _outcome(
        self, call: Admit | Confirm | Rollback
    ) -> Judged | Applied | Behind | Changed | Disabled:
        writer = self._writer
        name = Writer(writer.incarnation, writer.ledger_id, call.position)
        match call:
            case Admit(_, revision, confirmation, units):
                named = name._replace(revision=revision)
                claims = claims_of(units)
                return await self._dedup.admit(self.topic, named, confirmation, claims)
            case Confirm():
                return await self._dedup.confirm(self.topic, name, call.confirmation)
            case Rollback():
                return await self._dedup.rollback(self.topic, name, call.confirmation)

    def _aligned(self, revision: int) -> list[Effect]:
        if self.stopped:
            return []
        self._has_all()
        return self._writer.aligned(revision)

    async def _keep_connected(self) -> None:
        """Report connected producers as alive: a recovery loses their activity, too."""
        if self._lacks_since_s is None:
            return
        try:
            await self.keep(self.producers)
        except DedupUnavailable as error:
            log.warning(
                "keeping producers alive failed", topic=str(self.topic), reason=error.reason
            )

    def _has_all(self) -> None:
        self._lacking_entries = 0
        if self._lacks_since_s is not None:
            took_s = round(time.monotonic() - self._lacks_since_s, 3)
            log.info("deduplication state caught up", topic=str(self.topic), seconds=took_s)
            self._lacks_since_s = None

    async def _append(self, append: Append) -> list[Effect]:
        writer = self._writer
        began_s = time.monotonic()
        self._last_append_ms = self._next_append_ms()
        instances = self._instances_of(append.entries)
        try:
            with self.tracing.appending(append.entries), _owned():
                await self._store.append(
                    self.topic,
                    writer.ledger_id,
                    append.expected_tail,
                    append.entries,
                    self._last_append_ms,
                    instances=instances,
                )
        except DomainError as error:
            if self.stopped:
                return []
            log.warning("append failed", topic=str(self.topic), reason=error.reason)
            self._cause = "append_failed"
            self._metrics.append_duration(time.monotonic() - began_s, FAILED)
            known = not isinstance(error, StoreUnavailable)
            effects = writer.append_failed(error, outcome_known=known)
            for producer in instances:
                self._drop_instance(producer)
            return effects
        self._metrics.appended(self._counts, append.entries, time.monotonic() - began_s)
        self.grown.beat()
        if self.stopped:
            return []
        effects = writer.appended(self._last_append_ms)
        for producer, instance in instances.items():
            if self._unstored_instances.get(producer) == instance:
                del self._unstored_instances[producer]
        return effects

    def _next_append_ms(self) -> int:
        return max(self._last_append_ms, time.time_ns() // 1_000_000)

    def _instances_of(self, entries: Sequence[Entry]) -> dict[str, bytes]:
        """The instances to store with these entries, by producer."""
        if not self._unstored_instances:
            return {}
        producers = {entry.producer for entry in entries if not entry.marker}
        return {
            each: self._unstored_instances[each]
            for each in producers
            if each in self._unstored_instances
        }

    async def _look_up(self, call: LookUp) -> None:
        """Look up units by producer, since a resent stream has many. Producers do not wait for one
        another."""
        by_producer: dict[str, list[Repeated]] = {}
        for repeated in call.units:
            by_producer.setdefault(repeated.unit.producer, []).append(repeated)
        refuses = call.refuses_conflicts
        await asyncio.gather(
            *(
                self._look_up_of(producer, asked, refuses=refuses)
                for producer, asked in by_producer.items()
            )
        )

    async def _look_up_of(self, producer: str, units: Sequence[Repeated], *, refuses: bool) -> None:
        """Look up one producer's units in small groups, so that others get a turn between."""
        for some in _some_ids(units):
            try:
                with _owned():
                    receipts = await self._receipts_of(producer, some, refuses=refuses)
            except Fenced as error:
                if not self.stopped:
                    self.lose(error)
                return
            except DomainError as error:
                for repeated, _ in some:
                    if not self.stopped:
                        self._perform(self._writer.look_up_failed(repeated.unit, error))
                continue
            self._perform(receipts)

    async def _receipts_of(
        self, producer: str, some: Sequence[tuple[Repeated, list[int]]], *, refuses: bool
    ) -> list[Answer]:
        """The receipts of one producer's units, by what is stored under their ids."""
        ids = [each for _, wanted in some for each in wanted]
        fates = iter(await self._store.find(self.topic, producer, ids))
        resent = [
            Resent(repeated, list(itertools.islice(fates, len(wanted))))
            for repeated, wanted in some
        ]
        receipts = [receipt_of(*each) for each in resent]
        if not producer.startswith(SYSTEM_PRODUCER):
            found = await comparisons(self._store, self.topic, resent)
            self._counts.compared(found)
            receipts = [
                told(receipt, its, refuses=refuses or self._refuses_conflicts(each.repeated.unit))
                for each, receipt, its in zip(resent, receipts, found, strict=True)
            ]
        return [
            Answer(repeated.unit, receipt)
            for (repeated, _), receipt in zip(resent, receipts, strict=True)
        ]

    def _refuses_conflicts(self, unit: Unit) -> bool:
        """Whether the stream that sent a unit refuses conflicts: another one may have the name."""
        session = self._sessions.get(unit.session)
        return session is not None and session.refuses_conflicts

    async def _replay_page(self, read: ReadLog) -> list[Effect]:
        """Read a page of the log and confirm it to deduplication."""
        if self.stopped:
            return []
        with self.tracing.replaying() as span:
            effects = await self._read_log(read, span)
        match effects:
            case [Confirm() as confirm]:
                return await self._ask(confirm)
        return effects

    async def _read_log(self, read: ReadLog, span: Span) -> list[Effect]:
        try:
            with _owned():
                page = await self._page(read)
        except Recovering as error:
            return [] if self.stopped else self._writer.log_failed(error)
        except Fenced as error:
            if not self.stopped:
                self.lose(error)
            return []
        except DomainError as error:
            about = {**error.details, "topic": str(self.topic), "reason": error.reason}
            if isinstance(error, EntryCorrupt):
                log.critical("replay failed: damaged entry", **about)
            else:
                log.warning("replay failed", **about)
            error.retry_after_s = error.retry_after_s or OPEN_RETRY_AFTER_S
            return [] if self.stopped else self._writer.log_failed(error)
        if self.stopped:
            return []
        if page is None:
            return await self._start_over()
        self._metrics.replayed_entries += len(page[0])
        span.set_attribute(names.ENTRIES, len(page[0]))
        log.info("replaying", topic=str(self.topic), entries=len(page[0]), remaining=page[1])
        return self._writer.log_read(*page)

    async def _start_over(self) -> list[Effect]:
        """Drop the deduplication state: a trim removed entries that it lacks."""
        log.warning("log trimmed during replay, starting over", topic=str(self.topic))
        try:
            await self._dedup.forget_topic(self.topic, self._writer.incarnation, deleted=False)
        except DedupUnavailable as error:
            log.warning("starting over failed", topic=str(self.topic), reason=error.reason)
            return [] if self.stopped else self._writer.log_failed(error)
        return [] if self.stopped else self._writer.log_trimmed()

    async def _page(self, read: ReadLog) -> tuple[list[Logged], int] | None:
        """A page of entries and the approximate number left; None: a trim removed some of them.

        Trimmed entries count too, or their producers could store them again: a replay from the
        start of the log begins with the last ids of those producers, as if they were entries of a
        ledger 0. A trim may happen between any two pages, also from another process; each page
        carries the start of the log at the time it was read.

        Raises:
            Recovering: more entries are left than this process replays, as counted when the replay
                begins.
        """
        after, replay = read.after, self._replay
        goes_on = replay is not None and after is not None and after == replay.reached
        if not goes_on:
            self._replay = replay = None
            if after is not None and after.ledger_id == BEFORE_THE_LOG:
                return None  # where this replay began is unknown
            await self._count(after)
        page = await self._store.replay(
            self.topic,
            None if after is None or after.ledger_id == BEFORE_THE_LOG else after,
            producers_after="" if after is None else replay and replay.producer,
            limit=read.limit,
            bytes_max=_REPLAY_PAGE_BYTES,
        )
        if not _follows(page, after, replay):
            self._replay = None
            return None
        if page.producers:
            place = self._next_place_before_the_log()
            now_ms = time.time_ns() // 1_000_000
            logged = [
                Logged(place, producer, highest, now_ms) for producer, highest in page.producers
            ]
            self._replay = _Replay(place, page.start, page.producers[-1][0])
            more = len(page.producers) == read.limit
            return logged, self._lacking_entries + more
        logged = [_logged(each) for each in page.entries]
        return [self._alive(each) for each in logged], self._remaining(page)

    def _next_place_before_the_log(self) -> Position:
        """The position of a page of trimmed producers, above all earlier pages', earlier writers'
        included. After a trim, a page may hold other ids of the same producers; at an earlier
        page's position, deduplication would take it for already confirmed."""
        earlier = self._writer.ledger_id << _TRIMMED_PAGES_BITS
        return Position(BEFORE_THE_LOG, earlier + next(self._trimmed_pages))

    def _alive(self, logged: Logged) -> Logged:
        """The entry for deduplication: a connected producer is active now, however old the
        entry."""
        if logged.producer not in self._names:
            return logged
        return logged._replace(append_ms=time.time_ns() // 1_000_000)

    async def _count(self, after: Position | None) -> None:
        """Count the entries of a replay from this position, unless a count of them is current.

        Raises:
            Recovering: there are more entries than `replay_entries_max`.
        """
        start = (await self._store.get(self.topic)).start
        place = _Postponed(after, self._writer.tail, start)
        if place != self._postponed:
            self._lacking_entries = await self._store.count_after(self.topic, after)
            if not 0 < self._replay_entries_max < self._lacking_entries:
                self._postponed = None
                return
            self._postponed = place
            log.warning(
                "replay too long, waiting for a rebuild",
                topic=str(self.topic),
                after=str(after),
                entries=self._lacking_entries,
                entries_max=self._replay_entries_max,
            )
        raise Recovering(
            "the topic waits for its deduplication state to be rebuilt",
            retry_after_s=BACKOFF_MAX_S,
            entries_to_replay=self._lacking_entries,
        )

    def _remaining(self, page: ReplayPage) -> int:
        """The approximate number of entries left after this page; 0: the replay is complete."""
        entries = page.entries
        if not entries or entries[-1].position == self._writer.tail:
            self._replay = None
            return 0
        self._replay = _Replay(entries[-1].position, page.start, None)
        self._lacking_entries = max(1, self._lacking_entries - len(entries))
        return self._lacking_entries

    async def _reopen(self) -> list[Effect]:
        try:
            # Only if no other writer took it since: that writer's producers know nothing of the
            # streams whose units wait here.
            with _owned():
                state = await self._store.take(
                    self.topic, create=False, ledger_id=self._writer.ledger_id
                )
        except DomainError as error:
            return [] if self.stopped else self._writer.reopen_failed(error)
        log.warning("topic retaken", topic=str(self.topic), ledger_id=state.ledger_id)
        return [] if self.stopped else self._writer.reopened(state.ledger_id, state.tail)


@contextmanager
def _owned() -> Iterator[None]:
    """Translate TopicNotFound for a topic that this process took: another writer deleted it. The
    next Open creates it again."""
    try:
        yield
    except TopicNotFound as error:
        raise Fenced("another writer deleted the topic") from error


def _is_another(noted: bytes | None, instance: bytes) -> bool | None:
    """Whether another instance stored the last entry; None: unknown."""
    return None if noted is None else not instance or noted != instance


def _some_ids(units: Iterable[Repeated]) -> Iterator[list[tuple[Repeated, list[int]]]]:
    """Units, each with the ids to look up, in groups of about LOOK_UP_IDS_MAX ids."""
    group: list[tuple[Repeated, list[int]]] = []
    count = 0
    for repeated in units:
        wanted = repeated_ids(repeated)
        if group and count + len(wanted) > LOOK_UP_IDS_MAX:
            yield group
            group, count = [], 0
        group.append((repeated, wanted))
        count += len(wanted)
    if group:
        yield group


def _described(outcome: Judged | Applied | Behind | Changed | Disabled) -> dict[str, str | int]:
    if isinstance(outcome, Judged):
        return {
            names.VERDICTS + each.name.lower(): count for each, count in outcome.tally().items()
        }
    return {names.OUTCOME: type(outcome).__name__.lower()}


class _Postponed(NamedTuple):
    """A replay that is too long: its first position, and the log's end and start when counted."""

    after: Position | None
    tail: Position | None
    start: Position


class _Replay(NamedTuple):
    """The progress of a replay: the last position, the start of the log when that page was read,
    and, among the trimmed producers, the last name."""

    reached: Position
    start: Position
    producer: str | None


def _follows(page: ReplayPage, after: Position | None, replay: _Replay | None) -> bool:
    """Whether no trimmed entry is missing between the replayed entries and this page."""
    if after is None:
        return True
    if replay is not None and replay.producer is not None:
        return page.start == replay.start
    return page.start <= following(after)


BEFORE_THE_LOG: Final = 0
"""The ledger id under which a replay reports trimmed producers; real ledgers start at 1."""

_TRIMMED_PAGES_BITS: Final = 24
"""The low bits of the entry id of a page of trimmed producers, which number a writer's pages; the
high bits are the writer's ledger id."""

_REPLAY_PAGE_BYTES: Final = 32 * 1024 * 1024

REPLAYS_MAX: Final = 8
"""The most replay pages in memory, each from its read until deduplication has it. Topics take
turns page by page, and every turn ends, since calls have deadlines."""

_CLOSED: Final = "CLOSED"
"""The reason for which a publication is not answered: its stream closed before it was admitted."""

_STORED: Final = Status.STORED
_numbers = itertools.count(1)


def _logged(stored: StoredEntry) -> Logged:
    entry = stored.entry
    producer = None if entry.marker else entry.producer
    return Logged(stored.position, producer, entry.highest, stored.append_ms, entry.chunk)
