"""An airline's feed starts its numbers again under its old name.

It numbers its flights from 0. Then it is installed anew, forgets its numbers, and publishes the
flights that follow, from 0. As many as were published before have numbers that are stored: each is
reported, by its receipt or as an error, and not lost without a word.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from seqgate.client import Batching, Client, OnConflict, Outgoing, SendManyError, connect
from seqgate.dev.stack import Stack
from seqgate.errors import ConflictError
from tools.demo.dataset import Original
from tools.demo.report import Screen

TOPIC: Final = "nyc/2013/feed"
NAME: Final = "feed"

FLIGHTS_MAX: Final = 2_000
"""The most flights of either numbering."""


async def restart_feed(stack: Stack, flights: Sequence[Original], screen: Screen) -> dict[str, int]:
    """Publish half of some flights, and the other half from 0 again, once reported and once
    refused. Returns the figures."""
    screen.tell("an airline's feed starts again at sequence id 0 under its old name")
    some = list(islice(flights, 2 * FLIGHTS_MAX))
    middle = len(some) // 2
    first, second = _numbered(some[:middle]), _numbered(some[middle:])
    async with connect(stack.target("ledger")) as client:
        stored = await _conflicts(client, first, OnConflict.REPORT)
        again = await _conflicts(client, first, OnConflict.REPORT)
        reported = await _conflicts(client, second, OnConflict.REPORT)
        refused = await _conflicts(client, second[:middle], OnConflict.REFUSE)
        read = [each.payload async for each in client.reader(TOPIC, follow=False)]
    is_stored = set(read)
    lost = [place for place, each in enumerate(second) if each.payload not in is_stored]
    return {
        "sent": len(second),
        "reported": len(reported),
        "refused": len(refused),
        "silent": len(set(lost) - reported) + len(set(lost) - refused),
        "false": len(stored) + len(again) + len(reported - set(lost)),
    }


def _numbered(flights: Sequence[Original]) -> list[Outgoing]:
    return [
        Outgoing(each.payload, key=each.key, properties=each.properties, sequence_id=number)
        for number, each in enumerate(flights)
    ]


async def _conflicts(
    client: Client, messages: Sequence[Outgoing], on_conflict: OnConflict
) -> set[int]:
    """Publish, and return the places of the messages that are reported as conflicts."""
    async with client.producer(
        TOPIC, name=NAME, batching=Batching(), on_conflict=on_conflict
    ) as producer:
        outcomes: Sequence[Any]
        try:
            outcomes = await producer.send_many(messages)
        except SendManyError as error:
            outcomes = error.outcomes
    return {
        place
        for place, each in enumerate(outcomes)
        if isinstance(each, ConflictError) or getattr(each, "differs", False)
    }
