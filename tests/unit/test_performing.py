"""Performs the effects of a machine (services/dispatcher/shell/performing.py)."""

import asyncio
from random import Random

import pytest

from tests.simulation.defects import find
from tests.support.shells import positions, shell, until, virtually


async def _due_during_a_change() -> None:
    """A redelivery is due during a change, and no other event follows."""
    async with shell(Random(7)) as it:
        it.log.append(b"k")
        peer = await it.join(retry_first_ms=20)
        peer.session.permit(2)
        await until(peer, lambda: len(peer.got) == 1)
        peer.negative_acknowledge(*peer.got, delay_ms=20)
        async with it.live.changing:
            await asyncio.sleep(0.05)
        await until(peer, lambda: len(peer.got) == 2)
        assert positions(peer.got) == [0, 0]


def test_work_due_during_a_change_is_done_after_it() -> None:
    virtually(_due_during_a_change)


@pytest.mark.deep
def test_work_due_during_a_change_is_lost_with_the_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    find("A8").apply(monkeypatch)
    with pytest.raises(AssertionError):
        virtually(_due_during_a_change)


async def _small_portions() -> None:
    """The machine is given a few entries at a time, however many the log sends."""
    async with shell(Random(7), read_entries_max=3) as it:
        for _ in range(100):
            it.log.append(b"k")
        portions: list[int] = []
        read = it.live.machine.read

        def counted(entries: list[object], now_ms: int) -> object:
            portions.append(len(entries))
            return read(entries, now_ms)  # type: ignore[arg-type]

        peer = await it.join()
        it.live.machine.read = counted  # type: ignore[method-assign, assignment]
        peer.session.permit(100)
        await until(peer, lambda: len(peer.got) == 100)
        assert positions(peer.got) == list(range(100))
        assert max(portions) == 3


def test_the_machine_gets_pages_of_the_configured_size() -> None:
    virtually(_small_portions)
