"""Snapshots: a topic's state, attached to the position of its cursor `seqgate.dedup`.

    entries confirmed ───┐
    time elapsed ────────┤            ┌─ the cursor's revision
    producers forgotten ─┼─▶ take ──▶ ├─ the state, frozen                  ─▶ mark-delete, if the
    a long replay, a load┤            └─ (position, persisted marks)           revision is the same
    shutting down ───────┘

The revision is read before the state, so a snapshot never replaces a newer one, of any replica. A
failure changes nothing: the previous snapshot remains, and the next attempt follows.

The cursor limits trims of the log, so it is created with the first snapshot that fits, never
without one. A state that outgrows the limit, which publishers can cause, is reported; when the log
is to be trimmed, the previous snapshot is dropped and the cursor moves to the position of the
state. Losing the state then costs a replay of the log, in which trimmed entries still count; never
trimming the log would fill the disk.
"""

import asyncio
import time
from collections import OrderedDict
from contextvars import Context
from typing import Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import structlog
from opentelemetry.trace import get_current_span

from seqgate.services.cursors import Cursor, CursorConflict, CursorsUnavailable
from seqgate.services.dedup.core.policy import EffectivePolicy
from seqgate.services.dedup.core.snapshot import (
    Snapshot,
    UnreadableSnapshot,
    covers_more,
    decode,
    encode,
)
from seqgate.services.dedup.core.topic import Frozen, Loaded, Saved
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.dedup.ports import Cursors, PolicySource, StateStore, Summary
from seqgate.services.deduplication import Writer
from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.backoff import Backoff
from seqgate.services.runtime.tasks import end
from seqgate.telemetry import names, spans
from seqgate.types import DEDUP_CURSOR, Position, TopicName

log = structlog.get_logger()

T = TypeVar("T")

SNAPSHOT_BYTES_MAX: Final = 16 * 1024 * 1024
"""The limit of a snapshot, names and values together, in bytes, which is that of a cursor."""

TAKING_MAX: Final = 4
"""The most snapshots that this process takes at a time."""

READING_MAX: Final = 8
"""The most snapshots that this process reads at a time; further reads wait. Reading one of
SNAPSHOT_BYTES_MAX takes up to ten times its size in memory."""

TOPICS_MAX: Final = 10_000
"""The most topics of which this process remembers that a snapshot is due, that there are unsaved
entries, and the last error: about 5 MB. For further topics, a snapshot is due again with the next
confirmation or by time; and the topic confirmed longest ago gets no last snapshot at shutdown."""

SHARE: Final = 20
"""After a snapshot, a topic rests for this many times its duration, so that a topic with many
producers and much traffic is not busy with snapshots."""

FAILURE_REST_S: Final = 1.0
FAILURE_REST_MAX_S: Final = 60.0
"""The longest pause after a failed snapshot; pauses double from FAILURE_REST_S up to it."""

LOOK_S: Final = 2.0
"""The time limit for finding the newest snapshot, for a status."""

CONFLICTS_MAX: Final = 3
"""How often a snapshot is taken again because another replica's was attached first."""

UNFORESEEN: Final = "unexpected error; see the log of the dedup service"

BEFORE_THE_LOG: Final = 0
"""The ledger id of positions that a replay puts before the log; not a position for a cursor."""


class SnapshotTooLarge(DomainError):
    """A topic's deduplication state is too large for the properties of a cursor's position."""

    kind = Kind.EXHAUSTED
    reason = "SNAPSHOT_TOO_LARGE"


class Taken(NamedTuple):
    """The position of the newest snapshot, and the number of its producers."""

    position: Position
    producers: int


class Standing(NamedTuple):
    """The newest snapshot, as the cursor service has it; `taken_ms` 0: it does not say when it was
    taken."""

    position: Position
    taken_ms: int


class Snapshots:
    """Takes and loads the snapshots of all topics, one at a time per topic."""

    def __init__(
        self,
        store: StateStore,
        cursors: Cursors,
        policies: PolicySource,
        tasks: asyncio.TaskGroup,
        metrics: DedupMetrics | None = None,
    ) -> None:
        self._store = store
        self._cursors = cursors
        self._policies = policies
        self._tasks = tasks
        self._metrics = metrics or DedupMetrics()
        self._at_a_time = asyncio.Semaphore(TAKING_MAX)
        self._reads_at_a_time = asyncio.Semaphore(READING_MAX)
        self._locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
        self._taking: dict[TopicName, asyncio.Task[None]] = {}
        self._wanted: set[TopicName] = set()
        self._unsaved: OrderedDict[TopicName, None] = OrderedDict()
        self._errors: OrderedDict[TopicName, str] = OrderedDict()
        self._finished = False

    # ---- when

    def confirmed(self, topic: TopicName, policy: EffectivePolicy, unsaved: int) -> None:
        """Record that entries were confirmed, `unsaved` of them since the newest snapshot."""
        if unsaved:
            _remember(self._unsaved, topic, None)
        if 0 < policy.snapshot_entries.value <= unsaved:
            self.soon(topic)

    def soon(self, topic: TopicName) -> None:
        """Take a snapshot in the background; a failure is logged."""
        if topic not in self._taking and (self._finished or len(self._taking) >= TOPICS_MAX):
            return
        self._wanted.add(topic)
        if topic not in self._taking:
            # Without the context of the operation that it follows.
            self._taking[topic] = self._tasks.create_task(
                self._take_while_wanted(topic), context=Context()
            )

    async def by_time_forever(self, interval_s: float) -> None:
        """Periodically take snapshots of all topics for which one is due by policy."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                with self._metrics.unforeseen("snapshot"):
                    await self._all_by_time()
            except DomainError as error:
                log.warning("periodic snapshots failed", reason=error.reason, error=str(error))

    async def _all_by_time(self) -> None:
        now_ms = await self._store.now_ms()
        async for topic in self._store.topics():
            with self._metrics.unforeseen("snapshot", topic):
                await self._by_time(topic, now_ms)

    async def finish(self, timeout_s: float) -> None:
        """Take last snapshots of the topics of which this process confirmed entries."""
        self._finished = True
        await end(*self._taking.values())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._try(topic) for topic in list(self._unsaved)))
        except TimeoutError:
            log.warning("stopping with unsaved snapshots", count=len(self._unsaved))

    def error(self, topic: TopicName) -> str:
        """The error of the last attempt; empty: it succeeded, or there was none."""
        return self._errors.get(topic, "")

    async def _by_time(self, topic: TopicName, now_ms: int) -> None:
        try:
            is_time = await self._is_time(topic, now_ms)
        except CursorsUnavailable as error:  # affects this topic's policy only
            log.warning("periodic snapshot skipped", topic=str(topic), error=error.message)
            return
        if is_time:
            await self._try(topic)

    async def _is_time(self, topic: TopicName, now_ms: int) -> bool:
        policy = await self._policies.effective(topic)
        interval_s = policy.snapshot_interval_s.value
        if not (policy.enabled.value and interval_s):
            return False
        summary = await self._store.summary(topic)
        if summary is None or summary.remaining or not summary.unsaved:
            return False
        # A clock that went back must not delay the snapshot.
        return not 0 <= now_ms - summary.saved.taken_ms < interval_s * 1000

    async def _take_while_wanted(self, topic: TopicName) -> None:
        backoff = Backoff(FAILURE_REST_S, FAILURE_REST_MAX_S)
        try:
            while topic in self._wanted:
                self._wanted.discard(topic)
                started = time.monotonic()
                if await self._try(topic):
                    backoff.reset()
                    await asyncio.sleep((time.monotonic() - started) * SHARE)
                else:
                    self._wanted.add(topic)
                    await asyncio.sleep(backoff.next_s())
        finally:
            self._wanted.discard(topic)
            del self._taking[topic]

    async def _try(self, topic: TopicName) -> bool:
        with self._metrics.unforeseen("snapshot", topic):
            try:
                await self.take(topic)
            except DomainError as error:
                log.warning(
                    "snapshot failed", topic=str(topic), reason=error.reason, error=error.message
                )
            else:
                return True
        return False

    # ---- how

    async def take(self, topic: TopicName, *, let_go: bool = False) -> Taken | None:
        """Take a snapshot now. Returns the newest snapshot; None: there is no state, or it does not
        fit and `let_go` dropped the previous snapshot.

        Raises:
            SnapshotTooLarge, CursorsUnavailable, StateUnavailable: the previous snapshot remains.
        """
        lock = self._locks.get(topic)
        if lock is None:
            self._locks[topic] = lock = asyncio.Lock()
        try:
            async with lock, self._at_a_time:
                try:
                    taken = await self._counted(topic)
                except SnapshotTooLarge as error:
                    if not let_go:
                        raise
                    _remember(self._errors, topic, error.message)
                    await self._let_go(topic)
                    return None
        except DomainError as error:
            _remember(self._errors, topic, error.message)
            raise
        except Exception:
            _remember(self._errors, topic, UNFORESEEN)
            raise
        self._errors.pop(topic, None)
        if taken is not None:
            log.debug("snapshot taken", topic=str(topic), producers=taken.producers)
        return taken

    async def _counted(self, topic: TopicName) -> Taken | None:
        began_s = time.monotonic()
        outcome = "failed"
        begin = spans.part if get_current_span().is_recording() else spans.own
        try:
            with begin(f"{names.SNAPSHOT} {topic}", {names.TOPIC: str(topic)}) as span:
                taken = await self._take(topic)
                outcome = "nothing" if taken is None else "taken"
                span.set_attribute(names.OUTCOME, outcome)
                span.set_attribute(names.PRODUCERS, 0 if taken is None else taken.producers)
        except SnapshotTooLarge:
            outcome = "too_large"
            raise
        finally:
            self._metrics.snapshots[outcome] += 1
            self._metrics.snapshot_duration(time.monotonic() - began_s, outcome)
        return taken

    async def _take(self, topic: TopicName) -> Taken | None:
        if not self._cursors.configured:
            return None
        policy = await self._policies.effective(topic)
        if not policy.enabled.value:
            return None
        for _ in range(CONFLICTS_MAX):
            cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=False)
            self._unsaved.pop(topic, None)
            try:
                return await self._attach(topic, cursor)
            except CursorConflict:
                log.info("snapshot superseded, retrying", topic=str(topic))
            except BaseException:
                _remember(self._unsaved, topic, None)
                raise
        _remember(self._unsaved, topic, None)
        raise CursorsUnavailable("snapshots keep being superseded", retry_after_s=FAILURE_REST_S)

    async def _attach(self, topic: TopicName, cursor: Cursor | None) -> Taken | None:
        frozen = await self._store.freeze(topic)
        position = _place(frozen)
        before = None if cursor is None else cursor.mark_delete
        if position is None or (before is not None and position < before):
            # The state was lost, or is still behind its snapshot.
            if cursor is None:
                return None
            found = await self._usable(topic, 0 if frozen is None else frozen.incarnation)
            return None if found is None else Taken(found[0], len(found[1].producers))
        assert frozen is not None
        now_ms = await self._store.now_ms()
        properties = _fitting(frozen, now_ms)
        if cursor is None:
            cursor = await self._cursors.create(topic, DEDUP_CURSOR, position)
            if cursor.revision:
                raise CursorConflict("another replica created and moved the cursor")
        await self._cursors.mark_delete(
            topic, DEDUP_CURSOR, position, properties, revision=cursor.revision
        )
        saved = Saved(position, frozen.entries, now_ms)
        await self._store.record_snapshot(topic, frozen.incarnation, saved)
        return Taken(position, len(frozen.producers))

    async def _usable(self, topic: TopicName, incarnation: int) -> tuple[Position, Snapshot] | None:
        """The snapshot in the cursor, if it is readable and of this incarnation or a newer one."""
        async with self._reads_at_a_time:
            cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=True)
            if cursor is None or cursor.mark_delete is None or not cursor.mark_delete_properties:
                return None
            snapshot = _read(topic, cursor, 0)
            if snapshot is None:
                return None
            of = incarnation if snapshot.incarnation is None else snapshot.incarnation
            if of < incarnation or not snapshot.is_of(of, cursor.mark_delete):
                return None
            return cursor.mark_delete, snapshot

    async def standing(self, topic: TopicName, state: Summary | None) -> Standing | None:
        """The newest snapshot, as the cursor service has it; None: it has none. The topic's state
        only saves reading the snapshot: Redis may have lost or rolled back what it records of it.

        Raises:
            CursorsUnavailable: it is unknown whether there is one.
        """
        try:
            async with asyncio.timeout(LOOK_S):
                cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=False)
                if cursor is None or cursor.mark_delete is None:
                    return None
                if state and state.saved.taken_ms and state.saved.position == cursor.mark_delete:
                    return Standing(cursor.mark_delete, state.saved.taken_ms)
                found = await self._usable(topic, 0 if state is None else state.incarnation)
                return None if found is None else Standing(found[0], found[1].taken_ms)
        except TimeoutError as error:
            raise CursorsUnavailable(
                f"the cursor service did not answer in {LOOK_S:g} s", retry_after_s=FAILURE_REST_S
            ) from error

    async def _let_go(self, topic: TopicName) -> None:
        """Move the cursor, without a snapshot, to the position of the state: the log can be
        trimmed."""
        cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=False)
        frozen = await self._store.freeze(topic)
        position = _place(frozen)
        if cursor is None or position is None or frozen is None:
            return
        if cursor.mark_delete is not None and position < cursor.mark_delete:
            return
        try:
            await self._cursors.mark_delete(
                topic, DEDUP_CURSOR, position, {}, revision=cursor.revision
            )
        except CursorConflict:
            return  # the cursor already moved: by a snapshot that fits, or by another replica
        log.error(
            "snapshot dropped: state too large, and holding back trims",
            topic=str(topic),
            producers=len(frozen.producers),
        )
        await self._store.record_snapshot(topic, frozen.incarnation, Saved(position))

    # ---- back

    async def restore(
        self, topic: TopicName, writer: Writer, confirmed: Position | None
    ) -> Position | None:
        """Load the newest snapshot if it covers more of the writer's log than the state, which ends
        at `confirmed`. Returns where the state ends now: at `confirmed`, so that the writer replays
        more, if there is no snapshot or the cursor service does not answer."""
        try:
            loaded = await self._loaded(topic, writer, confirmed)
        except CursorsUnavailable as error:
            log.warning(
                "snapshot unavailable, replaying instead", topic=str(topic), error=str(error)
            )
            self._metrics.restores["unavailable"] += 1
            return confirmed
        self._metrics.restores["nothing" if loaded is None else "loaded"] += 1
        return confirmed if loaded is None else loaded.confirmed

    async def _loaded(
        self, topic: TopicName, writer: Writer, confirmed: Position | None
    ) -> Loaded | None:
        """Load the newest snapshot; None: none covers more."""
        cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=False)
        if cursor is None or not covers_more(cursor.mark_delete, writer, confirmed):
            return None
        async with self._reads_at_a_time:
            return await self._loaded_whole(topic, writer, confirmed)

    async def _loaded_whole(
        self, topic: TopicName, writer: Writer, confirmed: Position | None
    ) -> Loaded | None:
        cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=True)
        if cursor is None or not covers_more(cursor.mark_delete, writer, confirmed):
            return None
        assert cursor.mark_delete is not None
        now_ms = await self._store.now_ms()
        snapshot = _read(topic, cursor, now_ms)
        if snapshot is None or not snapshot.is_of(writer.incarnation, cursor.mark_delete):
            return None
        loaded = await self._store.load(
            topic,
            writer.incarnation,
            cursor.mark_delete,
            snapshot.producers,
            replacing=False,
            taken_ms=snapshot.taken_ms or now_ms,
        )
        log.warning("snapshot loaded", topic=str(topic), position=str(loaded.confirmed))
        return loaded

    async def forget(self, topic: TopicName, incarnation: int | None) -> None:
        """Remove the snapshot unless it has a newer incarnation; None: whatever its incarnation."""
        if incarnation is not None:
            async with self._reads_at_a_time:
                cursor = await self._cursors.get(topic, DEDUP_CURSOR, whole=True)
                snapshot = None if cursor is None else _read(topic, cursor, 0)
            if snapshot is not None and (snapshot.incarnation or 0) > incarnation:
                return
        await self._cursors.delete(topic, DEDUP_CURSOR)


def _remember(what: "OrderedDict[TopicName, T]", topic: TopicName, value: T) -> None:
    """Remember a value for a topic; beyond TOPICS_MAX topics, the oldest is forgotten."""
    what[topic] = value
    what.move_to_end(topic)
    if len(what) > TOPICS_MAX:
        what.popitem(last=False)


def _place(frozen: Frozen | None) -> Position | None:
    """The position for a snapshot of this state; None: there is nothing to keep."""
    if frozen is None or frozen.confirmed is None:
        return None
    return None if frozen.confirmed.ledger_id == BEFORE_THE_LOG else frozen.confirmed


def _fitting(frozen: Frozen, taken_ms: int) -> dict[str, str]:
    """The properties of a snapshot.

    Raises:
        SnapshotTooLarge: they exceed the limits.
    """
    properties = encode(frozen, taken_ms=taken_ms)
    size_bytes = sum(len(text.encode()) for each in properties.items() for text in each)
    if size_bytes > SNAPSHOT_BYTES_MAX:
        raise SnapshotTooLarge(
            f"state too large for a snapshot (limit {SNAPSHOT_BYTES_MAX:,} bytes)",
            bytes=size_bytes,
            bytes_max=SNAPSHOT_BYTES_MAX,
            producers=len(frozen.producers),
        )
    return properties


def _read(topic: TopicName, cursor: Cursor, now_ms: int) -> Snapshot | None:
    if not cursor.mark_delete_properties:
        log.info("snapshot was dropped earlier", topic=str(topic))
        return None
    try:
        return decode(cursor.mark_delete_properties, now_ms=now_ms)
    except UnreadableSnapshot as error:
        log.critical("snapshot unreadable", topic=str(topic), error=str(error))
        return None
