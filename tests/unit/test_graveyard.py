"""What a subscription remembers of its dead letters: services/dispatcher/dead.py."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.types import Position, TopicName
from services.dispatcher import dead
from services.dispatcher.adapters.memory import MemoryCursors
from services.dispatcher.core.effects import AfterDeadLetter, DeadLetter
from services.dispatcher.core.positions import Acknowledged
from services.dispatcher.dead import BURIED_MAX, Graveyard
from services.dispatcher.ports import Letter

TOPIC = TopicName.parse("test/dead/topic")
DLQ = TopicName.parse("test/dead/topic-s-DLQ")


class Everything:
    """A log that has every entry, and a dead letter topic that takes every letter."""

    def __init__(self) -> None:
        self.put_: list[Position] = []

    async def fetch(
        self, topic: TopicName, positions: Iterable[Position]
    ) -> Sequence[ledger_pb2.StoredEntry]:
        return [
            ledger_pb2.StoredEntry(position=entry_pb2.Position(ledger_id=each[0], entry_id=each[1]))
            for each in positions
        ]

    async def put(self, letter: Letter) -> bool:
        at = letter.entry.position
        self.put_.append(Position(at.ledger_id, at.entry_id))
        return True


async def opened(cursors: MemoryCursors, everything: Any) -> Graveyard:
    """That of who has the subscription now."""
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    graveyard = Graveyard(TOPIC, "s", cursors, everything, everything)
    await graveyard.load(await cursors.get(TOPIC, "s"), lease.epoch, Acknowledged(None))
    return graveyard


async def bury(graveyard: Graveyard, count: int) -> list[Position]:
    """So many entries die, one after the other."""
    positions = [Position(1, entry_id) for entry_id in range(count)]
    for position in positions:
        await graveyard.bury(DeadLetter(position, b"k", 1, AfterDeadLetter.CONTINUE))
        graveyard.acknowledged([position])
        await graveyard.tidy()
    return positions


async def test_of_the_last_letters_it_is_remembered_where_they_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BURIED_MAX == 10_000
    monkeypatch.setattr(dead, "BURIED_MAX", 3)
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    graveyard = await opened(cursors, everything)
    positions = await bury(graveyard, 5)
    assert everything.put_ == positions
    assert graveyard.buried == dict.fromkeys(positions[-3:], DLQ)


async def test_who_takes_the_subscription_over_does_not_know_where_letters_went() -> None:
    cursors, everything = MemoryCursors(), Everything()
    await cursors.create(TOPIC, "s", None, {})
    before = await opened(cursors, everything)
    positions = await bury(before, 2)
    assert list(before.buried) == positions
    assert not (await opened(cursors, everything)).buried
