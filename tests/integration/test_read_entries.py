"""Entries by their positions, and positions by their time."""

import time
from collections.abc import AsyncIterator, Iterable
from random import Random
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.ledger.servicer import POSITIONS_MAX
from seqgate.times import TIME_MAX_MS, milliseconds, timestamp
from seqgate.types import SEQUENCE_ID_MAX
from tests.integration.refusals import refused
from tests.integration.services import Services, running, stopping
from tests.support.publisher import publishing, single
from tests.support.waiting import eventually

RESPONSE_BYTES_MAX = 1_100_000
"""The limit of a response whose entries are all smaller: 1 MiB, and the framing."""


@pytest.fixture(scope="module")
async def stoppable(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack whose services are stopped and restarted; all run again when a test ends."""
    async with running(tmp_path_factory.mktemp("stoppable")) as services:
        yield services


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


def asking(topic: str, positions: Iterable[Position], **more: Any) -> pb.ReadEntriesRequest:
    return pb.ReadEntriesRequest(topic=topic, positions=positions, **more)


async def responses(
    services: Services, topic: str, positions: Iterable[Position], **more: Any
) -> list[pb.ReadEntriesResponse]:
    call = services.ledger.ReadEntries(asking(topic, positions, **more))
    found = [each async for each in call]
    assert all(each.entries.entries for each in found), "nothing but entries, and none is empty"
    return found


async def entries(
    services: Services, topic: str, positions: Iterable[Position], **more: Any
) -> list[pb.StoredEntry]:
    some = await responses(services, topic, positions, **more)
    return [entry for response in some for entry in response.entries.entries]


async def publish(services: Services, topic: str, *payloads: bytes) -> None:
    """Publish messages, those of one call together; their ids are their places in the log."""
    async with publishing(services.ledger, topic, "p") as publisher:
        first = (
            publisher.opened.last_sequence_id + 1
            if publisher.opened.HasField("last_sequence_id")
            else 0
        )
        ids = range(first, first + len(payloads))
        await publisher.send(
            *(single(each, each, payload) for each, payload in zip(ids, payloads, strict=True))
        )
        for each in ids:
            assert (await publisher.receipt(each)).status == pb.RECEIPT_STATUS_STORED


async def test_entries_are_read_at_positions(services: Services, topic: str) -> None:
    for first in range(0, 60, 20):
        await publish(services, topic, *(b"%d" % each for each in range(first, first + 20)))
    log = await services.read(topic)
    for wanted in ([0], [59], [0, 1, 2], [3, 19, 20, 41], [*range(60)], [*range(0, 60, 7)]):
        found = await entries(services, topic, [log[each].position for each in wanted])
        assert found == [log[each] for each in wanted]
        bare = await entries(
            services, topic, [log[each].position for each in wanted], metadata_only=True
        )
        assert [each.payload for each in bare] == [b""] * len(wanted)
        for each, whole in zip(bare, found, strict=True):
            each.payload = whole.payload
        assert bare == found


async def test_missing_entries_are_left_out(services: Services, topic: str) -> None:
    await publish(services, topic, *(b"%d" % each for each in range(10)))
    asked = [at(9, 0), *map(at, range(8, 12)), at(0, 2), at(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)]
    found = await entries(services, topic, asked)
    assert [each.position for each in found] == [at(8), at(9)]
    await services.settled(topic)
    await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=at(5)))
    found = await entries(services, topic, map(at, range(3, 7)))
    assert [each.position for each in found] == [at(5), at(6)]
    assert await responses(services, topic, map(at, range(5))) == []


async def test_a_topic_without_entries_returns_none(services: Services, topic: str) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    assert await responses(services, topic, [at(0), at(1)]) == []


async def test_entries_are_read_up_to_the_limit_of_a_request(
    services: Services, topic: str, seed: int
) -> None:
    await publish(services, topic, *(b"%d" % each for each in range(POSITIONS_MAX)))
    everything = [at(each) for each in range(POSITIONS_MAX)]
    found = await responses(services, topic, everything)
    assert len(found) > 3
    assert [each.position for some in found for each in some.entries.entries] == everything
    some = [each for each in everything if Random(f"{seed} {each}").random() < 0.3]
    assert [each.position for each in await entries(services, topic, some)] == some


async def test_responses_are_split_by_size(services: Services, topic: str) -> None:
    sizes = [1, 5 * 1024 * 1024, 1, 600_000, 600_000, 600_000, 0] * 3
    for each in range(0, len(sizes), 7):
        payloads = (bytes([place]) * size for place, size in enumerate(sizes[each : each + 7]))
        await publish(services, topic, *payloads)
    log = await services.read(topic)
    found = await responses(services, topic, [each.position for each in log])
    assert [entry for each in found for entry in each.entries.entries] == log
    for answer in found:
        assert len(answer.entries.entries) == 1 or answer.ByteSize() < RESPONSE_BYTES_MAX
    bare = await responses(services, topic, [each.position for each in log], metadata_only=True)
    assert len(bare) == 1


@pytest.mark.parametrize(
    "positions",
    [
        [],
        [at(1), at(1)],
        [at(2), at(1)],
        [at(0, 2), at(9, 1)],
        [at(0), at(1), at(3), at(2)],
        [at(SEQUENCE_ID_MAX + 1)],
        [at(0, SEQUENCE_ID_MAX + 1)],
        [at(each) for each in range(POSITIONS_MAX + 1)],
    ],
    ids=["none", "twice", "back", "ledgers back", "the last", "entry", "ledger", "many"],
)
async def test_positions_must_be_ordered_and_bounded(
    services: Services, topic: str, positions: list[Position]
) -> None:
    await publish(services, topic, b"0")
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_RANGE"):
        await responses(services, topic, positions)


async def test_a_reader_of_entries_is_told_to_reconnect_when_the_service_drains(
    stoppable: Services, topic: str
) -> None:
    """It continues after the last entry that it received."""
    for _ in range(30):  # 30 MB: more than the buffers between service and client hold
        await publish(stoppable, topic, b"x" * 1_000_000)
    wanted = [each.position for each in await stoppable.read(topic, metadata_only=True)]
    call = stoppable.ledger.ReadEntries(asking(topic, wanted))
    found = [*(await call.read()).entries.entries]
    ending = await stopping(stoppable, "ledger")
    while (response := await call.read()).HasField("entries"):
        found += response.entries.entries
    assert response.HasField("draining")
    assert await call.read() is aio.EOF
    assert 0 < len(found) < 30
    assert await ending == 0
    await stoppable.stack.run("ledger")
    found += await entries(stoppable, topic, wanted[len(found) :])
    assert [each.position for each in found] == wanted


# ---- positions by their time


async def find(services: Services, topic: str, append_time: int) -> Position | None:
    request = pb.FindPositionRequest(topic=topic, append_time=timestamp(append_time))
    answer = await services.ledger.FindPosition(request)
    return answer.position if answer.HasField("position") else None


async def test_a_start_time_selects_the_first_entry_since_then(
    services: Services, topic: str
) -> None:
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    assert await find(services, topic, 0) is None
    times: list[int] = []
    for each in range(5):

        async def later(last: int = times[-1] if times else 0) -> bool:
            return time.time_ns() // 1_000_000 > last

        await eventually(later, "another millisecond has come")
        await publish(services, topic, *[b"x"] * (each + 1))
        times = [milliseconds(entry.append_time) for entry in await services.read(topic)]
    assert len({*times}) >= 5
    assert times == sorted(times)
    for append_time in {0, *times, *(each + 1 for each in times)}:
        expected = [at(place) for place, each in enumerate(times) if each >= append_time]
        assert await find(services, topic, append_time) == next(iter(expected), None)
    assert await find(services, topic, TIME_MAX_MS) is None

    await services.settled(topic)
    await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=at(4)))
    assert await find(services, topic, 0) == at(4)
    await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=at(99)))
    assert await find(services, topic, 0) is None
