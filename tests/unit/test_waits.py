"""What a command waits for is said after a second, once, and again only with another reason."""

import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from seqgate.cli import _waiting
from seqgate.cli._output import Format, Output
from seqgate.cli._waiting import AGAIN_MAX_S, AGAIN_S, FIRST_S, Waits
from seqgate.errors import UnavailableError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Noted(Output):
    def __init__(self) -> None:
        super().__init__(Format.JSON)
        self.notes: list[str] = []
        self.came = threading.Event()

    def note(self, reason: str, message: str, details: object) -> None:
        assert reason == "WAITING"
        self.notes.append(message.removeprefix("waiting for "))
        self.came.set()

    def taken(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def waits(noted: Noted, clock: Clock) -> Waits:
    return Waits(noted, clock)


def test_a_wait_is_said_once_it_lasts_a_second(noted: Noted, clock: Clock, waits: Waits) -> None:
    assert FIRST_S == 1
    with waits.on("the ledger", lambda: "connection\nrefused"):
        assert waits.look() == FIRST_S
        clock.now_s += 0.75
        assert (waits.look(), noted.taken()) == (0.25, [])
        clock.now_s += 0.25
        waits.look()
        assert noted.taken() == ["the ledger: connection refused"]
    clock.now_s += 60
    waits.look()
    assert noted.taken() == []


def test_the_innermost_wait_that_lasts_is_said(noted: Noted, clock: Clock, waits: Waits) -> None:
    with waits.on("outer"):
        clock.now_s += 1
        with waits.on("inner"):
            waits.look()
            assert noted.taken() == ["outer"]
            clock.now_s += 1
            waits.look()
            assert noted.taken() == ["inner"]


def test_a_reason_is_said_once_and_looked_at_less_and_less_often(
    noted: Noted, clock: Clock, waits: Waits
) -> None:
    looks: list[float] = []

    def because() -> str:
        looks.append(clock.now_s - 100)
        return "refused" if clock.now_s < 700 else "silent"

    with waits.on("the ledger", because):
        for _ in range(1_000):
            clock.now_s += 1
            waits.look()
    assert noted.taken() == ["the ledger: refused", "the ledger: silent"]
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert gaps[:5] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, 8 * AGAIN_S, AGAIN_MAX_S]
    assert set(gaps[5:]) == {AGAIN_MAX_S}


def test_many_waits_for_the_same_are_said_once(noted: Noted, clock: Clock, waits: Waits) -> None:
    """A consumer whose messages trickle in waits anew for each."""
    for _ in range(100):
        with waits.on("messages"):
            clock.now_s += 2
            waits.look()
    assert noted.taken() == ["messages"]


def test_nothing_is_said_after_the_end(noted: Noted, clock: Clock, waits: Waits) -> None:
    with waits.on("the ledger"):
        clock.now_s += 2
        waits.end()
        waits.look()
    assert noted.taken() == []


@pytest.mark.parametrize("outcome", ["found", "too late", "failed"])
async def test_a_reason_is_found_in_the_event_loop(
    noted: Noted, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setattr(_waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(_waiting, "REASON_S", 0.01 if outcome == "too late" else 60)

    async def because() -> str:
        match outcome:
            case "failed":
                raise UnavailableError("gone")
            case "too late":
                await asyncio.Event().wait()
        return "held back"

    with Waits(noted) as waits, waits.on("messages", because):
        assert await asyncio.to_thread(noted.came.wait, 60)
    assert noted.notes == ["messages: held back" if outcome == "found" else "messages"]


def test_a_call_that_blocks_the_thread_is_said(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_waiting, "FIRST_S", 0.01)
    with Waits(noted) as waits, waits.on("a writer"):
        assert noted.came.wait(60)
    assert noted.notes == ["a writer"]


async def test_the_items_of_a_source_are_waited_for(
    noted: Noted, clock: Clock, waits: Waits
) -> None:
    async def source() -> AsyncIterator[int]:
        yield 1
        clock.now_s += 2
        waits.look()
        yield 2

    assert [each async for each in waits.each("lines", source())] == [1, 2]
    assert noted.taken() == ["lines"]
