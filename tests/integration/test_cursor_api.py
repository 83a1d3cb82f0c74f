"""The cursor service alone over real gRPC, for an application that delivers from its own log."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any

import pytest
from grpc import StatusCode

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import managed_pb2
from seqgate.api.internal.cursor.v1 import lease_pb2
from seqgate.services.cursor import servicer as limits
from seqgate.times import duration
from tests.integration.refusals import refused
from tests.integration.services import Services, health, running
from tests.support.waiting import eventually

IN_USE, ABORTED = StatusCode.FAILED_PRECONDITION, StatusCode.ABORTED
INVALID, NOT_FOUND = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND

SERVICE = "seqgate.api.cursor.v1.CursorService"

Private = Callable[..., AbstractAsyncContextManager[Services]]


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


def run(first: int, last: int | None = None, ledger_id: int = 1) -> pb.PositionRange:
    return pb.PositionRange(
        first=at(first, ledger_id), last_entry_id=first if last is None else last
    )


def messages(entry_id: int, indexes: Iterable[int], size: int = 10) -> pb.BatchAcknowledgement:
    return pb.BatchAcknowledgement(position=at(entry_id), batch_size=size, indexes=indexes)


class Cursor:
    """One cursor, as its user sees it."""

    def __init__(self, stub: Any, topic: str, name: str = "c") -> None:
        self.stub = stub
        self.names: dict[str, Any] = {"topic": topic, "cursor": name}

    async def create(self, mark_delete: Position | None = None, **more: Any) -> pb.Cursor:
        request = pb.CreateCursorRequest(mark_delete=mark_delete, **self.names, **more)
        answer = await self.stub.CreateCursor(request)
        assert answer.created
        cursor: pb.Cursor = answer.cursor
        return cursor

    async def get(self) -> pb.Cursor:
        cursor: pb.Cursor = (await self.stub.GetCursor(pb.GetCursorRequest(**self.names))).cursor
        return cursor

    async def mark_delete(
        self, position: Position, properties: dict[str, str] | None = None, **more: Any
    ) -> pb.MarkDeleteResponse:
        request = pb.MarkDeleteRequest(
            position=position, properties=properties or {}, **self.names, **more
        )
        answer: pb.MarkDeleteResponse = await self.stub.MarkDelete(request)
        return answer

    async def acknowledge(self, *what: Any, **more: Any) -> pb.AcknowledgeResponse:
        """Acknowledge entry ids of ledger 1, ranges, and parts of batches."""
        ranges = [run(each) if isinstance(each, int) else each for each in what]
        batches = [each for each in ranges if isinstance(each, pb.BatchAcknowledgement)]
        ranges = [each for each in ranges if isinstance(each, pb.PositionRange)]
        request = pb.AcknowledgeRequest(ranges=ranges, batches=batches, **self.names, **more)
        answer: pb.AcknowledgeResponse = await self.stub.Acknowledge(request)
        return answer

    async def page(self, **more: Any) -> pb.ListAcknowledgedResponse:
        request = pb.ListAcknowledgedRequest(**self.names, **more)
        answer: pb.ListAcknowledgedResponse = await self.stub.ListAcknowledged(request)
        return answer

    async def beyond(self, page_size: int = 0) -> list[tuple[int, int, int]]:
        """The acknowledged ranges beyond the mark-delete position, page by page."""
        found: list[tuple[int, int, int]] = []
        token = ""
        while True:
            page = await self.page(page_token=token, page_size=page_size)
            found += [
                (each.first.ledger_id, each.first.entry_id, each.last_entry_id)
                for each in page.ranges
            ]
            if not page.next_page_token:
                return found
            token = page.next_page_token

    async def messages(self) -> dict[int, list[int]]:
        """The acknowledged messages of batches of ledger 1, by entry id."""
        return {each.position.entry_id: list(each.indexes) for each in (await self.page()).batches}

    async def waiting(self, entries: int) -> list[int]:
        """The unacknowledged ones among the first entries of ledger 1."""
        done = set[int]()
        for _, first, last in await self.beyond():
            done.update(range(first, last + 1))
        cursor = await self.get()
        start = cursor.mark_delete.entry_id + 1 if cursor.HasField("mark_delete") else 0
        return [entry_id for entry_id in range(start, entries) if entry_id not in done]

    async def reset(self, mark_delete: Position | None, **more: Any) -> pb.Cursor:
        request = pb.ResetCursorRequest(mark_delete=mark_delete, **self.names, **more)
        cursor: pb.Cursor = (await self.stub.ResetCursor(request)).cursor
        return cursor

    async def update(self, **more: Any) -> pb.Cursor:
        request = pb.UpdateCursorPropertiesRequest(**self.names, **more)
        cursor: pb.Cursor = (await self.stub.UpdateCursorProperties(request)).cursor
        return cursor

    async def attempts(self, *entry_ids: int, **more: Any) -> list[int]:
        request = lease_pb2.RecordAttemptsRequest(
            positions=[at(each) for each in entry_ids], **self.names, **more
        )
        return list((await self.stub.RecordAttempts(request)).attempts)

    async def counts(self, page_size: int = 0) -> list[tuple[int, int, int]]:
        """The recorded attempts of entries, page by page."""
        found: list[tuple[int, int, int]] = []
        token = ""
        while True:
            request = lease_pb2.ListAttemptsRequest(
                page_token=token, page_size=page_size, **self.names
            )
            page = await self.stub.ListAttempts(request)
            assert page_size == 0 or len(page.entries) <= page_size
            found += [
                (each.position.ledger_id, each.position.entry_id, each.attempts)
                for each in page.entries
            ]
            if not page.next_page_token:
                return found
            token = page.next_page_token

    async def acquire(self, owner: str, duration_ms: int = 60_000) -> pb.Lease:
        request = lease_pb2.AcquireLeaseRequest(
            owner=owner, duration=duration(duration_ms), **self.names
        )
        lease: pb.Lease = (await self.stub.AcquireLease(request)).lease
        return lease

    async def renew(self, owner: str, epoch: int, duration_ms: int = 60_000) -> pb.Lease:
        request = lease_pb2.RenewLeaseRequest(
            owner=owner, epoch=epoch, duration=duration(duration_ms), **self.names
        )
        lease: pb.Lease = (await self.stub.RenewLease(request)).lease
        return lease

    async def release(self, epoch: int) -> None:
        await self.stub.ReleaseLease(lease_pb2.ReleaseLeaseRequest(epoch=epoch, **self.names))

    async def delete(self) -> None:
        await self.stub.DeleteCursor(pb.DeleteCursorRequest(**self.names))

    async def import_(self, info: bytes, position: bytes = b"", **more: Any) -> pb.Cursor:
        request = pb.ImportManagedCursorRequest(
            managed_cursor_info=info, position_info=position, **self.names, **more
        )
        cursor: pb.Cursor = (await self.stub.ImportManagedCursor(request)).cursor
        return cursor

    async def export(self) -> bytes:
        request = pb.ExportManagedCursorRequest(**self.names)
        info: bytes = (await self.stub.ExportManagedCursor(request)).managed_cursor_info
        return info


@pytest.fixture
async def cursor(services: Services, topic: str) -> Cursor:
    """A cursor of a topic of its own, at its start."""
    cursor = Cursor(services.cursor, topic)
    await cursor.create()
    return cursor


@pytest.fixture(scope="module")
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """The service alone; tests kill and restart it, and it runs again when a test ends."""
    async with running(tmp_path_factory.mktemp("alone"), services=("cursor",)) as services:
        yield services


@pytest.fixture(params=["terminate", "kill"])
async def restarted(
    alone: Services, topic: str, request: pytest.FixtureRequest
) -> tuple[Cursor, Callable[[], Any]]:
    """A cursor, and a function that restarts the process, after a clean stop or SIGKILL."""
    cursor = Cursor(alone.cursor, topic)
    await cursor.create()

    async def restart() -> None:
        await getattr(alone.stack, request.param)("cursor")
        await alone.stack.run("cursor")

        async def answers() -> bool:
            return await health(alone.stack.address("cursor"), SERVICE) == "SERVING"

        await eventually(answers, "the service is back")

    return cursor, restart


# ---- creation and deletion


async def test_a_cursor_is_created_once(services: Services, topic: str) -> None:
    cursor = Cursor(services.cursor, topic)
    made = await cursor.create(at(4), properties={"team": "billing"})
    assert (made.topic, made.name, made.revision) == (topic, "c", 0)
    assert made.mark_delete == at(4)
    assert dict(made.properties) == {"team": "billing"}
    assert made.created.ToMilliseconds() > 1_700_000_000_000
    assert not made.HasField("lease")

    again = await services.cursor.CreateCursor(
        pb.CreateCursorRequest(mark_delete=at(9), **cursor.names)
    )
    assert (again.created, again.cursor) == (False, made)
    assert await cursor.get() == made


async def test_a_cursor_without_a_position_is_before_everything(cursor: Cursor) -> None:
    assert not (await cursor.get()).HasField("mark_delete")
    assert (await cursor.acknowledge(0)).mark_delete == at(0)


async def test_a_deleted_cursor_is_gone_and_its_name_is_free(cursor: Cursor) -> None:
    await cursor.mark_delete(at(5), {"a": "1"})
    await cursor.acknowledge(7, messages(9, [1]))
    await cursor.delete()
    with refused(NOT_FOUND, "CURSOR_NOT_FOUND"):
        await cursor.delete()
    with refused(NOT_FOUND, "CURSOR_NOT_FOUND"):
        await cursor.get()
    made = await cursor.create()
    assert not made.HasField("mark_delete")
    assert (made.acknowledged_entries, made.partial_batches) == (0, 0)
    assert await cursor.beyond() == []


@pytest.mark.parametrize("size", [0, 1, 3, 7, 1000])
async def test_cursors_are_listed_page_by_page(services: Services, topic: str, size: int) -> None:
    names = sorted(["a", "b/c", "b", "é", " ", "z" * 255, "a/b/c/d"], key=str.encode)
    for name in names:
        await Cursor(services.cursor, topic, name).create()
    await Cursor(services.cursor, f"{topic}-other").create()

    found, token = [], ""
    while True:
        request = pb.ListCursorsRequest(topic=topic, page_size=size, page_token=token)
        page = await services.cursor.ListCursors(request)
        assert size == 0 or len(page.cursors) <= size
        found += [each.name for each in page.cursors]
        token = page.next_page_token
        if not token:
            break

    assert found == names


async def test_cursors_of_all_topics_are_listed_by_topic_and_name(
    services: Services, topic: str
) -> None:
    for ending, name in (("b", "1"), ("a", "2"), ("a", "1")):
        await Cursor(services.cursor, f"{topic}-{ending}", name).create()
    found, token = [], ""
    while True:
        request = pb.ListCursorsRequest(page_size=2, page_token=token)
        page = await services.cursor.ListCursors(request)
        found += [(each.topic, each.name) for each in page.cursors]
        token = page.next_page_token
        if not token:
            break
    assert found == sorted(found)
    assert [each for each in found if each[0].startswith(topic)] == [
        (f"{topic}-a", "1"),
        (f"{topic}-a", "2"),
        (f"{topic}-b", "1"),
    ]


@pytest.mark.parametrize(("cursors", "properties", "pages"), [(20, 128, 3), (4, 1_024, 4)])
async def test_a_page_of_large_cursors_ends_early(
    services: Services, topic: str, cursors: int, properties: int, pages: int
) -> None:
    """Otherwise a response could exceed the message limit."""
    names = [f"c{number:02}" for number in range(cursors)]
    large = {f"{number:04}": "x" * 4_092 for number in range(properties)}
    for name in names:
        await Cursor(services.cursor, topic, name).create(properties=large)

    token = ""
    found: list[str] = []
    sizes: list[int] = []
    while not sizes or token:
        request = pb.ListCursorsRequest(topic=topic, page_token=token)
        page = await services.cursor.ListCursors(request)
        assert all(dict(each.properties) == large for each in page.cursors)
        found += [each.name for each in page.cursors]
        token = page.next_page_token
        sizes.append(page.ByteSize())

    assert (found, len(sizes)) == (names, pages)
    assert max(sizes) < limits.CURSORS_BYTES_MAX + 64 * properties  # a page has at least one cursor


# ---- mark-delete and attached properties


async def test_repeating_a_position_replaces_its_properties(
    restarted: tuple[Cursor, Callable[[], Any]],
) -> None:
    cursor, restart = restarted
    assert (await cursor.mark_delete(at(3), {"a": "1", "b": "2"})).revision == 1
    assert (await cursor.mark_delete(at(3), {"a": "4"})).revision == 2
    before = await cursor.get()
    assert dict(before.mark_delete_properties) == {"a": "4"}
    await restart()
    assert await cursor.get() == before


async def test_attached_properties_are_cleared_kept_and_inherited(cursor: Cursor) -> None:
    await cursor.mark_delete(at(1), {"a": "1"})
    await cursor.acknowledge(2)
    moved = await cursor.get()
    assert (moved.mark_delete, dict(moved.mark_delete_properties)) == (at(2), {"a": "1"})
    await cursor.mark_delete(at(3))
    assert dict((await cursor.get()).mark_delete_properties) == {}

    answers = await asyncio.gather(
        *(cursor.mark_delete(at(4), {"k": str(number)}) for number in range(20))
    )
    last = max(range(20), key=lambda number: answers[number].revision)
    assert dict((await cursor.get()).mark_delete_properties) == {"k": str(last)}
    await cursor.acknowledge(5)
    inherited = await cursor.get()
    assert (inherited.mark_delete, inherited.mark_delete_properties["k"]) == (at(5), str(last))


async def test_a_cursor_does_not_move_back_or_beyond_the_end(cursor: Cursor) -> None:
    await cursor.mark_delete(at(5), {"a": "1"})
    before = await cursor.get()
    with refused(IN_USE, "ALREADY_MARK_DELETED"):
        await cursor.mark_delete(at(4), {"b": "2"})
    with refused(INVALID, "INVALID_POSITION"):
        await cursor.mark_delete(at(11), {"b": "2"}, log_end=at(10))
    with refused(INVALID, "INVALID_POSITION"):
        await cursor.acknowledge(7, 11, log_end=at(10))
    with refused(INVALID, "INVALID_POSITION"):
        await cursor.acknowledge(7, messages(11, [0]), log_end=at(10))
    assert await cursor.get() == before
    assert await cursor.beyond() == []
    assert (await cursor.mark_delete(at(5), log_end=at(10))).mark_delete == at(5)
    assert (await cursor.mark_delete(at(10), log_end=at(10))).mark_delete == at(10)


async def test_mark_delete_returns_the_actual_position(cursor: Cursor) -> None:
    await cursor.acknowledge(4, 5, 6)
    assert (await cursor.mark_delete(at(3))).mark_delete == at(6)


async def test_many_large_properties_are_stored_unchanged(
    restarted: tuple[Cursor, Callable[[], Any]],
) -> None:
    """Like a snapshot of deduplication: a number for each producer."""
    cursor, restart = restarted
    properties = {f"producer-{number}": str(number) for number in range(50_000)}
    await cursor.mark_delete(at(1), properties)
    await restart()
    assert dict((await cursor.get()).mark_delete_properties) == properties


# ---- individual acknowledgements


async def test_a_run_adjacent_to_the_mark_delete_position_moves_it(cursor: Cursor) -> None:
    left = []
    for entry_id in (3, 2, 1):
        answer = await cursor.acknowledge(entry_id)
        assert not answer.HasField("mark_delete")
        assert answer.revision == 0
        left.append(len(await cursor.waiting(10)))
    answer = await cursor.acknowledge(0)
    left.append(len(await cursor.waiting(10)))
    assert (left, answer.mark_delete, answer.revision) == ([9, 8, 7, 6], at(3), 1)

    before = await cursor.get()
    await cursor.acknowledge(0, 1, 2, 3)
    assert await cursor.get() == before


async def test_holes_survive_every_kind_of_exit(
    restarted: tuple[Cursor, Callable[[], Any]],
) -> None:
    cursor, restart = restarted
    await cursor.acknowledge(2, 5, 7, 8, 9)
    await restart()
    waiting = await cursor.waiting(20)
    assert (len(waiting), waiting[:4]) == (15, [0, 1, 3, 4])
    assert await cursor.beyond() == [(1, 2, 2), (1, 5, 5), (1, 7, 9)]
    assert (await cursor.get()).acknowledged_entries == 5


@pytest.mark.parametrize("page_size", [0, 1_000, 7_919])
async def test_any_number_of_holes_is_durable(alone: Services, topic: str, page_size: int) -> None:
    """Pulsar keeps 10,000 or 200,000, and silently forgets the others."""
    cursor = Cursor(alone.cursor, topic)
    await cursor.create()
    holes = 20_000
    for start in range(0, holes, 10_000):
        ranges = [run(2 * number + 1) for number in range(start, start + 10_000)]
        await cursor.acknowledge(*ranges)
    await alone.stack.kill("cursor")
    await alone.stack.run("cursor")
    assert (await cursor.get()).acknowledged_entries == holes
    assert await cursor.beyond(page_size) == [
        (1, 2 * number + 1, 2 * number + 1) for number in range(holes)
    ]


async def test_messages_of_a_batch_are_acknowledged_one_by_one(cursor: Cursor) -> None:
    await cursor.mark_delete(at(4))
    for indexes, done in (
        (range(2, 5), [*range(2, 5)]),
        (range(3, 9), [*range(2, 9)]),
        ([0], [0, *range(2, 9)]),
    ):
        await cursor.acknowledge(messages(5, indexes))
        assert await cursor.messages() == {5: done}
        assert (await cursor.get()).partial_batches == 1
    await cursor.acknowledge(messages(5, [1]))
    answer = await cursor.acknowledge(messages(5, [9]))
    assert answer.mark_delete == at(5)
    assert (await cursor.get()).partial_batches == 0


@pytest.mark.parametrize("how", ["the whole entry", "mark-delete", "reset"])
async def test_acknowledgements_within_a_batch_are_forgotten_with(cursor: Cursor, how: str) -> None:
    await cursor.mark_delete(at(4))
    await cursor.acknowledge(messages(7, [1, 2]), messages(8, [3], size=4))
    match how:
        case "the whole entry":
            await cursor.acknowledge(7)
        case "mark-delete":
            await cursor.mark_delete(at(7))
        case _:
            await cursor.reset(at(4))
    assert await cursor.messages() == ({} if how == "reset" else {8: [3]})
    assert (await cursor.get()).partial_batches == (0 if how == "reset" else 1)


async def test_messages_of_a_batch_survive_alone(
    restarted: tuple[Cursor, Callable[[], Any]],
) -> None:
    """Even without any other acknowledgement (Pulsar's #26498)."""
    cursor, restart = restarted
    await cursor.acknowledge(messages(3, [0, 2, 9]), messages(70_000, [1], size=10_000))
    await restart()
    assert await cursor.messages() == {3: [0, 2, 9], 70_000: [1]}
    assert (await cursor.get()).partial_batches == 2


async def test_a_batch_acknowledgement_is_never_taken_for_the_whole_entry(
    cursor: Cursor,
) -> None:
    """No setting ignores or widens it. An empty one does nothing, and one that names all messages
    acknowledges the entry."""
    await cursor.mark_delete(at(0))
    await cursor.acknowledge(messages(1, []))
    assert await cursor.waiting(3) == [1, 2]
    await cursor.acknowledge(messages(1, [0, 1, 2], size=4))
    assert await cursor.waiting(3) == [1, 2]
    answer = await cursor.acknowledge(messages(1, range(4), size=4))
    assert answer.mark_delete == at(1)


async def test_a_batch_has_one_size(cursor: Cursor) -> None:
    await cursor.acknowledge(messages(1, [0], size=4))
    with refused(INVALID, "INVALID_POSITION"):
        await cursor.acknowledge(5, messages(1, [1], size=5))
    assert await cursor.messages() == {1: [0]}
    assert await cursor.beyond() == []


async def test_holes_behind_the_cursor_are_removed(cursor: Cursor) -> None:
    await cursor.acknowledge(2, 4, 6)
    await cursor.mark_delete(at(4))
    assert await cursor.beyond() == [(1, 6, 6)]
    await cursor.acknowledge(2, run(0, 4))
    assert await cursor.beyond() == [(1, 6, 6)]
    answer = await cursor.acknowledge(run(5, 9))
    assert answer.mark_delete == at(9)
    assert await cursor.beyond() == []
    assert (await cursor.get()).acknowledged_entries == 0


async def test_a_cursor_passes_a_ledgers_end_once_it_is_known(cursor: Cursor) -> None:
    await cursor.mark_delete(at(5))
    answer = await cursor.acknowledge(run(6, 9), run(0, 3, ledger_id=4))
    assert answer.mark_delete == at(9)
    succession = pb.Succession(last=at(9), next=at(0, 4))
    answer = await cursor.acknowledge(successions=[succession])
    assert answer.mark_delete == at(3, 4)
    with refused(INVALID, "INVALID_POSITION"):
        contradicting = pb.Succession(last=at(9), next=at(0, 5))
        await cursor.acknowledge(successions=[contradicting])


async def test_cursors_of_a_topic_share_its_successions(cursor: Cursor) -> None:
    other = Cursor(cursor.stub, cursor.names["topic"], "other")
    await other.create(at(8))
    await cursor.mark_delete(at(1), successions=[pb.Succession(last=at(9), next=at(0, 4))])
    assert (await other.acknowledge(9, run(0, 2, ledger_id=4))).mark_delete == at(2, 4)


async def test_pages_of_holes_list_ranges_and_batches_in_order(cursor: Cursor) -> None:
    await cursor.mark_delete(at(0))
    await cursor.acknowledge(2, 4, messages(3, [0]), messages(5, [1]))
    page = await cursor.page(page_size=2)
    assert page.mark_delete == at(0)
    assert [each.first.entry_id for each in page.ranges] == [2]
    assert [each.position.entry_id for each in page.batches] == [3]
    page = await cursor.page(page_token=page.next_page_token, page_size=2)
    assert [each.first.entry_id for each in page.ranges] == [4]
    assert [each.position.entry_id for each in page.batches] == [5]
    assert not page.next_page_token


async def test_a_page_of_large_batches_ends_early(cursor: Cursor) -> None:
    size = limits.BATCH_MESSAGES_MAX
    count = limits.HOLES_INDEXES_MAX // size + limits.HOLES_STEP
    for start in range(0, count, 500):
        some = range(start, min(start + 500, count))
        await cursor.acknowledge(*(messages(each + 1, [0, size - 1], size) for each in some))
    found, token = 0, ""
    while True:
        page = await cursor.page(page_token=token, page_size=limits.HOLES_MAX)
        found += len(page.batches)
        if not page.next_page_token:
            break
        token = page.next_page_token
    assert found == count


async def test_the_order_of_acknowledgements_does_not_matter(cursor: Cursor) -> None:
    seed = 4
    random = Random(seed)
    ranges = [run(first, first + random.randrange(9)) for first in range(0, 3_000, 10)]
    shuffled = random.sample(ranges, len(ranges))
    await asyncio.gather(*(cursor.acknowledge(*shuffled[i::7]) for i in range(7)))
    expected = [(1, each.first.entry_id, each.last_entry_id) for each in ranges]
    first = expected.pop(0)
    assert (await cursor.get()).mark_delete == at(first[2]), f"seed {seed}"
    assert await cursor.beyond() == expected, f"seed {seed}"


# ---- reset, attempts, properties


async def test_a_reset_moves_anywhere_and_forgets_holes(cursor: Cursor) -> None:
    await cursor.mark_delete(at(5), {"a": "1"})
    await cursor.update(put={"own": "kept"})
    await cursor.acknowledge(8, messages(9, [1]))
    await cursor.attempts(7)
    revision = (await cursor.get()).revision
    back = await cursor.reset(at(2))
    assert (back.mark_delete, dict(back.mark_delete_properties)) == (at(2), {})
    assert (back.acknowledged_entries, back.partial_batches) == (0, 0)
    assert dict(back.properties) == {"own": "kept"}
    assert back.revision == revision + 1
    assert await cursor.attempts(7) == [1]
    assert not (await cursor.reset(None)).HasField("mark_delete")


async def test_deliveries_are_counted_until_the_entry_is_acknowledged(cursor: Cursor) -> None:
    await cursor.mark_delete(at(1))
    assert await cursor.attempts(2, 3) == [1, 1]
    assert await cursor.attempts(3, 1, 4) == [2, 0, 1]
    await cursor.acknowledge(3)
    assert await cursor.attempts(2, 3, 4) == [2, 0, 2]
    assert await cursor.attempts() == []


async def test_counted_deliveries_survive_a_restart(
    restarted: tuple[Cursor, Callable[[], Any]],
) -> None:
    cursor, restart = restarted
    await cursor.attempts(2, 3)
    await restart()
    assert await cursor.attempts(2, 3, 4) == [2, 2, 1]
    await cursor.attempts(3, 5, attempts=[7, 2])
    await restart()
    assert await cursor.counts() == [(1, 2, 2), (1, 3, 7), (1, 4, 1), (1, 5, 2)]


async def test_explicit_delivery_counts_are_idempotent(cursor: Cursor) -> None:
    await cursor.mark_delete(at(1))
    for _ in range(2):
        assert await cursor.attempts(2, 3, 1, attempts=[1, 5, 5]) == [1, 5, 0]
    assert await cursor.attempts(3, 2, attempts=[4, 2]) == [5, 2]
    assert await cursor.attempts(3) == [6]
    assert await cursor.counts() == [(1, 2, 2), (1, 3, 6)]


@pytest.mark.parametrize("page_size", [0, 1, 2, 3, 4, 100])
async def test_deliveries_are_listed_page_by_page(cursor: Cursor, page_size: int) -> None:
    assert await cursor.counts(page_size) == []
    for ledger_id in (2, 1):
        positions = [at(each, ledger_id) for each in (9, 7, 8)]
        request = lease_pb2.RecordAttemptsRequest(
            positions=positions, attempts=[3, 1, 2], **cursor.names
        )
        await cursor.stub.RecordAttempts(request)
    expected = [(ledger_id, 6 + count, count) for ledger_id in (1, 2) for count in (1, 2, 3)]
    assert await cursor.counts(page_size) == expected
    await cursor.acknowledge(8)
    expected.remove((1, 8, 2))
    assert await cursor.counts(page_size) == expected
    await cursor.mark_delete(at(7, 2))
    assert await cursor.counts(page_size) == expected[3:]
    await cursor.reset(None)
    assert await cursor.counts(page_size) == []


async def test_attached_properties_are_left_out_on_request(
    cursor: Cursor,
) -> None:
    await cursor.update(put={"own": "1"})
    await cursor.mark_delete(at(4), {"attached": "x" * 1_000})
    whole = await cursor.get()
    request = pb.GetCursorRequest(**cursor.names, without_mark_delete_properties=True)
    bare = (await cursor.stub.GetCursor(request)).cursor
    assert dict(whole.mark_delete_properties) == {"attached": "x" * 1_000}
    assert not bare.mark_delete_properties
    bare.mark_delete_properties["attached"] = "x" * 1_000
    assert bare == whole


async def test_a_cursors_properties_are_independent_of_its_position(
    restarted: tuple[Cursor, Callable[[], Any]],
) -> None:
    cursor, restart = restarted
    await cursor.update(put={"a": "1", "b": "2", "#seqgate.internal.x": "y"})
    await cursor.update(put={"a": "3"}, remove=["b", "never there"])
    await cursor.mark_delete(at(4), {"other": "map"})
    await cursor.mark_delete(at(5))
    await restart()
    kept = {"a": "3", "#seqgate.internal.x": "y"}
    assert dict((await cursor.get()).properties) == kept

    with refused(INVALID, "INVALID_PROPERTY"):
        await cursor.update(clear=True, put={"#seqgate.internal.x": "z"})
    assert dict((await cursor.get()).properties) == kept
    cleared = await cursor.update(clear=True, put={"c": "4"})
    assert dict(cleared.properties) == {"c": "4", "#seqgate.internal.x": "y"}
    assert dict((await cursor.update(remove=["#seqgate.internal.x"])).properties) == {"c": "4"}


async def test_concurrent_writers_of_properties_converge(cursor: Cursor) -> None:
    async def add(writer: int) -> int:
        conflicts = 0
        while True:
            known = await cursor.get()
            count = int(known.properties.get("count", "0"))
            try:
                with refused(ABORTED, "REVISION_CONFLICT"):
                    await cursor.update(
                        put={"count": str(count + 1), f"w{writer}": "was here"},
                        revision=known.revision,
                    )
            except pytest.fail.Exception:  # not refused
                return conflicts
            conflicts += 1

    conflicts = await asyncio.gather(*(add(writer) for writer in range(6)))
    final = await cursor.get()
    assert final.properties["count"] == "6"
    assert len(final.properties) == 7
    assert final.revision == 6
    assert sum(conflicts) > 0


async def test_a_stale_version_changes_nothing(cursor: Cursor) -> None:
    await cursor.mark_delete(at(1), {"a": "1"}, revision=0)
    before = await cursor.get()
    with refused(ABORTED, "REVISION_CONFLICT") as details:
        await cursor.mark_delete(at(2), revision=0)
    assert details["revision"] == "1"
    with refused(ABORTED, "REVISION_CONFLICT"):
        await cursor.update(put={"a": "1"}, revision=2)
    assert await cursor.get() == before
    await cursor.mark_delete(at(2), revision=1)


# ---- leases


async def test_a_lease_has_one_owner(cursor: Cursor) -> None:
    first = await cursor.acquire("one")
    assert (first.owner, first.epoch) == ("one", 1)
    with refused(IN_USE, "LEASE_HELD") as details:
        await cursor.acquire("two")
    assert details["owner"] == "one"
    assert 0 < int(details["remaining_ms"]) <= 60_000
    again = await cursor.acquire("one")
    assert again.epoch == 1
    assert again.expires.ToMilliseconds() >= first.expires.ToMilliseconds()
    assert (await cursor.get()).lease == again

    await cursor.release(1)
    second = await cursor.acquire("two")
    assert (second.owner, second.epoch) == ("two", 3)


async def test_a_lease_is_free_when_it_has_expired(cursor: Cursor) -> None:
    await cursor.acquire("one", 100)

    async def taken() -> bool:
        try:
            with refused(IN_USE, "LEASE_HELD"):
                await cursor.acquire("two")
        except pytest.fail.Exception:  # not refused
            return True
        return False

    await eventually(taken, "the lease is free")
    lease = (await cursor.get()).lease
    assert (lease.owner, lease.epoch) == ("two", 3)


async def test_a_fenced_owner_changes_nothing(cursor: Cursor) -> None:
    await cursor.acquire("one")
    await cursor.mark_delete(at(1), epoch=1)
    await cursor.release(1)
    await cursor.acquire("two")
    before = await cursor.get()
    for late in (
        cursor.mark_delete(at(2), epoch=1),
        cursor.acknowledge(3, epoch=1),
        cursor.reset(None, epoch=1),
        cursor.attempts(3, epoch=1),
        cursor.renew("one", 1),
        cursor.renew("one", 2),
        cursor.release(1),
    ):
        with refused(ABORTED, "FENCED"):
            await late
    assert await cursor.get() == before
    assert await cursor.beyond() == []
    await cursor.mark_delete(at(2), epoch=3)
    await cursor.acknowledge(4, epoch=3)
    assert await cursor.attempts(3, epoch=3) == [1]
    await cursor.reset(at(1), epoch=3)
    await cursor.mark_delete(at(2))  # the epoch is optional


async def test_an_epoch_stays_fenced_after_its_lease_expires(cursor: Cursor) -> None:
    await cursor.acquire("one")
    await cursor.release(1)
    await cursor.release(1)
    await cursor.acquire("two")
    await cursor.release(3)
    with refused(ABORTED, "FENCED"):
        await cursor.mark_delete(at(2), epoch=1)


async def test_a_lease_lasts_longer_when_it_is_renewed(cursor: Cursor) -> None:
    first = await cursor.acquire("one", 1_000)
    renewed = await cursor.renew("one", first.epoch, 60_000)
    assert renewed.epoch == first.epoch
    assert renewed.expires.ToMilliseconds() > first.expires.ToMilliseconds() + 10_000
    revision = (await cursor.get()).revision
    assert revision == 0  # leases do not change the revision


async def test_a_lease_survives_a_restart(restarted: tuple[Cursor, Callable[[], Any]]) -> None:
    cursor, restart = restarted
    lease = await cursor.acquire("one")
    await restart()
    found = (await cursor.get()).lease
    assert (found.owner, found.epoch) == (lease.owner, lease.epoch)
    with refused(IN_USE, "LEASE_HELD"):
        await cursor.acquire("two")
    with refused(ABORTED, "FENCED"):
        await cursor.mark_delete(at(1), epoch=7)


# ---- atomicity


async def test_answered_changes_survive_a_crash(alone: Services, topic: str) -> None:
    cursor = Cursor(alone.cursor, topic)
    await cursor.create()
    answered: list[int] = []

    async def acknowledge() -> None:
        for entry_id in range(1, 100_000, 2):
            try:
                await cursor.acknowledge(entry_id)
            except Exception:  # the process was killed
                return
            answered.append(entry_id)

    working = asyncio.create_task(acknowledge())
    await eventually(lambda: len(answered) >= 30, "some are answered")
    await alone.stack.kill("cursor")
    await working
    await alone.stack.run("cursor")
    found = [first for _, first, _ in await cursor.beyond()]
    assert found in (answered, [*answered, answered[-1] + 2])


async def test_a_refused_call_changes_nothing(cursor: Cursor) -> None:
    await cursor.acquire("one")
    with refused(ABORTED, "FENCED"):
        await cursor.acknowledge(
            3, messages(5, [1]), epoch=9, successions=[pb.Succession(last=at(9), next=at(0, 2))]
        )
    assert await cursor.beyond() == []
    other = Cursor(cursor.stub, cursor.names["topic"], "other")
    await other.create(at(8))
    assert (await other.acknowledge(9, run(0, ledger_id=2))).mark_delete == at(9)


# ---- Pulsar's records


def info(entry_id: int = 7, *, ledger: int = -1, **more: Any) -> bytes:
    return managed_pb2.ManagedCursorInfo(
        cursors_ledger_id=ledger, mark_delete_ledger_id=3, mark_delete_entry_id=entry_id, **more
    ).SerializeToString()


async def test_a_cursor_is_imported_from_and_exported_to_pulsar(
    services: Services, topic: str
) -> None:
    cursor = Cursor(services.cursor, topic)
    await cursor.create(at(4), properties={"team": "billing"})
    await cursor.mark_delete(at(5), {"a": "1", "b": "x"})
    await cursor.acknowledge(run(8, 9), 11, messages(13, [0, 3], size=5))

    other = Cursor(services.cursor, topic, "other")
    imported = await other.import_(await cursor.export())

    assert imported.mark_delete == at(5)
    assert dict(imported.mark_delete_properties) == {"a": "1", "b": "x"}
    assert dict(imported.properties) == {"team": "billing"}
    assert (imported.acknowledged_entries, imported.partial_batches) == (3, 1)
    assert await other.get() == imported
    assert await other.beyond() == [(1, 8, 9), (1, 11, 11)]
    assert await other.messages() == {13: [0, 3]}


async def test_an_import_replaces_a_cursor_only_on_request(cursor: Cursor) -> None:
    await cursor.acknowledge(5, messages(6, [1]))
    await cursor.update(put={"own": "1", "#seqgate.internal.x": "y"})
    await cursor.acquire("one")
    before = await cursor.get()
    with refused(IN_USE, "CURSOR_EXISTS"):
        await cursor.import_(info())
    assert await cursor.get() == before

    replaced = await cursor.import_(info(), replace=True)

    assert replaced.mark_delete == at(7, 3)
    assert dict(replaced.properties) == {}
    assert (replaced.acknowledged_entries, replaced.partial_batches) == (0, 0)
    assert replaced.revision > before.revision
    assert replaced.lease.epoch > before.lease.epoch
    assert (await cursor.acquire("two")).owner == "two"
    with refused(ABORTED, "FENCED"):
        await cursor.mark_delete(at(8), epoch=before.lease.epoch)
    assert await cursor.beyond() == []


async def test_the_cursor_ledgers_entry_takes_precedence(services: Services, topic: str) -> None:
    cursor = Cursor(services.cursor, topic)
    position = managed_pb2.PositionInfo(ledger_id=3, entry_id=9).SerializeToString()
    imported = await cursor.import_(info(ledger=12), position)
    assert imported.mark_delete == at(9, 3)


async def test_an_interrupted_import_is_resumed(services: Services, topic: str) -> None:
    cursor = Cursor(services.cursor, topic)
    await cursor.create(properties={"#seqgate.internal.importing": "begun"})
    imported = await cursor.import_(info())
    assert (imported.mark_delete, dict(imported.properties)) == (at(7, 3), {})


async def test_an_invalid_import_creates_no_cursor(services: Services, topic: str) -> None:
    cursor = Cursor(services.cursor, topic)
    with refused(INVALID, "INVALID_MANAGED_CURSOR"):
        await cursor.import_(b"\xff\xff")
    with refused(NOT_FOUND, "CURSOR_NOT_FOUND"):
        await cursor.get()


# ---- the process


async def test_the_cursor_service_runs_alone(alone: Services, topic: str) -> None:
    await alone.stack.kill("redis")
    await Cursor(alone.cursor, topic).create()
    assert await health(alone.stack.address("cursor"), SERVICE) == "SERVING"
    await alone.stack.run("redis")


async def test_a_full_store_refuses_changes_and_keeps_its_data(
    private: Private, topic: str
) -> None:
    size = 512 * 1024
    async with private(services=("cursor",), SEQGATE_CURSOR_STORE_BYTES_MAX=str(size)) as services:
        cursor = Cursor(services.cursor, topic)
        await cursor.create()
        await cursor.mark_delete(at(1), {"a": "1"})
        large = {str(number): Random(number).randbytes(20_000).hex() for number in range(30)}
        with refused(StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL"):
            await cursor.mark_delete(at(2), large)
        assert (await cursor.get()).mark_delete == at(1)
        await cursor.mark_delete(at(2), {"a": "2"})


async def test_readiness_ends_with_the_service(private: Private) -> None:
    async with private(services=("cursor",)) as services:
        address = services.stack.address("cursor")
        assert await health(address) == "SERVING"
        ending = asyncio.create_task(services.stack.terminate("cursor"))
        assert await ending == 0
        assert await health(address) == ""
