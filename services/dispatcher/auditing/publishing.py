"""Publishes the histories of audited topics, beside delivery and never in its way.

    record ──▶ waits, within a budget ──every second──▶ page ──▶ audit topic
                  │ no room
                  ▼
               dropped, and counted: the next page says how many

A page is published under one number until it is stored, so its topic has it once. The topics do not
wait for each other. What waits when the process dies is lost; at an orderly end it is published.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import structlog

from seqgate.services.dispatcher.auditing.pages import (
    PRODUCER,
    SUFFIX,
    is_audit,
    page_of,
)
from seqgate.services.dispatcher.core.history import OVERHEAD_BYTES
from seqgate.services.dispatcher.ports import AuditPage, AuditTopics
from seqgate.services.errors import DomainError
from seqgate.services.runtime.globs import matches
from seqgate.types import PRODUCER_NAME_BYTES_MAX, InvalidNameError, TopicName

log = structlog.get_logger()

WAITING_BYTES_MAX: Final = 16 * 1024 * 1024
"""The most bytes of records that wait to be published, of all topics together; see `has_room`."""

PAGE_BYTES_MAX: Final = 64 * 1024
"""The bytes of records after which a page ends; as JSON they take up to three times as much."""

PAGES_AT_ONCE: Final = 16
"""The most pages that are published together, over one stream."""

INTERVAL_S: Final = 1.0
"""How often pages are published, in seconds, and a failed one is retried."""

TOPICS_AT_ONCE: Final = 8
"""How many audit topics are published to at the same time."""


class _Pages(NamedTuple):
    """Pages that are being published, and the records in them."""

    pages: list[AuditPage]
    records: int
    size_bytes: int


class _Queue:
    """The records of a subscription that wait."""

    __slots__ = ("_all", "lost", "records", "subscription", "topic")

    def __init__(self, everything: "Auditing", topic: TopicName, subscription: str) -> None:
        self.topic = topic
        self.subscription = subscription
        self.records: deque[bytes] = deque()
        self.lost = 0
        self._all = everything

    def put(self, record: bytes) -> None:
        everything, size_bytes = self._all, len(record) + OVERHEAD_BYTES
        everything.waiting[self] = None
        if everything.has_room(self.topic, size_bytes):
            self.records.append(record)
            everything.waiting_bytes += size_bytes
            everything.bytes_of[self.topic] += size_bytes
        else:
            self.lost += 1
            everything.count_dropped()


class Auditing:
    """The audit topics of one instance.

    Attributes:
        waiting: the subscriptions with records that wait, the longest waiting first.
        waiting_bytes: what all these records take.
        bytes_of: what those of each audit topic take.
        counts: of events, those published and those dropped.
    """

    def __init__(
        self,
        audit: AuditTopics,
        patterns: Sequence[str],
        owner: str,
        bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """`patterns` are those of audited topics; `owner` is the address of this instance."""
        self.bytes_max = bytes_max
        self.waiting: dict[_Queue, None] = {}
        self.waiting_bytes = 0
        self.bytes_of: Counter[TopicName] = Counter()
        self.counts: Counter[str] = Counter(published=0, dropped=0)
        self._audit = audit
        self._patterns = [pattern.split("/") for pattern in patterns]
        self._owner = owner
        self._producer = _producer(owner)
        self._number = 0
        self._unfinished: dict[TopicName, _Pages] = {}
        self._is_dropping = False
        self._flushing = asyncio.Lock()

    def topic_of(self, topic: TopicName) -> TopicName | None:
        """The audit topic of a topic; None: it is not audited. An audit topic has none."""
        parts = str(topic).split("/")
        if is_audit(topic) or not any(all(map(matches, each, parts)) for each in self._patterns):
            return None
        try:
            return TopicName.parse(f"{topic}{SUFFIX}")
        except InvalidNameError:  # too long
            return None

    def queue(self, topic: TopicName, subscription: str) -> Callable[[bytes], None] | None:
        """Takes the records of a subscription; None: its topic is not audited."""
        where = self.topic_of(topic)
        return None if where is None else _Queue(self, where, subscription).put

    def has_room(self, topic: TopicName, size_bytes: int) -> bool:
        """Whether a record may wait. A topic may take as much as is left for the others: one that
        is refused for good takes half of the budget, and two take a third each."""
        return self.bytes_of[topic] + size_bytes <= self.bytes_max - self.waiting_bytes

    def count_dropped(self) -> None:
        self.counts["dropped"] += 1
        if not self._is_dropping:
            self._is_dropping = True
            log.warning("audit events dropped", waiting_bytes=self.waiting_bytes)

    async def keep_forever(self) -> None:
        """Publish what waits, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.flush()

    async def close(self, timeout_s: float) -> None:
        """Publish what waits, as far as the time allows."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.flush()
        except TimeoutError:
            pass
        if self.waiting or self._unfinished:
            log.warning("audit events lost", waiting_bytes=self.waiting_bytes)

    async def flush(self) -> None:
        """Publish what waits now. What cannot be published goes on waiting."""
        async with self._flushing:
            waiting, self.waiting = self.waiting, {}
            topics: dict[TopicName, list[_Queue]] = {each: [] for each in self._unfinished}
            for queue in waiting:
                topics.setdefault(queue.topic, []).append(queue)
            slots = asyncio.Semaphore(TOPICS_AT_ONCE)

            async def publish(topic: TopicName, queues: list[_Queue]) -> None:
                async with slots:
                    try:
                        await self._publish(topic, queues)
                    except DomainError as error:
                        log.warning("audit topic unavailable", topic=str(topic), why=error.message)
                    finally:
                        left = (each for each in queues if each.records or each.lost)
                        self.waiting.update(dict.fromkeys(left))

            async with asyncio.TaskGroup() as tasks:
                for each in topics.items():
                    tasks.create_task(publish(*each))

    async def _publish(self, topic: TopicName, queues: Sequence[_Queue]) -> None:
        """Publish what the queues have now: what comes meanwhile shares the next pages."""
        if topic in self._unfinished:
            await self._put(topic, self._unfinished[topic])
        for queue in queues:
            left = len(queue.records)
            while left or queue.lost:
                pages = self._unfinished[topic] = self._pages(queue, left)
                left -= pages.records
                await self._put(topic, pages)

    def _pages(self, queue: _Queue, records_max: int) -> _Pages:
        """Take the next pages off a queue."""
        pages: list[AuditPage] = []
        count = size_bytes = 0
        while len(pages) < PAGES_AT_ONCE and (count < records_max or queue.lost):
            records: list[bytes] = []
            left_bytes = PAGE_BYTES_MAX
            while count + len(records) < records_max and left_bytes > 0:
                records.append(queue.records.popleft())
                left_bytes -= len(records[-1]) + OVERHEAD_BYTES
            lost, queue.lost = queue.lost, 0
            self._number += 1
            page = page_of(queue.subscription, self._owner, records, lost)
            pages.append(AuditPage(self._number, queue.subscription, *page))
            count += len(records)
            size_bytes += PAGE_BYTES_MAX - left_bytes
        return _Pages(pages, count, size_bytes)

    async def _put(self, topic: TopicName, pages: _Pages) -> None:
        await self._audit.put(topic, self._producer, pages.pages)
        del self._unfinished[topic]
        self.waiting_bytes -= pages.size_bytes
        self.bytes_of[topic] -= pages.size_bytes
        if not self.bytes_of[topic]:
            del self.bytes_of[topic]
        self.counts["published"] += pages.records
        self._is_dropping = False


def _producer(owner: str) -> str:
    """A name that no other process has, so that numbers start at 1."""
    name = f"{PRODUCER}{owner}/{uuid.uuid4().hex[:12]}"
    if len(name.encode()) <= PRODUCER_NAME_BYTES_MAX:
        return name
    return f"{PRODUCER}{blake2b(name.encode(), digest_size=16).hexdigest()}"
