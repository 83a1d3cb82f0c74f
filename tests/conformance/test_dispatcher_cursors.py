"""The contract of cursors for the dispatcher, over the wire and in memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2_grpc
from seqgate.api.internal.cursor.v1 import lease_pb2_grpc
from seqgate.dev.ports import free_ports
from seqgate.services.cursor import lease_servicer as lease_limits
from seqgate.services.cursor import servicer as limits
from seqgate.services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from seqgate.services.cursor.app import open_store
from seqgate.services.cursor.config import CursorConfig
from seqgate.services.cursor.core.state import LEASE_MAX_MS
from seqgate.services.cursor.lease_servicer import CursorLeaseServicer
from seqgate.services.cursor.service import ManagedCursors
from seqgate.services.cursor.servicer import CursorServicer
from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.adapters import cursors as adapter
from seqgate.services.dispatcher.adapters.cursors import CALL_ITEMS_MAX, SubscriptionCursors
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.core.effects import FailedDelivery, FailedEntry, How, Persist
from seqgate.services.dispatcher.core.positions import Run, runs_of
from seqgate.services.dispatcher.cursor.tenure import Tenure, persist
from seqgate.services.dispatcher.ports import (
    Cursors,
    CursorsRefused,
    Ends,
    InvalidProperty,
    Lease,
    NotOwner,
    Part,
    SubscriptionNotFound,
)
from seqgate.services.errors import DomainError, Fenced, InvalidPage, Kind
from seqgate.services.runtime.channels import following_channel
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.server import grpc_server
from seqgate.types import Position, TopicName
from tests.support.postgres_server import empty_database
from tests.support.waiting import eventually

TOPIC = TopicName.parse("test/cursors/topic")
OTHER = TopicName.parse("test/cursors/topic2")
NAME = "s"
LONG_MS = 60_000


@asynccontextmanager
async def over(port: int) -> AsyncIterator[SubscriptionCursors]:
    async with following_channel(f"127.0.0.1:{port}", keepalive_s=5) as channel:
        yield SubscriptionCursors(channel, timeout_s=10)


@pytest_asyncio.fixture(
    params=["memory", "grpc, sqlite", pytest.param("grpc, postgres", marks=pytest.mark.deep)]
)
async def cursors(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cursors]:
    if request.param == "memory":
        yield MemoryCursors(lambda: time.time_ns() // 1_000_000)
        return
    if request.param == "grpc, postgres":
        url = await empty_database(request.getfixturevalue("postgres"), "cursor_tests")
        config = CursorConfig(listen="127.0.0.1:0", postgres_url=url)
    else:
        config = CursorConfig(listen="127.0.0.1:0", store_path=tmp_path / "cursor.db")
    async with serving(config) as cursors:
        yield cursors


@asynccontextmanager
async def serving(config: CursorConfig) -> AsyncIterator[SubscriptionCursors]:
    """A cursor service, and the adapter that calls it."""
    async with open_store(config) as store:

        def register(server: aio.Server) -> None:
            managed = ManagedCursors(store, import_managed_cursor, export_managed_cursor)
            cursor_pb2_grpc.add_CursorServiceServicer_to_server(
                CursorServicer(store, managed), server
            )
            lease_pb2_grpc.add_CursorLeaseServiceServicer_to_server(
                CursorLeaseServicer(store), server
            )

        async with (
            grpc_server(config, Drain(), register=register, services=[], checks={}) as port,
            over(port) as cursors,
        ):
            yield cursors


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id, entry_id)


def entries(
    *positions: Position,
    parts: tuple[tuple[Position, int, int], ...] = (),
    successions: tuple[tuple[Position, Position], ...] = (),
) -> Persist:
    return Persist(1, runs_of(positions), parts, successions)


NOTHING = entries()


async def leased(cursors: Cursors, mark_delete: Position | None = None) -> int:
    """Create a cursor and acquire its lease; returns the epoch."""
    await cursors.create(TOPIC, NAME, mark_delete, {})
    return (await cursors.acquire(TOPIC, NAME, "me", LONG_MS)).epoch


async def beyond(cursors: Cursors) -> list[Run | Part]:
    return [each async for each in cursors.acknowledged(TOPIC, NAME)]


async def attempts(cursors: Cursors) -> dict[Position, int]:
    return {each.position: each.attempts async for each in cursors.attempts(TOPIC, NAME)}


async def test_a_cursor_is_created_once_at_the_given_position(cursors: Cursors) -> None:
    before_ms = time.time_ns() // 1_000_000
    made, created = await cursors.create(TOPIC, NAME, at(7), {"a": "1"})
    assert created
    assert (made.name, made.mark_delete, made.properties) == (NAME, at(7), {"a": "1"})
    assert (made.acknowledged_entries, made.owner) == (0, "")
    assert before_ms <= made.created_ms <= time.time_ns() // 1_000_000
    assert await cursors.create(TOPIC, NAME, None, {"b": "2"}) == (made, False)
    assert await cursors.get(TOPIC, NAME) == made
    other, _ = await cursors.create(OTHER, NAME, None, {})
    assert other.mark_delete is None


async def test_one_of_many_concurrent_creations_succeeds(cursors: Cursors) -> None:
    made = await asyncio.gather(*(cursors.create(TOPIC, NAME, None, {}) for _ in range(20)))
    assert sum(created for _, created in made) == 1


async def test_cursors_are_listed_by_name(cursors: Cursors) -> None:
    names = ["Z", "a", "b", "ä", "\U0001f600"]
    for name in reversed(names):
        await cursors.create(TOPIC, name, None, {})
    await cursors.create(OTHER, "c", None, {})
    found: list[str] = []
    token = ""
    while True:
        page, token = await cursors.page(TOPIC, limit=2, token=token)
        found += [each.name for each in page]
        if not token:
            break
    assert found == names
    assert await cursors.page(TopicName.parse("a/b/none"), limit=2, token="") == ([], "")


async def test_an_invalid_page_token_is_refused(cursors: Cursors) -> None:
    await cursors.create(TOPIC, NAME, None, {})
    with pytest.raises(InvalidPage):
        await cursors.page(TOPIC, limit=2, token="\u00fc none")


async def test_acknowledgements_move_the_cursor_up_to_the_first_gap(
    cursors: Cursors,
) -> None:
    epoch = await leased(cursors)
    assert await cursors.persist(TOPIC, NAME, entries(at(1), at(4), at(2)), epoch) is None
    assert await beyond(cursors) == [Run(at(1), 2), Run(at(4), 4)]
    assert (await cursors.get(TOPIC, NAME)).acknowledged_entries == 3
    assert await cursors.persist(TOPIC, NAME, entries(at(0)), epoch) == at(2)
    for _ in range(2):
        assert await cursors.persist(TOPIC, NAME, entries(at(0), at(3)), epoch) == at(4)
    assert await beyond(cursors) == []
    cursor = await cursors.get(TOPIC, NAME)
    assert (cursor.mark_delete, cursor.acknowledged_entries) == (at(4), 0)


async def test_a_cursor_moves_to_the_next_ledger_across_a_known_end(
    cursors: Cursors,
) -> None:
    epoch = await leased(cursors, at(1))
    first, second = at(0, 3), at(1, 3)
    await cursors.persist(TOPIC, NAME, entries(first, second), epoch)
    assert (await cursors.get(TOPIC, NAME)).mark_delete == at(1)
    told = entries(at(2), successions=((at(2), first),))
    assert await cursors.persist(TOPIC, NAME, told, epoch) == second


async def test_a_log_may_begin_at_any_position(cursors: Cursors) -> None:
    epoch = await leased(cursors)
    told = entries(at(5, 2), at(6, 2), successions=((at(0, 0), at(5, 2)),))
    assert await cursors.persist(TOPIC, NAME, told, epoch) == at(6, 2)


async def test_acknowledging_all_messages_acknowledges_the_batch(cursors: Cursors) -> None:
    epoch = await leased(cursors)
    await cursors.persist(TOPIC, NAME, entries(parts=((at(0), 3, 0b001),)), epoch)
    await cursors.persist(TOPIC, NAME, entries(at(2), parts=((at(3), 10, 1 << 9),)), epoch)
    for _ in range(2):
        await cursors.persist(TOPIC, NAME, entries(parts=((at(0), 3, 0b100),)), epoch)
    assert await beyond(cursors) == [
        Run(at(2), 2),
        Part(at(0), 3, 0b101),
        Part(at(3), 10, 1 << 9),
    ]
    assert await cursors.persist(TOPIC, NAME, entries(parts=((at(0), 3, 0b010),)), epoch) == at(0)
    assert await cursors.persist(TOPIC, NAME, entries(at(1)), epoch) == at(2)
    assert await cursors.persist(TOPIC, NAME, entries(at(3)), epoch) == at(3)
    assert await beyond(cursors) == []


async def test_the_most_that_a_machine_persists_at_once_is_stored(cursors: Cursors) -> None:
    """It takes more than one call of the service."""
    epoch = await leased(cursors)
    odd = [at(2 * i + 1) for i in range(CALL_ITEMS_MAX + 1)]
    await cursors.persist(TOPIC, NAME, entries(*odd), epoch)
    assert await beyond(cursors) == [Run(each, each.entry_id) for each in odd]
    even = [at(2 * i) for i in range(CALL_ITEMS_MAX + 1)]
    assert await cursors.persist(TOPIC, NAME, entries(*even), epoch) == odd[-1]


async def test_attempts_are_kept_until_their_entry_is_acknowledged(cursors: Cursors) -> None:
    epoch = await leased(cursors)
    counted = [FailedEntry(at(i), i + 1) for i in range(CALL_ITEMS_MAX + 1)]
    counts = {each.position: each.attempts for each in counted}
    for _ in range(2):
        await cursors.record(TOPIC, NAME, counted, epoch)
    assert await attempts(cursors) == counts
    await cursors.record(TOPIC, NAME, [FailedEntry(at(1), 9)], epoch)
    await cursors.record(TOPIC, NAME, [], epoch)
    await cursors.persist(TOPIC, NAME, entries(at(0), at(5)), epoch)
    expected = {**counts, at(1): 9}
    del expected[at(0)], expected[at(5)]
    assert await attempts(cursors) == expected


async def test_a_reset_forgets_later_acknowledgements_and_attempts(cursors: Cursors) -> None:
    epoch = await leased(cursors, at(3))
    told = entries(at(6), parts=((at(7), 2, 1),))
    await cursors.persist(TOPIC, NAME, told, epoch)
    await cursors.record(TOPIC, NAME, [FailedEntry(at(5), 2)], epoch)
    for mark_delete in (at(1), at(9), None):
        await cursors.reset(TOPIC, NAME, mark_delete, epoch)
        assert (await cursors.get(TOPIC, NAME)).mark_delete == mark_delete
        assert (await beyond(cursors), await attempts(cursors)) == ([], {})


async def test_properties_are_put_and_removed_together(cursors: Cursors) -> None:
    await cursors.create(TOPIC, NAME, None, {"a": "1", "b": "2"})
    cursor = await cursors.set_properties(
        TOPIC, NAME, {"c": "ü", "a": "3"}, ["b", "none"], epoch=None
    )
    assert cursor.properties == {"a": "3", "c": "ü"}
    assert (await cursors.get(TOPIC, NAME)).properties == {"a": "3", "c": "ü"}


async def test_properties_are_bounded(cursors: Cursors) -> None:
    await cursors.create(TOPIC, NAME, None, {"a": "1"})
    for bad in ({"x": "y" * 4096}, {str(i): "" for i in range(2_001)}):
        with pytest.raises(InvalidProperty):
            await cursors.set_properties(TOPIC, NAME, bad, [], epoch=None)
        with pytest.raises(InvalidProperty):
            await cursors.create(TOPIC, "other", None, bad)
    await cursors.set_properties(TOPIC, NAME, {"x": "y" * 4095}, [], epoch=None)
    await cursors.set_properties(TOPIC, NAME, {str(i): "" for i in range(1_998)}, [], epoch=None)
    assert len((await cursors.get(TOPIC, NAME)).properties) == 2_000


# ---- leases


async def test_a_lease_has_one_holder_who_may_acquire_it_again(cursors: Cursors) -> None:
    await cursors.create(TOPIC, NAME, None, {})
    assert await cursors.acquire(TOPIC, NAME, "me", LONG_MS) == Lease("me", 1)
    assert await cursors.acquire(TOPIC, NAME, "me", LONG_MS) == Lease("me", 1)
    assert (await cursors.get(TOPIC, NAME)).owner == "me"
    with pytest.raises(NotOwner) as caught:
        await cursors.acquire(TOPIC, NAME, "you", LONG_MS)
    assert caught.value.details == {"owner": "me"}
    assert caught.value.retry_after_s


async def test_a_released_lease_is_fenced_by_the_next_holder(cursors: Cursors) -> None:
    epoch = await leased(cursors)
    await cursors.release(TOPIC, NAME, epoch)
    assert (await cursors.get(TOPIC, NAME)).owner == ""
    assert await cursors.acquire(TOPIC, NAME, "me", LONG_MS) == Lease("me", epoch + 2)
    await all_fenced(cursors, epoch)
    await cursors.persist(TOPIC, NAME, entries(at(0)), epoch + 2)
    assert (await cursors.get(TOPIC, NAME)).mark_delete == at(0)


@pytest.mark.parametrize("next_epoch", [False, True])
async def test_a_late_renewal_of_a_released_lease_is_fenced(
    cursors: Cursors, next_epoch: bool
) -> None:
    """A renewal that its caller gave up may arrive between the release and the acquisition."""
    epoch = await leased(cursors)
    await cursors.release(TOPIC, NAME, epoch)
    with pytest.raises(Fenced):
        await cursors.renew(TOPIC, NAME, "me", epoch, LONG_MS, next_epoch=next_epoch)
    assert await cursors.acquire(TOPIC, NAME, "me", LONG_MS) == Lease("me", epoch + 2)


async def test_renewing_with_the_next_epoch_fences_earlier_calls(
    cursors: Cursors,
) -> None:
    epoch = await leased(cursors)
    lease = Lease("me", epoch + 1)
    for _ in range(2):  # the reply may be lost
        assert await cursors.renew(TOPIC, NAME, "me", epoch, LONG_MS, next_epoch=True) == lease
    await all_fenced(cursors, epoch)
    await cursors.persist(TOPIC, NAME, entries(at(0)), epoch + 1)
    assert await cursors.renew(TOPIC, NAME, "me", epoch + 1, LONG_MS) == lease
    for owner, of in (("you", epoch), ("you", epoch + 1), ("me", epoch - 1)):
        with pytest.raises(Fenced):
            await cursors.renew(TOPIC, NAME, owner, of, LONG_MS, next_epoch=True)
    assert (await cursors.get(TOPIC, NAME)).owner == "me"


async def test_epochs_of_a_deleted_cursor_do_not_recur(cursors: Cursors) -> None:
    epoch = await leased(cursors)
    await cursors.delete(TOPIC, NAME)
    assert await leased(cursors) == epoch + 2
    await all_fenced(cursors, epoch)


async def test_an_expired_lease_remains_until_it_is_taken(cursors: Cursors) -> None:
    await cursors.create(TOPIC, NAME, None, {})
    epoch = (await cursors.acquire(TOPIC, NAME, "me", 100)).epoch

    async def nobodys() -> bool:
        return not (await cursors.get(TOPIC, NAME)).owner

    await eventually(nobodys)
    await cursors.persist(TOPIC, NAME, entries(at(0)), epoch)
    await cursors.renew(TOPIC, NAME, "me", epoch, 2_000)
    assert (await cursors.get(TOPIC, NAME)).owner == "me"
    await eventually(nobodys)
    taken = await cursors.acquire(TOPIC, NAME, "you", LONG_MS)
    assert taken == Lease("you", epoch + 2)
    await all_fenced(cursors, epoch)
    with pytest.raises(Fenced):
        await cursors.renew(TOPIC, NAME, "me", taken.epoch, LONG_MS)
    assert (await cursors.get(TOPIC, NAME)).mark_delete == at(0)


async def all_fenced(cursors: Cursors, epoch: int) -> None:
    """Check that every call with this epoch is fenced, even an empty one, and changes nothing."""
    before = await cursors.get(TOPIC, NAME)
    for call in (
        lambda: cursors.persist(TOPIC, NAME, entries(at(0)), epoch),
        lambda: cursors.persist(TOPIC, NAME, NOTHING, epoch),
        lambda: cursors.record(TOPIC, NAME, [FailedEntry(at(3), 1)], epoch),
        lambda: cursors.set_properties(TOPIC, NAME, {"a": "1"}, [], epoch=epoch),
        lambda: cursors.reset(TOPIC, NAME, None, epoch),
        lambda: cursors.renew(TOPIC, NAME, "me", epoch, LONG_MS),
        lambda: cursors.release(TOPIC, NAME, epoch),
    ):
        with pytest.raises(Fenced):
            await call()
    assert await cursors.get(TOPIC, NAME) == before
    assert await attempts(cursors) == {}


# ---- permanent refusals


async def test_a_succession_may_change_after_a_trim_and_a_reset(cursors: Cursors) -> None:
    """The new succession is persisted if the log begins at its end, and refused otherwise."""
    epoch = await leased(cursors, at(9))
    await cursors.persist(TOPIC, NAME, entries(successions=((at(9), at(0, 2)),)), epoch)
    await cursors.reset(TOPIC, NAME, at(9), epoch)
    what = entries(at(0, 3), successions=((at(9), at(0, 3)),))
    with pytest.raises(CursorsRefused) as caught:
        await cursors.persist(TOPIC, NAME, what, epoch)
    assert caught.value.details == {"because": "INVALID_POSITION"}
    for first, expected in ((None, CursorsRefused), (at(0, 2), CursorsRefused), (at(0, 3), None)):
        log: Any = Beginning(first)
        tenure = Tenure(cursors, TOPIC, NAME, "me", epoch, LONG_MS)
        if expected is None:
            assert await persist(tenure, log, TOPIC, what) == at(0, 3)
        else:
            with pytest.raises(expected):
                await persist(tenure, log, TOPIC, what)
            assert (await cursors.get(TOPIC, NAME)).mark_delete == at(9)


UNUSED: Any = None


class Beginning:
    """A log that begins at a position."""

    def __init__(self, first: Position | None) -> None:
        self._first = first

    async def ends(self, topic: TopicName) -> Ends:
        del topic
        return Ends(self._first, self._first)


async def test_a_permanent_refusal_is_not_reported_as_unavailable(cursors: Cursors) -> None:
    epoch = await leased(cursors)
    if isinstance(cursors, MemoryCursors):
        return
    with pytest.raises(CursorsRefused) as caught:
        await cursors.persist(TOPIC, NAME, entries(at(0, 0)), epoch)
    assert caught.value.details == {"because": "INVALID_POSITION"}
    assert caught.value.kind is Kind.FENCED
    with pytest.raises(CursorsRefused):
        await cursors.acquire(TOPIC, NAME, "me", LEASE_MAX_MS + 1)


def test_calls_stay_within_the_limits_of_the_service() -> None:
    assert (
        min(
            limits.RANGES_MAX, limits.BATCHES_MAX, limits.SUCCESSIONS_MAX, lease_limits.ATTEMPTS_MAX
        )
        >= adapter.CALL_ITEMS_MAX
    )
    assert adapter.RUN_ENTRIES_MAX <= limits.RANGE_ENTRIES_MAX
    assert adapter.RUN_ENTRIES_MAX <= adapter.CALL_ENTRIES_MAX <= limits.ENTRIES_MAX
    assert limits.BATCH_MESSAGES_MAX <= adapter.CALL_INDEXES_MAX


async def test_runs_beyond_the_limit_of_a_range_or_a_call_are_persisted(
    cursors: Cursors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RANGE_ENTRIES_MAX", 4)
    monkeypatch.setattr(adapter, "RUN_ENTRIES_MAX", 4)
    monkeypatch.setattr(limits, "ENTRIES_MAX", 9)
    monkeypatch.setattr(adapter, "CALL_ENTRIES_MAX", 9)
    monkeypatch.setattr(adapter, "CALL_INDEXES_MAX", 12)
    epoch = await leased(cursors)
    whole = [at(each) for each in range(1, 40)]
    parts = tuple((at(each), 10, 0b1111111) for each in range(50, 55))
    assert await cursors.persist(TOPIC, NAME, entries(*whole, parts=parts), epoch) is None
    found = await beyond(cursors)
    assert found == [Run(at(1), 39), *(Part(*each) for each in parts)]
    assert await cursors.persist(TOPIC, NAME, entries(at(0)), epoch) == at(39)


async def test_persists_beyond_the_limit_of_a_request_are_split(tmp_path: Path) -> None:
    config = CursorConfig(
        listen="127.0.0.1:0", store_path=tmp_path / "cursor.db", message_bytes_max=64 * 1024
    )
    async with serving(config) as cursors:
        epoch = await leased(cursors)
        whole = [at(2**40 + 2 * each, 2**40) for each in range(9_999)]
        parts = tuple((at(each, 2**41), 10, 0b1010101010) for each in range(9_999))
        await cursors.persist(TOPIC, NAME, entries(*whole, parts=parts), epoch)
        assert len(await beyond(cursors)) == len(whole) + len(parts)
        failures = (FailedDelivery(How.REFUSED, 2**42, "c" * 255),) * 3
        counted = [FailedEntry(at(2**40 + 2 * each, 2**42), 2**31, failures) for each in range(200)]
        counted += [FailedEntry(at(2**41 + 2 * each, 2**42), 2**31) for each in range(9_999)]
        await cursors.record(TOPIC, NAME, counted, epoch)
        assert [each async for each in cursors.attempts(TOPIC, NAME)] == counted


# ---- missing cursors


def methods(cursors: Cursors) -> dict[str, Callable[[], Awaitable[object]]]:
    """A call of every method that names a cursor."""

    async def listed(items: AsyncIterator[object]) -> list[object]:
        return [each async for each in items]

    return {
        "get": lambda: cursors.get(TOPIC, NAME),
        "delete": lambda: cursors.delete(TOPIC, NAME),
        "reset": lambda: cursors.reset(TOPIC, NAME, None, 1),
        "acknowledged": lambda: listed(cursors.acknowledged(TOPIC, NAME)),
        "attempts": lambda: listed(cursors.attempts(TOPIC, NAME)),
        "persist": lambda: cursors.persist(TOPIC, NAME, entries(at(0)), 1),
        "record": lambda: cursors.record(TOPIC, NAME, [FailedEntry(at(0), 1)], 1),
        "set_properties": lambda: cursors.set_properties(TOPIC, NAME, {"a": "1"}, [], epoch=1),
        "acquire": lambda: cursors.acquire(TOPIC, NAME, "me", LONG_MS),
        "renew": lambda: cursors.renew(TOPIC, NAME, "me", 1, LONG_MS),
        "release": lambda: cursors.release(TOPIC, NAME, 1),
    }


METHODS = list(methods(MemoryCursors()))


async def fails(cursors: Cursors, method: str, refusal: type[DomainError]) -> DomainError:
    with pytest.raises(refusal) as caught:
        await methods(cursors)[method]()
    return caught.value


@pytest.mark.parametrize("method", METHODS)
async def test_a_missing_cursor_is_not_found(cursors: Cursors, method: str) -> None:
    await fails(cursors, method, SubscriptionNotFound)
    await leased(cursors)
    await cursors.delete(TOPIC, NAME)
    await fails(cursors, method, SubscriptionNotFound)


@pytest.mark.parametrize("method", [*METHODS, "create", "page", "check"])
async def test_an_unresponsive_service_is_unavailable(method: str) -> None:
    (port,) = free_ports(1)
    memory = MemoryCursors()
    memory.available = False
    async with over(port) as unreachable:
        for cursors in (unreachable, memory):
            more: dict[str, Callable[[], Awaitable[object]]] = {
                **methods(cursors),
                "create": partial(cursors.create, TOPIC, NAME, None, {}),
                "page": partial(cursors.page, TOPIC, limit=1, token=""),
                "check": cursors.check,
            }
            with pytest.raises(CursorsUnavailable) as caught:
                await more[method]()
            assert caught.value.retry_after_s
