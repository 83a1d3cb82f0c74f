"""Which messages a redrive of many takes, and large ones whole
(services/dispatcher/redrives/selecting.py)."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.chains import NO_FILTERS
from seqgate.services.dispatcher.letters.record import RedriveOutcome, Selection
from seqgate.services.dispatcher.letters.returns import RETURNS_MAX
from seqgate.services.dispatcher.redrives import selecting
from seqgate.services.dispatcher.redrives.selecting import Candidate, Selecting
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("test/selecting/topic")


class Replayed:
    """A topic, of whose entries a replay takes all: a word for each entry, like "a0/2", chunk 0 of
    2 of the message a, or "a", which is no chunk."""

    def __init__(self, log: str) -> None:
        self.entries = [self._stored(*each) for each in enumerate(log.split())]

    def _stored(self, number: int, word: str) -> StoredEntry:
        metadata = entry_pb2.EntryMetadata(producer_name="p", uuid=word[0])
        if len(word) > 1:
            chunk, _, count = word[1:].partition("/")
            metadata.chunk_id, metadata.num_chunks_from_msg = int(chunk), int(count)
        place = common_pb2.Position(ledger_id=1, entry_id=number)
        return StoredEntry(position=place, metadata=metadata)

    async def scan(
        self, topic: TopicName, at: Position | None, after: Position | None, limit: int
    ) -> Sequence[StoredEntry]:
        first = at.entry_id if at is not None else 0 if after is None else after.entry_id + 1
        return self.entries[first:][:limit]

    async def last_before(self, topic: TopicName, ledger_id: int) -> None:
        """There is no earlier ledger."""

    async def taken(self, after: int = -1) -> tuple[list[Candidate], list[int]]:
        """The candidates after an entry, and how many entries were judged at a time."""
        of: Any = SimpleNamespace(topic=TOPIC, chain=NO_FILTERS)
        log: Any = self
        judge = Selecting(of, log, TOPIC, Selection()).judge
        left, found, counts = self.entries[after + 1 :], list[Candidate](), list[int]()
        while left:
            judged = await judge(left)
            found += judged.candidates
            counts.append(judged.read)
            left = left[judged.read :]
        return found, counts


def parts_of(found: list[Candidate]) -> list[list[int]]:
    return [[position.entry_id for position in each.parts] for each in found]


@pytest.mark.parametrize("after", [-1, 0, 1, 2])
async def test_a_large_message_is_taken_at_its_last_chunk_wherever_reading_began(
    after: int,
) -> None:
    found, _ = await Replayed("a0/3 b0/2 a1/3 x b1/2 a2/3").taken(after)
    assert parts_of(found) == [[3], [1, 4], [0, 2, 5]]
    assert [position_of(each.entry).entry_id for each in found] == [3, 4, 5]
    assert {each.outcome for each in found} == {None}


@pytest.mark.parametrize("after", [-1, 1, 2])
async def test_of_a_message_that_was_sent_twice_the_chunks_of_one_attempt_are_taken(
    after: int,
) -> None:
    found, _ = await Replayed("a0/3 a1/3 a0/3 a1/3 a2/3").taken(after)
    assert parts_of(found) == [[2, 3, 4]]


async def test_a_message_that_lacks_chunks_or_has_too_many_is_left_out() -> None:
    many = RETURNS_MAX + 1
    found, _ = await Replayed(f"a1/3 a2/3 b{many - 1}/{many} c0/2").taken()
    outcomes = [each.outcome for each in found]
    assert outcomes == [RedriveOutcome.INCOMPLETE, RedriveOutcome.TOO_LARGE]
    assert parts_of(found) == [[], []]


async def test_the_chunks_that_are_judged_at_once_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert selecting.CHUNKS_BYTES_MAX == 4 * 1024 * 1024
    log = Replayed("a0/2 b0/2 x a1/2 y b1/2 z")
    whole, counts = await log.taken()
    assert counts == [7]
    monkeypatch.setattr(selecting, "CHUNKS_BYTES_MAX", 1)
    cut, counts = await log.taken()
    assert counts == [4, 2, 1]
    assert parts_of(cut) == parts_of(whole) == [[2], [0, 3], [4], [1, 5], [6]]
