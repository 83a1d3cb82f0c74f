"""Letters on their way back, as they are kept in the cursor (letters/returns.py)."""

from typing import Any

import pytest

from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.core.effects import FailedDelivery, How
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.letters.returns import Return, Returns
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("test/returns/topic")
LETTERS = TopicName.parse("test/returns/letters")
FIRST, SECOND, THIRD = (Position(1, number) for number in range(3))


@pytest.mark.parametrize("last", [None, THIRD])
@pytest.mark.parametrize("failures", [(), (FailedDelivery(How.REFUSED, 5, "c", "why"),)])
def test_a_return_is_read_as_it_was_written(
    last: Position | None, failures: tuple[FailedDelivery, ...]
) -> None:
    made = Return(LETTERS, FIRST, 7, 3, 0b101, len(failures), failures, last)
    assert Return.from_text(made.to_text()) == made


async def test_a_reset_into_a_large_message_takes_back_all_its_returns() -> None:
    """The log delivers no rest of it: consumers would wait for that for ever."""
    cursors = MemoryCursors()
    chunks = (FIRST, SECOND)
    put = {f"seqgate.return.{each}": Return(LETTERS, each, 1, 1, last=SECOND) for each in chunks}
    put[f"seqgate.return.{THIRD}"] = Return(LETTERS, THIRD, 1, 1)
    await cursors.create(TOPIC, "s", None, {name: each.to_text() for name, each in put.items()})
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    unread: Any = None
    returns = Returns(Tenure(cursors, TOPIC, "s", "me", lease.epoch, 60_000), unread)
    acknowledged = Acknowledged(FIRST)
    acknowledged.add(THIRD)
    cursor = await cursors.get(TOPIC, "s")
    await returns.load(cursor, acknowledged)
    assert returns.open.keys() == {THIRD}
    assert (await cursors.get(TOPIC, "s")).properties.keys() == {f"seqgate.return.{THIRD}"}
