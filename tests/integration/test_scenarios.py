"""Deduplication over real services and the wire: A (verdicts), B (batches), C (failures,
reconnects) and D (recovery). Where Pulsar and our requirements differ, the latter apply.

Related cases are in test_client.py, test_ledger_api.py, test_policies.py, unit/test_outbox.py and
simulation/.
"""

import asyncio
import itertools
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from grpc import StatusCode, aio

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import connect
from seqgate.dev.stack import Stack
from seqgate.message_id import MessageId
from tests.integration.conftest import ON_SQLITE
from tests.integration.refusals import check
from tests.integration.services import Services, connected, paused, running
from tests.support.checkers import (
    Acknowledgement,
    Content,
    History,
    Identity,
    Stored,
    log_anomalies,
    report,
)
from tests.support.publisher import Publisher, batch, batch_entry, publishing, single
from tests.support.waiting import eventually

STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
STALE, PARTIAL = pb.RECEIPT_STATUS_STALE, pb.RECEIPT_STATUS_PARTIAL
REFUSED, FAILED, SKIPPED = (
    pb.RECEIPT_STATUS_REFUSED,
    pb.RECEIPT_STATUS_FAILED,
    pb.RECEIPT_STATUS_SKIPPED,
)


@pytest.fixture(scope="module")
async def frail(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack whose ledger is stopped and killed; it runs again when a test ends."""
    async with running(tmp_path_factory.mktemp("frail")) as services:
        yield services


def position(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


def fates(receipt: pb.Receipt) -> list[str | tuple[int, int | None]]:
    """Each message's position (entry, index), or the fate of one that has none."""
    return [
        (each.position.entry_id, each.batch_index if each.HasField("batch_index") else None)
        if each.fate == pb.FATE_STORED
        else pb.Fate.Name(each.fate)
        for each in receipt.fates
    ]


async def answers(publisher: Publisher, *publications: pb.Publication) -> list[pb.Receipt]:
    """Send these together; their receipts, in the order of the publications."""
    await publisher.send(*publications)
    return [await publisher.receipt(each.request_id) for each in publications]


class Watermarks(NamedTuple):
    persisted: int | None
    pushed: int | None


async def watermarks(services: Services, topic: str, producer: str = "p") -> Watermarks:
    """Deduplication's marks of a producer."""
    known = (await services.producers(topic)).get(producer)
    if known is None:
        return Watermarks(None, None)
    return Watermarks(
        known.persisted_sequence_id if known.HasField("persisted_sequence_id") else None,
        known.pushed_sequence_id if known.HasField("pushed_sequence_id") else None,
    )


@contextmanager
def appends_held_back(stack: Stack) -> Iterator[None]:
    """Nothing is committed while the block runs, because another connection has locked the
    database. The block ends within the service's own time-out, 5 seconds."""
    with sqlite3.connect(stack.folder / "ledger" / "ledger.db", isolation_level=None) as database:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            database.execute("ROLLBACK")
    database.close()


async def messages(stack: Stack, topic: str) -> list[tuple[int, bytes]]:
    """The ids and payloads that a reader returns."""
    async with (
        connect(stack.address("ledger")) as client,
        client.reader(topic, follow=False) as reader,
    ):
        return [(each.sequence_id, each.payload) async for each in reader]


# ---- A. Verdicts, single messages


async def test_watermarks_are_per_producer(services: Services, topic: str) -> None:
    async with (
        publishing(services.ledger, topic, "p") as p,
        publishing(services.ledger, topic, "q") as q,
    ):
        assert (await p.store(single(1, 0))).position == position(0)
        assert (await q.store(single(1, 1))).position == position(1)
        assert (await q.store(single(2, 0))).status == STALE
        assert (await p.store(single(2, 1))).status == STORED
    await services.settled(topic)
    assert await watermarks(services, topic, "p") == (1, 1)
    assert await watermarks(services, topic, "q") == (1, 1)


async def test_gaps_between_ids_are_allowed(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as p:
        for each in (0, 1, 5):
            assert (await p.store(single(each, each))).status == STORED
    assert await services.ids(topic) == [0, 1, 5]
    await services.settled(topic)
    assert await watermarks(services, topic) == (5, 5)


async def test_a_duplicate_is_answered_with_the_position_of_the_original(
    services: Services, topic: str
) -> None:
    """Pulsar answers with -1:-1."""
    async with publishing(services.ledger, topic, "p") as p:
        first = await p.store(single(1, 0, b"first"))
        assert (first.status, first.position) == (STORED, position(0))
        await p.store(single(2, 1))
        again = await p.store(single(3, 0, b"again"))
        assert (again.status, again.position) == (DUPLICATE, position(0))
    assert await messages(services.stack, topic) == [(0, b"first"), (1, b"x")]


async def test_an_overtaken_id_is_stale(services: Services, topic: str) -> None:
    """Pulsar answers with success."""
    async with publishing(services.ledger, topic, "p") as p:
        await p.store(single(1, 5))
        overtaken = await p.store(single(2, 3))
        assert overtaken.status == STALE
        assert fates(overtaken) == ["FATE_STALE"]
        assert not overtaken.HasField("position")
    assert await services.ids(topic) == [5]


@ON_SQLITE
async def test_a_copy_of_a_message_in_flight_gets_the_same_answer(
    services: Services, topic: str
) -> None:
    """Pulsar's second copy ends with "cannot determine whether it is a duplicate"."""
    async with publishing(services.ledger, topic, "p") as p:
        await p.store(single(1, 5))
        with appends_held_back(services.stack):
            await p.send(single(2, 6, b"first"))
            await eventually(lambda: _is_pushed(services, topic, 6), "6 is let through")
            await p.send(single(3, 6, b"again"))
            await p.send(single(4, 7))
            assert await watermarks(services, topic) == (5, 6)
            assert p.receipts == {}
        first, again, next_ = [await p.receipt(each) for each in (2, 3, 4)]
        assert (first.status, first.position) == (STORED, position(1))
        assert (again.status, again.position) == (DUPLICATE, position(1))
        assert (next_.status, next_.position) == (STORED, position(2))
    assert await messages(services.stack, topic) == [(5, b"x"), (6, b"first"), (7, b"x")]


async def _is_pushed(services: Services, topic: str, sequence_id: int) -> bool:
    pushed = (await watermarks(services, topic)).pushed
    return pushed is not None and pushed >= sequence_id


@ON_SQLITE
async def test_ids_below_one_in_flight_wait_for_its_outcome(services: Services, topic: str) -> None:
    """5 is admitted, nothing is durable: 0 is neither new nor a duplicate."""
    async with publishing(services.ledger, topic, "p") as p:
        with appends_held_back(services.stack):
            await p.send(single(1, 5))
            await eventually(lambda: _is_pushed(services, topic, 5), "5 is let through")
            assert await watermarks(services, topic) == (None, 5)
            await p.send(single(2, 0))
        assert (await p.receipt(1)).status == STORED
        below = await p.receipt(2)
        assert (below.status, fates(below)) == (STALE, ["FATE_STALE"])
        await services.settled(topic)
        assert await watermarks(services, topic) == (5, 5)
    assert await services.ids(topic) == [5]


async def test_without_deduplication_an_id_is_stored_twice_and_none_is_remembered(
    services: Services, topic: str
) -> None:
    """On a system topic, which never deduplicates."""
    system = topic.replace("default/", "default/__")
    for _ in range(2):
        async with publishing(services.ledger, system, "p") as p:
            assert not p.opened.HasField("last_sequence_id")
            assert (await p.store(single(1, 6))).status == STORED
    assert await services.ids(system) == [6, 6]


async def test_a_marker_with_any_id_is_stored_and_changes_no_watermark(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as p:
        await p.store(single(1, 5))
        told = await answers(
            p, *(single(each, id_, marker_type=1) for each, id_ in ((2, 3), (3, 5), (4, 5), (5, 9)))
        )
        assert [each.status for each in told] == [STORED] * 4
        assert (await p.store(single(6, 3))).status == STALE
        assert (await p.store(single(7, 6))).status == STORED
    assert await services.ids(topic) == [5, 3, 5, 5, 9, 6]
    await services.settled(topic)
    assert await watermarks(services, topic) == (6, 6)


async def test_refused_messages_move_no_watermark(services: Services, topic: str) -> None:
    """Too large, damaged, a highest id below the lowest; then 9 is still new."""
    async with publishing(services.ledger, topic, "p") as p:
        await p.store(single(1, 8))
        too_large = await p.store(single(2, 9, b"x" * (p.opened.max_message_bytes + 1)))
        damaged = await p.store(single(3, 9, b"x", payload_crc32c=1))
        reversed_ = await p.store(single(4, 9, highest_sequence_id=7, num_messages_in_batch=3))
        upside_down = await p.store(single(5, 7, highest_sequence_id=99, num_messages_in_batch=2))
        for receipt, reason in (
            (too_large, "ENTRY_TOO_LARGE"),
            (damaged, "CHECKSUM_MISMATCH"),
            (reversed_, "INVALID_ENTRY"),
            (upside_down, "INVALID_ENTRY"),
        ):
            assert receipt.status == REFUSED
            check(receipt.error, StatusCode.INVALID_ARGUMENT, reason)
        assert await watermarks(services, topic) == (8, 8)
        assert (await p.store(single(6, 9))).status == STORED
    assert await services.ids(topic) == [8, 9]


# ---- B. Batches


async def test_a_batch_counts_each_of_its_messages(services: Services, topic: str) -> None:
    """[1..5] after 0; sent again it is one duplicate."""
    async with publishing(services.ledger, topic, "p") as p:
        await p.store(single(1, 0))
        assert (await p.store(batch(2, range(1, 6)))).position == position(1)
        again = await p.store(batch(3, range(1, 6)))
        assert (again.status, again.position) == (DUPLICATE, position(1))
    await services.settled(topic)
    assert await watermarks(services, topic) == (5, 5)
    (described,) = [each for each in await services.topics(topic) if each.name == topic]
    assert (described.entries, described.messages) == (2, 6)


BATCHES: dict[str, tuple[list[Sequence[int]], list[Sequence[int]], list[str]]] = {
    # The durable ids, the ids then sent together, and the answers.
    "new": ([[0]], [range(1, 6)], ["STORED"]),
    "overlaps ids in flight": (
        [[0]],
        [range(1, 6), range(4, 9)],
        ["STORED", "PARTIAL from 6: (1, 3) (1, 4)"],
    ),
    "overlaps durable ids": (
        [[0], range(1, 6)],
        [range(4, 9)],
        ["PARTIAL from 6: (1, 3) (1, 4)"],
    ),
    "continues": ([[0], range(1, 6)], [[6]], ["STORED"]),
    "copy of ids in flight": ([range(6)], [range(6, 9), range(6, 9)], ["STORED", "DUPLICATE"]),
    "copy of durable ids": ([range(6), range(6, 9)], [range(6, 9)], ["DUPLICATE"]),
    "late and lower": ([range(9)], [range(10, 13), [9]], ["STORED", "STALE: FATE_STALE"]),
    "around durable ids": (
        [[0], [3, 4]],
        [[1, 2, 3, 4, 5, 6]],
        ["PARTIAL from 5: FATE_STALE FATE_STALE (1, 0) (1, 1)"],
    ),
    "inside durable ids": (
        [[0], range(1, 9)],
        [range(3, 6)],
        ["DUPLICATE: (1, 2) (1, 3) (1, 4)"],
    ),
    "in gaps of durable ids": (
        [[0], [2, 4, 6]],
        [range(1, 7)],
        ["STALE: FATE_STALE (1, 0) FATE_STALE (1, 1) FATE_STALE (1, 2)"],
    ),
}


@pytest.mark.parametrize("case", BATCHES)
async def test_a_batch_is_answered_by_the_fates_of_its_messages(
    services: Services, topic: str, case: str
) -> None:
    before, together, expected = BATCHES[case]
    async with publishing(services.ledger, topic, "p") as p:
        for number, ids in enumerate(before):
            assert (await p.store(_publication(100 + number, ids))).status == STORED
        told = await answers(p, *(_publication(each, ids) for each, ids in enumerate(together)))
    assert [_said(each) for each in told] == expected


def _publication(request_id: int, ids: Sequence[int]) -> pb.Publication:
    ids = list(ids)
    return single(request_id, ids[0]) if len(ids) == 1 else batch(request_id, ids)


def _said(receipt: pb.Receipt) -> str:
    text = pb.ReceiptStatus.Name(receipt.status).removeprefix("RECEIPT_STATUS_")
    if receipt.HasField("first_new_sequence_id"):
        text += f" from {receipt.first_new_sequence_id}"
    told = " ".join(str(each) for each in fates(receipt))
    return f"{text}: {told}" if told else text


async def test_messages_after_a_partly_stored_batch_wait_for_its_rest(
    services: Services, topic: str
) -> None:
    """None of 6, 7, 8 is ever overtaken."""
    async with publishing(services.ledger, topic, "p") as p:
        await p.store(batch(1, range(6)))
        told = await answers(p, batch(2, range(4, 9)), single(3, 9), batch(4, [10, 11]))
        assert [each.status for each in told] == [PARTIAL, SKIPPED, SKIPPED]
        assert (await p.store(single(5, 9))).status == SKIPPED  # until it resumes
        told = await answers(p, batch(6, [6, 7, 8], resume=True), single(7, 9), batch(8, [10, 11]))
        assert [each.status for each in told] == [STORED] * 3
    assert await services.ids(topic) == [0, 6, 9, 10]


async def test_a_flush_by_key_is_one_publication(services: Services, topic: str) -> None:
    """A{0,3,4} and B{1,2} lie in the log as 1,2 and 0,3,4; each id is known afterwards."""

    def by_key(request_id: int) -> pb.Publication:
        return pb.Publication(
            request_id=request_id,
            entries=[
                batch_entry([1, 2], partition_key="B"),
                batch_entry([0, 3, 4], partition_key="A"),
            ],
        )

    async with publishing(services.ledger, topic, "p") as p:
        stored = await p.store(by_key(1))
        assert (stored.status, stored.position) == (STORED, position(0))
        again = await p.store(by_key(2))
        assert _said(again) == "DUPLICATE: (0, 0) (0, 1) (1, 0) (1, 1) (1, 2)"
        told = await answers(p, *(single(10 + each, each) for each in range(5)))
        assert [_said(each) for each in told] == [
            "DUPLICATE: (1, 0)",
            "DUPLICATE: (0, 0)",
            "DUPLICATE: (0, 1)",
            "DUPLICATE: (1, 1)",
            "DUPLICATE: (1, 2)",
        ]
    entries = await services.read(topic)
    assert [each.metadata.partition_key for each in entries] == ["B", "A"]
    await services.settled(topic)
    assert await watermarks(services, topic) == (4, 4)


# ---- C. Failure, reconnect, concurrency


async def test_messages_refused_by_a_full_store_are_new_again(private: Any, topic: str) -> None:
    """6 is stored, the append of 10..19 fails, and with it q's 7 in the same group. Every watermark
    goes back. Messages sent again are stored; the others never appear."""
    large = b"x" * 1_000_000
    async with private(SEQGATE_LEDGER_STORE_BYTES_MAX="3000000") as services:
        async with (
            publishing(services.ledger, topic, "p") as p,
            publishing(services.ledger, topic, "q") as q,
        ):
            assert (await p.store(single(1, 6))).status == STORED
            assert (await q.store(single(1, 6))).status == STORED
            told = await answers(p, *(single(each, each, large) for each in range(10, 20)))
            assert {each.status for each in told} <= {FAILED, SKIPPED}
            assert told[0].status == FAILED
            check(told[0].error, StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")
            assert (await p.store(single(2, 7))).status == SKIPPED
            await eventually(lambda: _are(services, topic, (6, 6)), "the watermark goes back")

            # The topic continues for others, and for p once it resumes.
            assert (await q.store(single(2, 7))).status == STORED
            assert (await p.store(single(3, 6, resume=True))).status == DUPLICATE
            told = await answers(p, single(4, 10), *(single(each, each) for each in range(20, 30)))
            assert {each.status for each in told} == {STORED}
            assert (await p.store(single(5, 11))).status == STALE
        assert await services.ids(topic, "p") == [6, 10, *range(20, 30)]
        await services.settled(topic)
        assert await watermarks(services, topic, "p") == (29, 29)
        assert await watermarks(services, topic, "q") == (7, 7)


async def _are(services: Services, topic: str, marks: tuple[int, int]) -> bool:
    return await watermarks(services, topic) == marks


IMPATIENT = """
import sys
from seqgate.services.runtime import sqlite as sqlite_threads
sqlite_threads.BUSY_TIMEOUT_MS = 30
from seqgate.services.ledger.app import run
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.process import run_service
sys.exit(run_service(LedgerConfig, run))
"""
"""The ledger service, with a short time-out for a database that another connection has locked."""


async def test_an_append_with_an_unknown_outcome_is_resolved(tmp_path: Path, topic: str) -> None:
    """While the store does not answer, every publish fails; then the topic is taken again, and
    messages in flight that are sent again are stored once."""
    async with (
        Stack(tmp_path, commands={"ledger": [sys.executable, "-c", IMPATIENT]}) as stack,
        connected(stack) as services,
        publishing(services.ledger, topic, "p") as p,
        publishing(services.ledger, topic, "q") as q,
    ):
        assert (await p.store(single(1, 6))).status == STORED
        with appends_held_back(stack):
            told = await answers(p, single(2, 7), single(3, 8), batch(4, [9, 10]))
            assert told[0].status == FAILED
            assert {each.status for each in told} <= {FAILED, SKIPPED}
            check(told[0].error, StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
            await q.send(single(1, 0))
        assert (await q.receipt(1)).status in (STORED, FAILED)
        told = await answers(
            p, single(5, 7, resume=True), single(6, 8), batch(7, [9, 10]), single(8, 6)
        )
        assert [each.status for each in told] == [STORED, STORED, STORED, DUPLICATE]
        assert told[0].position.ledger_id > 1  # the topic was taken again
        await services.settled(topic)
        assert await watermarks(services, topic) == (10, 10)
        assert await services.ids(topic, "p") == [6, 7, 8, 9]


@ON_SQLITE
async def test_a_message_appended_before_a_disconnection_is_a_duplicate(
    services: Services, topic: str
) -> None:
    async with publishing(services.ledger, topic, "p") as lost:
        with appends_held_back(services.stack):
            await lost.send(single(1, 0, b"first"), batch(2, [1, 2]))
            await eventually(lambda: _is_pushed(services, topic, 2), "both are let through")
            await lost.cut()
    async with publishing(services.ledger, topic, "p") as p:
        # It connects after the append has ended, so the last id includes both.
        assert p.opened.last_sequence_id == 2
        told = await answers(p, single(1, 0, b"again"), batch(2, [1, 2]), single(3, 3))
        assert [(each.status, each.position.entry_id) for each in told] == [
            (DUPLICATE, 0),
            (DUPLICATE, 1),
            (STORED, 2),
        ]
    assert await services.ids(topic) == [0, 1, 3]


async def test_a_message_not_admitted_before_a_disconnection_is_new(
    services: Services, topic: str
) -> None:
    """The message was sent, and deduplication had not answered yet."""
    async with publishing(services.ledger, topic, "p") as lost:
        await lost.store(single(1, 0))
        with paused(services.stack, "dedup"):
            await lost.send(*(single(each, each) for each in range(1, 50)))
            await lost.cut()
    async with publishing(services.ledger, topic, "p", takeover=True) as p:
        told = await answers(p, *(single(each, each) for each in range(50)))
        assert {each.status for each in told} <= {STORED, DUPLICATE}
    assert await services.ids(topic) == list(range(50))


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
async def test_durable_ids_survive_a_restart_of_the_ledger(
    frail: Services, topic: str, kill: bool
) -> None:
    """0..9 are stored, the process ends, and 8, 9 are sent again; then 10."""
    async with publishing(frail.ledger, topic, "p") as p:
        assert not p.opened.HasField("last_sequence_id")
        for each in range(9):
            await p.store(single(each, each))
        await p.store(batch(9, [9, 10, 11]))
    async with publishing(frail.ledger, topic, "p") as p:
        assert p.opened.last_sequence_id == 11
    if kill:
        await frail.stack.kill("ledger")
    else:
        assert await frail.stack.terminate("ledger") == 0
    await frail.stack.run("ledger")
    async with publishing(frail.ledger, topic, "p") as p:
        assert (p.opened.last_sequence_id, p.opened.ledger_id) == (11, 2)
        told = await answers(p, single(1, 7), single(2, 8), batch(3, [9, 10, 11]), single(4, 12))
        assert [each.status for each in told] == [DUPLICATE, DUPLICATE, DUPLICATE, STORED]
        assert [each.position for each in told] == [
            position(7),
            position(8),
            position(9),
            position(0, ledger_id=2),
        ]
    assert await frail.ids(topic) == [*range(10), 12]


async def test_a_new_producer_has_no_last_id(services: Services, topic: str) -> None:
    """Absent differs from 0, and an initial id is returned as the last one."""
    async with publishing(services.ledger, topic, "p") as p:
        assert not p.opened.HasField("last_sequence_id")
        await p.store(single(1, 0))
    async with publishing(services.ledger, topic, "p") as p:
        assert p.opened.HasField("last_sequence_id")
        assert p.opened.last_sequence_id == 0
    async with publishing(services.ledger, topic, "q", initial_sequence_id=41) as q:
        assert q.opened.last_sequence_id == 41
        assert (await q.store(single(1, 42))).status == STORED


async def test_a_ledger_killed_amid_a_stream_stores_each_message_once(
    frail: Services, topic: str
) -> None:
    """kill -9 at a random moment: unanswered messages are sent again in order."""
    count = 1_000
    unanswered = dict.fromkeys(range(count))
    for kill_after in (20, 5, None):  # requests
        try:
            async with publishing(frail.ledger, topic, "p") as p:
                # The log, not the receipts, tells which messages are durable.
                stored = await frail.ids(topic)
                assert stored == list(range(len(stored)))
                assert (p.opened.last_sequence_id if stored else -1) == len(stored) - 1
                asked = list(unanswered)
                for request in range(0, len(asked), 20):
                    some = asked[request : request + 20]
                    await p.send(*(single(each, each, b"x" * 1000) for each in some))
                    if request == 20 * (kill_after or count):
                        break
                if kill_after is not None:
                    await frail.stack.kill("ledger")
                for each in asked:
                    assert (await p.receipt(each)).status in (STORED, DUPLICATE)
                    del unanswered[each]
        except aio.AioRpcError as error:
            if error.code() is not StatusCode.UNAVAILABLE:
                raise
        if kill_after is not None:
            await frail.stack.run("ledger")
    assert not unanswered
    assert await frail.ids(topic) == list(range(count))


# ---- concurrent producers


async def test_messages_repeated_by_many_producers_are_stored_once(
    services: Services, topic: str, seed: int
) -> None:
    """Messages and batches of five producers, each sent once or several times, some of it late,
    over streams that are cut at any time."""
    history = History()
    await asyncio.gather(
        *(
            _publish_again_and_again(services, topic, f"p{number}", history, Random(seed + number))
            for number in range(5)
        )
    )
    log = [
        Stored(
            MessageId(each.position.ledger_id, each.position.entry_id, -1, index),
            Identity(each.metadata.producer_name, sequence_id),
            Content(each.payload),
        )
        for each in await services.read(topic)
        for index, sequence_id in _ids(each)
    ]
    anomalies = log_anomalies(history, log)
    assert not anomalies, report(anomalies, f"seed {seed}")
    assert {each.identity for each in log} | set(history.stale) == history.sent.keys()


def _ids(entry: pb.StoredEntry) -> list[tuple[int, int]]:
    metadata = entry.metadata
    if not metadata.HasField("num_messages_in_batch"):
        return [(-1, metadata.sequence_id)]
    steps = metadata.sequence_id_steps or [1] * (metadata.num_messages_in_batch - 1)
    return list(enumerate(itertools.accumulate(steps, initial=metadata.sequence_id)))


async def _publish_again_and_again(
    services: Services, topic: str, producer: str, history: History, random: Random
) -> None:
    work = []
    next_id = 0
    for _ in range(40):
        ids = [next_id]
        while random.random() < 0.5:
            ids.append(ids[-1] + random.choice((1, 1, 3)))
        next_id = ids[-1] + random.choice((1, 1, 2))
        work.append(ids)
    done = 0
    while done < len(work):
        async with publishing(services.ledger, topic, producer, takeover=True) as publisher:
            # Restart a little before the first unanswered message: some are stored already.
            start = max(0, done - random.randrange(3))
            asked = [ids for ids in work[start:] for _ in range(random.choice((1, 1, 2)))]
            asked = asked[: random.randrange(5, 20)]
            publications = []
            for request_id, ids in enumerate(asked):
                payload = f"{producer}:{ids}".encode()
                for each in ids:
                    history.send(Identity(producer, each), Content(payload))
                made = single(request_id, ids[0], payload)
                publications.append(made if len(ids) == 1 else batch(request_id, ids, payload))
            await publisher.send(*publications)
            answered = asked[: random.randrange(len(asked) + 1)] if random.random() < 0.5 else asked
            for request_id, ids in enumerate(answered):
                receipt = await publisher.receipt(request_id)
                _note(history, producer, ids, receipt)
                done = max(done, work.index(ids) + 1)
            if len(answered) < len(asked):
                await publisher.cut()


def _note(history: History, producer: str, ids: Sequence[int], receipt: pb.Receipt) -> None:
    """Check that each message is stored now or was before: nothing here overtakes."""
    assert receipt.status in (STORED, DUPLICATE), _said(receipt)
    assert receipt.HasField("position")
    for index, sequence_id in enumerate(ids):
        where = MessageId(
            receipt.position.ledger_id,
            receipt.position.entry_id,
            -1,
            index if len(ids) > 1 else -1,
        )
        history.acknowledged.append(
            Acknowledgement(Identity(producer, sequence_id), where, receipt.status == DUPLICATE)
        )


async def test_topics_do_not_block_one_another(services: Services, topic: str) -> None:
    """Twenty topics with the same producer's name and the same ids."""
    topics = [f"{topic}-{number}" for number in range(20)]

    async def publish(one: str) -> None:
        async with publishing(services.ledger, one, "p") as p:
            told = await answers(p, *(single(each, each % 20) for each in range(40)))
            assert [each.status for each in told] == [STORED] * 20 + [DUPLICATE] * 20

    await asyncio.gather(*map(publish, topics))
    assert [await services.ids(one) for one in topics] == [list(range(20))] * len(topics)
