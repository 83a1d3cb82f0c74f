"""The contract of cursors for deduplication and the ledger, over the wire and in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import apsw
import pytest
import pytest_asyncio
from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc
from seqgate.dev.ports import free_ports
from seqgate.services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from seqgate.services.cursor.adapters.sqlite import open_sqlite_store
from seqgate.services.cursor.config import CursorConfig
from seqgate.services.cursor.service import ManagedCursors
from seqgate.services.cursor.servicer import CursorServicer
from seqgate.services.cursors import Cursor, CursorConflict, CursorsUnavailable
from seqgate.services.runtime import cursors as adapter
from seqgate.services.runtime.channels import following_channel
from seqgate.services.runtime.cursors import GrpcCursors, MemoryCursors, NoCursors
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.server import grpc_server
from seqgate.types import Position, TopicName
from tests.support.stubs import cursor_stub

TOPIC = TopicName.parse("test/cursors/topic")
OTHER = TopicName.parse("test/cursors/topic2")
NAME = "seqgate.dedup"
KEY = "#seqgate.internal.key"

Cursors = GrpcCursors | MemoryCursors | NoCursors
Serve = Callable[[], AbstractAsyncContextManager[int]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Runs a cursor service; each run uses the same database."""

    @asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        config = CursorConfig(listen="127.0.0.1:0", store_path=tmp_path / "cursor.db")
        async with open_sqlite_store(config.store_path) as store:

            def register(server: aio.Server) -> None:
                managed = ManagedCursors(store, import_managed_cursor, export_managed_cursor)
                cursor_pb2_grpc.add_CursorServiceServicer_to_server(
                    CursorServicer(store, managed), server
                )

            async with grpc_server(
                config, Drain(), register=register, services=[], checks={}
            ) as port:
                yield port

    return serve


@asynccontextmanager
async def over(port: int) -> AsyncIterator[GrpcCursors]:
    async with following_channel(f"127.0.0.1:{port}", keepalive_s=5) as channel:
        yield GrpcCursors(channel, timeout_s=10)


@pytest_asyncio.fixture(params=["memory", "grpc"])
async def cursors(request: pytest.FixtureRequest, serve: Serve) -> AsyncIterator[Cursors]:
    if request.param == "memory":
        yield MemoryCursors()
        return
    async with serve() as port, over(port) as cursors:
        yield cursors


async def get(cursors: Cursors, name: str = NAME, topic: TopicName = TOPIC) -> Cursor:
    cursor = await cursors.get(topic, name, whole=True)
    assert cursor is not None
    return cursor


async def test_a_missing_cursor_is_absent(cursors: Cursors) -> None:
    assert await cursors.get(TOPIC, NAME, whole=True) is None
    assert await cursors.get(TOPIC, NAME, whole=False) is None


async def test_a_cursor_is_created_once_at_the_earliest_position(cursors: Cursors) -> None:
    made = await cursors.create(TOPIC, NAME)
    assert made == Cursor(NAME, None, {}, {}, made.revision)
    assert await cursors.create(TOPIC, NAME) == made
    assert await get(cursors) == made
    assert await cursors.get(OTHER, NAME, whole=True) is None


async def test_concurrent_creations_return_the_same_cursor(cursors: Cursors) -> None:
    made = await asyncio.gather(*(cursors.create(TOPIC, NAME) for _ in range(20)))
    assert set(map(str, made)) == {str(await get(cursors))}


async def test_a_position_and_its_properties_move_together(cursors: Cursors) -> None:
    revision = (await cursors.create(TOPIC, NAME)).revision
    for position, properties in (
        (Position(1, 0), {"a": "1", "b": "ü" * 100}),
        (Position(1, 0), {"a": "2"}),
        (Position(2**63 - 1, 2**63 - 1), {}),
    ):
        await cursors.mark_delete(TOPIC, NAME, position, properties, revision=revision)
        moved = await get(cursors)
        assert (moved.mark_delete, moved.mark_delete_properties) == (position, properties)
        assert moved.revision > revision
        revision = moved.revision


async def test_a_cursor_reads_alike_without_attached_properties(cursors: Cursors) -> None:
    revision = (await cursors.create(TOPIC, NAME)).revision
    await cursors.mark_delete(TOPIC, NAME, Position(1, 7), {"a": "1"}, revision=revision)
    await cursors.put_property(TOPIC, NAME, KEY, "own")
    whole = await get(cursors)
    assert (whole.mark_delete_properties, whole.properties) == ({"a": "1"}, {KEY: "own"})
    bare = whole._replace(mark_delete_properties={})
    assert await cursors.get(TOPIC, NAME, whole=False) == bare
    assert await cursors.create(TOPIC, NAME) == bare
    assert await get(cursors) == whole


async def test_a_stale_version_moves_nothing(cursors: Cursors) -> None:
    revision = (await cursors.create(TOPIC, NAME)).revision
    await cursors.mark_delete(TOPIC, NAME, Position(1, 1), {"a": "1"}, revision=revision)
    before = await get(cursors)
    for wrong in (revision, before.revision + 1):
        with pytest.raises(CursorConflict):
            await cursors.mark_delete(TOPIC, NAME, Position(1, 2), {}, revision=wrong)
    assert await get(cursors) == before


async def test_one_of_many_movers_with_the_same_version_succeeds(cursors: Cursors) -> None:
    revision = (await cursors.create(TOPIC, NAME)).revision
    moves = [
        cursors.mark_delete(TOPIC, NAME, Position(1, 5), {"by": str(i)}, revision=revision)
        for i in range(10)
    ]
    outcomes = await asyncio.gather(*moves, return_exceptions=True)
    (winner,) = (i for i, outcome in enumerate(outcomes) if outcome is None)
    assert sum(isinstance(each, CursorConflict) for each in outcomes) == 9
    assert (await get(cursors)).mark_delete_properties == {"by": str(winner)}


async def test_a_cursor_does_not_move_back(cursors: Cursors) -> None:
    revision = (await cursors.create(TOPIC, NAME)).revision
    await cursors.mark_delete(TOPIC, NAME, Position(2, 3), {"a": "1"}, revision=revision)
    before = await get(cursors)
    for position in (Position(2, 2), Position(1, 9)):
        with pytest.raises(CursorConflict):
            await cursors.mark_delete(TOPIC, NAME, position, {}, revision=before.revision)
    assert await get(cursors) == before


async def test_a_deleted_cursor_does_not_move(cursors: Cursors) -> None:
    revision = (await cursors.create(TOPIC, NAME)).revision
    await cursors.delete(TOPIC, NAME)
    with pytest.raises(CursorConflict):
        await cursors.mark_delete(TOPIC, NAME, Position(1, 1), {}, revision=revision)
    assert await cursors.get(TOPIC, NAME, whole=True) is None


async def test_sixteen_megabytes_are_read_back_unchanged(cursors: Cursors) -> None:
    """100,000 properties of 160 bytes: the largest number, and nearly the largest size."""
    properties = {f"{i:040}": "x" * 120 for i in range(100_000)}
    revision = (await cursors.create(TOPIC, NAME)).revision
    await cursors.mark_delete(TOPIC, NAME, Position(1, 1), properties, revision=revision)
    assert (await get(cursors)).mark_delete_properties == properties


async def test_properties_are_put_and_removed_one_by_one(cursors: Cursors) -> None:
    await cursors.put_property(TOPIC, NAME, KEY, "1")
    made = await get(cursors)
    assert (made.mark_delete, made.properties) == (None, {KEY: "1"})
    await cursors.put_property(TOPIC, NAME, "other", "ü")
    await cursors.put_property(TOPIC, NAME, KEY, "")
    assert (await get(cursors)).properties == {KEY: "", "other": "ü"}
    for _ in range(2):
        await cursors.put_property(TOPIC, NAME, KEY, None)
        assert (await get(cursors)).properties == {"other": "ü"}


async def test_a_property_is_put_before_or_after_its_cursor_is_removed(cursors: Cursors) -> None:
    for i in range(10):
        value = str(i)
        await asyncio.gather(
            cursors.put_property(TOPIC, NAME, KEY, value), cursors.delete(TOPIC, NAME)
        )
        found = await cursors.get(TOPIC, NAME, whole=True)
        assert found is None or found.properties.get(KEY) in (None, value)


async def test_removing_a_property_creates_no_cursor(cursors: Cursors) -> None:
    await cursors.put_property(TOPIC, NAME, KEY, None)
    assert await cursors.get(TOPIC, NAME, whole=True) is None


async def test_deleting_a_cursor_is_idempotent_and_affects_no_other(cursors: Cursors) -> None:
    for topic, name in ((TOPIC, NAME), (TOPIC, "@namespace"), (OTHER, NAME)):
        await cursors.put_property(topic, name, KEY, name)
    for _ in range(2):
        await cursors.delete(TOPIC, NAME)
        assert await cursors.get(TOPIC, NAME, whole=True) is None
    assert (await get(cursors, "@namespace")).properties == {KEY: "@namespace"}
    assert (await get(cursors, NAME, OTHER)).properties == {KEY: NAME}


CURSORS: Mapping[str, Position | None] = {
    "b": Position(1, 4),
    "a": None,
    "seqgate.dedup": Position(2, 0),
    "ü/ %": Position(2**63 - 1, 2**63 - 1),
    "Z": Position(0, 0),
    "c": Position(1, 4),
    "d": None,
}


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cursors fill many pages."""
    monkeypatch.setattr(adapter, "PAGE_SIZE", 3)


async def make_all(cursors: Cursors) -> None:
    await cursors.create(OTHER, "other", Position(9, 9))
    for name, mark_delete in CURSORS.items():
        await cursors.create(TOPIC, name, mark_delete)


async def test_a_topic_without_cursors_has_none(cursors: Cursors) -> None:
    await cursors.create(OTHER, "other")
    assert await cursors.mark_deletes(TOPIC) == {}
    assert await cursors.delete_all(TOPIC, gone)


@pytest.mark.usefixtures("small_pages")
async def test_positions_of_all_cursors_of_a_topic_are_listed(cursors: Cursors) -> None:
    await make_all(cursors)
    positions = await cursors.mark_deletes(TOPIC)
    assert positions == CURSORS
    assert list(positions) == sorted(CURSORS)


@pytest.mark.usefixtures("small_pages")
async def test_all_cursors_of_a_topic_are_deleted_and_no_others(cursors: Cursors) -> None:
    await make_all(cursors)
    for _ in range(2):
        assert await cursors.delete_all(TOPIC, gone)
        assert await cursors.mark_deletes(TOPIC) == {}
    assert await cursors.mark_deletes(OTHER) == {"other": Position(9, 9)}


async def test_cursors_of_a_topic_that_is_there_again_stay(cursors: Cursors) -> None:
    await make_all(cursors)

    async def there() -> bool:
        return False

    assert not await cursors.delete_all(TOPIC, there)
    assert await cursors.mark_deletes(TOPIC) == CURSORS


async def test_cursors_made_after_they_were_listed_stay(cursors: Cursors) -> None:
    await make_all(cursors)

    async def recreated_now() -> bool:
        await cursors.create(TOPIC, "new", Position(1, 1))
        return True

    assert await cursors.delete_all(TOPIC, recreated_now)
    assert await cursors.mark_deletes(TOPIC) == {"new": Position(1, 1)}


async def gone() -> bool:
    return True


def methods(cursors: Cursors) -> dict[str, Callable[[], object]]:
    """A call of every method."""
    return {
        "get": lambda: cursors.get(TOPIC, NAME, whole=False),
        "create": lambda: cursors.create(TOPIC, NAME),
        "mark_delete": lambda: cursors.mark_delete(TOPIC, NAME, Position(1, 1), {}, revision=0),
        "put_property": lambda: cursors.put_property(TOPIC, NAME, KEY, "1"),
        "remove a property": lambda: cursors.put_property(TOPIC, NAME, KEY, None),
        "delete": lambda: cursors.delete(TOPIC, NAME),
        "mark_deletes": lambda: cursors.mark_deletes(TOPIC),
        "delete_all": lambda: cursors.delete_all(TOPIC, gone),
    }


METHODS = list(methods(NoCursors()))


async def called(cursors: Cursors, method: str) -> object:
    answer: object = await methods(cursors)[method]()  # type: ignore[misc]
    return answer


@pytest.mark.parametrize("method", METHODS)
async def test_an_unresponsive_service_is_unavailable(method: str) -> None:
    (port,) = free_ports(1)
    memory = MemoryCursors()
    memory.available = False
    async with over(port) as unreachable:
        for cursors in (unreachable, memory):
            with pytest.raises(CursorsUnavailable) as caught:
                await called(cursors, method)
            assert caught.value.retry_after_s


async def test_stored_cursors_survive_a_restart(serve: Serve) -> None:
    async with serve() as port, over(port) as cursors:
        revision = (await cursors.create(TOPIC, NAME)).revision
        await cursors.mark_delete(TOPIC, NAME, Position(3, 4), {"a": "1"}, revision=revision)
        await cursors.put_property(TOPIC, NAME, KEY, "own")
        before = await get(cursors)
    async with serve() as port, over(port) as cursors:
        assert await get(cursors) == before


async def test_a_damaged_cursor_is_not_reported_as_missing(serve: Serve, tmp_path: Path) -> None:
    """Damaged attached properties are not taken for none, and are not read unless requested."""
    async with serve() as port, over(port) as cursors:
        revision = (await cursors.create(TOPIC, NAME)).revision
        await cursors.mark_delete(TOPIC, NAME, Position(3, 4), {"a": "1"}, revision=revision)
    with apsw.Connection(str(tmp_path / "cursor.db")) as db:
        db.execute("DELETE FROM properties")
    db.close()
    async with serve() as port, over(port) as cursors:
        with pytest.raises(CursorsUnavailable) as caught:
            await cursors.get(TOPIC, NAME, whole=True)
        assert caught.value.details == {"because": "CURSOR_CORRUPT"}
        bare = await cursors.get(TOPIC, NAME, whole=False)
        assert bare is not None
        assert bare.mark_delete == Position(3, 4)
        await cursors.delete(TOPIC, NAME)
        assert await cursors.get(TOPIC, NAME, whole=True) is None


async def test_a_refusal_of_the_service_has_its_reason(serve: Serve) -> None:
    async with serve() as port, over(port) as cursors:
        with pytest.raises(CursorsUnavailable) as caught:
            await cursors.put_property(TOPIC, NAME, KEY, "x" * 5_000)
        assert caught.value.details == {"because": "INVALID_PROPERTY"}


async def test_a_created_cursor_is_visible_to_others(serve: Serve) -> None:
    async with serve() as port, over(port) as cursors:
        await cursors.put_property(TOPIC, NAME, KEY, "1")
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = cursor_stub(channel)
            reply = await stub.GetCursor(pb.GetCursorRequest(topic=str(TOPIC), cursor=NAME))
        assert reply.cursor.properties == {KEY: "1"}
        assert not reply.cursor.HasField("mark_delete")


async def test_without_a_cursor_service_nothing_is_found_or_stored() -> None:
    cursors = NoCursors()
    for method in ("get", "remove a property", "delete"):
        assert await called(cursors, method) is None
    for method in ("create", "mark_delete", "put_property"):
        with pytest.raises(CursorsUnavailable, match="no cursor service: cursor_target is empty"):
            await called(cursors, method)
    assert await cursors.delete_all(TOPIC, gone)
    assert await cursors.mark_deletes(TOPIC) == {}
