"""A cursor ahead of its log (services/dispatcher/cursor/resuming.py)."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    Because,
    DeadLetter,
    FailedEntry,
    Persist,
)
from seqgate.services.dispatcher.core.positions import runs_of
from seqgate.types import Position
from tests.simulation.defects import find
from tests.support.shells import NAME, TOPIC, Shell, positions, shell, until, virtually


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


async def _said(it: Shell, *entries: int, parts: Sequence[tuple[Position, int, int]] = ()) -> None:
    persist = Persist(0, runs_of(map(at, entries)), tuple(parts), ())
    await it.cursors.persist(TOPIC, NAME, persist, it.live.epoch)
    await it.live.load()


async def _delivered(it: Shell, expected: list[int]) -> None:
    peer = await it.join()
    peer.session.permit(100)
    await until(peer, lambda: len(peer.got) >= len(expected))
    assert positions(peer.got) == expected
    peer.acknowledge(*peer.got)
    last = at(len(it.log.entries) - 1)
    while await it.mark_delete() != last:
        await asyncio.sleep(0.01)


async def _beyond() -> None:
    """The cursor's mark-delete position is beyond the end of the log, and the log continues."""
    async with shell(Random(7)) as it:
        it.log.append(b"k")
        await it.cursors.reset(TOPIC, NAME, at(100), it.live.epoch)
        await it.live.load()
        assert await it.mark_delete() == at(0)
        for _ in range(200):
            it.log.append(b"k")
        peer = await it.join()
        peer.session.permit(200)
        await until(peer, lambda: len(peer.got) == 200)
        assert positions(peer.got) == list(range(1, 201))


def test_entries_stored_below_a_cursor_ahead_of_the_log_are_delivered() -> None:
    virtually(_beyond)


async def _nothing_stored() -> None:
    """The log never had an entry."""
    async with shell(Random(7), at(100)) as it:
        assert await it.mark_delete() is None
        it.log.append(b"k")
        await _delivered(it, [0])


def test_the_first_entry_below_a_cursor_ahead_of_the_log_is_delivered() -> None:
    virtually(_nothing_stored)


async def _no_topic() -> None:
    """The topic does not exist yet, or its log was lost."""
    async with shell(Random(7)) as it:
        it.log.is_missing = True
        await it.cursors.reset(TOPIC, NAME, at(1), it.live.epoch)
        await it.live.load()
        assert await it.mark_delete() is None
        it.log.is_missing = False
        it.log.append(b"k")
        await _delivered(it, [0])


def test_a_cursor_of_a_missing_topic_skips_no_entry_that_is_stored_later() -> None:
    virtually(_no_topic)


async def _single_ones() -> None:
    """Some acknowledged entries and messages, and some attempts, are beyond the end; the others are
    kept."""
    async with shell(Random(7)) as it:
        for _ in range(6):
            it.log.append(b"k", num_messages_in_batch=2)
        counted = [FailedEntry(at(3), 1), FailedEntry(at(8), 7)]
        await it.cursors.record(TOPIC, NAME, counted, it.live.epoch)
        parts = [(at(4), 2, 0b01), (at(9), 2, 0b01)]
        await _said(it, 1, 2, 5, 6, 7, 11, parts=parts)
        found = [each async for each in it.cursors.acknowledged(TOPIC, NAME)]
        assert found == [(at(1), 2), (at(5), 5), parts[0]]
        assert [each async for each in it.cursors.attempts(TOPIC, NAME)] == counted[:1]
        for _ in range(6):
            it.log.append(b"k")
        await _delivered(it, [0, 3, 4, 6, 7, 8, 9, 10, 11])


def test_acknowledgements_within_the_log_are_kept() -> None:
    virtually(_single_ones)


async def _within() -> None:
    """Everything is within the log, whose beginning is trimmed."""
    async with shell(Random(7)) as it:
        for _ in range(4):
            it.log.append(b"k")
        it.log.trim(3)
        await it.cursors.reset(TOPIC, NAME, at(1), it.live.epoch)
        await _said(it, 3)
        assert await it.mark_delete() == at(1)
        assert at(3) in it.live.machine.acknowledged


def test_a_cursor_within_the_log_is_not_changed() -> None:
    virtually(_within)


@pytest.mark.deep
@pytest.mark.parametrize("shown", [_beyond, _nothing_stored, _no_topic, _single_ones])
def test_a_trusted_cursor_ahead_of_the_log_is_found(
    shown: Callable[[], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    find("A9").apply(monkeypatch)
    with pytest.raises(AssertionError):
        virtually(shown)


async def _moved_back_after_a_letter() -> None:
    """An entry's dead letter is stored and the entry acknowledged, but the letter's number is not
    forgotten yet."""
    async with shell(Random(7)) as it:
        position = it.log.append(b"k")
        await it.live._graveyard.bury(DeadLetter(position, b"k", 1, AfterDeadLetter.CONTINUE))
        it.live._graveyard.acknowledged(runs_of([position]))
        await it.live.reset(None)
        peer = await it.join()
        peer.session.permit(1)
        await until(peer, lambda: len(peer.got) == 1)
        assert positions(peer.got) == [0]


def test_dead_lettered_entries_are_delivered_again_after_a_reset() -> None:
    virtually(_moved_back_after_a_letter)


async def _moved_back_after_passing() -> None:
    async with shell(Random(7)) as it:
        for _ in range(6):
            it.log.append(b"k")
        it.live._performing.passed = {at(0): Because.CYCLE, at(5): Because.CYCLE}
        await it.live.reset(at(3))
        assert it.live._performing.passed == {at(0): Because.CYCLE}


def test_gaps_of_redelivered_entries_are_forgotten() -> None:
    virtually(_moved_back_after_passing)
