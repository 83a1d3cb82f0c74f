"""The ledger service without its wire: topics, publishing, reading.

servicer.py translates requests to these calls; live.py runs the topics that this process writes.
"""

import asyncio
import time
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import structlog

from seqgate.services.errors import DomainError, Draining, Kind, StoreUnavailable
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.columns import Columns, parts
from seqgate.services.ledger.core.entry import StoredEntry
from seqgate.services.ledger.core.receipt import Fate, Found, Status, refused
from seqgate.services.ledger.core.writer import Limits
from seqgate.services.ledger.live import REPLAYS_MAX, LastStored, LiveTopic, Pulse, Session, Window
from seqgate.services.ledger.metrics import LedgerMetrics, register_topics
from seqgate.services.ledger.owners import SharedOwner
from seqgate.services.ledger.ports import (
    Cursors,
    Deduplicator,
    DedupUnavailable,
    LedgerRange,
    LedgerStore,
    LogState,
    TopicNotFound,
    Trimmed,
    following,
)
from seqgate.services.ledger.readers import (
    ENTRY_BYTES,
    PAGE_ENTRIES_MAX,
    Pages,
    Readers,
    TooManyStreams,
)
from seqgate.services.ledger.sharing import (
    HAND_OVER_RETRY_S,
    Sharing,
    another_owns,
    durable,
    durable_ranges,
    is_durable,
    known,
    reading,
)
from seqgate.services.ledger.tracing import ReadTracing
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.clock import CautiousClock
from seqgate.services.runtime.globs import matches
from seqgate.services.runtime.locks import Locks
from seqgate.services.runtime.metrics import OFF, Metrics
from seqgate.types import DEDUP_CURSOR, Position, TopicName

log = structlog.get_logger()

T = TypeVar("T")

SWEEP_REST_S: Final = 10.0
"""The pause between two rounds of removing the cursors of deleted topics."""

SWEEP_TIMEOUT_S: Final = 30.0
"""The time limit for removing the cursors of one deleted topic."""

READ_ENTRIES_MAX: Final = 1_000
READ_BYTES_MAX: Final = 1024 * 1024
"""The most bytes of one ReadResponse; one entry always fits."""

TOPICS_PAGE: Final = 100
"""The number of topics per page of a sweep or retention pass."""

KEEPS_AT_A_TIME: Final = 16
"""The number of topics whose producers are reported as alive concurrently."""

READ_RUNS_MAX: Final = 1_000
"""The most runs of one ReadColumnsResponse."""


class TopicInUse(DomainError):
    """The topic has connected producers."""

    kind = Kind.IN_USE
    reason = "TOPIC_IN_USE"


class TopicDeleted(DomainError):
    """The topic was deleted while the stream was open."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_DELETED"


class Opening(NamedTuple):
    """A producer's request to connect."""

    topic: TopicName
    producer: str
    initial_sequence_id: int | None
    takeover: bool
    instance: bytes
    refuses_conflicts: bool = False


class Opened(NamedTuple):
    topic: LiveTopic
    session: Session
    last_sequence_id: int | None
    window: Window
    last_stored: LastStored | None = None


class ReadRange(NamedTuple):
    """The range of a read: after `after` (None: from the first entry), through `through` (None: to
    the end, or forever with `follow`), at most `entries_max` entries (0: no limit)."""

    after: Position | None
    through: Position | None
    follow: bool
    entries_max: int
    payloads: bool


class Missed(NamedTuple):
    """A range of requested entries that were trimmed: from a position through an entry."""

    first: Position
    last: Position


class Trim(NamedTuple):
    """A trim's result, and the names of the cursors that limited it."""

    trimmed: Trimmed
    held_back_by: list[str]


class TopicLocks(Locks[TopicName]):
    """A lock per topic; a lock neither held nor awaited takes no memory."""


class Ledger:
    """The topics of one ledger process."""

    def __init__(
        self,
        config: LedgerConfig,
        store: LedgerStore,
        dedup: Deduplicator,
        cursors: Cursors,
        tasks: asyncio.TaskGroup,
        metrics: Metrics = OFF,
        owner: SharedOwner | None = None,
    ) -> None:
        """
        Args:
            owner: what this process owns beside others on the store; None: it is alone there.
        """
        self._config = config
        self._store = store
        self._dedup = dedup
        self._cursors = cursors
        self._tasks = tasks
        self._live: dict[TopicName, LiveTopic] = {}
        self._now_ms = CautiousClock()
        self._changing = TopicLocks()
        self._sharing: Sharing | None = None
        if owner is not None:
            self._sharing = Sharing(owner, store, self._live, self._changing, self._take_existing)
        self.unanswered = Budget(config.unanswered_bytes_max)
        """The budget for the unanswered bytes of all producers."""
        self._replays = asyncio.Semaphore(REPLAYS_MAX)
        self.readers = Readers(config)
        self._streams = 0
        self._nothing_grows = Pulse()
        self._metrics = LedgerMetrics(metrics)
        register_topics(metrics, self._written, producers_max=config.publish_streams_max)

    # ---- publishing

    async def open(self, opening: Opening) -> Opened:
        """Connect a producer. The caller must `close` the result.

        Raises:
            TopicNotFound: the topic does not exist, and is not created on demand.
            TooManyStreams, and the errors of LiveTopic.open.
        """
        config = self._config
        if self._streams >= config.publish_streams_max:
            raise TooManyStreams(
                f"too many connected producers (limit {config.publish_streams_max:,})",
                retry_after_s=1.0,
                publish_streams_max=config.publish_streams_max,
            )
        self._streams += 1
        try:
            live = await self._take(opening.topic, create=self.may_create(opening.topic))
            window = Window(config.window_messages, config.window_bytes)
            session, standing = await live.open(
                opening.producer or f"seqgate-{uuid.uuid4().hex}",
                opening.instance,
                takeover=opening.takeover,
                window=window,
                timeout_s=config.open_timeout_s,
                refuses_conflicts=opening.refuses_conflicts,
            )
        except BaseException:
            self._streams -= 1
            raise
        last = standing.last_sequence_id
        initial = opening.initial_sequence_id
        return Opened(
            live, session, initial if last is None else last, window, standing.last_stored
        )

    def close(self, opened: Opened) -> None:
        opened.topic.close(opened.session)
        self._streams -= 1

    def may_create(self, topic: TopicName) -> bool:
        return any(matches(pattern, topic.namespace) for pattern in self._config.auto_create)

    def _written(self) -> list[LiveTopic]:
        return [live for live in self._live.values() if not live.stopped]

    async def _take_existing(self, topic: TopicName) -> LiveTopic:
        return await self._take(topic, create=False)

    async def _take(self, topic: TopicName, *, create: bool) -> LiveTopic:
        async with self._changing.of(topic):
            return await self._take_locked(topic, create=create)

    async def _take_locked(self, topic: TopicName, *, create: bool) -> LiveTopic:
        """Become a topic's writer, unless this process is. The caller holds `_changing`.

        Raises:
            NotOwner: another instance owns it.
            Draining: this instance is handing over.
            TopicNotFound: the topic does not exist, and `create` is false.
        """
        if self._sharing is not None:
            await self._sharing.confirm()
        live = self._live.get(topic)
        if live is not None and not live.stopped:
            return live
        taking = self._store if self._sharing is None else self._sharing
        state = await taking.take(topic, create=create)
        log.info("topic taken", topic=str(topic), ledger_id=state.ledger_id)
        limits = Limits(
            self._config.group_entries_max, self._config.group_bytes_max, self._config.failures_max
        )
        last_append_ms = await self._store.last_append_ms(topic)
        live = LiveTopic(
            state,
            self._store,
            self._dedup,
            self._tasks,
            limits=limits,
            replay_entries_max=self._config.inline_replay_entries_max,
            metrics=self._metrics,
            last_append_ms=last_append_ms,
            budget=self.unanswered,
            replays=self._replays,
            is_shared=self._sharing is not None,
        )
        self._live[topic] = live
        return live

    async def _owned(self, topic: TopicName) -> LiveTopic | None:
        """The topic as written here: reads go through its owner, and end at what that knows to be
        durable. None: this process is alone on the store, and reads what is there.

        Raises:
            NotOwner, Draining, TopicNotFound: as from _take_locked.
        """
        return None if self._sharing is None else await self._take_existing(topic)

    async def _told(self, live: LiveTopic | None, found: T, told: T) -> T:
        """Return `told`: what was found in the store, without what is not known to be durable. A
        caller takes what is missing for trimmed, or never stored. That is right while its outcome
        is unknown, but not if another instance took the topic and stored it.

        Raises:
            StoreUnavailable: another instance took the topic.
        """
        if live is not None and told != found:
            known(live, await self._store.get(live.topic))
        return told

    def refuse(self, opened: Opened, request_id: int, error: DomainError) -> None:
        self._metrics.of(opened.topic.topic).receipts[Status.REFUSED] += 1
        opened.session.refuse(request_id, refused(error))

    # ---- reading

    async def read(
        self, topic: TopicName, what: ReadRange, pages: Pages, draining: asyncio.Event
    ) -> AsyncIterator[list[StoredEntry] | Missed]:
        """Entries as they are appended, with each trimmed range reported in its place. Ends with
        the range, or when `draining` is set. A page is released when the next one is requested; so
        it is in `read_at` and `columns`."""
        counts, tracing = self._metrics.of(topic), ReadTracing(topic)
        after, left = what.after, what.entries_max
        through = what.through
        if not what.follow:
            # A bounded read ends at the current end of the log, even if the log grows meanwhile.
            tail = (await self.get(topic)).tail
            if tail is None:
                return
            through = tail if through is None else min(tail, through)
        while not draining.is_set():
            live = await self._owned(topic)
            grown = self._growth(topic)
            if through is not None and after is not None and after >= through:
                return
            bytes_max = await pages.begin()
            began_ns = time.time_ns()
            with reading(live):
                entries = await self._store.read(
                    topic,
                    after,
                    entries_max=min(PAGE_ENTRIES_MAX, left or PAGE_ENTRIES_MAX),
                    bytes_max=bytes_max,
                    payloads=what.payloads,
                )
                entries = await self._with_true_aborts(topic, entries)
            entries = durable(live, entries)
            if through is not None:
                entries = [each for each in entries if each.position <= through]
            sizes = _sizes(entries, payloads=what.payloads)
            pages.fit(sum(sizes) + ENTRY_BYTES * len(entries))
            if after is not None:
                missed = await self._missed(topic, after, entries, through)
                if missed is not None and entries and missed.last >= entries[0].position:
                    continue  # trimmed after this page was read: read the remaining entries again
                if missed is not None:
                    yield missed
                    after = missed.last
            if entries:
                tracing.read(entries, began_ns)
                for some in _responses(entries, sizes):
                    yield some
                counts.read_entries += len(entries)
                after = entries[-1].position
                if left:
                    left -= len(entries)
                    if not left:
                        return
            elif what.follow and not (through is not None and await self._reached(topic, through)):
                with reading(live):
                    await self._wait(grown, draining)
            else:
                return

    async def _with_true_aborts(
        self, topic: TopicName, entries: list[StoredEntry]
    ) -> list[StoredEntry]:
        """Leave out aborts of attempts that go on. Version 0.2.0 stored such while deduplication
        was off; this process never does."""
        live = self._live.get(topic)
        for place, stored in enumerate(entries):
            entry, position = stored.entry, stored.position
            if not entry.aborts or (live is not None and position.ledger_id >= live.ledger_id):
                continue
            if await self._store.goes_on(topic, entry.producer, entry.aborts, position):
                entries[place] = stored._replace(entry=entry._replace(aborts=""))
        return entries

    async def _missed(
        self,
        topic: TopicName,
        after: Position,
        entries: Sequence[StoredEntry],
        through: Position | None,
    ) -> Missed | None:
        """The range trimmed after a position, up to these entries or, without any, to the last
        trimmed one. Usually consecutive entry ids show, without a query, that there is none."""
        first = following(after)
        if entries and entries[0].position == first:
            return None
        if entries and entries[0].position.entry_id > 0:
            return Missed(
                first, entries[0].position._replace(entry_id=entries[0].position.entry_id - 1)
            )
        last = await self._store.trimmed_through(topic)
        if last is not None and through is not None:
            last = min(last, through)
        return Missed(first, last) if last is not None and last > after else None

    async def read_at(
        self,
        topic: TopicName,
        positions: Sequence[Position],
        pages: Pages,
        draining: asyncio.Event,
        *,
        payloads: bool,
    ) -> AsyncIterator[list[StoredEntry]]:
        """The entries at ascending positions, one list per response; missing ones are left out.
        Ends early when `draining` is set."""
        while positions and not draining.is_set():
            live = await self._owned(topic)
            bytes_max = await pages.begin()
            asked = positions[:PAGE_ENTRIES_MAX]
            with reading(live):
                entries = await self._store.read_at(
                    topic, asked, bytes_max=bytes_max, payloads=payloads
                )
                entries = await self._with_true_aborts(topic, entries)
            entries = await self._told(live, entries, durable(live, entries))
            if not entries:
                positions = positions[len(asked) :]
                continue
            sizes = _sizes(entries, payloads=payloads)
            pages.fit(sum(sizes) + ENTRY_BYTES * len(entries))
            self._metrics.of(topic).read_entries += len(entries)
            for some in _responses(entries, sizes):
                yield some
            positions = positions[bisect_right(positions, entries[-1].position) :]

    async def columns(
        self,
        log: LogState,
        after: Position | None,
        through: Position | None,
        pages: Pages,
        draining: asyncio.Event,
        *,
        metadata: bool,
    ) -> AsyncIterator[list[Columns]]:
        """Entries after one position and through another, up to the tail in `log`, one list per
        response. Ends early when `draining` is set."""
        if log.tail is None:
            return
        end = log.tail if through is None else min(log.tail, through)
        while not draining.is_set() and (after is None or after < end):
            live = await self._owned(log.topic)
            bytes_max = await pages.begin()
            with reading(live):
                runs = await self._store.columns(
                    log.topic,
                    after,
                    through=end,
                    metadata=metadata,
                    runs_max=READ_RUNS_MAX,
                    bytes_max=min(READ_BYTES_MAX, bytes_max),
                )
            if not runs:
                return
            pages.fit(sum(run.size_bytes + ENTRY_BYTES for run in runs))
            if len(runs) > 1:
                yield runs
            else:  # only a single run can exceed the limit
                for part in parts(runs[0], READ_BYTES_MAX):
                    yield [part]
            after = runs[-1].last

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        live = await self._owned(topic)
        found = await self._store.ledgers(topic, after=after, limit=limit)
        return await self._told(live, found, durable_ranges(live, found))

    async def trimmed_producers(
        self, topic: TopicName, *, after: str, limit: int
    ) -> list[tuple[str, int]]:
        """Producers after a name that have trimmed entries, each with its last id among those."""
        await self._owned(topic)
        return await self._store.trimmed_producers(topic, after=after, limit=limit)

    async def _reached(self, topic: TopicName, through: Position) -> bool:
        tail = (await self.get(topic)).tail
        return tail is not None and tail >= through

    def _growth(self, topic: TopicName) -> asyncio.Event:
        live = self._live.get(topic)
        return (self._nothing_grows if live is None else live.grown).next

    async def _wait(self, grown: asyncio.Event, draining: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (grown, draining)]
        try:
            await asyncio.wait(
                waits,
                timeout=self._config.follow_poll_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()

    # ---- topics

    async def create(self, topic: TopicName) -> tuple[LogState, bool]:
        """Create a topic unless it exists. Returns whether this call created it. Waits while a
        topic of this name is being deleted, so that the new one does not inherit its leftovers."""
        async with self._changing.of(topic):
            answer = await self._store.create(topic)
        if self._sharing is not None:
            await self._sharing.settle()
        return answer

    async def get(self, topic: TopicName) -> LogState:
        live = await self._owned(topic)
        return known(live, await self._store.get(topic))

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        found = await self._store.topics(prefix=prefix, after=after, limit=limit)
        if self._sharing is not None:
            await self._sharing.settle()
        return found

    def connected(self, topic: TopicName) -> int:
        live = self._live.get(topic)
        return 0 if live is None else len(live.producers)

    def entries_to_replay(self, topic: TopicName) -> int:
        """The approximate number of entries that deduplication lacks, as known to this process."""
        live = self._live.get(topic)
        return 0 if live is None or live.stopped else live.entries_to_replay

    async def find(self, topic: TopicName, producer: str, sequence_id: int, uuid: str) -> Fate:
        """The fate of a message; with a uuid, of this attempt at a large one."""
        live = await self._owned(topic)
        (fate,) = await self._store.find(topic, producer, [sequence_id], uuid=uuid)
        if isinstance(fate, Found) and not is_durable(live, fate.position):
            raise StoreUnavailable(
                "it is not known yet whether the message is durable", retry_after_s=0.5
            )
        return fate

    def now_ms(self) -> int:
        """The time by the clock of this process, in milliseconds since 1970."""
        return self._now_ms()

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        live = await self._owned(topic)
        found = await self._store.find_time(topic, append_ms)
        told = found if found is None or is_durable(live, found) else None
        return await self._told(live, found, told)

    async def trim(self, topic: TopicName, before: Position) -> Trim:
        """Remove the entries before a position that every cursor has acknowledged.

        Deduplication's own cursor lags most of the time. Before it limits a trim, deduplication is
        asked for a snapshot, which moves it.

        Raises:
            CursorsUnavailable: nothing was removed.
        """
        state = await self.get(topic)
        if state.tail is not None:  # keep entries appended after this call
            before = min(before, following(state.tail))
        mark_deletes: Mapping[str, Position | None] = await self._cursors.mark_deletes(topic)
        if DEDUP_CURSOR in _slowest_cursors(mark_deletes, before):
            mark_deletes = await self._snapshot(topic, mark_deletes)
        holding = _slowest_cursors(mark_deletes, before)
        if holding:
            lowest = mark_deletes[holding[0]]
            limit = NOWHERE if lowest is None else following(lowest)
        else:
            limit = before
        trimmed = Trimmed(0, state.first)
        if state.first is not None and state.first < limit:
            trimmed = await self._trim(topic, limit)
        if trimmed.first is None or trimmed.first >= before:
            holding = []  # such as at the end of a ledger: nothing is left to remove
        if trimmed.removed_entries:
            self._metrics.trimmed_entries += trimmed.removed_entries
            log.info("topic trimmed", topic=str(topic), removed_entries=trimmed.removed_entries)
        return Trim(trimmed, holding)

    async def _snapshot(
        self, topic: TopicName, mark_deletes: Mapping[str, Position | None]
    ) -> Mapping[str, Position | None]:
        """Have deduplication move its cursor by a snapshot. Returns the current mark-delete
        positions, without deduplication's own if it has nothing to keep."""
        try:
            kept = await self._dedup.snapshot(topic)
        except DedupUnavailable as error:
            log.warning("snapshot before trim failed", topic=str(topic), reason=error.reason)
            return mark_deletes
        moved = await self._cursors.mark_deletes(topic)
        if kept is None:
            moved.pop(DEDUP_CURSOR, None)
        return moved

    async def _trim(self, topic: TopicName, before: Position) -> Trimmed:
        """Remove entries.

        An incomplete large message that loses its first chunks must never be completed: a new
        incarnation makes deduplication forget them, so its producer sends the message from chunk 0.
        """
        removed_entries = 0
        may_cut = True  # once false it stays false: a complete or overtaken message remains so
        while True:
            # One step per lock, so that an Open gets a turn in between.
            async with self._changing.of(topic):
                ledger_id = await self._owned_as(topic)
                may_cut = may_cut and await self._store.cuts_unfinished(topic, before)
                if may_cut:
                    live = self._live.pop(topic, None)
                    if live is not None:
                        live.stop(Draining("the topic was released", retry_after_s=0.1))
                with another_owns():
                    trimmed = await self._store.trim(
                        topic, before, ledger_id=ledger_id, renewing=True, steps_max=1
                    )
            removed_entries += trimmed.removed_entries
            if trimmed.first is None or trimmed.first >= before:
                return trimmed._replace(removed_entries=removed_entries)

    async def renew(self, topic: TopicName, *, above: int) -> LogState | None:
        """Renew a topic whose log was replaced by an older copy: its ledger_id becomes greater than
        `above`, whatever others have seen, and its deduplication state is not used any more.
        Returns None for a topic that does not exist: a later one begins above."""
        async with self._changing.of(topic):
            try:
                ledger_id = await self._owned_as(topic)
                live = self._live.pop(topic, None)
                if live is not None:
                    live.stop(Draining("the topic was renewed", retry_after_s=HAND_OVER_RETRY_S))
                with another_owns():
                    return await self._store.renew(topic, ledger_id=ledger_id, above=above)
            except TopicNotFound:
                await self._store.reserve(topic, above)
                return None

    async def delete(self, topic: TopicName, *, force: bool) -> None:
        """Remove a topic, its deduplication state and its cursors.

        The log is removed first, permanently. If dedup or the cursor service is unreachable, its
        part remains: leftover state does not apply to a later topic of this name, but a leftover
        cursor would limit its trims. So removing cursors is retried, also after a restart, until it
        succeeds or the topic is recreated.

        Raises:
            TopicInUse: producers are connected, and `force` is false.
        """
        async with self._changing.of(topic):
            ledger_id = await self._owned_as(topic)
            state = await self._store.get(topic)
            if self.connected(topic) and not force:
                raise TopicInUse("the topic has connected producers", topic=topic)
            live = self._live.pop(topic, None)
            if live is not None:
                live.stop(TopicDeleted("the topic was deleted", topic=topic))
            # Cursors of system topics hold data of services and do not read a log.
            with another_owns():
                await self._store.delete(
                    topic, ledger_id=ledger_id, leaves_cursors=not topic.is_system
                )
            if self._sharing is not None and ledger_id is not None:
                await self._sharing.gave_up(topic, ledger_id)
            log.info("topic deleted", topic=str(topic))
            # Concurrently: each call may take the caller's whole deadline.
            await asyncio.gather(
                self._forget(topic, state.incarnation), self._delete_cursors(topic)
            )

    async def _owned_as(self, topic: TopicName) -> int | None:
        """The ledger_id for which a topic may be changed; None: any. The caller holds
        `_changing`."""
        if self._sharing is None:
            return None
        return (await self._take_locked(topic, create=False)).ledger_id

    async def _forget(self, topic: TopicName, incarnation: int) -> None:
        try:
            await self._dedup.forget_topic(topic, incarnation, deleted=True)
        except DedupUnavailable as error:
            # Harmless: the next incarnation of the topic starts without state, and the purge
            # forgets inactive producers.
            log.warning("deduplication state not dropped", topic=str(topic), reason=error.reason)

    async def _delete_cursors(self, topic: TopicName) -> None:
        if topic.is_system:
            return
        try:
            await self._remove_left(topic)
        except (DomainError, TimeoutError) as error:
            log.warning("deleting cursors failed", topic=str(topic), error=repr(error))

    async def _remove_left(self, topic: TopicName) -> None:
        """Remove the cursors of a deleted topic, unless it was recreated."""
        async with asyncio.timeout(SWEEP_TIMEOUT_S):
            if not await self._cursors.delete_all(topic, lambda: self._store.is_leaving(topic)):
                return
        await self._store.left(topic)
        log.info("cursors of a deleted topic deleted", topic=str(topic))

    async def sweep_forever(self, rest_s: float = SWEEP_REST_S) -> None:
        """Remove cursors of topics deleted, now or by an earlier process, while the cursor service
        did not answer."""
        after = ""
        while True:
            after = await self._sweep_from(after)
            await asyncio.sleep(rest_s)

    async def _sweep_from(self, after: str) -> str:
        """Sweep the topics after a name. Returns the topic that failed, after which the next round
        continues, so that one failure does not block the others; empty: start from the first."""
        try:
            while page := await self._store.leaving(after=after, limit=TOPICS_PAGE):
                for topic in page:
                    after = str(topic)
                    await self._sweep(topic)
        except (DomainError, TimeoutError) as error:
            log.warning("deleting cursors failed", topic=after, error=repr(error))
            return after
        except Exception:  # affects one topic only
            log.exception("deleting cursors failed", topic=after)
            return after
        return ""

    async def _sweep(self, topic: TopicName) -> None:
        async with self._changing.of(topic):
            await self._remove_left(topic)

    # ---- background loops

    async def keep_forever(self) -> None:
        """Periodically report connected producers as alive, and release idle topics."""
        idle_since: dict[TopicName, float] = {}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._keep_within_s())
            topics = list(self._live.items())
            await self._keep_all([(topic, live) for topic, live in topics if live.producers])
            for topic, live in topics:
                if not live.idle:
                    idle_since.pop(topic, None)
                elif loop.time() - idle_since.setdefault(topic, loop.time()) >= (
                    self._config.idle_timeout_s
                ):
                    idle_since.pop(topic)
                    await self._release(topic, live)

    async def _release(self, topic: TopicName, live: LiveTopic) -> None:
        """Release an idle topic: the next one that is asked for it takes it."""
        async with self._changing.of(topic):
            if self._live.get(topic) is not live or not live.idle:
                return
            del self._live[topic]
            live.stop(Draining("the topic was released"))
            if self._sharing is not None:
                await self._sharing.gave_up(topic, live.ledger_id)

    def _keep_within_s(self) -> float:
        """The seconds until the next report of connected producers is due."""
        asked = (live.keep_within_s for live in self._live.values() if live.producers)
        return min([self._config.keep_interval_s, *(each for each in asked if each is not None)])

    async def _keep_all(self, topics: Sequence[tuple[TopicName, LiveTopic]]) -> None:
        """Report connected producers as alive, several topics concurrently, so that a slow topic
        does not delay the others."""
        some = asyncio.Semaphore(KEEPS_AT_A_TIME)

        async def keep(topic: TopicName, live: LiveTopic) -> None:
            async with some:
                try:
                    await live.keep(live.producers)
                except DedupUnavailable as error:
                    log.warning(
                        "keeping producers alive failed", topic=str(topic), reason=error.reason
                    )
                except Exception:  # affects one topic only
                    log.exception("keeping producers alive failed", topic=str(topic))

        await asyncio.gather(*(keep(topic, live) for topic, live in topics))

    async def trim_forever(self) -> None:
        """Periodically trim entries that retention does not keep; return if it keeps all."""
        config = self._config
        if config.retention_minutes < 0 and config.retention_bytes < 0:
            return
        while True:
            await asyncio.sleep(config.trim_interval_s)
            after = ""
            while page := await self._some_topics(after):
                for state in page:
                    await self._retain(state)
                after = str(page[-1].topic)

    async def _some_topics(self, after: str) -> list[LogState]:
        try:
            return await self._store.topics(prefix="", after=after, limit=TOPICS_PAGE)
        except DomainError as error:
            log.warning("retention pass failed", after=after, reason=error.reason)
            return []

    async def _retain(self, state: LogState) -> None:
        """Trim the entries of a topic that retention does not keep. A failure affects this topic
        only. A topic whose log is being replayed, or that waits for a rebuild, is skipped, since a
        trim would make either start over."""
        topic, first = state.topic, state.first
        if self.entries_to_replay(topic):
            return
        if self._sharing is not None and not await self._sharing.retains(topic):
            return
        minutes, size_bytes = self._config.retention_minutes, self._config.retention_bytes
        # A trim cannot be undone, so a clock set forward must not age entries.
        since_ms = None if minutes < 0 else self._now_ms() - minutes * 60_000
        bytes_max = None if size_bytes < 0 else size_bytes
        try:
            while first is not None:
                before = await self._store.retained_from(
                    topic, appended_since_ms=since_ms, bytes_max=bytes_max
                )
                if before is None or before <= first:
                    return
                trim = await self.trim(topic, before)
                if trim.held_back_by or not trim.trimmed.removed_entries:
                    return
                first = trim.trimmed.first
        except TopicNotFound:
            return
        except DomainError as error:
            about = {**error.details, "topic": str(topic), "reason": error.reason}
            log.warning("retention trim failed", **about)
        except Exception:  # affects one topic only
            log.exception("retention trim failed", topic=str(topic))

    # ---- beside others on the store

    async def share_forever(self) -> None:
        """Share the topics with the other instances on the store, if there can be any."""
        if self._sharing is not None:
            await self._sharing.share_forever()

    async def leave(self) -> None:
        """Hand over all topics, so that other instances go on with them at once."""
        if self._sharing is not None:
            await self._sharing.leave()

    async def finish(self, timeout_s: float) -> None:
        """Finish pending work, including confirmations, then stop."""
        try:
            async with asyncio.timeout(timeout_s):
                for live in list(self._live.values()):
                    await live.quiet()
        except TimeoutError:
            log.warning("stopping with unconfirmed topics", seconds=timeout_s)
        for live in self._live.values():
            live.stop(Draining("the service is shutting down"))

    def drain(self) -> None:
        """Ask all producers to reconnect elsewhere."""
        for live in self._live.values():
            live.drain()

    def cut(self) -> None:
        """Close the streams of producers that are still connected."""
        for live in self._live.values():
            live.stop(Draining("the service is shutting down", retry_after_s=0.5))


NOWHERE: Final = Position(0, 0)
"""Before the first entry of any log."""


def _slowest_cursors(mark_deletes: Mapping[str, Position | None], before: Position) -> list[str]:
    """The cursors that have acknowledged the least; none if all have reached `before`."""
    lowest = min((each or NOWHERE for each in mark_deletes.values()), default=before)
    if before <= following(lowest):
        return []
    return sorted(name for name, each in mark_deletes.items() if (each or NOWHERE) == lowest)


def _sizes(entries: Sequence[StoredEntry], *, payloads: bool) -> list[int]:
    """The bytes of each entry. Written out: a property costs more than the rest."""
    if payloads:
        return [len(each.entry.metadata) + each.payload_bytes for each in entries]
    return [len(each.entry.metadata) for each in entries]


def _responses(entries: list[StoredEntry], sizes: Sequence[int]) -> Iterator[list[StoredEntry]]:
    start, response_bytes = 0, 0
    for place, size_bytes in enumerate(sizes):
        is_full = place - start >= READ_ENTRIES_MAX or response_bytes + size_bytes > READ_BYTES_MAX
        if is_full and place > start:
            yield entries[start:place]
            start, response_bytes = place, 0
        response_bytes += size_bytes
    yield entries[start:]
