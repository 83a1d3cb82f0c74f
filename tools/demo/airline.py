"""The application of the demo: publishes the flights of some carriers, and does not behave well.

Each carrier is a producer of its own. It publishes its flights leg by leg; for each leg it connects
anew, with other batches and another compression, and often goes back first and sends again what it
sent before, so that batches overlap what is stored. It also sends single flights again while their
first copies are under way. After a crash it goes on from its last checkpoint.

    python -m tools.demo.airline LEDGER FOLDER SEED CARRIER...
"""

import asyncio
import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Final

from seqgate.client import Batching, Client, Compression, Producer, Receipt, connect
from tools.demo.flights import Flight, read_flights
from tools.demo.journal import Counter, Journal

TOPIC: Final = "nyc/2013/flights"

LEG_FLIGHTS: Final = (1_500, 8_000)  # at least and at most
REWIND_FLIGHTS_MAX: Final = 400
REWIND_PROBABILITY: Final = 0.6  # before a leg
STRETCH_FLIGHTS: Final = 500
STRETCHES_UNDER_WAY_MAX: Final = 6
"""A leg is sent in stretches; the checkpoint moves when one is stored."""

LATE_PROBABILITY: Final = 0.3
LATE_FLIGHTS_MAX: Final = 5
"""How often, and how many, flights of the latest stretch are sent once more, each alone."""

BATCH_MESSAGES: Final = (1, 10, 50, 100, 500, 1_000)


class Airline:
    """One carrier."""

    def __init__(self, carrier: str, flights: list[Flight], journal: Journal, seed: str) -> None:
        self._carrier = carrier
        self._flights = flights
        self._journal = journal
        self._random = Random(f"{seed}/{carrier}/{journal[Counter.SENT]}")

    async def fly(self, client: Client) -> None:
        """Publish everything that is not known to be stored."""
        while (checkpoint := self._journal[Counter.CHECKPOINT]) < len(self._flights):
            stop = min(checkpoint + self._random.randint(*LEG_FLIGHTS), len(self._flights))
            async with self._producer(client) as producer:
                await self._leg(producer, self._rewound(checkpoint), stop)

    def _producer(self, client: Client) -> Producer:
        messages_max = self._random.choice(BATCH_MESSAGES)
        return client.producer(
            TOPIC,
            name=self._carrier,
            takeover=True,  # from the stream of a process that was killed
            batching=Batching(messages_max=messages_max) if messages_max > 1 else None,
            compression=self._random.choice(list(Compression)),
            send_timeout_s=None,
            open_timeout_s=120,
        )

    def _rewound(self, checkpoint: int) -> int:
        if checkpoint == 0 or self._random.random() > REWIND_PROBABILITY:
            return checkpoint
        self._journal.count(Counter.REWINDS)
        return max(0, checkpoint - self._random.randint(1, REWIND_FLIGHTS_MAX))

    async def _leg(self, producer: Producer, start: int, stop: int) -> None:
        under_way: deque[tuple[int, list[asyncio.Future[Receipt]]]] = deque()
        for first in range(start, stop, STRETCH_FLIGHTS):
            last = min(first + STRETCH_FLIGHTS, stop)
            sends = [self._send(producer, self._flights[i]) for i in range(first, last)]
            if self._random.random() < LATE_PROBABILITY:
                count = self._random.randint(1, LATE_FLIGHTS_MAX)
                for _ in range(count):
                    again = self._flights[self._random.randrange(first, last)]
                    sends.append(self._send(producer, again))
            under_way.append((last, sends))
            while len(under_way) > STRETCHES_UNDER_WAY_MAX:
                await self._settle(*under_way.popleft())
        while under_way:
            await self._settle(*under_way.popleft())

    def _send(self, producer: Producer, flight: Flight) -> "asyncio.Future[Receipt]":
        self._journal.count(Counter.SENT)
        return producer.send_nowait(
            flight.payload,
            key=flight.key,
            properties=flight.properties,
            sequence_id=flight.sequence_id,
        )

    async def _settle(self, checkpoint: int, sends: list["asyncio.Future[Receipt]"]) -> None:
        self._journal.settle(await asyncio.gather(*sends), checkpoint)


async def run(ledger: str, folder: Path, seed: str, carriers: list[str]) -> None:
    """Publish until everything is stored."""
    async with connect(ledger) as client, asyncio.TaskGroup() as tasks:
        for carrier in carriers:
            flights = read_flights(folder / f"{carrier}.flights", carrier)
            tasks.create_task(_fly(client, carrier, flights, folder, seed))


async def _fly(
    client: Client, carrier: str, flights: list[Flight], folder: Path, seed: str
) -> None:
    with closing(Journal(folder, carrier)) as journal:
        await Airline(carrier, flights, journal, seed).fly(client)


if __name__ == "__main__":
    address, where, given_seed, *names = sys.argv[1:]
    asyncio.run(run(address, Path(where), given_seed, names))
