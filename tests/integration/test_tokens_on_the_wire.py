"""A token of another subscription fits no delivery, whoever sends it."""

from collections.abc import Callable
from typing import Any

import pytest

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.shell.performing import FIRST_DELIVERY_BITS
from tests.integration.services import Services
from tests.support.publisher import publishing, single
from tests.support.raw_consumer import EXCLUSIVE, consuming

Settling = Callable[[int], Any]

WIRE: dict[str, Settling] = {
    "acknowledge": lambda number: pb.Acknowledge(settlements=[pb.Settlement(delivery=number)]),
    "acknowledge, as a run": lambda number: pb.Acknowledge(
        runs=[pb.DeliveryNumbers(first=number, count=1)]
    ),
    "acknowledge, in part": lambda number: pb.Acknowledge(
        settlements=[pb.Settlement(delivery=number, indexes=[0])]
    ),
    "acknowledge_cumulative": lambda number: pb.AcknowledgeCumulative(
        settlement=pb.Settlement(delivery=number)
    ),
    "negative_acknowledge": lambda number: pb.NegativeAcknowledge(
        negative_acknowledgements=[pb.NegativeAcknowledgement(delivery=number)]
    ),
    "give_back": lambda number: pb.GiveBack(deliveries=[number]),
    "give_back, without room": lambda number: pb.GiveBack(deliveries=[number], no_room=True),
    "renew": lambda number: pb.Renew(deliveries=[number]),
}


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("same_topic", [True, False])
async def test_a_token_of_another_subscription_is_stale_on_the_wire(
    services: Services, topic: str, *, same_topic: bool, runs: bool
) -> None:
    topics = (topic, topic if same_topic else f"{topic}-other")
    for name in dict.fromkeys(topics):
        async with publishing(services.ledger, name, "p") as publisher:
            for number in range(3):
                await publisher.store(single(number, number))
    about: dict[str, Any] = {"type": EXCLUSIVE, "permits": 9, "delivery_runs": runs}
    async with (
        consuming(services.dispatcher, topics[0], "one", **about) as one,
        consuming(services.dispatcher, topics[1], "two", **about) as two,
    ):
        mine, others = await one.received(3), await two.received(3)
        assert one.epoch == two.epoch
        for own, foreign in ((one, others), (two, mine)):
            for kind, ask in WIRE.items():
                for each in foreign:
                    request = ask(each.delivery)
                    answer = await own.settled(await own.ask(kind.partition(",")[0], request))
                    assert not answer.HasField("error")
                    assert list(answer.outcomes) == [pb.SETTLE_OUTCOME_STALE]
        for own, known in ((one, mine), (two, others)):
            assert not own.revoked
            assert not (await own.acknowledge(*known)).outcomes


async def test_owners_count_deliveries_from_random_numbers_on(
    services: Services, topic: str
) -> None:
    """Also the owner that takes a subscription from a log and a cursor that were restored."""
    first: list[int] = []
    for name in "abcd":
        async with publishing(services.ledger, f"{topic}-{name}", "p") as publisher:
            await publisher.store(single(0, 0))
        async with consuming(services.dispatcher, f"{topic}-{name}", permits=1) as consumer:
            (delivery,) = await consumer.received(1)
            first.append(delivery.delivery)
            await consumer.acknowledge(delivery)
    assert all(1 <= each <= 2**FIRST_DELIVERY_BITS for each in first)
    apart = sorted(abs(a - b) for a in first for b in first if a != b)
    assert apart[0] > 1_000_000
    assert len(apart) == len(first) * (len(first) - 1)
