"""A subscription's shells over a slow and failing log and cursor store with small pages: no
decision made before an await may be trusted after it."""

import asyncio
from random import Random
from typing import Any

import pytest

from seqgate.services.dispatcher.core.effects import SubscriptionType
from seqgate.types import Position
from tests.simulation.defects import find
from tests.support.depth import times
from tests.support.shells import Peer, Shell, positions, shell, virtually

HISTORIES = times(quick=60, full=150)

LIMIT_S = 600.0
"""The limit of a history, in virtual seconds."""

ENTRIES = 60


def small(random: Random) -> dict[str, Any]:
    """Draw limits, tiny or large."""
    return {
        "key_parked_max": random.choice((1, 3, 1_000)),
        "consumer_parked_max": random.choice((2, 12, 20_000)),
        "read_entries_max": random.choice((1, 7, 500)),
        "cache_bytes_max": random.choice((0, 700, 3_000, 1_000_000)),
        "caches_bytes_max": random.choice((1_000, 1_000_000)),
        "stream_bytes_max": random.choice((1, 2_000, 1_000_000)),
        "streams_bytes_max": random.choice((1, 3_000, 1_000_000)),
        "slow_consumer_s": 1,
    }


async def history(random: Random) -> None:
    """Consumers join and leave, acknowledge, refuse and stop reading. Then the faults end, and
    every entry is delivered and acknowledged.

    Raises:
        AssertionError: an entry was acknowledged by no consumer, or the cache exceeds its limit.
    """
    settings = small(random)
    async with shell(random, **settings) as it:
        it.log.page_entries = random.choice((1, 3, 500))
        it.log.longest_s = random.choice((0.0, 0.05))
        it.log.fails = random.choice((0.0, 0.2))
        it.cursors.longest_s = random.choice((0.0, 0.05))
        it.cursors.fails = random.choice((0.0, 0.2))
        kind = random.choice(list(SubscriptionType))
        done: set[int] = set()
        peers: list[Peer] = []
        for _ in range(ENTRIES):
            await _something_happens(it, random, kind, peers, done)
            _check(it, settings, done)
        it.log.fails = it.cursors.fails = 0.0
        for peer in peers:
            peer.reading.set()
        while len(done) < len(it.log.entries):
            peers[:] = [each for each in peers if not each.has_ended]
            if not peers:
                peers.append(await it.join(kind=kind))
            for peer in peers:
                peer.session.permit(5)
                _acknowledge(peer, done, list(peer.waiting.values()))
            await asyncio.sleep(0.05)
            _check(it, settings, done)
        last = Position(1, len(it.log.entries) - 1)
        while it.log.entries and await it.mark_delete() != last:
            await asyncio.sleep(0.05)
        assert it.live.machine.totals["passed_entries"] == 0


async def _something_happens(
    it: Shell, random: Random, kind: SubscriptionType, peers: list[Peer], done: set[int]
) -> None:
    peers[:] = [each for each in peers if not each.has_ended]
    may_join = not peers or (kind is not SubscriptionType.EXCLUSIVE and len(peers) < 3)
    if may_join and random.random() < 0.3:
        peers.append(await it.join(kind=kind))
    for _ in range(random.randint(0, 3)):
        it.log.append(b"key-%d" % random.randrange(4), bytes(random.choice((0, 100, 1_000))))
    if peers:
        peer = random.choice(peers)
        some = random.sample(list(peer.waiting.values()), random.randint(0, len(peer.waiting)))
        match random.randrange(8):
            case 0:
                peer.negative_acknowledge(*some)
            case 1:
                peer.reading.clear()
            case 2:
                peer.reading.set()
            case 3:
                peer.vanish()
                peers.remove(peer)
            case 4 | 5:
                _acknowledge(peer, done, some)
            case _:
                peer.session.permit(random.randint(1, 20))
    await asyncio.sleep(random.choice((0.0, 0.01, 0.05)))


def _acknowledge(peer: Peer, done: set[int], some: list[Any]) -> None:
    if some and not peer.has_ended:
        peer.acknowledge(*some)
        done.update(positions(some))


def _check(it: Shell, settings: dict[str, Any], done: set[int]) -> None:
    machine = it.live.machine
    for at, entry in enumerate(it.log.entries):
        if Position(1, at) in machine.acknowledged:
            assert at in done, f"{at} is acknowledged, but by no consumer: {entry}"
    assert all(each.permits >= 0 for each in machine.consumers.values())
    assert it.live.cache_bytes <= settings["cache_bytes_max"]


@pytest.mark.parametrize("part", range(3))
def test_every_entry_is_delivered_and_acknowledged_under_the_smallest_limits(
    seed: int, part: int
) -> None:
    size = HISTORIES // 3
    for each in range(seed + part * size, seed + (part + 1) * size):
        _run(each)


def _run(seed: int) -> None:
    try:
        virtually(lambda: history(Random(seed)), seed, LIMIT_S)
    except BaseException as error:
        raise AssertionError(f"history({seed}): {type(error).__name__}: {error}") from error


@pytest.mark.deep
@pytest.mark.parametrize("id_", ["A1", "F11"])
def test_a_defect_of_the_shells_is_found(
    seed: int, id_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(id_).apply(monkeypatch)
    for each in range(seed, seed + HISTORIES):
        try:
            _run(each)
        except AssertionError:
            return
    pytest.fail(f"no history finds {id_}")
