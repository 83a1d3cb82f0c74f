"""Publications that are treated in runs get the receipts that each would get alone."""

import pytest

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from tests.integration.services import Services
from tests.support.publisher import batch, publishing, single

COUNT = 1_200  # more than a run may have
STORED = pb.RECEIPT_STATUS_STORED
DUPLICATE = pb.RECEIPT_STATUS_DUPLICATE


@pytest.mark.parametrize("runs", [False, True])
async def test_each_publication_of_a_request_gets_its_position(
    services: Services, topic: str, *, runs: bool
) -> None:
    async with publishing(services.ledger, topic, "p", receipt_runs=runs) as publisher:
        await publisher.send(*(single(each, each, b"%d" % each) for each in range(COUNT)))
        receipts = [await publisher.receipt(each) for each in range(COUNT)]
    assert {each.status for each in receipts} == {STORED}
    stored = await services.read(topic)
    assert [each.position for each in receipts] == [each.position for each in stored]
    assert [each.payload for each in stored] == [b"%d" % each for each in range(COUNT)]
    if runs:
        assert sum(each.count for each in publisher.runs) == COUNT
        assert len(publisher.runs) < COUNT / 100
    else:
        assert not publisher.runs


async def test_stored_messages_split_a_run(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p", receipt_runs=True) as publisher:
        await publisher.send(single(1, 10), single(2, 12))
        first, second = [(await publisher.receipt(each)).position for each in (1, 2)]
        await publisher.send(*(single(10 + each, each) for each in range(10, 16)))
        receipts = [await publisher.receipt(20 + each) for each in range(6)]
    statuses = [
        pb.ReceiptStatus.Name(each.status).removeprefix("RECEIPT_STATUS_") for each in receipts
    ]
    assert statuses == ["DUPLICATE", "STALE", "DUPLICATE", "STORED", "STORED", "STORED"]
    assert [receipts[0].position, receipts[2].position] == [first, second]
    assert await services.ids(topic) == [10, 12, 13, 14, 15]


async def test_a_resent_run_is_a_run_of_duplicates(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p", receipt_runs=True) as publisher:
        await publisher.send(*(single(each, each) for each in range(100)))
        stored = [await publisher.receipt(each) for each in range(100)]
        await publisher.send(*(single(100 + each, each) for each in range(100)))
        again = [await publisher.receipt(100 + each) for each in range(100)]
    assert [each.position for each in again] == [each.position for each in stored]
    assert {each.status for each in again} == {DUPLICATE}


async def test_a_refused_publication_splits_a_run(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p", receipt_runs=True) as publisher:
        bad = single(3, 3, partition_key="no base64!", partition_key_b64_encoded=True)
        await publisher.send(single(1, 1), single(2, 2), bad, single(4, 4), batch(5, [5, 6]))
        statuses = [(await publisher.receipt(each)).status for each in range(1, 6)]
    assert statuses == [STORED, STORED, pb.RECEIPT_STATUS_REFUSED, STORED, STORED]
    assert await services.ids(topic) == [1, 2, 4, 5]


async def test_ids_that_fall_split_a_run(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p", receipt_runs=True) as publisher:
        await publisher.send(single(1, 5), single(2, 6), single(3, 6), single(4, 5), single(5, 7))
        statuses = [(await publisher.receipt(each)).status for each in range(1, 6)]
    assert statuses == [STORED, STORED, DUPLICATE, DUPLICATE, STORED]
    assert await services.ids(topic) == [5, 6, 7]


async def test_an_id_that_is_in_use_by_a_run_is_refused(services: Services, topic: str) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(*(single(each, each) for each in [1, 2, 3, 2]))
        error = await publisher.ended()
    assert error is not None
    assert "request_id is in use" in str(error.details())
    assert await services.ids(topic) == []
