"""Deduplication of chunks, over real services and the wire.

Cases of the client are in test_large_messages.py, faults in simulation/ and faults/.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import connect
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.types import TopicName
from tests.integration.services import Services
from tests.support.publisher import Publisher, batch, publishing, single

STORED, DUPLICATE, STALE = (
    pb.RECEIPT_STATUS_STORED,
    pb.RECEIPT_STATUS_DUPLICATE,
    pb.RECEIPT_STATUS_STALE,
)
CHUNK_GAP, LAYOUT_CONFLICT, SKIPPED = (
    pb.RECEIPT_STATUS_CHUNK_GAP,
    pb.RECEIPT_STATUS_LAYOUT_CONFLICT,
    pb.RECEIPT_STATUS_SKIPPED,
)
PARTS = [b"one, ", b"two, ", b"three"]
LARGER_PARTS = [b"one, two", b", three"]
WHOLE = b"".join(PARTS)


def chunk(
    request_id: int,
    chunk_id: int,
    parts: Sequence[bytes] = PARTS,
    *,
    sequence_id: int = 5,
    uuid: str = "a",
    resume: bool = False,
) -> pb.Publication:
    return single(
        request_id,
        sequence_id,
        parts[chunk_id],
        resume=resume,
        uuid=uuid,
        chunk_id=chunk_id,
        num_chunks_from_msg=len(parts),
        total_chunk_msg_size=sum(map(len, parts)),
    )


def attempt(parts: Sequence[bytes] = PARTS, *, uuid: str = "a") -> list[pb.Publication]:
    """Publications 10, 11, ... of all chunks of message 5; the first ends a hold."""
    return [chunk(10 + each, each, parts, uuid=uuid, resume=not each) for each in range(len(parts))]


async def statuses(publisher: Publisher, *publications: pb.Publication) -> list[int]:
    """Send these together; the statuses of their receipts."""
    if publications:
        await publisher.send(*publications)
    return [(await publisher.receipt(each.request_id)).status for each in publications]


async def consumed(services: Services, topic: str) -> list[tuple[int, bytes]]:
    """The ids and payloads that a reader returns."""
    async with (
        connect(services.stack.address("ledger")) as client,
        client.reader(topic, follow=False) as reader,
    ):
        return [(each.sequence_id, each.payload) async for each in reader]


async def aborts(services: Services, topic: str) -> list[str]:
    """The attempt that each entry aborts; "" for none."""
    return [each.aborts for each in await services.read(topic, metadata_only=True)]


async def forget(services: Services, topic: str) -> None:
    """Delete the topic's state in Redis."""
    async with Redis.from_url(services.stack.redis_url) as redis:
        await redis.delete(topic_key(TopicName.parse(topic)))


async def persisted(services: Services, topic: str) -> int | None:
    """The producer's highest durable id."""
    await services.settled(topic)
    known = (await services.producers(topic))["p"]
    return known.persisted_sequence_id if known.HasField("persisted_sequence_id") else None


@pytest.mark.parametrize(
    ("parts", "places"),
    [(LARGER_PARTS, [0, 1, 1]), (PARTS, [0, 1, 1, 2])],
    ids=["two chunks", "three chunks"],
)
async def test_a_repeated_chunk_is_not_stored_again(
    services: Services, topic: str, parts: list[bytes], places: list[int]
) -> None:
    """It is answered with the position of the first copy."""
    async with publishing(services.ledger, topic, "p") as p:
        receipts = [await p.store(chunk(n, place, parts)) for n, place in enumerate(places)]
    assert [each.position.entry_id for each in receipts] == places
    assert [each.status for each in receipts].count(DUPLICATE) == 1
    assert len(await services.ids(topic)) == len(parts)
    assert await consumed(services, topic) == [(5, WHOLE)]


async def test_an_id_is_persisted_with_the_last_chunk(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as p:
        for chunk_id, mark in enumerate([4, 4, 5]):
            assert (await p.store(chunk(chunk_id, chunk_id))).status == STORED
            assert await persisted(services, topic) == mark
    assert (await services.status(topic)).counts.confirmed_entries == 3


@pytest.mark.parametrize("stored", [1, 2, 3])
@pytest.mark.parametrize("same_stream", [True, False])
async def test_a_message_resumes_after_its_state_is_lost(
    services: Services, topic: str, stored: int, same_stream: bool
) -> None:
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *attempt()[:stored]) == [STORED] * stored
        await forget(services, topic)
        if same_stream:
            assert await statuses(p, *attempt()[stored:]) == [STORED] * (3 - stored)
    async with publishing(services.ledger, topic, "p") as p:
        known = 3 if same_stream else stored
        assert await statuses(p, *attempt()) == [DUPLICATE] * known + [STORED] * (3 - known)
    assert await consumed(services, topic) == [(5, WHOLE)]


@pytest.mark.parametrize("lost", [False, True], ids=["", "state lost"])
@pytest.mark.parametrize("uuid", ["a", "b"])
@pytest.mark.parametrize("parts", [LARGER_PARTS, [*PARTS[:2], b"thr", b"ee"]])
async def test_a_message_may_be_sent_again_with_other_chunks(
    services: Services, topic: str, parts: list[bytes], uuid: str, lost: bool
) -> None:
    """The chunks already stored belong to no message."""
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *attempt()[:2]) == [STORED, STORED]
        if lost:
            await forget(services, topic)
        assert await statuses(p, *attempt(parts, uuid=uuid)) == [STORED] * len(parts)
    assert await aborts(services, topic) == ["", "", "a"] + [""] * (len(parts) - 1)
    assert await consumed(services, topic) == [(5, WHOLE)]


async def test_chunks_of_another_attempt_are_refused(services: Services, topic: str) -> None:
    """By its number alone, one of the chunks would be a duplicate and the other one new."""
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *attempt()[:2]) == [STORED, STORED]
        for request_id, chunk_id in ((1, 1), (2, 2)):
            wrong = chunk(request_id, chunk_id, uuid="b", resume=True)
            assert await statuses(p, wrong, single(9, 6)) == [LAYOUT_CONFLICT, SKIPPED]
        assert await statuses(p, *attempt(uuid="b"), single(9, 6)) == [STORED] * 4
    assert await consumed(services, topic) == [(5, WHOLE), (6, b"x")]


@pytest.mark.parametrize("first", [[], [0]], ids=["no chunk", "one chunk"])
async def test_a_gap_is_refused_and_the_message_succeeds_afterwards(
    services: Services, topic: str, first: list[int]
) -> None:
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *(chunk(each, each) for each in first)) == [STORED for _ in first]
        assert await statuses(p, chunk(2, 2), single(3, 6)) == [CHUNK_GAP, SKIPPED]
        assert await persisted(services, topic) == (4 if first else None)
        again = [DUPLICATE if each in first else STORED for each in range(3)]
        assert await statuses(p, *attempt(), single(3, 6)) == [*again, STORED]
    assert await consumed(services, topic) == [(5, WHOLE), (6, b"x")]


async def test_an_overtaken_message_is_never_reported_as_stored(
    services: Services, topic: str
) -> None:
    """A message between two chunks overtakes the large one."""
    async with publishing(services.ledger, topic, "p") as p:
        between = [chunk(1, 0), single(2, 6, b"six"), chunk(3, 1), chunk(4, 2)]
        assert await statuses(p, *between) == [STORED, STORED, STALE, STALE]
        assert await statuses(p, *attempt()) == [STALE] * 3
        assert await statuses(p, single(1, 5)) == [STALE]
    assert await consumed(services, topic) == [(6, b"six")]


async def test_a_repeated_first_chunk_restarts_the_message_without_deduplication(
    private: Callable[..., AbstractAsyncContextManager[Services]], topic: str
) -> None:
    """The reader assembles the second attempt, which starts at the repeated first chunk."""
    async with private(policies=f'[topic."{topic}"]\nenabled = false\n') as services:
        async with publishing(services.ledger, topic, "p") as p:
            assert await statuses(p, chunk(1, 0), *attempt()) == [STORED] * 4
        assert await consumed(services, topic) == [(5, WHOLE)]


SUCCESSORS = {
    # Each with the status of the aborted attempt's next chunk.
    "an attempt": (chunk(9, 0, uuid="b"), LAYOUT_CONFLICT),
    "the message in one piece": (single(9, 5), DUPLICATE),
    "a batch that begins with it": (batch(9, [5, 6]), DUPLICATE),
    "the next message": (single(9, 6), STALE),
    "the next large message": (chunk(9, 0, sequence_id=6, uuid="b"), STALE),
}


@pytest.mark.parametrize("lost", [False, True], ids=["", "state lost"])
@pytest.mark.parametrize("what", SUCCESSORS)
async def test_an_aborted_attempt_is_marked_in_the_log(
    services: Services, topic: str, what: str, lost: bool
) -> None:
    successor, rest = SUCCESSORS[what]
    async with (
        publishing(services.ledger, topic, "p") as p,
        publishing(services.ledger, topic, "q") as q,
    ):
        assert await statuses(p, *attempt()[:2]) == [STORED, STORED]
        assert await statuses(q, single(1, 5)) == [STORED], "another producer ends nothing"
        if lost:
            await forget(services, topic)
        assert await statuses(p, successor, chunk(3, 2)) == [STORED, rest]
    assert await aborts(services, topic) == ["", "", "", "a"]


async def test_a_large_message_is_found_with_its_first_and_last_chunk(
    services: Services, topic: str
) -> None:
    asked = pb.FindMessageRequest(topic=topic, producer_name="p", sequence_id=5)
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, single(1, 4), *attempt()[:2]) == [STORED] * 3
        assert (await services.ledger.FindMessage(asked)).fate.fate == pb.FATE_STALE
        assert await statuses(p, *attempt()[2:]) == [STORED]
        fate = (await services.ledger.FindMessage(asked)).fate
        other = await p.store(chunk(20, 0, LARGER_PARTS, uuid="b"))
        piece = await p.store(single(21, 5))
    assert (fate.fate, fate.position.entry_id, fate.first_chunk_position.entry_id) == (
        pb.FATE_STORED,
        3,
        1,
    )
    assert (other.status, piece.status) == (DUPLICATE, DUPLICATE)
    assert (list(other.fates), list(piece.fates)) == ([fate], [fate])
    assert not other.HasField("position")


@pytest.mark.parametrize(("stored", "before"), [(1, 2), (2, 2), (2, 3)])
async def test_a_message_whose_first_chunks_are_trimmed_starts_over(
    services: Services, topic: str, stored: int, before: int
) -> None:
    """A trim in the middle of the message: the rest must not complete it."""
    trim = pb.TrimTopicRequest(topic=topic, before=Position(ledger_id=1, entry_id=before))
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, single(1, 4), *attempt()[:stored]) == [STORED] * (stored + 1)
        await services.ledger.TrimTopic(trim)
        await p.ended()
    async with publishing(services.ledger, topic, "p") as p:
        assert p.opened.last_sequence_id == 4
        rest = await statuses(p, *attempt()[stored:])
        assert rest == [CHUNK_GAP] + [SKIPPED] * (2 - stored)
        assert await statuses(p, *attempt(uuid="b")) == [STORED] * 3
        assert await statuses(p, *attempt(uuid="b"), single(9, 6)) == [DUPLICATE] * 3 + [STORED]
    assert await consumed(services, topic) == [(5, WHOLE), (6, b"x")]


async def test_a_late_confirmation_does_not_restore_trimmed_chunks(
    services: Services, topic: str
) -> None:
    """It is in flight when the topic is trimmed, and finds no state in Redis."""
    first = Position(ledger_id=1, entry_id=0)
    place = common_pb2.Chunk(uuid="a", chunk_id=0, num_chunks=3, total_bytes=len(WHOLE))
    entries = writer_pb2.ProducerEntries(
        producer_name="p", highest_sequence_ids=[5], chunks={0: place}
    )
    late = writer_pb2.ConfirmRequest(
        topic=topic,
        writer=writer_pb2.Writer(incarnation=1, epoch=1, position=first),
        confirmation=writer_pb2.Confirmation(through=first, producers=[entries], entry_count=1),
    )
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *attempt()[:1]) == [STORED]
        beyond = Position(ledger_id=1, entry_id=1)
        await services.ledger.TrimTopic(pb.TrimTopicRequest(topic=topic, before=beyond))
        await p.ended()
    await forget(services, topic)
    assert (await services.dedup.Confirm(late)).HasField("confirmed")
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *attempt()[1:]) == [CHUNK_GAP, SKIPPED]
        assert await statuses(p, *attempt(uuid="b")) == [STORED] * 3
    assert await consumed(services, topic) == [(5, WHOLE)]


async def test_a_trim_does_not_affect_an_unfinished_message_after_it(
    services: Services, topic: str
) -> None:
    trim = pb.TrimTopicRequest(topic=topic, before=Position(ledger_id=1, entry_id=1))
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, single(1, 4), *attempt()[:2]) == [STORED] * 3
        await services.ledger.TrimTopic(trim)
        assert await statuses(p, *attempt()[2:]) == [STORED]
    assert await consumed(services, topic) == [(5, WHOLE)]


async def test_a_complete_message_trimmed_in_part_is_not_stored_again(
    services: Services, topic: str
) -> None:
    trim = pb.TrimTopicRequest(topic=topic, before=Position(ledger_id=1, entry_id=1))
    async with publishing(services.ledger, topic, "p") as p:
        assert await statuses(p, *attempt()) == [STORED] * 3
        await services.ledger.TrimTopic(trim)
        await forget(services, topic)
        assert await statuses(p, *attempt(uuid="b")) == [STALE] * 3
        (fate,) = (await p.store(single(1, 5))).fates
        assert fate.fate == pb.FATE_TRIMMED
