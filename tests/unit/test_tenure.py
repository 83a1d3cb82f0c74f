"""Calls from before a reset or a change of properties never apply after it, late or repeated."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.core.effects import FailedEntry, Persist
from seqgate.services.dispatcher.core.positions import runs_of
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.ports import Cursor
from seqgate.services.errors import DomainError, Fenced
from seqgate.types import Position, TopicName

TOPIC: Final = TopicName.parse("t/n/a")
FIRST, SECOND = Position(1, 0), Position(1, 1)
ACK: Final = Persist(1, runs_of([FIRST]), (), ())


class Delaying(MemoryCursors):
    """A lost call gets no answer, and is applied at once, later, or both. A repeated call is
    answered, and applied at once and later."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.repeated: list[str] = []
        self.is_done_at_once = False
        self.late: list[Callable[[], Awaitable[Any]]] = []
        self.error: Callable[[], BaseException] = lambda: CursorsUnavailable(
            "no answer", retry_after_s=0.1
        )

    async def _maybe(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if method in self.repeated:
            self.repeated.remove(method)
            self.late.append(call)
        if method not in self.lost:
            return await call()
        self.lost.remove(method)
        self.late.append(call)
        if self.is_done_at_once:
            await call()
        raise self.error()

    async def persist(self, *args: Any) -> Any:
        return await self._maybe("persist", lambda: MemoryCursors.persist(self, *args))

    async def reset(self, *args: Any) -> Any:
        return await self._maybe("reset", lambda: MemoryCursors.reset(self, *args))

    async def record(self, *args: Any) -> Any:
        return await self._maybe("record", lambda: MemoryCursors.record(self, *args))

    async def set_properties(self, *args: Any, **named: Any) -> Any:
        return await self._maybe("set", lambda: MemoryCursors.set_properties(self, *args, **named))

    async def renew(self, *args: Any, **named: Any) -> Any:
        return await self._maybe("renew", lambda: MemoryCursors.renew(self, *args, **named))

    async def arrive(self) -> list[bool]:
        """Apply all late calls; returns whether each succeeded."""
        late, self.late = self.late, []
        return [await done(call) for call in late]

    async def cursor(self) -> Cursor:
        return await self.get(TOPIC, "s")


async def done(call: Callable[[], Awaitable[Any]]) -> bool:
    try:
        await call()
    except Fenced:
        return False
    return True


async def held(cursors: MemoryCursors) -> Tenure:
    await cursors.create(TOPIC, "s", None, {})
    lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
    return Tenure(cursors, TOPIC, "s", "me", lease.epoch, 60_000)


async def in_doubt(cursors: Delaying) -> Tenure:
    """A tenure with an unanswered call."""
    tenure = await held(cursors)
    cursors.lost.append("persist")
    with pytest.raises(CursorsUnavailable):
        await tenure.persist(ACK)
    return tenure


@pytest.mark.parametrize(
    "error", [lambda: CursorsUnavailable("no answer", retry_after_s=1), asyncio.CancelledError]
)
async def test_a_late_acknowledgement_does_not_skip_redelivered_entries(
    error: Callable[[], BaseException],
) -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.lost, cursors.error = ["persist"], error
    with pytest.raises((CursorsUnavailable, asyncio.CancelledError)):
        await tenure.persist(ACK)
    assert await tenure.persist(ACK) == FIRST
    await tenure.reset(None)
    assert await cursors.arrive() == [False]
    assert (await cursors.cursor()).mark_delete is None


async def test_a_late_reset_does_not_undo_later_acknowledgements() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.lost = ["reset"]
    with pytest.raises(CursorsUnavailable):
        await tenure.reset(None)
    await tenure.reset(None)
    await tenure.persist(ACK)
    assert await cursors.arrive() == [False]
    assert (await cursors.cursor()).mark_delete == FIRST


async def test_late_properties_do_not_undo_newer_ones() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.lost = ["set"]
    with pytest.raises(CursorsUnavailable):
        await tenure.set_properties({"filters": "old"}, ())
    await tenure.set_properties({"filters": "new"}, ())
    assert await cursors.arrive() == [False]
    assert (await cursors.cursor()).own == {"filters": "new"}


async def test_a_repeated_acknowledgement_does_not_skip_redelivered_entries() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.repeated = ["persist"]
    assert await tenure.persist(ACK) == FIRST
    await tenure.reset(None)
    assert await cursors.arrive() == [False]
    assert (await cursors.cursor()).mark_delete is None


async def test_a_repeated_count_of_attempts_does_not_outlast_a_reset() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.repeated = ["record"]
    await tenure.record([FailedEntry(SECOND, 3)])
    await tenure.reset(None)
    assert await cursors.arrive() == [False]
    assert [each async for each in tenure.attempts()] == []


async def test_a_repeated_reset_does_not_undo_later_acknowledgements() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.repeated = ["reset"]
    await tenure.reset(None)
    await tenure.persist(ACK)
    assert await cursors.arrive() == [False]
    assert (await cursors.cursor()).mark_delete == FIRST


async def test_repeated_properties_do_not_undo_newer_ones() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    cursors.repeated = ["set"]
    await tenure.set_properties({"filters": "old"}, ())
    await tenure.set_properties({"filters": "new"}, ())
    assert await cursors.arrive() == [False]
    assert (await cursors.cursor()).own == {"filters": "new"}


async def test_commutative_calls_keep_the_epoch() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    epoch = tenure.epoch
    await tenure.set_properties({"a": "1"}, ())
    await tenure.persist(ACK)
    await tenure.record([FailedEntry(SECOND, 1)])
    await tenure.persist(ACK)
    await tenure.renew()
    assert tenure.epoch == epoch


async def test_concurrently_set_properties_are_all_stored() -> None:
    cursors = Delaying()
    tenure = await held(cursors)
    await asyncio.gather(*(tenure.set_properties({str(at): "1"}, ()) for at in range(20)))
    assert (await cursors.cursor()).own == {str(at): "1" for at in range(20)}


@pytest.mark.parametrize("is_done", [False, True])
async def test_the_next_epoch_is_requested_again_when_its_answer_is_lost(is_done: bool) -> None:
    cursors = Delaying()
    cursors.is_done_at_once = is_done
    tenure = await in_doubt(cursors)
    epoch = tenure.epoch
    cursors.lost = ["renew"]
    with pytest.raises(CursorsUnavailable):
        await tenure.reset(None)
    assert await tenure.persist(ACK) == FIRST  # under either epoch
    assert tenure.epoch == epoch + is_done
    await tenure.reset(None)
    assert tenure.epoch == epoch + is_done + 1
    assert await cursors.arrive() == [False, not is_done]
    assert await tenure.persist(ACK) == FIRST


async def test_calls_overtaken_by_the_next_epoch_succeed_in_it() -> None:
    cursors = Delaying()
    tenure = await in_doubt(cursors)
    both = asyncio.gather(tenure.reset(None), tenure.renew(), tenure.persist(ACK))
    await both
    assert await tenure.persist(ACK) == FIRST


async def test_a_lost_lease_fences_every_call() -> None:
    cursors = Delaying()
    tenure = await in_doubt(cursors)
    await cursors.release(TOPIC, "s", tenure.epoch)
    await cursors.acquire(TOPIC, "s", "you", 60_000)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: tenure.persist(ACK),
        lambda: tenure.record([FailedEntry(FIRST, 1)]),
        lambda: tenure.reset(None),
        lambda: tenure.set_properties({}, ()),
        tenure.renew,
        tenure.release,
    ]
    for call in calls:
        with pytest.raises(DomainError) as caught:
            await call()
        assert isinstance(caught.value, Fenced)


@pytest.mark.parametrize("is_made_again", [False, True])
async def test_a_late_renewal_does_not_take_the_lease_of_a_namesake_successor(
    is_made_again: bool,
) -> None:
    cursors = Delaying()
    before = await in_doubt(cursors)
    cursors.lost = ["renew"]
    with pytest.raises(CursorsUnavailable):
        await before.reset(None)
    if is_made_again:
        await cursors.delete(TOPIC, "s")
        after = await held(cursors)
    else:
        await cursors.release(TOPIC, "s", before.epoch)
        lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
        after = Tenure(cursors, TOPIC, "s", "me", lease.epoch, 60_000)
    assert await cursors.arrive() == [False, False]
    for ask in (before.renew, before.release, lambda: before.reset(None)):
        with pytest.raises(Fenced):
            await ask()
    assert await after.persist(ACK) == FIRST
