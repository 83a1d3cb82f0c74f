"""P7: whatever Redis loses, and whenever snapshots are taken, the rebuilt state is the fold.

The log has any entries: messages, batches, chunks that continue a message and chunks that do not,
ids that decrease because deduplication was off for a while. The service reads it page by page, with
real snapshots and recovery, over stores in memory with losses drawn by hypothesis.
"""

import asyncio
import copy
from collections.abc import Coroutine, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.core.policy import EffectivePolicy, Source, Sourced
from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.services.dedup.core.snapshot import decode
from seqgate.services.dedup.service import Deduplication
from seqgate.services.dedup.snapshots import Snapshots
from seqgate.services.deduplication import Behind, Confirmation, ProducerEntries, Writer
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import DEDUP_CURSOR, Chunk, Position, TopicName
from tests.support.depth import times
from tests.support.policies import FixedPolicies

TOPIC = TopicName.parse("test/recovery/topic")
INCARNATION = 3
PAGE = 4

Logged = tuple[str, int, Chunk | None]

entries = st.tuples(
    st.sampled_from(("a", "b", "#c")),
    st.integers(0, 6),
    st.none()
    | st.builds(
        lambda uuid, chunk_id: Chunk(uuid, chunk_id, 3, 30),
        st.sampled_from(("one", "two")),
        st.integers(0, 2),
    ),
)
whole_messages = st.builds(
    lambda name, sequence_id, uuid: [
        (name, sequence_id, Chunk(uuid, chunk_id, 3, 30)) for chunk_id in range(3)
    ],
    st.sampled_from(("a", "b")),
    st.integers(0, 6),
    st.sampled_from(("one", "two")),
)
logs = st.lists(entries.map(lambda entry: [entry]) | whole_messages, min_size=1, max_size=15).map(
    lambda parts: [entry for part in parts for entry in part]
)
happenings = st.sampled_from(
    ("confirm", "confirm", "confirm", "snapshot", "forget", "copy", "go back", "restart")
)


class Service:
    """A dedup service, and the writer of its only topic."""

    def __init__(self, log: list[Logged], every: int, tasks: asyncio.TaskGroup) -> None:
        self.log = log
        self.end = 0
        self.store = MemoryStateStore()
        self.cursors = MemoryCursors()
        self.copies: list[Any] = [None]
        self._policies = FixedPolicies(
            EffectivePolicy(snapshot_entries=Sourced(every, Source.TOPIC))
        )
        self._tasks = tasks
        self.restart()

    def restart(self) -> None:
        """Replace the process, which loses its memory."""
        self.snapshots = Snapshots(self.store, self.cursors, self._policies, self._tasks)
        self._dedup = Deduplication(self.store, self._policies, self.snapshots)

    async def happen(self, what: str) -> None:
        match what:
            case "confirm":
                self.end = min(self.end + 1, len(self.log))
                await self.recover()
            case "snapshot":
                await self.snapshots.take(TOPIC)
            case "forget":
                self.store.states.clear()
            case "copy":
                self.copies.append(copy.deepcopy(self.store.states.get(TOPIC)))
            case "go back" if (state := copy.deepcopy(self.copies[-1])) is not None:
                self.store.states[TOPIC] = state
            case "restart":
                self.restart()

    async def recover(self) -> None:
        """Act as a writer: name the end of the log, and confirm what the state lacks."""
        tail = _position(self.end - 1) if self.end else None
        writer = Writer(INCARNATION, 5, tail)
        while isinstance(behind := await self._dedup.rollback(TOPIC, writer, None, []), Behind):
            first = 0 if behind.confirmed is None else _index(behind.confirmed) + 1
            last = min(first + PAGE, self.end) - 1
            confirmation = Confirmation(
                behind.confirmed,
                _position(last),
                tuple(_of_producers(self.log[first : last + 1])),
                last + 1 - first,
                self.end - 1 - last,
            )
            await self._dedup.confirm(TOPIC, writer, confirmation)

    def check(self) -> None:
        """The state equals the fold over the log it covers."""
        state = self.store.states.get(TOPIC)
        if state is not None and state.confirmed is not None:
            marks = {name: each.marks for name, each in state.producers.items()}
            assert _stored(marks) == _fold(self.log[: _index(state.confirmed) + 1])


def _position(index: int) -> Position:
    """A position in a log of seven entries per ledger."""
    return Position(1 + index // 7, index % 7)


def _index(position: Position) -> int:
    return (position.ledger_id - 1) * 7 + position.entry_id


def _of_producers(log: list[Logged]) -> Iterator[ProducerEntries]:
    for name in dict.fromkeys(producer for producer, _, _ in log):
        own = [(highest, chunk) for producer, highest, chunk in log if producer == name]
        chunks = {place: chunk for place, (_, chunk) in enumerate(own) if chunk is not None}
        yield ProducerEntries(name, tuple(highest for highest, _ in own), 0, chunks)


def _fold(log: list[Logged]) -> dict[str, Marks]:
    marks: dict[str, Marks] = {}
    for producer, highest, chunk in log:
        marks[producer] = advance(marks.get(producer, Marks()), highest, chunk)
    return _stored(marks)


def _stored(marks: dict[str, Marks]) -> dict[str, Marks]:
    """The marks without producers whose only entries are chunks that continue nothing."""
    return {name: each for name, each in marks.items() if each != Marks()}


async def _played(log: list[Logged], every: int, story: list[str]) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = Service(log, every, tasks)
        for what in story:
            await service.happen(what)
            service.check()
        service.end = len(log)
        await service.recover()
        state = service.store.states[TOPIC]
        assert state.confirmed == _position(len(log) - 1)
        service.check()
        await service.snapshots.take(TOPIC)
        await _check_snapshot(service)


async def _check_snapshot(service: Service) -> None:
    cursor = await service.cursors.get(TOPIC, DEDUP_CURSOR, whole=True)
    assert cursor is not None
    assert cursor.mark_delete is not None
    read = decode(cursor.mark_delete_properties, now_ms=0)
    assert read.is_of(INCARNATION, cursor.mark_delete)
    fold = _fold(service.log[: _index(cursor.mark_delete) + 1])
    assert {each.producer: (each.highest, each.unfinished) for each in read.producers} == {
        name: (marks.persisted, marks.persisted_chunk) for name, marks in fold.items()
    }


def _run(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner() as runner:
        runner.run(story)


@settings(max_examples=times(quick=80, full=400), deadline=None, derandomize=True)
@given(log=logs, every=st.integers(0, 5), story=st.lists(happenings, max_size=40))
def test_lost_state_is_rebuilt_unchanged(log: list[Logged], every: int, story: list[str]) -> None:
    _run(_played(log, every, story))
