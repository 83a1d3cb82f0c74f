"""Runs of deliveries, for consumers that understand them, and acknowledgements in runs."""

import pytest
from grpc import StatusCode

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.dispatcher.shell.sending import RESPONSE_ENTRIES_MAX
from seqgate.services.dispatcher.wire.parsing import ITEMS_MAX
from tests.integration.refusals import check
from tests.integration.services import Services
from tests.support.publisher import batch, publishing, single
from tests.support.raw_consumer import consuming

COUNT = 1_200  # more than one response holds
STALE = pb.SETTLE_OUTCOME_STALE


async def store(services: Services, topic: str, *publications: ledger_pb2.Publication) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(*publications)
        for each in publications:
            await publisher.receipt(each.request_id)


async def publish(services: Services, topic: str, count: int) -> None:
    some = (single(at, at, b"%d" % at, partition_key=f"k{at % 7}") for at in range(count))
    await store(services, topic, *some)


@pytest.mark.parametrize("runs", [False, True])
async def test_every_entry_is_delivered_in_the_form_that_was_asked_for(
    services: Services, topic: str, *, runs: bool
) -> None:
    await publish(services, topic, COUNT)
    async with consuming(services.dispatcher, topic, permits=COUNT, delivery_runs=runs) as consumer:
        deliveries = await consumer.received(COUNT)
    assert sorted(int(each.payload) for each in deliveries) == [*range(COUNT)]
    assert len({each.delivery for each in deliveries}) == COUNT
    by_id = {each.position.entry_id: each for each in deliveries}
    stored = await services.read(topic)
    for entry in stored:
        delivery = by_id[entry.position.entry_id]
        assert delivery.metadata == entry.metadata
        assert delivery.append_time == entry.append_time
    in_runs = [len(run.entries) for run in consumer.runs]
    assert sum(in_runs) == (COUNT if runs else 0)
    assert max(in_runs, default=0) <= RESPONSE_ENTRIES_MAX
    if runs:
        assert len(in_runs) < COUNT / 100


async def test_runs_are_acknowledged_as_wholes(services: Services, topic: str) -> None:
    await publish(services, topic, COUNT)
    async with consuming(services.dispatcher, topic, permits=COUNT, delivery_runs=True) as consumer:
        await consumer.received(COUNT)
        given = [(run.first, len(run.entries)) for run in consumer.runs]
        (first, count), *others = given
        settled = await consumer.acknowledge_runs((first, count - 1), *others)
        assert not settled.outcomes
        settled = await consumer.acknowledge_runs((first, count))
        assert list(settled.outcomes) == [STALE] * (count - 1) + [pb.SETTLE_OUTCOME_DONE]
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        await consumer.still()
        assert not consumer.deliveries


async def test_what_failed_or_is_acknowledged_in_part_has_a_delivery_of_its_own(
    services: Services, topic: str
) -> None:
    await store(
        services,
        topic,
        batch(1, [1, 2], partition_key="a"),
        single(2, 3, partition_key="b"),
        batch(3, [4, 5], partition_key="c"),
    )
    async with consuming(services.dispatcher, topic, permits=9, delivery_runs=True) as consumer:
        in_part, failed, whole = sorted(
            await consumer.received(3), key=lambda each: each.position.entry_id
        )
        assert sum(len(run.entries) for run in consumer.runs) == 3
        await consumer.acknowledge(in_part, indexes=[0])
        await consumer.negative_acknowledge(failed, delay_ms=0)
        (again,) = await consumer.received(1)
        assert again.attempts == 1
        assert again.position == failed.position
        await consumer.give_back(in_part, whole)
        later = sorted(await consumer.received(2), key=lambda each: each.position.entry_id)
        assert [list(each.acknowledged) for each in later] == [[0], []]
        assert [len(run.entries) for run in consumer.runs][-1:] == [1]
        assert sum(len(run.entries) for run in consumer.runs) == 4


async def test_parts_and_runs_are_acknowledged_in_one_request(
    services: Services, topic: str
) -> None:
    await store(services, topic, batch(1, [1, 2], partition_key="a"), single(2, 3))
    async with consuming(services.dispatcher, topic, permits=9, delivery_runs=True) as consumer:
        some, one = sorted(await consumer.received(2), key=lambda each: each.position.entry_id)
        request = pb.Acknowledge(
            settlements=[pb.Settlement(delivery=some.delivery, indexes=[7])],
            runs=[pb.DeliveryNumbers(first=one.delivery, count=1)],
        )
        settled = await consumer.settled(await consumer.ask("acknowledge", request))
        outcomes = [pb.SETTLE_OUTCOME_INVALID, pb.SETTLE_OUTCOME_DONE]
        assert list(settled.outcomes) == outcomes


async def test_the_deliveries_in_runs_are_bounded(services: Services, topic: str) -> None:
    await publish(services, topic, 1)
    async with consuming(services.dispatcher, topic, permits=1, delivery_runs=True) as consumer:
        (one,) = await consumer.received(1)
        number = one.delivery
        for wrong in (
            [(number, 0)],
            [(number, 1), (number + 1, 0)],
            [(number, ITEMS_MAX + 1)],
            [(number, ITEMS_MAX), (number, 1)],
            [(number, 2**32 - 1)] * 3,
        ):
            settled = await consumer.acknowledge_runs(*wrong)
            check(settled.error, StatusCode.INVALID_ARGUMENT, "INVALID_SETTLEMENT")
        settled = await consumer.acknowledge_runs((2**64 - 1, ITEMS_MAX))
        assert list(settled.outcomes) == [STALE] * ITEMS_MAX
        assert not (await consumer.acknowledge_runs((number, 1))).outcomes
