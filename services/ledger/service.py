"""What the ledger service does, in its own words: topics, publishing, reading.

servicer.py translates the wire to these calls; live.py runs the topics that are written here.
"""

import asyncio
import fnmatch
import time
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from seqgate.types import DEDUP_CURSOR, SEQUENCE_ID_MAX, Position, TopicName
from services.errors import DomainError, Draining, Kind
from services.ledger.config import LedgerConfig
from services.ledger.core.columns import Columns, parts
from services.ledger.core.entry import StoredEntry
from services.ledger.core.receipt import Fate, Status, refused
from services.ledger.core.writer import Limits
from services.ledger.following import Reading
from services.ledger.live import LiveTopic, Pulse, Session, Window
from services.ledger.metrics import LedgerMetrics, tell_topics
from services.ledger.ports import (
    Cursors,
    CursorsUnavailable,
    Deduplicator,
    DedupUnavailable,
    LedgerRange,
    LedgerStore,
    LogState,
    TopicNotFound,
    Trimmed,
)
from services.runtime.metrics import OFF, Metrics

log = structlog.get_logger()

READ_ENTRIES_MAX: Final = 1_000
READ_BYTES_MAX: Final = 1024 * 1024
"""How much one ReadResponse holds at most; one entry always fits."""

TOPICS_PAGE: Final = 100
"""How many topics are looked through at a time for what retention keeps no longer."""

READ_RUNS_MAX: Final = 1_000
"""How many runs one ReadColumnsResponse holds at most."""

PAGE_ENTRIES_MAX: Final = 4_000
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""How much is read from the store at a time: it reads whole groups, however little is asked for."""


class TooManyStreams(DomainError):
    """As many producers are connected as may be."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_STREAMS"


class TopicInUse(DomainError):
    """Producers are connected to the topic."""

    kind = Kind.IN_USE
    reason = "TOPIC_IN_USE"


class TopicDeleted(DomainError):
    """The topic was deleted while the stream was open."""

    kind = Kind.NOT_FOUND
    reason = "TOPIC_DELETED"


class Opening(NamedTuple):
    """What a producer asks for."""

    topic: TopicName
    producer: str
    initial_sequence_id: int | None
    takeover: bool
    instance: bytes


class Opened(NamedTuple):
    """What it gets."""

    topic: LiveTopic
    session: Session
    last_sequence_id: int | None
    window: Window


class Range(NamedTuple):
    """What to read: from `after` on (None: from the first entry), through `through` (None: to the
    end, or for ever when following), at most `entries_max` entries (0: no limit)."""

    after: Position | None
    through: Position | None
    follow: bool
    entries_max: int
    payloads: bool


class Trim(NamedTuple):
    """What a trim did, and the cursors without which it would have removed more, by name."""

    trimmed: Trimmed
    held_back_by: list[str]


class Ledger:
    """One instance serves all topics."""

    def __init__(
        self,
        config: LedgerConfig,
        store: LedgerStore,
        dedup: Deduplicator,
        cursors: Cursors,
        tasks: asyncio.TaskGroup,
        metrics: Metrics = OFF,
    ) -> None:
        self._config = config
        self._store = store
        self._dedup = dedup
        self._cursors = cursors
        self._tasks = tasks
        self._live: dict[TopicName, LiveTopic] = {}
        self._taking = asyncio.Lock()
        self._streams = 0
        self._nothing_grows = Pulse()
        self._check_writable: Callable[[str], None] = lambda _: None
        self._metrics = LedgerMetrics(metrics)
        tell_topics(metrics, self._written, producers_max=config.publish_streams_max)

    # ---- publishing

    async def open(self, opening: Opening) -> Opened:
        """Connect a producer. The caller closes what it gets.

        Raises:
            TopicNotFound: it does not exist, and policy does not have it made.
            TooManyStreams, and what LiveTopic.open raises.
        """
        config = self._config
        if self._streams >= config.publish_streams_max:
            raise TooManyStreams(
                "as many producers are connected as may be",
                retry_after_s=1.0,
                publish_streams_max=config.publish_streams_max,
            )
        self._streams += 1
        try:
            live = await self._take(opening.topic)
            window = Window(config.window_messages, config.window_bytes)
            session, last = await live.open(
                opening.producer or f"seqgate-{uuid.uuid4().hex}",
                opening.instance,
                takeover=opening.takeover,
                window=window,
                timeout_s=config.open_timeout_s,
            )
        except BaseException:
            self._streams -= 1
            raise
        return Opened(live, session, opening.initial_sequence_id if last is None else last, window)

    def close(self, opened: Opened) -> None:
        """Disconnect a producer."""
        opened.topic.close(opened.session)
        self._streams -= 1

    def may_create(self, topic: TopicName) -> bool:
        """Whether publishing to a topic that does not exist makes it."""
        patterns = self._config.auto_create
        return any(fnmatch.fnmatchcase(topic.namespace, pattern) for pattern in patterns)

    def keep_to(self, check_writable: Callable[[str], None]) -> None:
        """Write only topics of which this returns; it raises of those that others hold."""
        self._check_writable = check_writable

    async def let_go(self, topic: str, error: DomainError) -> None:
        """Write a topic no more, for those who are connected end with this error. After it, nothing
        is written here unless the topic is taken again."""
        async with self._taking:
            live = self._live.pop(TopicName.parse(topic), None)
            if live is not None:
                live.stop(error)

    def _written(self) -> list[LiveTopic]:
        return [live for live in self._live.values() if not live.stopped]

    async def _take(self, topic: TopicName) -> LiveTopic:
        async with self._taking:
            live = self._live.get(topic)
            if live is None or live.stopped:
                self._check_writable(str(topic))
                state = await self._store.take(topic, create=self.may_create(topic))
                log.info("topic taken", topic=str(topic), ledger_id=state.ledger_id)
                limits = Limits(
                    self._config.group_entries_max,
                    self._config.group_bytes_max,
                    self._config.failures_max,
                )
                live = LiveTopic(
                    state,
                    self._store,
                    self._dedup,
                    self._tasks,
                    limits=limits,
                    replay_entries_max=self._config.inline_replay_entries_max,
                    metrics=self._metrics,
                )
                self._live[topic] = live
            return live

    def refuse(self, opened: Opened, request_id: int, error: DomainError) -> None:
        """Answer a publication that is wrong."""
        self._metrics.of(opened.topic.topic).receipts[Status.REFUSED] += 1
        opened.session.answer(request_id, refused(error))

    # ---- reading

    async def started(self, topic: TopicName) -> LogState:
        """Where a reader stands."""
        return await self._store.get(topic)

    async def read(
        self, topic: TopicName, what: Range, draining: asyncio.Event
    ) -> AsyncIterator[list[StoredEntry]]:
        """Entries, as they come; ends with the range, or when `draining` is set."""
        counts, following = self._metrics.of(topic), Reading(topic)
        after, left = what.after, what.entries_max
        through = what.through
        if not what.follow:
            # A bounded read ends where the log ends now, however fast it grows.
            tail = (await self._store.get(topic)).tail
            if tail is None:
                return
            through = tail if through is None else min(tail, through)
        while not draining.is_set():
            grown = self._growth(topic)
            if through is not None and after is not None and after >= through:
                return
            began_ns = time.time_ns()
            entries = await self._store.read(
                topic,
                after,
                entries_max=min(PAGE_ENTRIES_MAX, left or PAGE_ENTRIES_MAX),
                bytes_max=PAGE_BYTES_MAX,
                payloads=what.payloads,
            )
            if through is not None:
                entries = [each for each in entries if each.position <= through]
            if entries:
                following.read(entries, began_ns)
                for some in _responses(entries, payloads=what.payloads):
                    yield some
                counts.read_entries += len(entries)
                after = entries[-1].position
                if left:
                    left -= len(entries)
                    if not left:
                        return
            elif what.follow and not (through is not None and await self._reached(topic, through)):
                await self._wait(grown, draining)
            else:
                return

    async def read_at(
        self,
        topic: TopicName,
        positions: Sequence[Position],
        draining: asyncio.Event,
        *,
        payloads: bool,
    ) -> AsyncIterator[list[StoredEntry]]:
        """The entries at positions, which are in order, by response; those that are not there are
        left out. Ends with them, or when `draining` is set."""
        while positions and not draining.is_set():
            entries = await self._store.read_at(
                topic, positions, bytes_max=PAGE_BYTES_MAX, payloads=payloads
            )
            if not entries:
                return
            self._metrics.of(topic).read_entries += len(entries)
            for some in _responses(entries, payloads=payloads):
                yield some
            positions = positions[bisect_right(positions, entries[-1].position) :]

    async def columns(
        self,
        log: LogState,
        after: Position | None,
        through: Position | None,
        draining: asyncio.Event,
        *,
        metadata: bool,
    ) -> AsyncIterator[list[Columns]]:
        """Entries after one position and through another, but not beyond the end of the log as it
        was given, by response; ends with them, or when `draining` is set."""
        if log.tail is None:
            return
        end = log.tail if through is None else min(log.tail, through)
        while not draining.is_set() and (after is None or after < end):
            runs = await self._store.columns(
                log.topic,
                after,
                through=end,
                metadata=metadata,
                runs_max=READ_RUNS_MAX,
                bytes_max=READ_BYTES_MAX,
            )
            if not runs:
                return
            if len(runs) > 1:
                yield runs
            else:  # the only one that may be too large
                for part in parts(runs[0], READ_BYTES_MAX):
                    yield [part]
            after = runs[-1].last

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        """A topic's ledgers after one that hold entries, in order."""
        return await self._store.ledgers(topic, after=after, limit=limit)

    async def trimmed_producers(
        self, topic: TopicName, *, after: str, limit: int
    ) -> list[tuple[str, int]]:
        """The producers after one of which entries were trimmed, each with its highest id there."""
        return await self._store.trimmed_producers(topic, after=after, limit=limit)

    async def _reached(self, topic: TopicName, through: Position) -> bool:
        tail = (await self._store.get(topic)).tail
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
        """Make a topic unless it exists; whether this call made it."""
        return await self._store.create(topic)

    async def get(self, topic: TopicName) -> LogState:
        """A topic's log."""
        return await self._store.get(topic)

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        """Topics in the order of their names."""
        return await self._store.topics(prefix=prefix, after=after, limit=limit)

    def connected(self, topic: TopicName) -> int:
        """How many producers are connected to a topic here."""
        live = self._live.get(topic)
        return 0 if live is None else len(live.producers)

    def entries_to_replay(self, topic: TopicName) -> int:
        """About how many entries of a topic deduplication lacks, as far as is known here."""
        live = self._live.get(topic)
        return 0 if live is None or live.stopped else live.entries_to_replay

    async def find(self, topic: TopicName, producer: str, sequence_id: int, uuid: str) -> Fate:
        """Where a message is; of a large one, this attempt at it, if a uuid is given."""
        (fate,) = await self._store.find(topic, producer, [sequence_id], uuid=uuid)
        return fate

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        """The first entry that was appended at a time or later; see LedgerStore.find_time."""
        return await self._store.find_time(topic, append_ms)

    async def trim(self, topic: TopicName, before: Position) -> Trim:
        """Remove the entries before a position that every cursor has acknowledged.

        Deduplication's own cursor is behind most of the time: it is asked to move it, so that it
        never holds a topic back for longer than that takes.

        Raises:
            CursorsUnavailable: nothing was removed.
        """
        state = await self._store.get(topic)
        if state.tail is not None:  # what is appended from now on stays
            before = min(before, _following(state.tail))
        mark_deletes: Mapping[str, Position | None] = await self._cursors.mark_deletes(topic)
        if DEDUP_CURSOR in _holding(mark_deletes, before):
            mark_deletes = await self._snapshot(topic, mark_deletes)
        holding = _holding(mark_deletes, before)
        if holding:
            lowest = mark_deletes[holding[0]]
            limit = NOWHERE if lowest is None else _following(lowest)
        else:
            limit = before
        trimmed = Trimmed(0, state.first)
        if state.first is not None and state.first < limit:
            trimmed = await self._trim(topic, limit)
        if trimmed.first is None or trimmed.first >= before:
            holding = []  # at the end of a ledger, say, with nothing more to go
        if trimmed.removed_entries:
            self._metrics.trimmed_entries += trimmed.removed_entries
            log.info("topic trimmed", topic=str(topic), removed_entries=trimmed.removed_entries)
        return Trim(trimmed, holding)

    async def _snapshot(
        self, topic: TopicName, mark_deletes: Mapping[str, Position | None]
    ) -> Mapping[str, Position | None]:
        """Have deduplication move its cursor. How far each of the topic's cursors is then; without
        deduplication's own, when there is nothing that it would keep in it."""
        try:
            kept = await self._dedup.snapshot(topic)
        except DedupUnavailable as error:
            log.warning("no snapshot before a trim", topic=str(topic), reason=error.reason)
            return mark_deletes
        moved = await self._cursors.mark_deletes(topic)
        if kept is None:
            moved.pop(DEDUP_CURSOR, None)
        return moved

    async def _trim(self, topic: TopicName, before: Position) -> Trimmed:
        """Remove entries.

        A large message that loses its first chunks while it is incomplete must not be completed:
        deduplication is made to forget them, and its producer starts it again.
        """
        async with self._taking:
            self._check_writable(str(topic))
            if await self._store.cuts_unfinished(topic, before):
                live = self._live.pop(topic, None)
                if live is not None:
                    live.stop(Draining("the topic was let go", retry_after_s=0.1))
                await self._store.renew(topic)
                return await self._store.trim(topic, before)
            live = self._live.get(topic)
            return await (self._store.trim(topic, before) if live is None else live.trim(before))

    async def delete(self, topic: TopicName, *, force: bool) -> None:
        """Remove a topic, its deduplication state and its cursors.

        The log goes first, and for good. What of the others cannot be reached then stays: a state
        counts for no later topic of this name, but a cursor holds its trims back, until somebody
        removes it.

        Raises:
            TopicInUse: producers are connected, and it is not forced.
        """
        async with self._taking:
            if self.connected(topic) and not force:
                raise TopicInUse("producers are connected", topic=topic)
            live = self._live.pop(topic, None)
            state = await self._store.get(topic)
            if live is not None:
                live.stop(TopicDeleted("the topic was deleted", topic=topic))
            await self._store.delete(topic)
        log.info("topic deleted", topic=str(topic))
        # At once: each has the time that the caller gave.
        await asyncio.gather(self._forget(topic, state.incarnation), self._delete_cursors(topic))

    async def _forget(self, topic: TopicName, incarnation: int) -> None:
        try:
            await self._dedup.forget_topic(topic, incarnation, deleted=True)
        except DedupUnavailable as error:
            # Harmless: the next incarnation of the topic starts from nothing, and the purge
            # forgets what is inactive.
            log.warning("deduplication state not dropped", topic=str(topic), reason=error.reason)

    async def _delete_cursors(self, topic: TopicName) -> None:
        if topic.is_system:  # what a system keeps there is no reader's of this log
            return
        try:
            await self._cursors.delete_all(topic)
        except CursorsUnavailable as error:
            log.warning("cursors not deleted", topic=str(topic), reason=error.reason)

    # ---- for as long as the process lives

    async def keep_forever(self) -> None:
        """Report connected producers as alive, and let idle topics go."""
        idle_since: dict[TopicName, float] = {}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._config.keep_interval_s)
            for topic, live in list(self._live.items()):
                if live.producers:
                    await self._keep(topic, live.producers)
                if not live.idle:
                    idle_since.pop(topic, None)
                elif loop.time() - idle_since.setdefault(topic, loop.time()) >= (
                    self._config.idle_timeout_s
                ):
                    del self._live[topic], idle_since[topic]
                    live.stop(Draining("the topic was let go"))

    async def _keep(self, topic: TopicName, producers: Sequence[str]) -> None:
        try:
            await self._dedup.keep(topic, producers)
        except DedupUnavailable as error:
            log.warning("producers not kept", topic=str(topic), reason=error.reason)

    async def trim_forever(self) -> None:
        """Remove what retention no longer keeps, time and again. Nothing to do if it keeps all."""
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
            log.warning("topics not looked through", after=after, reason=error.reason)
            return []

    async def _retain(self, state: LogState) -> None:
        """Remove what retention keeps no longer of a topic. A failure is this topic's alone."""
        topic, first = state.topic, state.first
        minutes, size_bytes = self._config.retention_minutes, self._config.retention_bytes
        now_ms = time.time_ns() // 1_000_000
        since_ms = None if minutes < 0 else now_ms - minutes * 60_000
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
            log.warning("not trimmed by retention", **about)

    async def finish(self, timeout_s: float) -> None:
        """Let what is under way end, confirmations included, and do nothing more."""
        try:
            async with asyncio.timeout(timeout_s):
                for live in self._live.values():
                    await live.quiet()
        except TimeoutError:
            log.warning("topics left with something to confirm", seconds=timeout_s)
        for live in self._live.values():
            live.stop(Draining("the service is shutting down"))

    def drain(self) -> None:
        """Ask all producers to move away."""
        for live in self._live.values():
            live.drain()

    def cut(self) -> None:
        """Close the streams of those who did not."""
        for live in self._live.values():
            live.stop(Draining("the service is shutting down", retry_after_s=0.5))


NOWHERE: Final = Position(0, 0)
"""A place before the first entry of any log."""


def _following(position: Position) -> Position:
    """The place right after a position."""
    if position.entry_id == SEQUENCE_ID_MAX:
        return Position(position.ledger_id + 1, 0)
    return Position(position.ledger_id, position.entry_id + 1)


def _holding(mark_deletes: Mapping[str, Position | None], before: Position) -> list[str]:
    """The cursors that have acknowledged the least, unless that is everything before a position."""
    lowest = min((each or NOWHERE for each in mark_deletes.values()), default=before)
    if before <= _following(lowest):
        return []
    return sorted(name for name, each in mark_deletes.items() if (each or NOWHERE) == lowest)


def _responses(entries: list[StoredEntry], *, payloads: bool) -> Iterator[list[StoredEntry]]:
    """Entries by the response that they travel in."""
    some: list[StoredEntry] = []
    size_bytes = 0
    for each in entries:
        each_bytes = each.size_bytes if payloads else len(each.entry.metadata)
        if some and (len(some) >= READ_ENTRIES_MAX or size_bytes + each_bytes > READ_BYTES_MAX):
            yield some
            some, size_bytes = [], 0
        some.append(each)
        size_bytes += each_bytes
    yield some
