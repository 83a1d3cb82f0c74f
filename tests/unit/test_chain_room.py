"""Streams share the memory for chains, and take turns when it is too small."""

from collections.abc import Sequence

import pytest

from seqgate.services.filter.core.room import KEPT_S, UNUSED_S, ChainRoom, ChainShare

ROOM = 100


class Streams:
    """Streams that each set a chain, one second apart, and judged with it at once."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.room = ChainRoom(ROOM)
        self.ended: list[int] = []
        self.shares = [self.share(number) for number in range(len(sizes))]
        for number, (share, size) in enumerate(zip(self.shares, sizes, strict=True)):
            assert self.room.take(share, size, 0, number)
            share.judged(number)

    def share(self, number: int) -> ChainShare:
        return ChainShare(lambda: self.ended.append(number))


@pytest.mark.parametrize(
    ("sizes", "size", "ended"),
    [
        ([], 1_000, []),  # alone
        ([40, 60], 0, []),
        ([40, 50], 10, []),
        ([40, 60], 10, [0]),  # the longest idle one
        ([40, 60], 50, [0, 1]),
        ([40, 60], 1_000, [0, 1]),
    ],
)
def test_a_chain_evicts_the_longest_idle_ones(
    sizes: Sequence[int], size: int, ended: Sequence[int]
) -> None:
    streams = Streams(sizes)
    new = streams.share(9)
    assert streams.room.take(new, size, 0, len(sizes) + KEPT_S)
    assert streams.ended == ended
    left = [each for number, each in enumerate(sizes) if number not in ended]
    assert streams.room.used == size + sum(left)


def test_judging_keeps_a_chain_from_eviction() -> None:
    streams = Streams([50, 50])
    streams.shares[0].judged(2)
    assert streams.room.take(streams.share(9), 50, 0, 2 + KEPT_S)
    assert streams.ended == [1]


def test_a_new_chain_is_kept_for_a_while() -> None:
    streams = Streams([ROOM])
    new = streams.share(9)
    assert not streams.room.take(new, 1, 0, KEPT_S / 2)
    assert (streams.ended, streams.room.used) == ([], ROOM)
    assert streams.room.take(new, 1, 0, KEPT_S)


def test_a_chain_is_kept_until_it_judges_or_is_unused_for_too_long() -> None:
    streams = Streams([ROOM])
    second, third = streams.share(1), streams.share(2)
    assert streams.room.take(second, ROOM, 0, KEPT_S)
    assert not streams.room.take(third, 1, 0, KEPT_S + UNUSED_S - 0.1)
    assert streams.room.take(third, 1, 0, KEPT_S + UNUSED_S)
    assert streams.ended == [0, 1]


def test_a_replacing_chain_takes_over_the_memory_of_its_predecessor() -> None:
    streams = Streams([60, 40])
    first = streams.shares[0]
    assert streams.room.take(first, 50, 60, 2)
    assert not streams.room.take(first, 1_000, 50, 1.5)  # the other one is too recent
    assert streams.room.take(first, 1_000, 50, 2)
    assert (streams.ended, streams.room.used) == ([1], 1_000)


def test_the_chains_of_one_stream_stay_within_the_budget() -> None:
    streams = Streams([60, 40])
    first = streams.shares[0]
    assert not streams.room.take(first, 50, 0, 9)
    assert streams.ended == []  # evicting others would not have helped
    assert streams.room.take(first, 40, 0, 9)
    assert streams.ended == [1]


def test_released_memory_is_free() -> None:
    streams = Streams([60, 40])
    for share in streams.shares:
        streams.room.give(share)
        streams.room.give(share)
    assert streams.room.used == 0
