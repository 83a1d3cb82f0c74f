"""Topics that are being written here: the shell around core/writer.py, and the streams it serves.

Publish stream ──Session.submit──▶ TopicWriter ──effects──▶ store, dedup
               ◀─Session.news────      ▲ ──Answer──▶ Session      │
                                       └──────── events ──────────┘
"""

import asyncio
import contextvars
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import structlog
from opentelemetry.trace import Span

from seqgate.telemetry import names
from seqgate.types import Position
from services.errors import DomainError, Fenced, Kind, StoreUnavailable
from services.ledger.core.entry import StoredEntry, Unit
from services.ledger.core.receipt import Receipt, Status, Unsettled, old_ids, settled
from services.ledger.core.writer import (
    BACKOFF_MAX_S,
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
    Rollback,
    Stop,
    TopicWriter,
)
from services.ledger.following import Following
from services.ledger.metrics import FAILED, LedgerMetrics, Recovery
from services.ledger.ports import (
    Applied,
    Behind,
    Changed,
    Deduplicator,
    Disabled,
    EntryCorrupt,
    Judged,
    LedgerStore,
    LogState,
    Trimmed,
    WriterName,
)

log = structlog.get_logger()

OPEN_RETRY_AFTER_S: Final = 0.5
"""What a producer is told to wait when its topic is not ready."""


class Recovering(DomainError):
    """The topic's deduplication state is being rebuilt, or waits for that."""

    kind = Kind.UNAVAILABLE
    reason = "RECOVERING"


class ProducerBusy(DomainError):
    """The producer's name is in use by another stream."""

    kind = Kind.IN_USE
    reason = "PRODUCER_BUSY"


class ProducerTakenOver(DomainError):
    """Another stream took the producer's name."""

    kind = Kind.FENCED
    reason = "PRODUCER_TAKEN_OVER"


class WindowExceeded(DomainError):
    """A producer sent more than its window lets it."""

    kind = Kind.EXHAUSTED
    reason = "WINDOW_EXCEEDED"


class Window(NamedTuple):
    """How much may be unanswered at a time."""

    messages: int
    size_bytes: int


class Pulse:
    """Wakes everyone who waits for something to have happened."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def beat(self) -> None:
        """Something happened."""
        self._next.set()
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next beat. Take it before looking, so that no beat is missed."""
        return self._next


class News(NamedTuple):
    """What a stream has to tell its producer."""

    receipts: list[tuple[int, Receipt]]
    draining: bool
    taken_over: bool


class Session:
    """One Publish stream of one producer."""

    def __init__(self, number: int, producer: str, instance: bytes, window: Window) -> None:
        self.number = number
        self.producer = producer
        self.instance = instance
        self._window = window
        self._unanswered: dict[int, Window] = {}
        self._messages = self._size_bytes = 0
        self._receipts: list[tuple[int, Receipt]] = []
        self._draining = self._taken_over = False
        self._closing = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def admit(self, units: Sequence[Unit]) -> None:
        """Note what has arrived.

        Raises:
            WindowExceeded: it is more than the window lets through.
        """
        for unit in units:
            if self._unanswered and (
                self._messages + unit.message_count > self._window.messages
                or self._size_bytes + unit.size_bytes > self._window.size_bytes
            ):
                raise WindowExceeded(
                    "more is unanswered than the window lets through",
                    window_messages=self._window.messages,
                    window_bytes=self._window.size_bytes,
                )
            share = Window(unit.message_count, unit.size_bytes)
            self._unanswered[unit.request_id] = share
            self._messages += share.messages
            self._size_bytes += share.size_bytes

    def answer(self, request_id: int, receipt: Receipt) -> None:
        """A publication has its receipt."""
        self.forget(request_id)
        self._receipts.append((request_id, receipt))
        self._changed.set()

    def forget(self, request_id: int) -> None:
        """A publication will not be answered."""
        share = self._unanswered.pop(request_id, None)
        if share is not None:
            self._messages -= share.messages
            self._size_bytes -= share.size_bytes
        self._changed.set()

    def is_unanswered(self, request_id: int) -> bool:
        """Whether a publication with this id is still to be answered."""
        return request_id in self._unanswered

    @property
    def unanswered_messages(self) -> int:
        """How many messages have no receipt yet."""
        return self._messages

    def drain(self) -> None:
        """Ask the producer to move away."""
        self._draining = True
        self._changed.set()

    def take_over(self) -> None:
        """Tell the producer that another stream has its name, and end."""
        self._taken_over = True
        self.finish(ProducerTakenOver("another stream took the producer's name"))

    def finish(self, error: Exception | None = None) -> None:
        """End the stream once everything is answered: with this error, or well."""
        self._closing = True
        self._error = self._error or error
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the stream now."""
        self._unanswered.clear()
        self.finish(error)

    @property
    def closing(self) -> bool:
        """Whether nothing more is taken from the producer."""
        return self._closing

    @property
    def error(self) -> Exception | None:
        """With what the stream ends; None: it goes on, or ends well."""
        return self._error

    async def news(self) -> News | None:
        """What there is to tell, as soon as there is something; None when the stream is to end.

        Raises:
            DomainError: the stream is to end with this error.
        """
        while True:
            if self._receipts or self._draining or self._taken_over:
                news = News(self._receipts, self._draining, self._taken_over)
                self._receipts = []
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
    ) -> None:
        """
        Args:
            replay_entries_max: how many entries that deduplication lacks are replayed from here; if
                it lacks more, the topic waits until somebody else has loaded them. 0: any number.
        """
        self.topic = state.topic
        self.grown = Pulse()
        self.progress = Pulse()
        self.stopped = False
        self._store = store
        self._dedup = dedup
        self._tasks = tasks
        # Work for the topic belongs to no call: it must not inherit a caller's deadline.
        self._context = contextvars.Context()
        self._writer = TopicWriter(state.incarnation, state.ledger_id, state.tail, limits)
        self._sessions: dict[int, Session] = {}
        self._names: dict[str, Session] = {}
        self._last_append_ms = 0
        self._replay_entries_max = replay_entries_max
        self._replayed: Position | None = None
        self._postponed: _Postponed | None = None
        self._lacking_entries = 0
        self._lacks_since_s: float | None = None
        self._trimming = asyncio.Lock()
        self._trims = self._trims_replayed = 0
        self._metrics = metrics
        self._counts = metrics.of(state.topic)
        self._following = Following(state.topic)
        self._recovery = Recovery(metrics)
        self._happened = "takeover"
        self._perform(self._writer.start())

    @property
    def ledger_id(self) -> int:
        """The epoch under which the topic is written."""
        return self._writer.ledger_id

    @property
    def incarnation(self) -> int:
        """Which topic of this name it is."""
        return self._writer.incarnation

    @property
    def entries_to_replay(self) -> int:
        """About how many entries deduplication lacks, as far as is known; 0 of a live topic."""
        return 0 if self._writer.phase is Phase.LIVE else self._lacking_entries

    @property
    def state(self) -> str:
        """What it is doing, as metrics say it."""
        if self._writer.phase is Phase.LIVE:
            return "live"
        waits = isinstance(self._writer.last_error, Recovering)
        return "waiting_for_rebuild" if waits else "aligning"

    @property
    def unanswered_messages(self) -> int:
        """How many messages of connected producers have no receipt yet."""
        return sum(session.unanswered_messages for session in self._sessions.values())

    @property
    def producers(self) -> list[str]:
        """Who is connected."""
        return list(self._names)

    @property
    def idle(self) -> bool:
        """Whether nobody is connected and nothing is left to do."""
        return not self._sessions and self._writer.idle

    async def open(
        self, producer: str, instance: bytes, *, takeover: bool, window: Window, timeout_s: float
    ) -> tuple[Session, int | None]:
        """Connect a producer; the last durable id of the producer, if there is one.

        Raises:
            ProducerBusy: the name is in use, and is not to be taken over.
            ProducerTakenOver: another stream took the name meanwhile.
            Recovering, EntryCorrupt: the log is not, or cannot be, replayed here.
            Recovering, DedupUnavailable, StoreUnavailable: the topic was not ready in time.
            Fenced: another writer has the topic.
        """
        session = self._register(producer, instance, takeover=takeover, window=window)
        try:
            number, effects = self._writer.ask_policy()
            self._perform(effects)
            await self._settled(producer, number, timeout_s)
            # The log itself is asked: what deduplication remembers may be lost or forgotten, and an
            # id that was used once must not be given to a new message.
            last = await self._store.highest(self.topic, self.ledger_id, producer)
        except Fenced as error:
            self.close(session)
            self._lose(error)
            raise
        except BaseException:
            self.close(session)
            raise
        if session.error is not None:
            self.close(session)
            raise session.error
        return session, last if self._writer.deduplicating else None

    def submit(self, session: Session, units: Sequence[Unit]) -> None:
        """Take what a producer sent, unless its stream is at its end."""
        if not session.closing:
            session.admit(units)
            self._following.arrived(units)
            self._perform(self._writer.submit(units))

    def close(self, session: Session) -> None:
        """Disconnect a producer. What was let through goes on."""
        self._forget(session)
        self._sessions.pop(session.number, None)
        if self._names.get(session.producer) is session:
            del self._names[session.producer]

    async def quiet(self) -> None:
        """Return when nothing is under way, and deduplication knows everything."""
        while not (self.stopped or self._writer.idle):
            await self.progress.next.wait()

    async def trim(self, before: Position) -> Trimmed:
        """Remove the entries before a position; a replay that is under way notices."""
        async with self._trimming:
            self._trims += 1
            return await self._store.trim(self.topic, before)

    def drain(self) -> None:
        """Ask all producers to move away."""
        for session in self._sessions.values():
            session.drain()

    def stop(self, error: DomainError) -> None:
        """Close all streams with this error, and do nothing more."""
        self.stopped = True
        for session in list(self._sessions.values()):
            session.fail(error)
        self._following.stopped(error.reason)
        self.progress.beat()

    def _register(
        self, producer: str, instance: bytes, *, takeover: bool, window: Window
    ) -> Session:
        before = self._names.get(producer)
        if before is not None and not before.closing:
            same = instance and instance == before.instance
            if not (takeover or same):
                raise ProducerBusy("the producer's name is in use", producer_name=producer)
            self._forget(before)
            before.take_over()
        session = Session(next(_numbers), producer, instance, window)
        self._sessions[session.number] = self._names[producer] = session
        self._writer.open_session(session.number)
        return session

    def _forget(self, session: Session) -> None:
        """What is not let through yet of a session that is closed is not answered."""
        for unit in self._writer.close_session(session.number):
            session.forget(unit.request_id)
            self._following.dropped(unit, _CLOSED)

    async def _settled(self, producer: str, number: int, timeout_s: float) -> None:
        """Wait until the topic is live, nothing of this producer is under way, and the question
        of this number, whether the topic deduplicates, is answered."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    progress = self.progress.next
                    if self.stopped:
                        raise StoreUnavailable(
                            "the topic changed hands", retry_after_s=OPEN_RETRY_AFTER_S
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
            raise self._writer.last_error or Recovering(
                "the topic's deduplication state is being rebuilt",
                retry_after_s=OPEN_RETRY_AFTER_S,
            ) from None

    # ---- effects

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(unit, receipt):
                    self._answer(unit, receipt)
                case Stop(error):
                    self._lose(error)
                case _:
                    self._tasks.create_task(self._do(effect), context=self._context.copy())
        if not self.stopped:
            is_aligning = self._writer.phase is Phase.ALIGNING
            self._recovery.note(self._happened, is_aligning=is_aligning)
            self._following.aligned(self._happened, is_aligning=is_aligning)
        self.progress.beat()

    def _lose(self, error: DomainError) -> None:
        log.warning("topic lost", topic=str(self.topic), reason=error.reason)
        self.stop(error)

    def _answer(self, unit: Unit, receipt: Receipt) -> None:
        if receipt.status is _STORED:
            self._counts.stored += 1
        else:
            self._counts.receipts[receipt.status] += 1
        self._following.answered(unit, receipt.status.name)
        session = self._sessions.get(unit.session)
        if session is not None:
            session.answer(unit.request_id, receipt)

    async def _do(self, effect: Effect) -> None:
        with self._following.recovering():
            effects = await self._done(effect)
        self._perform(effects)

    async def _done(self, effect: Effect) -> list[Effect]:
        """What follows from an effect, once it is carried out."""
        match effect:
            case Admit() | Confirm() | Rollback():
                return await self._ask(effect)
            case Append():
                return await self._append(effect)
            case LookUp(units):
                with self._following.looking_up([each.unit for each in units]):
                    return await self._look_up(units)
            case ReadLog():
                with self._following.replaying() as span:
                    return await self._read_log(effect, span)
            case Reopen():
                return await self._reopen()
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return [] if self.stopped else self._writer.pause_over()
            case _:
                raise AssertionError(f"not to be awaited: {effect}")

    async def _ask(self, call: Admit | Confirm | Rollback) -> list[Effect]:
        writer = self._writer
        began_s, answered = time.monotonic(), "failed"
        operation = type(call).__name__.lower()
        units = call.claims if isinstance(call, Admit) else ()
        confirms = call.confirmation is not None
        try:
            with self._following.asking(operation, units, confirms=confirms) as span:
                outcome = await self._outcome(call)
                if span.is_recording():
                    span.set_attributes(_described(outcome))
            answered = "answered"
        except DomainError as error:
            if self.stopped:
                return []
            log.warning("deduplication failed", topic=str(self.topic), reason=error.reason)
            self._happened = "dedup_failed"
            return writer.dedup_failed(error)
        finally:
            self._metrics.judge_duration(time.monotonic() - began_s, operation, answered)
        if self.stopped:
            return []
        match outcome:
            case Judged(revision, verdicts, persisted, aborts):
                self._happened = "lost_claim" if writer.deduplicating else "switched_on"
                return writer.judged(revision, verdicts, persisted, aborts)
            case Applied() if isinstance(call, Confirm):
                return writer.confirmed()
            case Applied(revision):
                self._has_all()
                return writer.aligned(revision)
            case Behind(confirmed):
                if self._postponed is None or confirmed != self._postponed.after:
                    log.warning(
                        "deduplication lacks entries", topic=str(self.topic), after=str(confirmed)
                    )
                self._lacks_since_s = self._lacks_since_s or time.monotonic()
                self._happened = "behind"
                return writer.behind(confirmed)
            case Changed():
                log.warning("deduplication state changed", topic=str(self.topic))
                self._happened = "changed"
                return writer.changed()
            case Disabled():
                self._has_all()
                return writer.disabled()

    async def _outcome(
        self, call: Admit | Confirm | Rollback
    ) -> Judged | Applied | Behind | Changed | Disabled:
        writer = self._writer
        name = WriterName(writer.incarnation, writer.ledger_id, call.position)
        match call:
            case Admit(_, revision, confirmation, claims):
                named = name._replace(revision=revision)
                return await self._dedup.admit(self.topic, named, confirmation, claims)
            case Confirm():
                return await self._dedup.confirm(self.topic, name, call.confirmation)
            case Rollback():
                return await self._dedup.rollback(self.topic, name, call.confirmation)

    def _has_all(self) -> None:
        self._lacking_entries = 0
        if self._lacks_since_s is not None:
            took_s = round(time.monotonic() - self._lacks_since_s, 3)
            log.info("deduplication has all entries", topic=str(self.topic), seconds=took_s)
            self._lacks_since_s = None

    async def _append(self, append: Append) -> list[Effect]:
        writer = self._writer
        began_s, now_ms = time.monotonic(), time.time_ns() // 1_000_000
        self._last_append_ms = max(self._last_append_ms, now_ms)
        try:
            with self._following.appending(append.entries):
                await self._store.append(
                    self.topic,
                    writer.ledger_id,
                    append.expected_tail,
                    append.entries,
                    self._last_append_ms,
                )
        except DomainError as error:
            if self.stopped:
                return []
            log.warning("append failed", topic=str(self.topic), reason=error.reason)
            self._happened = "append_failed"
            self._metrics.append_duration(time.monotonic() - began_s, FAILED)
            known = not isinstance(error, StoreUnavailable)
            return writer.append_failed(error, outcome_known=known)
        self._metrics.appended(self._counts, append.entries, time.monotonic() - began_s)
        self.grown.beat()
        return [] if self.stopped else writer.appended(self._last_append_ms)

    async def _look_up(self, units: Sequence[Unsettled]) -> list[Effect]:
        """Units of one producer are looked up together: a resent stream has many."""
        effects: list[Effect] = []
        by_producer: dict[str, list[tuple[Unsettled, list[int]]]] = {}
        for unsettled in units:
            asked = by_producer.setdefault(unsettled.unit.producer, [])
            asked.append((unsettled, old_ids(unsettled)))
        for producer, asked in by_producer.items():
            ids = [each for _, wanted in asked for each in wanted]
            try:
                fates = iter(await self._store.find(self.topic, producer, ids))
            except DomainError as error:
                for unsettled, _ in asked:
                    effects += self._writer.look_up_failed(unsettled.unit, error)
                continue
            for unsettled, wanted in asked:
                receipt = settled(unsettled, list(itertools.islice(fates, len(wanted))))
                effects.append(Answer(unsettled.unit, receipt))
        return effects

    async def _read_log(self, read: ReadLog, span: Span) -> list[Effect]:
        try:
            async with self._trimming:
                page = await self._page(read)
                if page is None:
                    log.warning("the log was trimmed: from the beginning", topic=str(self.topic))
                    await self._dedup.forget_topic(
                        self.topic, self._writer.incarnation, deleted=False
                    )
        except Recovering as error:
            return [] if self.stopped else self._writer.log_failed(error)
        except DomainError as error:
            about = {**error.details, "topic": str(self.topic), "reason": error.reason}
            log.critical("the log cannot be replayed", **about)
            error.retry_after_s = error.retry_after_s or OPEN_RETRY_AFTER_S
            return [] if self.stopped else self._writer.log_failed(error)
        if self.stopped:
            return []
        if page is None:
            return self._writer.log_trimmed()
        self._metrics.replayed_entries += len(page[0])
        span.set_attribute(names.ENTRIES, len(page[0]))
        log.info("replaying", topic=str(self.topic), entries=len(page[0]), remaining=page[1])
        return self._writer.log_read(*page)

    async def _page(self, read: ReadLog) -> tuple[list[Logged], int] | None:
        """What follows a position, and about how much follows that; None: some of it was trimmed.

        What was trimmed counts as well, or its producers could store it again. A replay that starts
        from nothing begins with the last ids of those producers, as if they were entries of a
        ledger 0.

        Raises:
            Recovering: it is more than is replayed from here. That is counted at the beginning.
        """
        after = read.after
        if after is None:
            self._trims_replayed = self._trims
        if after is not None and await self._is_trimmed_after(after):
            return None
        if after is None or after != self._replayed:
            await self._count(after)
        if after is None or after.ledger_id == BEFORE_THE_LOG:
            skip = 0 if after is None else after.entry_id + 1
            trimmed = await self._store.trimmed_producers(self.topic, skip=skip, limit=read.limit)
            if trimmed:
                now_ms = time.time_ns() // 1_000_000
                logged = [
                    Logged(Position(BEFORE_THE_LOG, skip + i), producer, highest, now_ms)
                    for i, (producer, highest) in enumerate(trimmed)
                ]
                self._replayed = logged[-1].position
                more = len(trimmed) == read.limit
                return logged, self._lacking_entries + more
        entries = await self._store.read(
            self.topic,
            after,
            entries_max=read.limit,
            bytes_max=_REPLAY_PAGE_BYTES,
            payloads=False,
        )
        return [_logged(each) for each in entries], self._remaining(entries)

    async def _is_trimmed_after(self, position: Position) -> bool:
        if position.ledger_id == BEFORE_THE_LOG:
            return self._trims_replayed != self._trims
        state = await self._store.get(self.topic)
        return position < (state.first or state.tail or position)

    async def _count(self, after: Position | None) -> None:
        """Count what a replay that begins after this position has to read.

        Raises:
            Recovering: it is too much. While the topic waits, it is not counted again.
        """
        place = _Postponed(after, self._writer.tail, self._trims)
        if place != self._postponed:
            self._lacking_entries = await self._store.count_after(self.topic, after)
            if not 0 < self._replay_entries_max < self._lacking_entries:
                self._postponed = None
                return
            self._postponed = place
            log.warning(
                "a long replay is left to a rebuild",
                topic=str(self.topic),
                after=str(after),
                entries=self._lacking_entries,
                entries_max=self._replay_entries_max,
            )
        raise Recovering(
            "the topic waits until its deduplication state is rebuilt",
            retry_after_s=BACKOFF_MAX_S,
            entries_to_replay=self._lacking_entries,
        )

    def _remaining(self, entries: Sequence[StoredEntry]) -> int:
        """About how many entries a replay has still to read after these; 0 at the end."""
        if not entries or entries[-1].position == self._writer.tail:
            self._replayed = None
            return 0
        self._replayed = entries[-1].position
        self._lacking_entries = max(1, self._lacking_entries - len(entries))
        return self._lacking_entries

    async def _reopen(self) -> list[Effect]:
        try:
            # Only if nobody else took it since: units that wait here come from streams that another
            # writer's producers know nothing of.
            state = await self._store.take(
                self.topic, create=False, ledger_id=self._writer.ledger_id
            )
        except DomainError as error:
            return [] if self.stopped else self._writer.reopen_failed(error)
        log.warning("topic taken again", topic=str(self.topic), ledger_id=state.ledger_id)
        return [] if self.stopped else self._writer.reopened(state.ledger_id, state.tail)


def _described(outcome: Judged | Applied | Behind | Changed | Disabled) -> dict[str, str | int]:
    """What deduplication answered, as a span says it."""
    if isinstance(outcome, Judged):
        counted = Counter(outcome.verdicts)
        return {names.VERDICTS + each.name.lower(): count for each, count in counted.items()}
    return {names.OUTCOME: type(outcome).__name__.lower()}


class _Postponed(NamedTuple):
    """A replay that is too long: where it would begin, where the log ended when it was counted, and
    how often that was trimmed before."""

    after: Position | None
    tail: Position | None
    trims: int


BEFORE_THE_LOG: Final = 0
"""The ledger id of what a replay puts in front of the log; real ones start at 1."""

_REPLAY_PAGE_BYTES: Final = 32 * 1024 * 1024
_CLOSED: Final = "CLOSED"
"""Why a publication is not answered: its stream was closed before it was let through."""

_STORED: Final = Status.STORED
_numbers = itertools.count(1)


def _logged(stored: StoredEntry) -> Logged:
    entry = stored.entry
    producer = None if entry.marker else entry.producer
    return Logged(stored.position, producer, entry.highest, stored.append_ms, entry.chunk)
