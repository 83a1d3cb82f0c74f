"""A cursor store in memory, lost when the process ends: dictionaries, copied for each step. For
tests, and the reference for the other adapters."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.sightings import Sightings
from seqgate.services.cursor.core.state import PAGE_ENTRIES, Attempted, Batch, Head
from seqgate.services.cursor.ports import CursorNotFound
from seqgate.types import Position, TopicName

T = TypeVar("T")
K = TypeVar("K", bound=tuple[Any, ...])
V = TypeVar("V")


class _Sorted(Generic[K, V]):
    """A dictionary with its keys in order."""

    def __init__(self, values: Mapping[K, V] | None = None) -> None:
        self.values = dict(values or {})
        self._keys: list[K] = sorted(self.values)

    def put(self, key: K, value: V | None) -> None:
        if not value:
            if key in self.values:
                del self.values[key]
                del self._keys[bisect_left(self._keys, key)]
            return
        if key not in self.values:
            insort(self._keys, key)
        self.values[key] = value

    def after(self, key: K | None) -> Iterator[tuple[K, V]]:
        """The items after a key, as of the call."""
        start = 0 if key is None else bisect_right(self._keys, key)
        return iter([(each, self.values[each]) for each in self._keys[start:]])

    def drop(self, first: K | None, last: K | None) -> int:
        """Remove the items from one key through another. Returns their number."""
        if not self._keys:
            return 0
        start: int = 0 if first is None else bisect_left(self._keys, first)
        end: int = len(self._keys) if last is None else bisect_right(self._keys, last)
        for key in self._keys[start:end]:
            del self.values[key]
        del self._keys[start:end]
        return end - start


class MemoryHoles:
    """See seqgate.services.cursor.core.state.Holes. The topic's cursors share `successions`."""

    def __init__(
        self, successions: dict[Position, Position] | None = None, spent_epoch: int = 0
    ) -> None:
        self.successions = {} if successions is None else successions
        self._spent_epoch = spent_epoch
        self._pages = _Sorted[tuple[int, int], int]()
        self._batches = _Sorted[Position, Batch]()
        self._attempts = _Sorted[Position, tuple[int, bytes]]()

    def copy(self, successions: dict[Position, Position], spent_epoch: int = 0) -> "MemoryHoles":
        holes = MemoryHoles(successions, spent_epoch)
        holes._pages = _Sorted(self._pages.values)
        holes._batches = _Sorted(self._batches.values)
        holes._attempts = _Sorted(self._attempts.values)
        return holes

    def page(self, ledger_id: int, number: int) -> int:
        bits: int = self._pages.values.get((ledger_id, number), 0)
        return bits

    def put_page(self, ledger_id: int, number: int, bits: int) -> None:
        assert bits.bit_length() <= PAGE_ENTRIES
        self._pages.put((ledger_id, number), bits)

    def pages(self, after: Position | None) -> Iterator[tuple[int, int, int]]:
        start = None if after is None else _last_ended(after)
        for (ledger_id, number), bits in self._pages.after(start):
            yield ledger_id, number, bits

    def batch(self, position: Position) -> Batch | None:
        return self._batches.values.get(position)

    def put_batch(self, position: Position, batch: Batch | None) -> None:
        self._batches.put(position, batch)

    def batches(self, after: Position | None) -> Iterator[tuple[Position, Batch]]:
        return self._batches.after(after)

    def attempts(self, position: Position) -> int:
        count: int = self._attempts.values.get(position, (0, b""))[0]
        return count

    def note(self, position: Position) -> bytes:
        note: bytes = self._attempts.values.get(position, (0, b""))[1]
        return note

    def put_attempts(self, position: Position, count: int, note: bytes = b"") -> None:
        self._attempts.put(position, (count, note) if count else None)

    def attempted(self, after: Position | None) -> Iterator[Attempted]:
        for position, counted in self._attempts.after(after):
            yield Attempted(position, *counted)

    def drop_run(self, first: Position, last_entry: int) -> int:
        last = Position(first.ledger_id, last_entry)
        self._attempts.drop(first, last)
        return self._batches.drop(first, last)

    def next_after(self, last: Position) -> Position | None:
        return self.successions.get(last)

    def put_succession(self, last: Position, following: Position) -> None:
        self.successions[last] = following

    def spent_epoch(self) -> int:
        return self._spent_epoch

    def drop_through(self, position: Position | None) -> int:
        self._pages.drop(None, None if position is None else _last_ended(position))
        self._attempts.drop(None, position)
        return self._batches.drop(None, position)


def _last_ended(position: Position) -> tuple[int, int]:
    """The ledger and number of the last page that ends at or before a position."""
    return position.ledger_id, (position.entry_id + 1) // PAGE_ENTRIES - 1


class MemoryCursorStore:
    """See seqgate.services.cursor.ports.CursorStore."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self._now_ms = now_ms
        self._cursors: dict[tuple[str, str], tuple[Head, MemoryHoles]] = {}
        self._successions: dict[TopicName, dict[Position, Position]] = {}
        self._spent: dict[TopicName, int] = {}
        self._sightings = Sightings()

    async def create(
        self,
        topic: TopicName,
        name: str,
        *,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Head, bool]:
        key = str(topic), name
        created = key not in self._cursors
        if created:
            head = Head(topic, name, self._now_ms(), mark_delete, properties=dict(properties))
            self._cursors[key] = head, MemoryHoles()
        head, _ = self._cursors[key]
        return self._seen(head), created

    async def change(self, topic: TopicName, name: str, step: Callable[[CursorState, int], T]) -> T:
        state, successions = self._copied(topic, name, matters=True)
        number = state.head.lease_number
        now_ms = self._now_ms()
        answer = step(state, now_ms)
        if state.head.lease_number != number:
            self._sightings.changed(state.head, now_ms)
        assert isinstance(state.holes, MemoryHoles)
        self._cursors[str(topic), name] = replace(state.head), state.holes
        self._successions[topic] = successions
        return answer

    async def look(
        self, topic: TopicName, name: str, look: Callable[[CursorState], T], *, whole: bool = True
    ) -> T:
        state, _ = self._copied(topic, name)
        if not whole:
            state.head.mark_delete_properties = {}
        return look(state)

    def beside(self, now_ms: Callable[[], int]) -> "MemoryCursorStore":
        """The same cursors, as seen by another process."""
        other = MemoryCursorStore(now_ms)
        other._cursors, other._successions, other._spent = (
            self._cursors,
            self._successions,
            self._spent,
        )
        other.begin()
        return other

    def begin(self) -> None:
        """What the start of a process does: it has seen no lease but those of now."""
        self._sightings = Sightings()
        for head, _ in self._cursors.values():
            if head.lease is not None and not head.lease.is_released:
                self._seen(head)

    def _copied(
        self, topic: TopicName, name: str, *, matters: bool = False
    ) -> tuple[CursorState, dict[Position, Position]]:
        """A copy of a cursor for one step, which may fail halfway."""
        if (str(topic), name) not in self._cursors:
            raise _not_found(topic, name)
        head, holes = self._cursors[str(topic), name]
        successions = dict(self._successions.get(topic, {}))
        spent = self._spent.get(topic, 0)
        copied = holes.copy(successions, spent)
        return CursorState(self._seen(head, matters=matters), copied), successions

    def _seen(self, head: Head, *, matters: bool = False) -> Head:
        """A copy of a head, with the lease as this process judges it."""
        lease = self._sightings.judged(head, self._now_ms(), matters=matters)
        return replace(head, lease=lease)

    async def cursors(
        self, topic: TopicName | None, *, after: tuple[str, str], limit: int
    ) -> list[Head]:
        wanted = None if topic is None else str(topic)
        keys = sorted(key for key in self._cursors if key > after and wanted in (None, key[0]))
        heads = (self._cursors[key][0] for key in keys[:limit])
        return [replace(self._seen(head), mark_delete_properties={}) for head in heads]

    async def delete(self, topic: TopicName, name: str, *, created_ms: int | None = None) -> None:
        found = self._cursors.get((str(topic), name))
        if found is None or created_ms not in (None, found[0].created_ms):
            raise _not_found(topic, name)
        del self._cursors[str(topic), name]
        lease = found[0].lease
        if lease is not None:
            self._spent[topic] = max(self._spent.get(topic, 0), lease.epoch)
        if not any(of == str(topic) for of, _ in self._cursors):
            self._successions.pop(topic, None)

    def now_ms(self) -> int:
        return self._now_ms()

    async def check(self) -> None:
        return


def _not_found(topic: TopicName, name: str) -> CursorNotFound:
    return CursorNotFound("cursor not found", topic=topic, cursor=name)
