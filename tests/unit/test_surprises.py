"""An unexpected error in one subscription of the dispatcher affects only that one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NoReturn

import pytest

from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import Options
from seqgate.services.dispatcher.core.selectors import Placement
from seqgate.services.dispatcher.ports import Ports
from seqgate.services.dispatcher.service import Dispatcher
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.shell.session import Joining
from seqgate.services.errors import DomainError, Fenced
from tests.simulation.defects import find
from tests.support.shells import (
    TOPIC,
    Letters,
    NoFilters,
    Peer,
    Slow,
    Stingy,
    positions,
    until,
    virtually,
)


class Surprised(Exception):
    """An error that no code here raises."""


def surprise(*_: object, **__: object) -> NoReturn:
    raise Surprised


class Stage:
    """A dispatcher with two subscriptions to a log."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        random, loop = Random(7), asyncio.get_running_loop()
        self.log, self.cursors = Stingy(random), Slow(random)
        now_ms = lambda: int(loop.time() * 1000)  # noqa: E731
        ports = Ports(self.log, self.cursors, Letters(), NoFilters(), "me", now_ms)
        self.dispatcher = Dispatcher(DispatcherConfig(), ports, tasks)
        self._tasks = tasks

    async def join(self, name: str) -> Peer:
        """Connect a consumer that accepts up to 100 messages."""
        joining = Joining("c", Options(), Placement.CONSISTENT_HASHING, TOPIC, (), 1, 0)
        live, session = await self.dispatcher.subscribe(TOPIC, name, joining, None, {})
        peer = Peer(live, session)
        self._tasks.create_task(peer.run())
        session.permit(100)
        return peer


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    async with asyncio.TaskGroup() as tasks:
        it = Stage(tasks)
        for name in ("one", "other"):
            await it.cursors.create(TOPIC, name, None, {})
        it.log.append(b"k")
        try:
            yield it
        finally:
            await it.dispatcher.finish(1.0)


def _in_reading(peer: Peer) -> None:
    peer.live.machine.read = surprise  # type: ignore[method-assign]


def _in_acknowledging(peer: Peer) -> None:
    peer.live.machine.acknowledge = surprise  # type: ignore[method-assign]
    peer.acknowledge(*peer.got)


def _in_a_timer(peer: Peer) -> None:
    peer.live.machine.tick = surprise  # type: ignore[method-assign]
    peer.negative_acknowledge(*peer.got, delay_ms=10)


def _in_permitting(peer: Peer) -> None:
    peer.live.machine.permit = surprise  # type: ignore[method-assign]
    peer.session.permit(1)


def _in_leaving(peer: Peer) -> None:
    peer.live.machine.leave = surprise  # type: ignore[method-assign]
    peer.vanish()


def _in_sending(peer: Peer) -> None:
    peer.live.machine.gone = surprise  # type: ignore[method-assign]
    peer.live._sending._next = surprise  # type: ignore[method-assign]


SURPRISES: list[Callable[[Peer], Any]] = [
    _in_reading,
    _in_acknowledging,
    _in_a_timer,
    _in_permitting,
    _in_leaving,
    _in_sending,
]


async def _surprised(happens: Callable[[Peer], Any]) -> None:
    async with stage() as it:
        one, other = await it.join("one"), await it.join("other")
        for peer in (one, other):
            await until(peer, lambda peer=peer: len(peer.got) == 1)  # type: ignore[misc]
        happens(one)
        it.log.append(b"k")
        while not (one.has_ended and one.live.stopped):
            await asyncio.sleep(0.01)
        stopped = one.live.stopped
        assert isinstance(stopped, DomainError)
        assert (stopped.reason, one.live.failures) == ("SUBSCRIPTION_FAILED", 1)
        assert stopped.retry_after_s
        await until(other, lambda: len(other.got) == 2)
        again = await it.join("one")
        await until(again, lambda: len(again.got) == 2)
        assert positions(again.got) == [0, 1]


@pytest.mark.parametrize("happens", SURPRISES)
def test_an_unexpected_error_ends_a_subscriptions_streams_and_reopens_it(
    happens: Callable[[Peer], Any],
) -> None:
    virtually(lambda: _surprised(happens))


@pytest.mark.deep
def test_an_uncontained_error_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    find("B6-subscription").apply(monkeypatch)
    with pytest.raises(BaseException) as ended:
        virtually(lambda: _surprised(_in_reading))
    found: BaseException = ended.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Surprised)


async def _lost(monkeypatch: pytest.MonkeyPatch) -> None:
    durable, lost = Live._durable, list[Live]()

    async def lose(live: Live) -> Any:
        live.stop(Fenced("lost"))
        lost.append(live)
        return await durable(live)

    async with stage() as it:
        with monkeypatch.context() as patch:
            patch.setattr(Live, "_durable", lose)
            with pytest.raises(Fenced):
                await it.join("one")
        (before,) = lost
        again = await it.join("one")
        await until(again, lambda: len(again.got) == 1)
        assert not before._work._running


def test_a_lease_lost_while_loading_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtually(lambda: _lost(monkeypatch))
