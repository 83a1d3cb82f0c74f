"""Invalid input to the cursor service: the refusal, and that it changes nothing.

Each limit is tested at its boundary: the last value accepted, and the first refused.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.internal.cursor.v1 import lease_pb2
from seqgate.services.cursor import lease_servicer as lease_limits
from seqgate.services.cursor import servicer as limits
from seqgate.services.cursor.core.cursor import PROPERTIES_BYTES_MAX, PROPERTIES_MAX
from seqgate.services.cursor.core.state import LEASE_MAX_MS
from seqgate.times import duration
from seqgate.types import CURSOR_NAME_BYTES_MAX, SEQUENCE_ID_MAX
from tests.integration.refusals import refused
from tests.integration.services import Services, channel_to
from tests.integration.test_bad_input import (
    BAD_PRODUCERS,
    BAD_TOPICS,
    GARBAGE,
    GOOD_PRODUCERS,
    longest_topic,
)
from tests.support.raw_channel import raw

INVALID = StatusCode.INVALID_ARGUMENT
NOT_FOUND = StatusCode.NOT_FOUND

BAD_NAMES, GOOD_NAMES = BAD_PRODUCERS, GOOD_PRODUCERS
"""Cursors are named by the rules for producers."""

TOO_LARGE = SEQUENCE_ID_MAX + 1
SERVICE = pb.DESCRIPTOR.services_by_name["CursorService"]
LEASE_SERVICE = lease_pb2.DESCRIPTOR.services_by_name["CursorLeaseService"]
LAST_TOKEN = f"{SEQUENCE_ID_MAX}:{SEQUENCE_ID_MAX}"


def at(ledger_id: int, entry_id: int) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


BAD_POSITIONS = [at(TOO_LARGE, 0), at(0, TOO_LARGE), at(2**64 - 1, 2**64 - 1)]
LAST_POSITION = at(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)


def run(first: int = 5, last: int = 5) -> pb.PositionRange:
    return pb.PositionRange(first=at(1, first), last_entry_id=last)


def batch(*indexes: int, size: int = 4, position: Position | None = None) -> Any:
    return pb.BatchAcknowledgement(
        position=position or at(1, 8), batch_size=size, indexes=indexes or [1]
    )


def succession(last: Position | None = None, following: Position | None = None) -> pb.Succession:
    return pb.Succession(last=last or at(1, 9), next=following or at(2, 0))


RIGHT: dict[str, dict[str, Any]] = {
    "CreateCursor": {},
    "GetCursor": {},
    "DeleteCursor": {},
    "ResetCursor": {},
    "MarkDelete": {"position": at(1, 5)},
    "Acknowledge": {},
    "ListAcknowledged": {},
    "RecordAttempts": {},
    "ListAttempts": {},
    "UpdateCursorProperties": {},
    "AcquireLease": {"owner": "o", "duration": duration(1_000)},
    "RenewLease": {"owner": "o", "epoch": 1, "duration": duration(1_000)},
    "ReleaseLease": {"epoch": 1},
    "ImportManagedCursor": {"managed_cursor_info": b"\x08\x01"},
    "ExportManagedCursor": {},
}
"""The fields, besides the names, of a valid request to each method that names a cursor."""


def _kind(method: str) -> Callable[..., Message]:
    described = SERVICE.methods_by_name.get(method) or LEASE_SERVICE.methods_by_name[method]
    return GetMessageClass(described.input_type)


def request(method: str, topic: str, name: str = "c", **changes: Any) -> Message:
    """A valid request with the changes of a test."""
    return _kind(method)(**{"topic": topic, "cursor": name, **RIGHT[method], **changes})


class Cursor:
    """A cursor at 1:3, with a hole, a partly acknowledged batch, and properties."""

    def __init__(self, stub: Any, topic: str) -> None:
        self.stub = stub
        self.topic = topic

    async def call(self, method: str, name: str = "c", **changes: Any) -> Any:
        return await getattr(self.stub, method)(request(method, self.topic, name, **changes))

    async def state(self) -> list[bytes]:
        """Everything that a refusal must not change."""
        listed = await self.stub.ListCursors(pb.ListCursorsRequest(topic=self.topic))
        answers = [listed]
        answers += [await self.call(each) for each in ("ListAcknowledged", "ListAttempts")]
        return [each.SerializeToString(deterministic=True) for each in answers]

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Check that the block leaves all state unchanged."""
        before = await self.state()
        yield
        assert await self.state() == before

    async def refuses(self, reason: str, method: str, **changes: Any) -> dict[str, str]:
        """Check that the method refuses a request with these changes."""
        async with self.unchanged():
            with refused(INVALID, reason) as details:
                await self.call(method, **changes)
        return details


@pytest.fixture
async def cursor(services: Services, topic: str) -> Cursor:
    cursor = Cursor(services.cursor, topic)
    await cursor.call("CreateCursor", mark_delete=at(1, 2), properties={"own": "1"})
    await cursor.call("MarkDelete", position=at(1, 3), properties={"a": "1"})
    await cursor.call("Acknowledge", ranges=[run(6, 6)], batches=[batch(0, position=at(1, 10))])
    return cursor


# ---- names


def test_every_method_is_in_the_table() -> None:
    methods = {*SERVICE.methods_by_name, *LEASE_SERVICE.methods_by_name}
    assert methods == RIGHT.keys() | {"ListCursors"}


@pytest.mark.parametrize("method", RIGHT)
async def test_methods_refuse_invalid_topic_names(services: Services, method: str) -> None:
    for topic in BAD_TOPICS:
        with refused(INVALID, "INVALID_TOPIC_NAME"):
            await getattr(services.cursor, method)(request(method, topic))


@pytest.mark.parametrize("method", RIGHT)
async def test_methods_refuse_invalid_cursor_names(cursor: Cursor, method: str) -> None:
    async with cursor.unchanged():
        for name in BAD_NAMES:
            with refused(INVALID, "INVALID_CURSOR_NAME"):
                await cursor.call(method, name)


@pytest.mark.parametrize(
    "method", [each for each in RIGHT if each not in ("CreateCursor", "ImportManagedCursor")]
)
async def test_methods_do_not_find_a_missing_cursor(cursor: Cursor, method: str) -> None:
    async with cursor.unchanged():
        with refused(NOT_FOUND, "CURSOR_NOT_FOUND"):
            await cursor.call(method, "another")
        with refused(NOT_FOUND, "CURSOR_NOT_FOUND"):
            other = request(method, f"{cursor.topic}-other")
            await getattr(cursor.stub, method)(other)


@pytest.mark.parametrize("method", RIGHT)
async def test_methods_refuse_an_empty_request(services: Services, method: str) -> None:
    with refused(INVALID, "INVALID_TOPIC_NAME"):
        await getattr(services.cursor, method)(_kind(method)())


@pytest.mark.parametrize("name", GOOD_NAMES)
async def test_valid_cursor_names_are_accepted(cursor: Cursor, name: str) -> None:
    assert (await cursor.call("CreateCursor", name)).cursor.name == name
    assert (await cursor.call("GetCursor", name)).cursor.name == name
    await cursor.call("DeleteCursor", name)


async def test_the_longest_topic_name_is_accepted(services: Services) -> None:
    topic = longest_topic()
    await services.cursor.CreateCursor(request("CreateCursor", topic))
    answer = await services.cursor.ListCursors(pb.ListCursorsRequest(topic=topic))
    # Deduplication may have a cursor there too.
    assert {each.topic for each in answer.cursors} == {topic}


async def test_a_listing_refuses_invalid_topic_names(services: Services) -> None:
    for topic in BAD_TOPICS[1:]:  # the empty name lists the cursors of all topics
        with refused(INVALID, "INVALID_TOPIC_NAME"):
            await services.cursor.ListCursors(pb.ListCursorsRequest(topic=topic))


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_malformed_requests_are_refused(services: Services, garbage: bytes) -> None:
    async with raw(channel_to(services.stack.address("cursor"))) as channel:
        ask = channel.unary_unary(f"/{SERVICE.full_name}/GetCursor")
        with refused(INVALID, "MALFORMED_REQUEST"):
            await ask(garbage)


# ---- pages


@pytest.mark.parametrize("page_size", [-1, -(2**31), limits.CURSORS_MAX + 1, 2**31 - 1])
async def test_page_sizes_of_cursors_are_bounded(services: Services, page_size: int) -> None:
    for right in (0, 1, limits.CURSORS_MAX):
        await services.cursor.ListCursors(pb.ListCursorsRequest(page_size=right))
    with refused(INVALID, "INVALID_PAGE"):
        await services.cursor.ListCursors(pb.ListCursorsRequest(page_size=page_size))


@pytest.mark.parametrize(
    "token",
    ["no page", "a/b", "a/b/c", "a/b/c/", "a/b//d", "/b/c/d", "a/b/c/\n", "a/b/c/" + "d" * 256],
)
async def test_invalid_page_tokens_of_cursors_are_refused(services: Services, token: str) -> None:
    await services.cursor.ListCursors(pb.ListCursorsRequest(page_token="a/b/c/d/e"))
    with refused(INVALID, "INVALID_PAGE"):
        await services.cursor.ListCursors(pb.ListCursorsRequest(page_token=token))


async def test_a_page_token_of_another_topic_is_refused(services: Services) -> None:
    right = pb.ListCursorsRequest(topic="a/b/c", page_token="a/b/c/d")
    await services.cursor.ListCursors(right)
    with refused(INVALID, "INVALID_PAGE"):
        wrong = pb.ListCursorsRequest(topic="a/b/d", page_token="a/b/c/d")
        await services.cursor.ListCursors(wrong)


@pytest.mark.parametrize("page_size", [-1, limits.HOLES_MAX + 1, 2**31 - 1])
async def test_page_sizes_of_holes_are_bounded(cursor: Cursor, page_size: int) -> None:
    for right in (0, 1, limits.HOLES_MAX):
        await cursor.call("ListAcknowledged", page_size=right)
    with refused(INVALID, "INVALID_PAGE"):
        await cursor.call("ListAcknowledged", page_size=page_size)


@pytest.mark.parametrize("page_size", [-1, lease_limits.COUNTS_MAX + 1, 2**31 - 1])
async def test_page_sizes_of_delivery_counts_are_bounded(cursor: Cursor, page_size: int) -> None:
    for right in (0, 1, lease_limits.COUNTS_MAX):
        await cursor.call("ListAttempts", page_size=right)
    with refused(INVALID, "INVALID_PAGE"):
        await cursor.call("ListAttempts", page_size=page_size)


@pytest.mark.parametrize("method", ["ListAcknowledged", "ListAttempts"])
@pytest.mark.parametrize("token", ["x", "1", "1:-1", f"1:{2**63}"])
async def test_an_invalid_page_token_is_refused(cursor: Cursor, method: str, token: str) -> None:
    with refused(INVALID, "INVALID_PAGE"):
        await cursor.call(method, page_token=token)


# ---- positions


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("CreateCursor", lambda bad: {"mark_delete": bad, "name": "new"}),
        ("ResetCursor", lambda bad: {"mark_delete": bad}),
        ("MarkDelete", lambda bad: {"position": bad}),
        ("MarkDelete", lambda bad: {"log_end": bad}),
        ("MarkDelete", lambda bad: {"successions": [succession(last=bad)]}),
        ("MarkDelete", lambda bad: {"successions": [succession(following=bad)]}),
        ("Acknowledge", lambda bad: {"ranges": [pb.PositionRange(first=bad, last_entry_id=2**63)]}),
        ("Acknowledge", lambda bad: {"batches": [batch(position=bad)]}),
        ("Acknowledge", lambda bad: {"log_end": bad}),
        ("Acknowledge", lambda bad: {"successions": [succession(last=bad)]}),
        ("RecordAttempts", lambda bad: {"positions": [at(1, 9), bad]}),
    ],
)
async def test_methods_refuse_invalid_positions(
    cursor: Cursor, method: str, make: Callable[[Position], dict[str, Any]]
) -> None:
    for bad in BAD_POSITIONS:
        await cursor.refuses("INVALID_POSITION", method, **make(bad))


async def test_the_last_position_is_accepted(cursor: Cursor) -> None:
    await cursor.call("CreateCursor", "last", mark_delete=LAST_POSITION)
    await cursor.call("ListAcknowledged", page_token=LAST_TOKEN)
    await cursor.call("RecordAttempts", positions=[LAST_POSITION])
    await cursor.call("ListAttempts", page_token=LAST_TOKEN)
    last = pb.PositionRange(first=LAST_POSITION, last_entry_id=SEQUENCE_ID_MAX)
    await cursor.call("Acknowledge", ranges=[last], batches=[batch(position=LAST_POSITION)])
    await cursor.call("MarkDelete", position=LAST_POSITION, log_end=LAST_POSITION)
    await cursor.call("ResetCursor", mark_delete=LAST_POSITION)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("MarkDelete", {"position": None}),
        ("MarkDelete", {"successions": [pb.Succession(next=at(2, 0))]}),
        ("MarkDelete", {"successions": [pb.Succession(last=at(1, 9))]}),
        ("Acknowledge", {"ranges": [pb.PositionRange(last_entry_id=5)]}),
        ("Acknowledge", {"batches": [pb.BatchAcknowledgement(batch_size=2, indexes=[0])]}),
    ],
)
async def test_a_missing_position_is_refused(
    cursor: Cursor, method: str, changes: dict[str, Any]
) -> None:
    await cursor.refuses("INVALID_POSITION", method, **changes)


@pytest.mark.parametrize(("positions", "attempts"), [(0, 1), (1, 2), (2, 1), (2, 3)])
async def test_counts_are_given_for_each_position_or_for_none(
    cursor: Cursor, positions: int, attempts: int
) -> None:
    await cursor.refuses(
        "INVALID_POSITION",
        "RecordAttempts",
        positions=[at(1, 20 + each) for each in range(positions)],
        attempts=[1] * attempts,
    )


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (5, 4),
        (1, 0),
        (5, 5 + limits.RANGE_ENTRIES_MAX),
        (5, TOO_LARGE),
        (SEQUENCE_ID_MAX, TOO_LARGE),
        (0, 2**64 - 1),
    ],
)
async def test_ranges_are_bounded(cursor: Cursor, first: int, last: int) -> None:
    await cursor.refuses("INVALID_POSITION", "Acknowledge", ranges=[run(7, 7), run(first, last)])


async def test_the_longest_range_is_accepted(cursor: Cursor) -> None:
    await cursor.call("Acknowledge", ranges=[run(8, 7 + limits.RANGE_ENTRIES_MAX)])
    answer = await cursor.call("GetCursor")
    assert answer.cursor.acknowledged_entries == 1 + limits.RANGE_ENTRIES_MAX


async def test_the_total_length_of_ranges_is_bounded(cursor: Cursor) -> None:
    step = limits.RANGE_ENTRIES_MAX
    count = limits.ENTRIES_MAX // step
    ranges = [run(8 + each * step, 7 + (each + 1) * step) for each in range(count)]
    one_more = run(8 + count * step, 8 + count * step)
    await cursor.refuses("INVALID_POSITION", "Acknowledge", ranges=[*ranges, one_more])
    await cursor.call("Acknowledge", ranges=ranges)
    answer = await cursor.call("GetCursor")
    assert answer.cursor.acknowledged_entries == 1 + limits.ENTRIES_MAX


@pytest.mark.parametrize(
    ("method", "field", "most", "make"),
    [
        ("Acknowledge", "ranges", limits.RANGES_MAX, lambda i: run(2 * i + 8, 2 * i + 8)),
        ("Acknowledge", "batches", limits.BATCHES_MAX, lambda i: batch(position=at(1, 20 + i))),
        ("Acknowledge", "successions", limits.SUCCESSIONS_MAX, lambda i: _apart(i)),
        ("MarkDelete", "successions", limits.SUCCESSIONS_MAX, lambda i: _apart(i)),
        ("RecordAttempts", "positions", lease_limits.ATTEMPTS_MAX, lambda i: at(1, 20 + i)),
    ],
)
async def test_lists_are_bounded(
    cursor: Cursor, method: str, field: str, most: int, make: Callable[[int], Any]
) -> None:
    items = [make(each) for each in range(most + 1)]
    await cursor.refuses("INVALID_POSITION", method, **{field: items})
    allowed: dict[str, Any] = {field: items[:-1]}
    await cursor.call(method, **allowed)


def _apart(number: int) -> pb.Succession:
    return succession(at(10 + number, 5), at(11 + number, 0))


@pytest.mark.parametrize(
    ("last", "following"), [((2, 5), (2, 6)), ((2, 5), (1, 0)), ((2, 5), (2, 5))]
)
@pytest.mark.parametrize("method", ["MarkDelete", "Acknowledge"])
async def test_a_succession_leads_to_a_later_ledger(
    cursor: Cursor, method: str, last: tuple[int, int], following: tuple[int, int]
) -> None:
    wrong = succession(at(*last), at(*following))
    await cursor.refuses("INVALID_POSITION", method, successions=[wrong])


# ---- batches


@pytest.mark.parametrize(
    "wrong",
    [
        batch(0, size=0),
        batch(0, size=limits.BATCH_MESSAGES_MAX + 1),
        batch(0, size=2**32 - 1),
        batch(4, size=4),
        batch(2**32 - 1, size=4),
        batch(0, 1, 1, size=2),
    ],
    ids=["none", "one more", "most", "one beyond", "far beyond", "twice"],
)
async def test_indexes_outside_a_batch_are_refused(
    cursor: Cursor, wrong: pb.BatchAcknowledgement
) -> None:
    await cursor.refuses("INVALID_POSITION", "Acknowledge", ranges=[run(7, 7)], batches=[wrong])


async def test_the_largest_batch_is_accepted(cursor: Cursor) -> None:
    size = limits.BATCH_MESSAGES_MAX
    await cursor.call("Acknowledge", batches=[batch(*range(size - 1), size=size)])
    answer = await cursor.call("ListAcknowledged", page_token="1:7", page_size=1)
    assert list(answer.batches[0].indexes) == [*range(size - 1)]
    await cursor.call("Acknowledge", batches=[batch(size - 1, size=size)])
    await cursor.call("Acknowledge", batches=[batch(0, size=1, position=at(1, 9))])
    ranges = (await cursor.call("ListAcknowledged")).ranges
    assert [(each.first.entry_id, each.last_entry_id) for each in ranges] == [(6, 6), (8, 9)]


# ---- properties


PROPERTY = limits.PROPERTY_BYTES_MAX
MOST = {f"{each:04}": "v" * 2_000 for each in range(PROPERTIES_MAX)}
LARGEST = {f"{each:04}": "v" * (PROPERTY - 4) for each in range(PROPERTIES_BYTES_MAX // PROPERTY)}


@pytest.mark.parametrize(
    ("method", "field"), [("CreateCursor", "properties"), ("UpdateCursorProperties", "put")]
)
async def test_a_cursors_properties_are_bounded(cursor: Cursor, method: str, field: str) -> None:
    many = {str(each): "" for each in range(PROPERTIES_MAX + 1)}
    for wrong in (
        many,
        {"n": "v" * PROPERTY},
        {"n" * PROPERTY: "v"},
        {"n": "é" * (PROPERTY // 2)},  # its bytes are counted
        LARGEST | {"n": ""},
    ):
        await cursor.refuses("INVALID_PROPERTY", method, name="c", **{field: wrong})


@pytest.mark.parametrize("many", [MOST, LARGEST], ids=["most", "largest"])
async def test_the_largest_properties_are_stored(cursor: Cursor, many: dict[str, str]) -> None:
    await cursor.call("CreateCursor", "large", properties=many)
    assert dict((await cursor.call("GetCursor", "large")).cursor.properties) == many
    await cursor.call("UpdateCursorProperties", clear=True, put=many)
    assert dict((await cursor.call("GetCursor")).cursor.properties) == many


async def test_the_number_of_properties_is_bounded_across_calls(cursor: Cursor) -> None:
    many = {str(each): "" for each in range(PROPERTIES_MAX - 1)}
    await cursor.call("UpdateCursorProperties", put=many)  # and the existing one
    await cursor.refuses("INVALID_PROPERTY", "UpdateCursorProperties", put={"more": ""})
    await cursor.call("UpdateCursorProperties", put={"more": ""}, remove=["own"])


async def test_the_size_of_properties_is_bounded_across_calls(cursor: Cursor) -> None:
    await cursor.call("UpdateCursorProperties", put=LARGEST, remove=["own"])
    await cursor.refuses("INVALID_PROPERTY", "UpdateCursorProperties", put={"more": ""})
    await cursor.call("UpdateCursorProperties", put={"more": ""}, remove=["0000"])


async def test_reserved_properties_are_not_set_by_a_full_replacement(cursor: Cursor) -> None:
    wrong = {"#seqgate.internal.x": ""}
    await cursor.refuses("INVALID_PROPERTY", "UpdateCursorProperties", put=wrong, clear=True)
    await cursor.call("UpdateCursorProperties", put=wrong)


async def test_attached_properties_are_bounded(cursor: Cursor) -> None:
    most, most_bytes = limits.MARK_DELETE_PROPERTIES_MAX, limits.MARK_DELETE_PROPERTIES_BYTES_MAX
    many = {str(each): "" for each in range(most)}
    await cursor.refuses("INVALID_PROPERTY", "MarkDelete", properties={**many, "more": ""})
    await cursor.call("MarkDelete", properties=many)
    await cursor.refuses("INVALID_PROPERTY", "MarkDelete", properties={"n": "v" * most_bytes})
    largest = {"n": "v" * (most_bytes - 1)}
    await cursor.call("MarkDelete", position=at(1, 6), properties=largest)
    answer = await cursor.call("GetCursor")
    assert dict(answer.cursor.mark_delete_properties) == largest


# ---- leases


@pytest.mark.parametrize("method", ["AcquireLease", "RenewLease"])
async def test_leases_are_bounded(cursor: Cursor, method: str) -> None:
    await cursor.call("AcquireLease")
    for duration_ms in (0, lease_limits.LEASE_MIN_MS - 1, LEASE_MAX_MS + 1, 2**32 - 1):
        await cursor.refuses("INVALID_LEASE", method, duration=duration(duration_ms))
    await cursor.refuses("INVALID_LEASE", method, duration=None)
    for owner in BAD_NAMES:
        await cursor.refuses("INVALID_LEASE", method, owner=owner)
    for duration_ms in (lease_limits.LEASE_MIN_MS, LEASE_MAX_MS):
        await cursor.call(method, duration=duration(duration_ms))


async def test_the_longest_owner_is_accepted(cursor: Cursor) -> None:
    owner = "o" * CURSOR_NAME_BYTES_MAX
    assert (await cursor.call("AcquireLease", owner=owner)).lease.owner == owner


@pytest.mark.parametrize("method", ["MarkDelete", "Acknowledge", "ResetCursor", "RecordAttempts"])
async def test_an_unknown_epoch_is_fenced(cursor: Cursor, method: str) -> None:
    async with cursor.unchanged():
        for epoch in (0, 1, 2**64 - 1):
            with refused(StatusCode.ABORTED, "FENCED"):
                await cursor.call(method, epoch=epoch)


async def test_an_unknown_lease_is_not_renewed_or_released(cursor: Cursor) -> None:
    async with cursor.unchanged():
        for method in ("RenewLease", "ReleaseLease"):
            for epoch in (0, 1, 2**64 - 1):
                with refused(StatusCode.ABORTED, "FENCED"):
                    await cursor.call(method, epoch=epoch)


@pytest.mark.parametrize("method", ["MarkDelete", "UpdateCursorProperties"])
async def test_an_impossible_version_is_a_conflict(cursor: Cursor, method: str) -> None:
    async with cursor.unchanged():
        for revision in (0, 2**64 - 1):
            with refused(StatusCode.ABORTED, "REVISION_CONFLICT"):
                await cursor.call(method, revision=revision)


# ---- Pulsar's records


@pytest.mark.parametrize(
    "changes",
    [
        {"managed_cursor_info": b""},
        {"managed_cursor_info": b"\xff\xff"},
        {"managed_cursor_info": b"\x08\x01", "position_info": b"\xff\xff"},
    ],
    ids=["nothing", "garbage", "garbage of the ledger"],
)
@pytest.mark.parametrize("replace", [False, True])
async def test_an_invalid_record_of_pulsar_is_refused(
    cursor: Cursor, changes: dict[str, bytes], replace: bool
) -> None:
    for name in ("c", "new"):
        await cursor.refuses(
            "INVALID_MANAGED_CURSOR", "ImportManagedCursor", name=name, replace=replace, **changes
        )
