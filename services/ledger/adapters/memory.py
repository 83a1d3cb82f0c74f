"""Logs in memory, lost when the process ends. For tests, and the reference for other adapters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from seqgate.services.deduplication import NEVER, Mark
from seqgate.services.errors import Fenced
from seqgate.services.ledger.core.columns import Columns, columns_of
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.find import Finder, goes_on_after, last_of
from seqgate.services.ledger.core.marks import (
    folded,
    is_cut,
    last_open,
    last_whole,
    remembered,
)
from seqgate.services.ledger.core.ownership import Beat
from seqgate.services.ledger.core.receipt import Fate, Missing
from seqgate.services.ledger.ports import (
    NO_INSTANCES,
    LedgerRange,
    LogState,
    Newest,
    ReplayPage,
    TopicNotFound,
    Trimmed,
)
from seqgate.types import Position, TopicName


@dataclass
class _Log:
    incarnation: int
    ledger_id: int
    tail: Position | None = None
    entries: list[StoredEntry] = field(default_factory=list)
    appends: dict[Position, Position] = field(default_factory=dict)
    """The first position of each entry's group."""
    trimmed: dict[str, int] = field(default_factory=dict)
    last_append_ms: int = 0
    instances: dict[str, bytes] = field(default_factory=dict)
    trimmed_through: Position | None = None

    def state(self, topic: TopicName) -> LogState:
        return LogState(
            topic,
            self.incarnation,
            self.ledger_id,
            0,
            self.entries[0].position if self.entries else None,
            self.tail,
            len(self.entries),
            sum(each.entry.message_count for each in self.entries),
            sum(each.size_bytes for each in self.entries),
        )

    def of(self, producer: str) -> list[StoredEntry]:
        """A producer's entries, without markers."""
        return [
            each
            for each in self.entries
            if each.entry.producer == producer and not each.entry.marker
        ]

    def mark(self, producer: str) -> Mark:
        entries = (each.entry for each in self.of(producer))
        return folded(Mark(self.trimmed.get(producer, NEVER)), entries)


class MemoryLedgerStore:
    """See seqgate.services.ledger.ports.LedgerStore."""

    def __init__(self) -> None:
        self.logs: dict[TopicName, _Log] = {}
        self._tombstones: dict[TopicName, int] = {}
        self._leaving: set[TopicName] = set()

    async def create(self, topic: TopicName) -> tuple[LogState, bool]:
        created = topic not in self.logs
        if created:
            before = self._tombstones.pop(topic, 0)
            self._leaving.discard(topic)
            self.logs[topic] = _Log(incarnation=before + 1, ledger_id=before)
        return self.logs[topic].state(topic), created

    async def take(
        self, topic: TopicName, *, create: bool, ledger_id: int | None = None
    ) -> LogState:
        if create:
            await self.create(topic)
        log = self._log(topic, ledger_id)
        log.ledger_id += 1
        return log.state(topic)

    async def append(
        self,
        topic: TopicName,
        ledger_id: int,
        expected_tail: Position | None,
        entries: Sequence[Entry],
        append_ms: int,
        *,
        instances: Mapping[str, bytes] = NO_INSTANCES,
    ) -> None:
        log = self._log(topic)
        if log.ledger_id != ledger_id or log.tail != expected_tail:
            raise Fenced("another writer owns the topic", epoch=log.ledger_id)
        same = log.tail is not None and log.tail.ledger_id == ledger_id
        entry_id = log.tail.entry_id + 1 if same and log.tail else 0
        first = Position(ledger_id, entry_id)
        for entry in entries:
            log.tail = Position(ledger_id, entry_id)
            log.appends[log.tail] = first
            log.entries.append(StoredEntry(log.tail, append_ms, entry, len(entry.payload)))
            entry_id += 1
        log.instances.update(instances)
        log.last_append_ms = append_ms

    async def read(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        entries_max: int,
        bytes_max: int,
        payloads: bool,
    ) -> list[StoredEntry]:
        found: list[StoredEntry] = []
        size_bytes = 0
        for stored in self._log(topic).entries:
            if after is not None and stored.position <= after:
                continue
            size_bytes += stored.size_bytes if payloads else len(stored.entry.metadata)
            if found and (len(found) >= entries_max or size_bytes > bytes_max):
                break
            bare = stored._replace(entry=stored.entry._replace(payload=b""))
            found.append(stored if payloads else bare)
        return found

    async def read_at(
        self, topic: TopicName, positions: Sequence[Position], *, bytes_max: int, payloads: bool
    ) -> list[StoredEntry]:
        wanted = set(positions)
        found: list[StoredEntry] = []
        size_bytes = 0
        for stored in self._log(topic).entries:
            if stored.position not in wanted:
                continue
            size_bytes += stored.size_bytes if payloads else len(stored.entry.metadata)
            if found and size_bytes > bytes_max:
                break
            bare = stored._replace(entry=stored.entry._replace(payload=b""))
            found.append(stored if payloads else bare)
        return found

    async def columns(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        through: Position,
        metadata: bool,
        runs_max: int,
        bytes_max: int,
    ) -> list[Columns]:
        log = self._log(topic)
        wanted = [
            each
            for each in log.entries
            if (after is None or each.position > after) and each.position <= through
        ]
        found: list[Columns] = []
        size_bytes = 0
        for _, run in groupby(wanted, lambda each: log.appends[each.position]):
            columns = columns_of(list(run), metadata=metadata)
            size_bytes += columns.size_bytes
            if found and (len(found) >= runs_max or size_bytes > bytes_max):
                break
            found.append(columns)
        return found

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        found: dict[int, LedgerRange] = {}
        for (ledger_id, entry_id), *_ in self._log(topic).entries:
            first = found[ledger_id].first_entry if ledger_id in found else entry_id
            found[ledger_id] = LedgerRange(ledger_id, first, entry_id)
        return [each for ledger_id, each in found.items() if ledger_id > after][:limit]

    async def count_after(self, topic: TopicName, position: Position | None) -> int:
        entries = self._log(topic).entries
        return sum(1 for each in entries if position is None or each.position > position)

    async def find(
        self, topic: TopicName, producer: str, sequence_ids: Sequence[int], *, uuid: str = ""
    ) -> list[Fate]:
        log = self._log(topic)
        finder = Finder(producer, sequence_ids, uuid)
        for stored in log.entries:
            finder.show(stored)
        trimmed = log.trimmed.get(producer, -1)
        return [
            finder.place(each) or (Missing.TRIMMED if each <= trimmed else Missing.STALE)
            for each in sequence_ids
        ]

    async def goes_on(self, topic: TopicName, producer: str, uuid: str, position: Position) -> bool:
        earlier = (
            each.entry
            for each in reversed(self._log(topic).entries)
            if each.position < position and each.entry.producer == producer
        )
        sequence_id = last_of(uuid, earlier)
        if sequence_id is None:
            return False
        (fate,) = await self.find(topic, producer, [sequence_id], uuid=uuid)
        return goes_on_after(position, fate)

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        entries = self._log(topic).entries
        if not entries or entries[-1].append_ms < append_ms:
            return None
        return next(each.position for each in entries if each.append_ms >= append_ms)

    async def highest(self, topic: TopicName, ledger_id: int, producer: str) -> int | None:
        log = self._log(topic)
        if ledger_id != log.ledger_id:
            raise Fenced("another writer owns the topic", epoch=log.ledger_id)
        decided = log.mark(producer).decided
        return None if decided < 0 else decided

    async def last_append_ms(self, topic: TopicName) -> int:
        return self._log(topic).last_append_ms

    async def trimmed_through(self, topic: TopicName) -> Position | None:
        return self._log(topic).trimmed_through

    async def newest(self, topic: TopicName, producer: str) -> Newest:
        log = self._log(topic)
        trimmed = Mark(log.trimmed.get(producer, NEVER))
        newest_first = [
            each.entry
            for each in reversed(log.entries)
            if each.entry.producer == producer and not each.entry.marker
        ]
        return Newest(
            log.instances.get(producer),
            last_whole(trimmed, newest_first),
            last_open(newest_first),
        )

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        trimmed = sorted(self._log(topic).trimmed.items())
        return [each for each in trimmed if each[0] > after][skip : skip + limit]

    async def replay(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        producers_after: str | None,
        limit: int,
        bytes_max: int,
    ) -> ReplayPage:
        producers: list[tuple[str, int]] = []
        entries: list[StoredEntry] = []
        if producers_after is not None:
            producers = await self.trimmed_producers(topic, after=producers_after, limit=limit)
        if not producers:
            entries = await self.read(
                topic, after, entries_max=limit, bytes_max=bytes_max, payloads=False
            )
        return ReplayPage(self._log(topic).state(topic).start, producers, entries)

    async def get(self, topic: TopicName) -> LogState:
        return self._log(topic).state(topic)

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        names = sorted(str(topic) for topic in self.logs)
        chosen = [name for name in names if name.startswith(prefix) and name > after]
        return [await self.get(TopicName.parse(name)) for name in chosen[:limit]]

    async def trim(
        self,
        topic: TopicName,
        before: Position,
        *,
        ledger_id: int | None = None,
        renewing: bool = False,
        steps_max: int = 0,
    ) -> Trimmed:
        del steps_max  # this store trims in one step
        log = self._log(topic, ledger_id)
        gone = [each for each in log.entries if each.position < before]
        cut = False
        for producer in {each.entry.producer for each in gone if not each.entry.marker}:
            entries = [(each.position, each.entry) for each in log.of(producer)]
            going = [entry for position, entry in entries if position < before]
            mark = folded(Mark(log.trimmed.pop(producer, NEVER)), going)
            decided, is_cut = remembered(mark, (each for at, each in entries if at >= before))
            cut = cut or is_cut
            if decided > NEVER:
                log.trimmed[producer] = decided
        del log.entries[: len(gone)]
        if gone:
            log.trimmed_through = gone[-1].position
        if cut and renewing:
            await self.renew(topic)
        return Trimmed(len(gone), log.state(topic).first)

    async def retained_from(
        self, topic: TopicName, *, appended_since_ms: int | None, bytes_max: int | None
    ) -> Position | None:
        entries = self._log(topic).entries
        size_bytes = sum(each.size_bytes for each in entries)
        for stored in entries:
            old = appended_since_ms is not None and stored.append_ms < appended_since_ms
            if not (old or (bytes_max is not None and size_bytes > bytes_max)):
                return stored.position
            size_bytes -= stored.size_bytes
        if not entries:
            return None
        last = entries[-1].position
        return last._replace(entry_id=last.entry_id + 1)

    async def renew(
        self, topic: TopicName, *, ledger_id: int | None = None, above: int = 0
    ) -> LogState:
        log = self._log(topic, ledger_id)
        log.ledger_id = max(log.ledger_id, above) + 1
        log.incarnation = log.ledger_id
        return log.state(topic)

    async def reserve(self, topic: TopicName, above: int) -> None:
        if topic not in self.logs:
            self._tombstones[topic] = max(self._tombstones.get(topic, 0), above)

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        log = self._log(topic)
        return any(
            is_cut(
                log.mark(producer),
                ((each.position, each.entry) for each in reversed(log.of(producer))),
                before,
            )
            for producer in {each.entry.producer for each in log.entries}
        )

    async def delete(
        self, topic: TopicName, *, ledger_id: int | None = None, leaves_cursors: bool = False
    ) -> None:
        self._tombstones[topic] = self._log(topic, ledger_id).ledger_id
        del self.logs[topic]
        if leaves_cursors:
            self._leaving.add(topic)

    async def leaving(self, *, after: str, limit: int) -> list[TopicName]:
        return sorted((each for each in self._leaving if str(each) > after), key=str)[:limit]

    async def is_leaving(self, topic: TopicName) -> bool:
        return topic in self._leaving

    async def left(self, topic: TopicName) -> None:
        self._leaving.discard(topic)

    async def check(self) -> None:
        return None

    def _log(self, topic: TopicName, ledger_id: int | None = None) -> _Log:
        """A topic's log, if it has the given ledger_id; None: any."""
        log = self.logs.get(topic)
        if log is None:
            raise TopicNotFound("topic not found", topic=topic)
        if ledger_id not in (None, log.ledger_id):
            raise Fenced("another writer owns the topic", epoch=log.ledger_id)
        return log


class MemoryRegister:
    """See seqgate.services.ledger.ports.Register."""

    def __init__(self) -> None:
        self.instances: dict[str, tuple[str, int]] = {}
        self.owners: dict[str, tuple[int, str]] = {}

    async def beat(self, instance: str, address: str) -> list[Beat]:
        _, count = self.instances.get(instance, ("", 0))
        self.instances[instance] = (address, count + 1)
        topics = Counter(owner for _, owner in self.owners.values())
        return [
            Beat(name, address, count, topics[name])
            for name, (address, count) in self.instances.items()
        ]

    async def leave(self, instance: str) -> None:
        self.instances.pop(instance, None)
        for topic in await self.owned(instance):
            del self.owners[topic]

    async def owner(self, topic: TopicName) -> str | None:
        _, owner = self.owners.get(str(topic), (0, None))
        return owner

    async def own(self, topic: TopicName, ledger_id: int, instance: str) -> None:
        before, _ = self.owners.get(str(topic), (0, ""))
        if before <= ledger_id:
            self.owners[str(topic)] = (ledger_id, instance)

    async def disown(self, topic: TopicName, ledger_id: int) -> None:
        before, _ = self.owners.get(str(topic), (0, ""))
        if before <= ledger_id:
            self.owners.pop(str(topic), None)

    async def owned(self, instance: str) -> frozenset[str]:
        return frozenset(topic for topic, (_, owner) in self.owners.items() if owner == instance)
