"""The dedup service alone, as used by an application with its own log."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

import pytest
from google.rpc import status_pb2
from grpc import StatusCode, aio
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.times import timestamp
from seqgate.types import SEQUENCE_ID_MAX, TopicName
from tests.integration.refusals import check, refused
from tests.integration.services import Services, not_serving, writes_held_up
from tests.support.publisher import publishing, single
from tests.support.waiting import eventually

NEW, IN_FLIGHT, DUPLICATE = (
    pb.CLAIM_VERDICT_NEW,
    pb.CLAIM_VERDICT_IN_FLIGHT,
    pb.CLAIM_VERDICT_DUPLICATE,
)
PARTIAL, HELD = pb.CLAIM_VERDICT_PARTIAL, pb.CLAIM_VERDICT_HELD
CHUNK_GAP, LAYOUT_CONFLICT = pb.CLAIM_VERDICT_CHUNK_GAP, pb.CLAIM_VERDICT_LAYOUT_CONFLICT

APPEND_TIME = 1_750_000_000_000


class Record(NamedTuple):
    """What the log below holds."""

    position: Position
    producer: str
    highest: int
    chunk: common_pb2.Chunk | None


class Log:
    """An application's log: a list, and the writer's side of the protocol in writer.proto."""

    def __init__(
        self, dedup: Any, topic: str, *, epoch: int = 1, incarnation: int = 1, first_entry: int = 0
    ) -> None:
        self.dedup = dedup
        self.topic = topic
        self.epoch = epoch
        self.incarnation = incarnation
        self.first_entry = first_entry
        self.records: list[Record] = []
        self.unconfirmed: list[Record] = []

    def successor(self, *, epoch: int) -> "Log":
        """Another process that takes the log over at its current end."""
        log = Log(self.dedup, self.topic, epoch=epoch, incarnation=self.incarnation)
        log.records = list(self.records)
        return log

    @property
    def tail(self) -> Position | None:
        return self.records[-1].position if self.records else None

    def writer(self, revision: int | None = None) -> writer_pb2.Writer:
        return writer_pb2.Writer(
            incarnation=self.incarnation, epoch=self.epoch, position=self.tail, revision=revision
        )

    def append(self, producer: str, *entries: Any) -> None:
        """Store entries whose verdicts the caller has checked: ids, or an id and its chunk."""
        for each in entries:
            tail = self.tail
            same = tail is not None and tail.ledger_id == self.epoch
            entry_id = tail.entry_id + 1 if same and tail else self.first_entry
            position = Position(ledger_id=self.epoch, entry_id=entry_id)
            record = Record(position, producer, _range(each)[1], _chunk(each))
            self.records.append(record)
            self.unconfirmed.append(record)

    def confirmation(
        self, records: Iterable[Record] | None = None, *, remaining: int = 0
    ) -> writer_pb2.Confirmation | None:
        """A confirmation of these records; by default, of all unconfirmed ones."""
        told = list(self.unconfirmed if records is None else records)
        if not told:
            return None
        before = self.records.index(told[0])
        by_producer: dict[str, writer_pb2.ProducerEntries] = {}
        for each in told:
            entries = by_producer.setdefault(
                each.producer,
                writer_pb2.ProducerEntries(
                    producer_name=each.producer, last_append_time=timestamp(APPEND_TIME)
                ),
            )
            if each.chunk is not None:
                entries.chunks[len(entries.highest_sequence_ids)].CopyFrom(each.chunk)
            entries.highest_sequence_ids.append(each.highest)
        return writer_pb2.Confirmation(
            after=self.records[before - 1].position if before else None,
            through=told[-1].position,
            producers=by_producer.values(),
            entry_count=len(told),
            entries_remaining=remaining,
        )

    async def confirm(
        self, records: Iterable[Record] | None = None, *, remaining: int = 0
    ) -> writer_pb2.ConfirmResponse:
        request = writer_pb2.ConfirmRequest(
            topic=self.topic,
            writer=self.writer(),
            confirmation=self.confirmation(records, remaining=remaining),
        )
        answer: writer_pb2.ConfirmResponse = await self.dedup.Confirm(request)
        if answer.HasField("confirmed"):
            self.unconfirmed.clear()
        return answer

    def claim(
        self, claims: dict[str, list[Any]], *, revision: int | None = None
    ) -> writer_pb2.AdmitRequest:
        """Claims by producer: ids, pairs of lowest and highest id, or an id and its chunk."""
        return writer_pb2.AdmitRequest(
            topic=self.topic,
            writer=self.writer(revision),
            confirmation=self.confirmation(),
            claims=[
                writer_pb2.Claims(
                    producer_name=producer,
                    sequence_ids=[_range(each)[0] for each in ids],
                    highest_sequence_ids=[_range(each)[1] for each in ids],
                    chunks={
                        place: chunk
                        for place, each in enumerate(ids)
                        if (chunk := _chunk(each)) is not None
                    },
                )
                for producer, ids in claims.items()
            ],
        )

    async def admit(
        self, claims: dict[str, list[Any]], *, revision: int | None = None
    ) -> writer_pb2.AdmitResponse:
        answer: writer_pb2.AdmitResponse = await self.dedup.Admit(
            self.claim(claims, revision=revision)
        )
        if answer.HasField("verdicts"):
            self.unconfirmed.clear()
        return answer

    async def judge(self, producer: str, *ids: Any) -> list[int]:
        """The verdicts on one producer's claims."""
        answer = await self.admit({producer: list(ids)})
        assert answer.verdicts.deduplicated
        (verdicts,) = answer.verdicts.producers
        return list(verdicts.verdicts)

    async def rollback(self, *withdrawals: writer_pb2.Withdrawal) -> writer_pb2.RollbackResponse:
        answer: writer_pb2.RollbackResponse = await self.dedup.Rollback(
            writer_pb2.RollbackRequest(
                topic=self.topic,
                writer=self.writer(),
                confirmation=self.confirmation(),
                withdrawals=withdrawals,
            )
        )
        if answer.HasField("rolled_back"):
            self.unconfirmed.clear()
        return answer

    async def store(self, producer: str, *ids: Any) -> None:
        """Claim, append, and confirm."""
        assert await self.judge(producer, *ids) == [NEW] * len(ids)
        self.append(producer, *ids)
        assert (await self.confirm()).confirmed.deduplicated


def _range(claim: Any) -> tuple[int, int]:
    match claim:
        case (int(lowest), int(highest)):
            return lowest, highest
        case (int(sequence_id), _) | int(sequence_id):
            return sequence_id, sequence_id
        case _:
            raise AssertionError(claim)


def _chunk(claim: Any) -> common_pb2.Chunk | None:
    match claim:
        case (_, common_pb2.Chunk() as chunk):
            return chunk
        case _:
            return None


def large(sequence_id: int, uuid: str, num_chunks: int = 3) -> list[tuple[int, common_pb2.Chunk]]:
    layout: dict[str, Any] = {"uuid": uuid, "num_chunks": num_chunks, "total_bytes": 300}
    return [(sequence_id, common_pb2.Chunk(chunk_id=each, **layout)) for each in range(num_chunks)]


@pytest.fixture
def log(dedup: Any, topic: str) -> Log:
    return Log(dedup, topic)


@pytest.fixture
async def redis(services: Services) -> AsyncIterator[Redis]:
    """The stack's own Redis, where tests delete state."""
    async with Redis.from_url(services.stack.redis_url) as redis:
        yield redis


def key_of(log: Log) -> str:
    return topic_key(TopicName.parse(log.topic))


async def marks(services: Services, log: Log, producer: str = "p") -> tuple[int | None, int | None]:
    """The producer's persisted and pushed ids."""
    known = (await services.producers(log.topic))[producer]
    return (
        known.persisted_sequence_id if known.HasField("persisted_sequence_id") else None,
        known.pushed_sequence_id if known.HasField("pushed_sequence_id") else None,
    )


async def unfinished(
    services: Services, log: Log, producer: str = "p"
) -> tuple[int, common_pb2.Chunk] | None:
    """The last durable chunk of the producer's unfinished message, if it has one."""
    asked = pb.GetProducerRequest(topic=log.topic, producer_name=producer)
    known = (await services.dedup.GetProducer(asked)).producer
    assert known == (await services.producers(log.topic))[producer]
    if not known.HasField("unfinished"):
        return None
    return known.unfinished.sequence_id, known.unfinished.last_chunk


# ---- the protocol


async def test_a_log_is_deduplicated_from_its_first_call(services: Services, log: Log) -> None:
    """Align, admit, append, confirm, and read the state."""
    assert (await services.status(log.topic)).state == pb.TOPIC_STATE_ABSENT

    aligned = await log.rollback()
    assert aligned.rolled_back.deduplicated
    admitted = await log.admit(
        {"p": [0, 1, 5], "q": [(3, 7)]}, revision=aligned.rolled_back.revision
    )
    assert [list(each.verdicts) for each in admitted.verdicts.producers] == [[NEW] * 3, [NEW]]
    assert not any(each.HasField("persisted_sequence_id") for each in admitted.verdicts.producers)
    log.append("p", 0, 1, 5)
    log.append("q", 7)
    confirmed = (await log.confirm()).confirmed
    assert confirmed.deduplicated
    assert confirmed.revision == admitted.verdicts.revision

    again = await log.admit({"p": [0, 1, 3, 5, 6], "q": [(3, 7)]}, revision=confirmed.revision)
    first, second = again.verdicts.producers
    assert list(first.verdicts) == [DUPLICATE, DUPLICATE, DUPLICATE, DUPLICATE, NEW]
    assert (first.persisted_sequence_id, second.persisted_sequence_id) == (5, 7)
    assert list(second.verdicts) == [DUPLICATE]

    known = await services.dedup.GetProducer(
        pb.GetProducerRequest(topic=log.topic, producer_name="p")
    )
    assert known.producer == (await services.producers(log.topic))["p"]
    assert (known.producer.persisted_sequence_id, known.producer.pushed_sequence_id) == (5, 6)
    assert known.producer.last_active.ToMilliseconds() >= APPEND_TIME
    status = await services.status(log.topic)
    assert (status.state, status.epoch) == (pb.TOPIC_STATE_ACTIVE, 1)
    assert status.confirmed == log.tail
    assert (status.producers, status.entries_remaining) == (2, 0)
    counts = status.counts
    assert (counts.confirmed_entries, counts.new_claims, counts.duplicate_claims) == (4, 5, 5)


async def test_each_producer_has_its_own_marks(services: Services, log: Log) -> None:
    await log.store("p", 0)
    await log.store("q", 1)
    assert await log.judge("p", 1) == [NEW]
    assert await log.judge("q", 0) == [DUPLICATE]
    assert await marks(services, log, "q") == (1, 1)


async def test_ids_need_not_be_consecutive(services: Services, log: Log) -> None:
    await log.store("p", 0, 1, 5)
    assert await marks(services, log) == (5, 5)


async def test_a_copy_waits_for_the_outcome_of_the_first(services: Services, log: Log) -> None:
    """Below an admitted id no id has a verdict until one is durable."""
    assert await log.judge("p", 5) == [NEW]
    assert await log.judge("p", 5) == [IN_FLIGHT]
    assert await log.judge("p", 0) == [IN_FLIGHT]
    assert await marks(services, log) == (None, 5)
    log.append("p", 5)
    assert await log.judge("p", 0, 5) == [DUPLICATE, DUPLICATE]
    assert await marks(services, log) == (5, 5)


@pytest.mark.parametrize(
    ("persisted", "pushed", "claims", "verdicts"),
    [
        pytest.param(0, 0, [(1, 5)], [NEW], id="13: a batch"),
        pytest.param(0, 5, [(4, 8)], [IN_FLIGHT], id="14: an overlap in flight"),
        pytest.param(5, 5, [(4, 8)], [PARTIAL], id="15: an overlap of durable ids"),
        pytest.param(5, 5, [(6, 6)], [NEW], id="the next id"),
        pytest.param(5, 8, [(6, 8)], [IN_FLIGHT], id="a copy in flight"),
        pytest.param(5, 8, [(4, 8)], [IN_FLIGHT], id="a copy in flight that overlaps"),
        pytest.param(8, 8, [(6, 8)], [DUPLICATE], id="16: a repeated batch"),
        pytest.param(8, 8, [(10, 12), (9, 9)], [NEW, IN_FLIGHT], id="a late lower id"),
        pytest.param(
            5, 5, [(4, 8), 9, 3], [PARTIAL, HELD, DUPLICATE], id="nothing overtakes a cut"
        ),
        pytest.param(5, 8, [7, 9, (9, 12)], [IN_FLIGHT, HELD, HELD], id="nothing overtakes a wait"),
    ],
)
async def test_a_batch_is_judged_by_its_lowest_and_its_highest_id(
    log: Log, persisted: int, pushed: int, claims: list[Any], verdicts: list[int]
) -> None:
    await log.store("p", persisted)
    if pushed > persisted:
        assert await log.judge("p", (persisted + 1, pushed)) == [NEW]
    assert await log.judge("p", *claims) == verdicts


async def test_an_id_that_was_not_appended_is_new_again(services: Services, log: Log) -> None:
    """7 fails; 6 stays a duplicate."""
    await log.store("p", 6)
    await log.store("q", 6)
    assert await log.judge("p", 7, 8) == [NEW, NEW]
    assert await log.judge("q", 7) == [NEW]
    before = (await log.admit({})).verdicts.revision
    rolled_back = (await log.rollback()).rolled_back
    assert rolled_back.revision > before
    for producer in ("p", "q"):
        assert await marks(services, log, producer) == (6, 6)
        assert await log.judge(producer, 6, 7) == [DUPLICATE, NEW]


async def test_claims_of_one_producer_are_withdrawn_down_to_an_id(
    services: Services, log: Log
) -> None:
    assert await log.judge("p", 1, 2, 3) == [NEW] * 3
    assert await log.judge("q", 1) == [NEW]
    await log.rollback(
        writer_pb2.Withdrawal(producer_name="p", keep_through_sequence_id=1),
        writer_pb2.Withdrawal(producer_name="nobody"),
    )
    assert await marks(services, log, "p") == (None, 1)
    assert await marks(services, log, "q") == (None, 1)
    assert (await services.producers(log.topic)).keys() == {"p", "q"}
    assert await log.judge("p", 2, 3) == [NEW, NEW]
    await log.rollback(writer_pb2.Withdrawal(producer_name="p"))
    assert await marks(services, log, "p") == (None, None)
    assert await log.judge("p", 1) == [NEW]


async def test_a_withdrawal_keeps_durable_ids(services: Services, log: Log) -> None:
    await log.store("p", 3)
    assert await log.judge("p", 4) == [NEW]
    await log.rollback(writer_pb2.Withdrawal(producer_name="p", keep_through_sequence_id=1))
    assert await marks(services, log) == (3, 3)


async def test_a_confirmation_rides_on_the_next_call(services: Services, log: Log) -> None:
    assert await log.judge("p", 1, 2) == [NEW, NEW]
    log.append("p", 1)
    assert (await log.rollback()).rolled_back.deduplicated
    assert await marks(services, log) == (1, 1)
    assert await log.judge("p", 2) == [NEW]
    log.append("p", 2)
    assert await log.judge("p", 2, 3) == [DUPLICATE, NEW]


async def test_a_repeated_confirmation_counts_once(services: Services, log: Log) -> None:
    assert await log.judge("p", 1, 2, 3) == [NEW] * 3
    log.append("p", 1, 2, 3)
    records = list(log.records)
    await log.confirm(records)
    before = await services.status(log.topic)
    assert (await log.confirm(records)).confirmed.deduplicated
    assert (await log.confirm(records[:2])).confirmed.deduplicated
    assert await services.status(log.topic) == before
    assert before.counts.confirmed_entries == 3


async def test_markers_are_counted_without_a_producer(services: Services, log: Log) -> None:
    """A confirmation may cover entries that it does not list."""
    request = writer_pb2.ConfirmRequest(
        topic=log.topic,
        writer=writer_pb2.Writer(
            incarnation=1, epoch=1, position=Position(ledger_id=1, entry_id=4)
        ),
        confirmation=writer_pb2.Confirmation(
            through=Position(ledger_id=1, entry_id=4), entry_count=5
        ),
    )
    assert (await services.dedup.Confirm(request)).confirmed.deduplicated
    status = await services.status(log.topic)
    assert (status.counts.confirmed_entries, status.producers) == (5, 0)
    assert status.confirmed.entry_id == 4


async def test_one_of_many_concurrent_claims_is_admitted(log: Log) -> None:
    verdicts = await asyncio.gather(*(log.judge("p", 7) for _ in range(50)))
    assert sorted(verdicts) == sorted([[NEW], *[[IN_FLIGHT]] * 49])


@pytest.mark.parametrize(
    "last", [2**53 - 1, 2**53, 2**53 + 1, 2**62 + 1, SEQUENCE_ID_MAX - 2, SEQUENCE_ID_MAX - 1]
)
async def test_ids_are_exact_up_to_the_last(
    services: Services, dedup: Any, topic: str, last: int
) -> None:
    """Redis's scripts count in doubles, which are inexact there."""
    log = Log(dedup, topic, epoch=last, incarnation=last, first_entry=last - 2)
    assert await log.judge("p", last - 1) == [NEW]
    assert await log.judge("p", last - 1, last) == [IN_FLIGHT, HELD]
    log.append("p", last - 1)
    assert await log.judge("p", last - 2, last - 1, last) == [DUPLICATE, DUPLICATE, NEW]
    assert await marks(services, log) == (last - 1, last)
    log.append("p", last)
    assert await log.judge("p", last, (last - 1, last + 1)) == [DUPLICATE, PARTIAL]
    status = await services.status(log.topic)
    assert (status.epoch, status.confirmed) == (last, log.tail)
    with refused(StatusCode.ABORTED, "FENCED") as details:
        await log.successor(epoch=last - 1).rollback()
    assert details == {"epoch": str(last)}


# ---- lost state


async def test_lost_newest_writes_are_confirmed_again(
    services: Services, log: Log, redis: Redis
) -> None:
    await log.store("p", 0, 1, 2)
    old = await redis.dump(key_of(log))
    assert old is not None
    await log.store("p", 3, 4, 5)
    await log.store("q", 0)
    await redis.restore(key_of(log), 0, old, replace=True)

    behind = await log.admit({"p": [4, 6]})
    assert behind.behind.confirmed == log.records[2].position
    assert await marks(services, log) == (2, 2), "nothing was judged"

    missing = log.records[3:]
    page = await log.confirm(missing[:2], remaining=2)
    assert page.confirmed.deduplicated
    status = await services.status(log.topic)
    assert (status.state, status.entries_remaining) == (pb.TOPIC_STATE_RECOVERING, 2)
    assert (await log.admit({"p": [6]})).behind.confirmed == missing[1].position
    await log.confirm(missing[2:])
    assert (await services.status(log.topic)).state == pb.TOPIC_STATE_ACTIVE
    assert await log.judge("p", 3, 4, 5, 6) == [DUPLICATE] * 3 + [NEW]
    assert await log.judge("q", 0) == [DUPLICATE]


async def test_a_lost_topic_is_rebuilt_from_the_first_entry(
    services: Services, log: Log, redis: Redis
) -> None:
    await log.store("p", 0, 1, 2)
    await redis.delete(key_of(log))
    assert (await services.status(log.topic)).state == pb.TOPIC_STATE_ABSENT
    answer = await log.admit({"p": [2]})
    assert answer.HasField("behind")
    assert not answer.behind.HasField("confirmed")
    await log.confirm(log.records)
    assert await log.judge("p", 0, 1, 2, 3) == [DUPLICATE] * 3 + [NEW]


async def test_a_large_message_resumes_at_the_end_of_the_log(
    services: Services, log: Log, redis: Redis
) -> None:
    """The state is lost after each chunk, and the message is stored once."""
    chunks = large(5, "a")
    await log.store("p", 4)
    for stored, chunk in enumerate(chunks):
        await redis.delete(key_of(log))
        assert (await log.admit({"p": [chunk]})).HasField("behind")
        await log.confirm(log.records)
        assert await unfinished(services, log) == (chunks[stored - 1] if stored else None)
        assert await marks(services, log) == (4, 4)
        assert await log.judge("p", *chunks[:stored]) == [DUPLICATE] * stored if stored else True
        await log.store("p", chunk)
    assert await marks(services, log) == (5, 5)
    assert await unfinished(services, log) is None
    assert await log.judge("p", *chunks, 5, 6) == [DUPLICATE] * 4 + [NEW]


async def test_misplaced_chunks_and_aborted_attempts_are_counted(
    services: Services, log: Log
) -> None:
    first, second, third = large(5, "a")
    other_first, other_second = large(5, "b", 2)
    await log.store("p", first)
    assert await log.judge("p", third, second) == [CHUNK_GAP, HELD]
    assert await log.judge("p", other_second) == [LAYOUT_CONFLICT]
    answer = await log.admit({"p": [second, other_first], "q": [7]})
    assert [list(each.verdicts) for each in answer.verdicts.producers] == [[NEW, IN_FLIGHT], [NEW]]
    log.append("p", second)
    log.append("q", 7)
    answer = await log.admit({"q": [8], "p": [second, other_first, other_second, 6]})
    _, of_p = answer.verdicts.producers
    assert list(of_p.verdicts) == [DUPLICATE, NEW, NEW, NEW]
    assert (dict(of_p.aborts), of_p.persisted_sequence_id) == ({1: "a"}, 4)
    counts = (await services.status(log.topic)).counts
    assert (counts.misplaced_chunk_claims, counts.aborted_attempts) == (2, 1)


async def test_nothing_is_confirmed_across_a_gap(
    services: Services, log: Log, redis: Redis
) -> None:
    await log.store("p", 0, 1, 2)
    await redis.delete(key_of(log))
    answer = await log.confirm(log.records[1:])
    assert answer.HasField("behind")
    assert not answer.behind.HasField("confirmed")
    assert await services.producers(log.topic) == {}
    assert (await log.confirm(log.records[:1])).confirmed.deduplicated
    assert await marks(services, log) == (0, 0)
    assert (await log.rollback()).behind.confirmed == log.records[0].position


async def test_a_rollback_withdraws_although_the_state_is_behind(
    services: Services, log: Log, redis: Redis
) -> None:
    await log.store("p", 0)
    assert await log.judge("p", 1) == [NEW]
    old = await redis.dump(key_of(log))
    assert old is not None
    log.append("p", 1)
    await log.store("p", 2)
    await redis.restore(key_of(log), 0, old, replace=True)
    assert await marks(services, log) == (0, 1)
    assert (await log.rollback()).behind.confirmed == log.records[0].position
    assert await marks(services, log) == (0, 0)


async def test_a_lost_answer_is_noticed_by_the_revision(services: Services, log: Log) -> None:
    """The claims of the lost answer must not be taken for copies of themselves."""
    revision = (await log.rollback()).rolled_back.revision
    await log.admit({"p": [1, 2]}, revision=revision)
    lost = await log.admit({"p": [1, 2]}, revision=revision)
    assert lost.HasField("changed")
    assert lost.changed.revision > revision
    assert await marks(services, log) == (None, 2)
    assert (await log.admit({"p": [1, 2]}, revision=lost.changed.revision + 1)).HasField("changed")
    revision = (await log.rollback()).rolled_back.revision
    answer = await log.admit({"p": [1, 2]}, revision=revision)
    assert list(answer.verdicts.producers[0].verdicts) == [NEW, NEW]


async def test_lost_claims_are_noticed_by_the_revision(log: Log, redis: Redis) -> None:
    """The positions are equal: nothing was appended in between."""
    await log.store("p", 0)
    old = await redis.dump(key_of(log))
    assert old is not None
    revision = (await log.admit({"p": [1]})).verdicts.revision
    await redis.restore(key_of(log), 0, old, replace=True)
    assert (await log.admit({"p": [2]}, revision=revision)).HasField("changed")


# ---- fencing


async def test_a_newer_writer_fences_the_older_one(services: Services, log: Log) -> None:
    await log.store("p", 0)
    assert await log.judge("p", 1) == [NEW]
    newer = log.successor(epoch=2)
    assert await newer.judge("p", 0, 1) == [DUPLICATE, NEW], "open claims are withdrawn"
    newer.append("p", 1)
    await newer.confirm()
    before = await services.status(log.topic)
    for attempt in (log.admit({"p": [1]}), log.confirm(log.records), log.rollback()):
        with refused(StatusCode.ABORTED, "FENCED") as details:
            await attempt
        assert details == {"epoch": "2"}
    assert await services.status(log.topic) == before
    assert await newer.judge("p", 1, 2) == [DUPLICATE, NEW]


async def test_every_call_can_take_over(services: Services, log: Log) -> None:
    await log.store("p", 0)
    for epoch, verb in enumerate(("confirm", "rollback"), start=2):
        assert await log.judge("p", 1) == [NEW]
        log = log.successor(epoch=epoch)
        await (log.confirm(log.records) if verb == "confirm" else log.rollback())
        assert (await services.status(log.topic)).epoch == epoch
        assert await marks(services, log) == (0, 0)


async def test_a_writer_whose_log_is_shorter_than_the_state_is_fenced(log: Log) -> None:
    """Another writer has appended under the same epoch."""
    await log.store("p", 0, 1)
    shorter = log.successor(epoch=1)
    shorter.records.pop()
    for attempt in (
        shorter.admit({"p": [2]}),
        shorter.confirm(shorter.records),
        shorter.rollback(),
    ):
        with refused(StatusCode.ABORTED, "FENCED"):
            await attempt
    assert await log.judge("p", 1, 2) == [DUPLICATE, NEW]


async def test_a_recreated_log_starts_empty(services: Services, log: Log) -> None:
    await log.store("p", 0, 1)
    again = Log(log.dedup, log.topic, epoch=2, incarnation=2)
    assert await again.judge("p", 0) == [NEW]
    again.append("p", 0)
    await again.confirm()
    with refused(StatusCode.ABORTED, "FENCED"):
        await log.judge("p", 2)
    assert (await services.status(log.topic)).confirmed == again.tail
    assert await marks(services, log) == (0, 0)


async def test_a_deleted_log_is_forgotten_and_a_newer_one_is_not(
    services: Services, log: Log, dedup: Any
) -> None:
    again = Log(dedup, log.topic, epoch=7, incarnation=7)
    await again.store("p", 5)
    for incarnation in (0, 1, 6):
        await dedup.ForgetTopic(
            writer_pb2.ForgetTopicRequest(topic=log.topic, incarnation=incarnation)
        )
        assert await marks(services, log) == (5, 5)
    for _ in range(2):
        await dedup.ForgetTopic(writer_pb2.ForgetTopicRequest(topic=log.topic, incarnation=7))
        assert (await services.status(log.topic)).state == pb.TOPIC_STATE_ABSENT
        assert await services.producers(log.topic) == {}
    with refused(StatusCode.NOT_FOUND, "PRODUCER_NOT_FOUND"):
        await dedup.GetProducer(pb.GetProducerRequest(topic=log.topic, producer_name="p"))
    # A remaining writer is not affected: it is asked to confirm its log.
    assert (await again.admit({"p": [5]})).HasField("behind")
    await again.confirm(again.records)
    assert await again.judge("p", 5, 6) == [DUPLICATE, NEW]


# ---- queries


async def test_an_explanation_agrees_with_the_verdict_and_changes_nothing(
    services: Services, log: Log
) -> None:
    async def explain(producer: str, sequence_id: int) -> pb.ExplainResponse:
        request = pb.ExplainRequest(
            topic=log.topic, producer_name=producer, sequence_id=sequence_id
        )
        answer: pb.ExplainResponse = await services.dedup.Explain(request)
        return answer

    unknown = await explain("p", 1)
    assert (unknown.verdict, unknown.status.state) == (NEW, pb.TOPIC_STATE_ABSENT)
    await log.store("p", 5)
    assert await log.judge("p", 8) == [NEW]
    before = await services.status(log.topic), await services.producers(log.topic)
    for sequence_id, verdict in (
        (0, DUPLICATE),
        (5, DUPLICATE),
        (6, IN_FLIGHT),
        (8, IN_FLIGHT),
        (9, NEW),
    ):
        answer = await explain("p", sequence_id)
        assert answer.verdict == verdict
        assert str(sequence_id) in answer.explanation
        assert answer.producer == before[1]["p"]
        assert answer.status == before[0]
    stranger = await explain("q", 0)
    assert stranger.verdict == NEW
    assert not stranger.HasField("producer")
    assert stranger.explanation
    assert (await services.status(log.topic), await services.producers(log.topic)) == before


async def test_a_kept_producer_was_active_now_and_an_unknown_one_stays_unknown(
    services: Services, log: Log
) -> None:
    keep = writer_pb2.KeepProducersAliveRequest(topic=log.topic, producer_names=["p", "q"])
    await services.dedup.KeepProducersAlive(keep)
    assert (await services.status(log.topic)).state == pb.TOPIC_STATE_ABSENT
    log.append("p", 3)
    await log.confirm()
    before = (await services.producers(log.topic))["p"].last_active.ToMilliseconds()
    assert before == APPEND_TIME
    await services.dedup.KeepProducersAlive(keep)
    producers = await services.producers(log.topic)
    assert producers.keys() == {"p"}
    assert producers["p"].last_active.ToMilliseconds() > before
    assert await marks(services, log) == (3, 3)


@pytest.mark.parametrize("page_size", [1, 100, 1_000])
async def test_all_producers_are_listed_page_by_page(
    services: Services, log: Log, page_size: int
) -> None:
    count = 1_200  # more than Redis encodes as one listpack
    names = [f"producer {each}" for each in range(count)]
    await log.admit({name: [each] for each, name in enumerate(names)})
    for each, name in enumerate(names):
        log.append(name, each)
    await log.confirm()

    found: list[pb.Producer] = []
    token, pages = "", 0
    while token or not pages:
        page = await services.dedup.ListProducers(
            pb.ListProducersRequest(topic=log.topic, page_size=page_size, page_token=token)
        )
        found.extend(page.producers)
        token, pages = page.next_page_token, pages + 1
    assert pages > 1
    assert {each.name: each.persisted_sequence_id for each in found} == dict(
        zip(names, range(count), strict=True)
    )
    assert (await services.status(log.topic)).producers == count


# ---- topics that never deduplicate


async def test_a_system_topic_never_deduplicates(services: Services, topic: str) -> None:
    """Through the API alone."""
    tenant, namespace, name = topic.split("/")
    log = Log(services.dedup, f"{tenant}/{namespace}/__{name}")
    assert not (await log.rollback()).rolled_back.deduplicated
    for _ in range(2):
        answer = await log.admit({"p": [1, 1, 0]})
        assert not answer.verdicts.deduplicated
        assert list(answer.verdicts.producers[0].verdicts) == [NEW] * 3
        log.append("p", 1, 1, 0)
        assert not (await log.confirm()).confirmed.deduplicated
    status = await services.status(log.topic)
    assert status.state == pb.TOPIC_STATE_DISABLED
    assert not status.policy.enabled
    assert status.policy.enabled_source == pb.POLICY_SOURCE_SYSTEM_TOPIC
    assert await services.producers(log.topic) == {}
    with refused(StatusCode.NOT_FOUND, "PRODUCER_NOT_FOUND"):
        await services.dedup.GetProducer(pb.GetProducerRequest(topic=log.topic, producer_name="p"))
    explained = await services.dedup.Explain(
        pb.ExplainRequest(topic=log.topic, producer_name="p", sequence_id=1)
    )
    assert explained.verdict == NEW
    assert "system topic" in explained.explanation


async def test_a_system_topic_of_the_ledger_stores_an_id_each_time(
    services: Services, topic: str
) -> None:
    """Through the publish path."""
    tenant, namespace, name = topic.split("/")
    system = f"{tenant}/{namespace}/__{name}"
    async with publishing(services.ledger, system, "p") as publisher:
        for request_id in range(3):
            receipt = await publisher.store(single(request_id, 7))
            assert receipt.status == ledger_pb2.RECEIPT_STATUS_STORED
    async with publishing(services.ledger, system, "p") as publisher:
        assert not publisher.opened.HasField("last_sequence_id")
    assert await services.ids(system) == [7, 7, 7]


# ---- one stream for all calls


async def test_an_exchange_carries_every_call_and_answers_in_order(
    services: Services, log: Log
) -> None:
    stream = services.dedup.Exchange()
    confirmed = log.successor(epoch=1)
    confirmed.append("p", 1)
    requests = [
        writer_pb2.ExchangeRequest(
            request_id=7, rollback=writer_pb2.RollbackRequest(topic=log.topic, writer=log.writer())
        ),
        writer_pb2.ExchangeRequest(request_id=7, admit=log.claim({"p": [1, 2]})),
        writer_pb2.ExchangeRequest(
            request_id=2**64 - 1,
            admit=writer_pb2.AdmitRequest(topic="no topic", writer=log.writer()),
        ),
        writer_pb2.ExchangeRequest(request_id=0, admit=log.claim({"p": [2]})),
        writer_pb2.ExchangeRequest(
            request_id=3,
            confirm=writer_pb2.ConfirmRequest(
                topic=log.topic,
                writer=confirmed.writer(),
                confirmation=confirmed.confirmation(confirmed.records),
            ),
        ),
        writer_pb2.ExchangeRequest(
            request_id=4, admit=confirmed.successor(epoch=1).claim({"p": [1, 2]})
        ),
        writer_pb2.ExchangeRequest(request_id=5),
        writer_pb2.ExchangeRequest(request_id=6, admit=log.claim({"p": [3]})),
        writer_pb2.ExchangeRequest(
            request_id=8,
            rollback=writer_pb2.RollbackRequest(topic=log.topic, writer=confirmed.writer()),
        ),
    ]
    for request in requests:
        await stream.write(request)
    await stream.done_writing()
    answers = [each async for each in stream]
    assert [each.request_id for each in answers] == [each.request_id for each in requests]
    assert [each.WhichOneof("response") for each in answers] == [
        "rollback",
        "admit",
        "error",
        "admit",
        "confirm",
        "admit",
        "error",
        "error",
        "rollback",
    ]
    judged = [
        list(each.admit.verdicts.producers[0].verdicts)
        for each in answers
        if each.HasField("admit")
    ]
    assert judged == [[NEW, NEW], [IN_FLIGHT], [DUPLICATE, IN_FLIGHT]]
    errors: list[status_pb2.Status] = [each.error for each in answers if each.HasField("error")]
    check(errors[0], StatusCode.INVALID_ARGUMENT, "INVALID_TOPIC_NAME")
    check(errors[1], StatusCode.INVALID_ARGUMENT, "INVALID_CLAIM")
    check(errors[2], StatusCode.ABORTED, "FENCED")
    assert await stream.code() is StatusCode.OK


async def test_one_exchange_serves_many_topics(services: Services, topic: str) -> None:
    stream = services.dedup.Exchange()
    logs = [Log(services.dedup, f"{topic}.{each}") for each in range(20)]
    for _ in range(2):
        for each, log in enumerate(logs):
            await stream.write(
                writer_pb2.ExchangeRequest(request_id=each, admit=log.claim({"p": [each]}))
            )
    answers = [await stream.read() for _ in range(2 * len(logs))]
    await stream.done_writing()
    assert await stream.read() is aio.EOF
    verdicts = [each.admit.verdicts.producers[0].verdicts[0] for each in answers]
    assert verdicts == [NEW] * 20 + [IN_FLIGHT] * 20


async def test_an_exchange_is_notified_when_the_service_drains(
    stoppable: Services, topic: str
) -> None:
    log = Log(stoppable.dedup, topic)
    stream = stoppable.dedup.Exchange()
    await stream.write(writer_pb2.ExchangeRequest(request_id=1, admit=log.claim({"p": [1]})))
    assert (await stream.read()).request_id == 1
    ending = asyncio.create_task(stoppable.stack.terminate("dedup"))
    last = await stream.read()
    assert (last.request_id, last.WhichOneof("response")) == (0, "draining")
    assert await stream.read() is aio.EOF
    assert await stream.code() is StatusCode.OK
    assert await ending == 0

    await stoppable.stack.run("dedup")
    assert await log.judge("p", 1, 2) == [IN_FLIGHT, HELD], "Redis kept what was let through"


async def test_a_pending_call_on_a_draining_exchange_is_answered_first(
    stoppable: Services, topic: str
) -> None:
    log = Log(stoppable.dedup, topic)
    stream = stoppable.dedup.Exchange()
    async with writes_held_up(stoppable.stack) as waiting:
        await stream.write(writer_pb2.ExchangeRequest(request_id=1, admit=log.claim({"p": [1]})))
        await eventually(waiting, "the script waits")
        ending = asyncio.create_task(stoppable.stack.terminate("dedup"))
        await not_serving(stoppable.stack.address("dedup"))
        assert not ending.done()
    first, second = await stream.read(), await stream.read()
    assert list(first.admit.verdicts.producers[0].verdicts) == [NEW]
    assert second.HasField("draining")
    assert await ending == 0
