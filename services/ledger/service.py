"""What the ledger service does, in its own words: topics, publishing, reading.

servicer.py translates the wire to these calls; live.py runs the topics that are written here.
"""

import asyncio
import fnmatch
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from seqgate.types import Position, TopicName
from services.errors import DomainError, Draining, Kind
from services.ledger.config import LedgerConfig
from services.ledger.core.entry import StoredEntry
from services.ledger.core.receipt import Fate
from services.ledger.core.writer import Limits
from services.ledger.live import LiveTopic, Pulse, Session, Window
from services.ledger.ports import (
    Deduplicator,
    DedupUnavailable,
    LedgerStore,
    LogState,
    Trimmed,
)

log = structlog.get_logger()

READ_ENTRIES_MAX: Final = 1_000
READ_BYTES_MAX: Final = 1024 * 1024
"""How much one ReadResponse holds at most; one entry always fits."""

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


class Ledger:
    """One instance serves all topics."""

    def __init__(
        self,
        config: LedgerConfig,
        store: LedgerStore,
        dedup: Deduplicator,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config = config
        self._store = store
        self._dedup = dedup
        self._tasks = tasks
        self._live: dict[TopicName, LiveTopic] = {}
        self._taking = asyncio.Lock()
        self._streams = 0
        self._nothing_grows = Pulse()

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

    async def _take(self, topic: TopicName) -> LiveTopic:
        async with self._taking:
            live = self._live.get(topic)
            if live is None or live.stopped:
                create = any(
                    fnmatch.fnmatchcase(topic.namespace, pattern)
                    for pattern in self._config.auto_create
                )
                state = await self._store.take(topic, create=create)
                log.info("topic taken", topic=str(topic), ledger_id=state.ledger_id)
                limits = Limits(
                    self._config.group_entries_max,
                    self._config.group_bytes_max,
                    self._config.failures_max,
                )
                live = LiveTopic(state, self._store, self._dedup, self._tasks, limits=limits)
                self._live[topic] = live
            return live

    # ---- reading

    async def started(self, topic: TopicName) -> LogState:
        """Where a reader stands."""
        return await self._store.get(topic)

    async def read(
        self, topic: TopicName, what: Range, draining: asyncio.Event
    ) -> AsyncIterator[list[StoredEntry]]:
        """Entries, as they come; ends with the range, or when `draining` is set."""
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
                for some in _responses(entries, payloads=what.payloads):
                    yield some
                after = entries[-1].position
                if left:
                    left -= len(entries)
                    if not left:
                        return
            elif what.follow and not (through is not None and await self._reached(topic, through)):
                await self._wait(grown, draining)
            else:
                return

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

    async def find(self, topic: TopicName, producer: str, sequence_id: int, uuid: str) -> Fate:
        """Where a message is; of a large one, this attempt at it, if a uuid is given."""
        (fate,) = await self._store.find(topic, producer, [sequence_id], uuid=uuid)
        return fate

    async def trim(self, topic: TopicName, before: Position) -> Trimmed:
        """Remove entries.

        A large message that loses its first chunks while it is incomplete must not be completed:
        deduplication is made to forget them, and its producer starts it again.
        """
        async with self._taking:
            state = await self._store.get(topic)
            if state.tail is not None:  # what is appended from now on stays
                before = min(before, state.tail._replace(entry_id=state.tail.entry_id + 1))
            if await self._store.cuts_unfinished(topic, before):
                live = self._live.pop(topic, None)
                if live is not None:
                    live.stop(Draining("the topic was let go", retry_after_s=0.1))
                await self._store.renew(topic)
                trimmed = await self._store.trim(topic, before)
            else:
                live = self._live.get(topic)
                trim = self._store.trim(topic, before) if live is None else live.trim(before)
                trimmed = await trim
        log.info("topic trimmed", topic=str(topic), removed_entries=trimmed.removed_entries)
        return trimmed

    async def delete(self, topic: TopicName, *, force: bool) -> None:
        """Remove a topic and its deduplication state.

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
        try:
            await self._dedup.forget_topic(topic, state.incarnation)
        except DedupUnavailable as error:
            # Harmless: the next incarnation of the topic starts from nothing, and the purge
            # forgets what is inactive.
            log.warning("deduplication state not dropped", topic=str(topic), reason=error.reason)

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
