"""Deliveries, turned into responses (services/dispatcher/shell/sending.py), and their budget."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from seqgate.services.dispatcher.core.effects import SubscriptionType
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.runtime.room import Room, Share
from seqgate.types import Position
from tests.simulation.defects import find
from tests.support.shells import Peer, Shell, positions, shell, until, virtually

KB = bytes(1_000)


async def _evicted() -> None:
    """Some entries to send are cached, and evicted while the others are fetched."""
    async with shell(Random(7), cache_bytes_max=20_000) as it:
        held, fetch_some = asyncio.Event(), it.log.fetch_some

        async def when_told(*asked: Any, **how: Any) -> Any:
            await held.wait()
            return await fetch_some(*asked, **how)

        it.log.fetch_some = when_told  # type: ignore[method-assign]
        peer = await it.join()
        peer.reading.clear()
        peer.session.permit(200)
        for entries in (60, 40):
            for _ in range(entries):
                it.log.append(b"k", KB)
            while it.live.machine.read_position != position_of(it.log.entries[-1]):
                await asyncio.sleep(0.001)
            peer.reading.set()
        held.set()
        await until(peer, lambda: positions(peer.got)[-1:] == [99])
        assert positions(peer.got) == list(range(100))
        assert it.live.machine.totals["passed_entries"] == 0


def test_entries_evicted_during_a_fetch_are_fetched_too() -> None:
    virtually(_evicted)


async def _trimmed() -> None:
    """The log is trimmed while its entries are in transit to a consumer."""
    async with shell(Random(7), cache_bytes_max=0) as it:
        peer = await it.join()
        peer.reading.clear()
        peer.session.permit(4)
        it.log.longest_s = 0.01
        for _ in range(5):
            it.log.append(b"k", KB)
        while it.live.machine.read_position != Position(1, 4):
            await asyncio.sleep(0.0001)
        it.log.trim(3)
        peer.reading.set()
        await until(peer, lambda: positions(peer.got)[-1:] == [4])
        gone = it.live.machine.totals["passed_entries"]
        assert gone > 0
        assert positions(peer.got) == [*range(3 - gone), 3, 4]
        assert peer.session.permits == 4 - len(peer.got)
        peer.acknowledge(*peer.got)
        while await it.mark_delete() != Position(1, 4):
            await asyncio.sleep(0.001)


def test_trimmed_entries_are_acknowledged_counted_and_take_no_permit() -> None:
    virtually(_trimmed)


async def _fetching(entries: int, size_bytes: int, **settings: Any) -> Shell:
    """A consumer that starts to read late, without a cache."""
    async with shell(Random(7), cache_bytes_max=0, **settings) as it:
        for _ in range(entries):
            it.log.append(b"k", bytes(size_bytes))
        peer = await it.join()
        peer.session.permit(entries)
        await until(peer, lambda: len(peer.got) == entries)
        assert positions(peer.got) == list(range(entries))
        return it


def test_fetched_bytes_of_a_consumer_stay_within_its_stream_limit() -> None:
    async def main() -> None:
        it = await _fetching(100, 50_000, stream_bytes_max=200_000)
        assert max(size_bytes for _, size_bytes in it.log.fetched) <= 200_000
        assert it.live.room.peak_bytes <= 400_000
        assert it.live.room.used_bytes == 0

    virtually(main)


def test_an_entry_of_any_size_is_sent_alone() -> None:
    async def main() -> None:
        it = await _fetching(5, 50_000, stream_bytes_max=1, streams_bytes_max=1)
        assert {asked for asked, _ in it.log.fetched} == {1}

    virtually(main)


def test_entries_of_many_keys_out_of_order_are_fetched_in_few_calls() -> None:
    async def main() -> None:
        async with shell(Random(7), cache_bytes_max=0, stream_bytes_max=400_000) as it:
            for each in range(300):
                it.log.append(b"key-%d" % (each % 7), bytes(10_000))
            peer = await it.join()
            peer.session.permit(300)
            await until(peer, lambda: len(peer.got) == 300)
            assert len(it.log.fetched) <= 40
            assert sum(size_bytes for _, size_bytes in it.log.fetched) <= 1.3 * 300 * 10_100

    virtually(main)


async def _left_out() -> int:
    """Entries exceed the limit of a stream, and are delivered in another order than the log's.
    Returns the most bytes that the stream holds during a fetch."""
    async with shell(Random(7), cache_bytes_max=0, stream_bytes_max=8_000) as it:
        for each in range(60):
            it.log.append(b"key-%d" % (each % 7), bytes(10_000 if each % 2 else 1_000))
        peer, fetch_some, taken = await it.join(), it.log.fetch_some, list[int]()

        async def noting(*asked: Any, **how: Any) -> Any:
            taken.append(peer.session._share.size_bytes)
            return await fetch_some(*asked, **how)

        it.log.fetch_some = noting  # type: ignore[method-assign]
        peer.session.permit(60)
        await until(peer, lambda: len(peer.got) == 60)
        return max(taken)


def test_an_entry_above_the_stream_limit_is_fetched_alone() -> None:
    async def main() -> None:
        assert await _left_out() <= 10_100

    virtually(main)


async def _stalled() -> tuple[Peer, Peer, Shell]:
    """One consumer does not read and takes up the whole budget, and another one waits."""
    settings: dict[str, Any] = {
        "streams_bytes_max": 40_000,
        "slow_consumer_s": 2,
        "cache_bytes_max": 0,
    }
    async with shell(Random(7), **settings) as it:
        for _ in range(30):
            it.log.append(b"k", bytes(10_000))
        one = await it.join(kind=SubscriptionType.SHARED)
        one.reading.clear()
        one.session.permit(10)
        await asyncio.sleep(0.05)
        two = await it.join(kind=SubscriptionType.SHARED)
        two.session.permit(30)
        await until(two, lambda: len(two.got) == 30)
        return one, two, it


def test_a_slow_reader_is_cut_off_when_others_wait_and_they_get_everything() -> None:
    async def main() -> None:
        one, two, _ = await _stalled()
        assert one.has_ended
        assert sorted(positions(two.got)) == list(range(30))

    virtually(main)


def test_a_failed_fetch_frees_its_budget() -> None:
    async def main() -> None:
        async with shell(Random(7), cache_bytes_max=0) as it:
            it.log.append(b"k", KB)
            peer = await it.join()
            peer.session.permit(1)
            it.log.fails = 0.0
            fetch_some = it.log.fetch_some
            used: list[int] = []

            async def failing(*asked: Any, **how: Any) -> Any:
                if len(used) < 3:
                    used.append(it.live.room.used_bytes)
                    it.log.fails = 1.0
                else:
                    it.log.fails = 0.0
                return await fetch_some(*asked, **how)

            it.log.fetch_some = failing  # type: ignore[method-assign]
            await until(peer, lambda: len(peer.got) == 1)
            assert used == [used[0]] * 3

    virtually(main)


def test_waiters_for_budget_are_served_in_order_and_cancel_cleanly() -> None:
    async def main() -> None:
        room = Room(100, slow_s=1)
        first, second, third = (room.share(lambda: None) for _ in range(3))
        await first.take(100)
        order: list[Share] = []

        async def wait(share: Share) -> None:
            await share.take(60)
            order.append(share)
            share.give_all()

        waiting = [asyncio.create_task(wait(each)) for each in (second, third)]
        await asyncio.sleep(0)
        assert not room.share(lambda: None).try_take(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        first.give_all()
        await waiting[1]
        assert order == [third]
        assert room.used_bytes == 0

    virtually(main)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("id_", "shown"),
    [
        ("A1", test_entries_evicted_during_a_fetch_are_fetched_too),
        ("B1", test_fetched_bytes_of_a_consumer_stay_within_its_stream_limit),
    ],
)
def test_a_defect_of_sending_is_found(
    id_: str, shown: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(id_).apply(monkeypatch)
    with pytest.raises(AssertionError):
        shown()
