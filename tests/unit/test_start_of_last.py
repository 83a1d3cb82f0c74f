"""Where the last entries of a topic start."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.client._log import start_of_last
from seqgate.types import Position


class Log:
    """Entries by ledger, the first `trimmed` of them removed."""

    def __init__(self, ledgers: list[int], trimmed: int = 0) -> None:
        self.positions = [
            Position(ledger_id, entry_id)
            for ledger_id, size in enumerate(ledgers, start=1)
            for entry_id in range(size)
        ][trimmed:]
        self.asked = 0

    async def start_of_last(self, count: int) -> Position:
        async def following(position: Position) -> list[Position]:
            self.asked += 1
            index = bisect_left(self.positions, position)
            return self.positions[index : index + count]

        return await start_of_last(
            count,
            first=self.positions[0],
            last=self.positions[-1],
            entries=len(self.positions),
            following=following,
        )


@pytest.mark.parametrize(
    ("count", "start", "asked"),
    [
        (1, (6, 2), 0),
        (3, (6, 0), 0),  # the whole last ledger: no call is needed
        (4, (4, 1), None),
        (6, (3, 4), None),
        (10, (3, 0), 0),  # all entries
        (11, (3, 0), 0),
    ],
)
async def test_the_tail_starts_this_many_entries_before_the_end(
    count: int, start: tuple[int, int], asked: int | None
) -> None:
    log = Log([0, 0, 5, 2, 0, 3])
    assert await log.start_of_last(count) == start
    assert asked is None or log.asked == asked


@given(
    ledgers=st.lists(st.integers(0, 40), max_size=12).filter(lambda sizes: sum(sizes) > 0),
    data=st.data(),
)
async def test_the_tail_has_the_requested_number_of_entries(
    ledgers: list[int], data: st.DataObject
) -> None:
    trimmed = data.draw(st.integers(0, sum(ledgers) - 1))
    log = Log(ledgers, trimmed)
    count = data.draw(st.integers(1, len(log.positions) + 1))

    start = await log.start_of_last(count)

    assert start == log.positions[max(0, len(log.positions) - count)]


async def test_a_large_log_needs_few_calls() -> None:
    log = Log([30_000, *[1] * 1_000, 2])
    assert await log.start_of_last(2_000) == (1, 30_000 - 998)
    assert log.asked < 30
