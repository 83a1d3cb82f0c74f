"""A process that publishes, and does not behave well.

    python -m tools.demo.publisher airline LEDGER FOLDER SEED CARRIER...
    python -m tools.demo.publisher station LEDGER FOLDER CHUNK_BYTES AIRPORT...

Each carrier is a producer. It publishes its flights leg by leg. For each leg it reconnects with
another batch size and compression, and often goes back first, so that new batches overlap what is
stored. It also resends single flights while their first copies are in flight. After a crash it
resumes at its last checkpoint.

Each airport is a producer, too. It publishes the weather month by month, in chunks. After a crash
it goes back by one month, and cuts messages into chunks of another size.

FOLDER has each producer's messages, and its journal: all that it remembers after a crash.
"""

import asyncio
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, Self

from seqgate.client import Batching, Chunking, Client, Compression, Producer, Receipt, connect
from tools.demo.dataset import Original
from tools.stack.journal import Journal, Tail, path_of

TOPIC: Final = "nyc/2013/flights"

LEG_FLIGHTS: Final = (1_500, 8_000)  # at least and at most
REWIND_FLIGHTS_MAX: Final = 400
REWIND_PROBABILITY: Final = 0.6  # before a leg
STRETCH_FLIGHTS: Final = 500  # of a leg; the checkpoint moves when a stretch is stored
STRETCHES_IN_FLIGHT_MAX: Final = 6
LATE_PROBABILITY: Final = 0.3  # that flights of a stretch are sent once more, each alone
LATE_FLIGHTS_MAX: Final = 5

BATCH_MESSAGES: Final = (1, 10, 50, 100, 500, 1_000)

Sends = list["asyncio.Future[Receipt]"]


class Progress:
    """A producer's progress, as far as its journal was read."""

    def __init__(self, folder: Path, producer: str) -> None:
        self._tail = Tail(path_of(folder, producer))
        self.checkpoint = 0  # how many of its messages are known to be stored
        self.sent = 0  # messages sent, resent ones included
        self.rewinds = 0  # how often a leg went back first
        self.duplicates = 0  # receipts of messages that were stored before
        self.receipts: list[tuple[int, str]] = []  # sequence id and message id of each

    def read(self) -> Self:
        for line in self._tail.read():
            match line["e"]:
                case "sent":
                    self.sent += line["messages"]
                case "rewound":
                    self.rewinds += 1
                case "stored":
                    self.checkpoint = max(self.checkpoint, line["checkpoint"])
                    self.duplicates += line["duplicates"]
                    self.receipts += map(tuple, line["receipts"])
        return self


class Publisher:
    def __init__(self, client: Client, folder: Path, name: str) -> None:
        self._client = client
        self._name = name
        originals = originals_of(folder, name).read_bytes()
        self._originals: Sequence[Original] = pickle.loads(originals)  # noqa: S301 - our own
        self._journal = Journal(folder, name)
        self._progress = Progress(folder, name)

    def _producer(self, **options: Any) -> Producer:
        return self._client.producer(
            TOPIC,
            name=self._name,
            takeover=True,  # from the stream of a process that was killed
            send_timeout_s=None,
            open_timeout_s=120,
            **options,
        )

    def _send(self, producer: Producer, numbers: Sequence[int]) -> Sends:
        sends = [
            producer.send_nowait(
                each.payload,
                key=each.key,
                properties=each.properties,
                sequence_id=each.sequence_id,
            )
            for each in (self._originals[number] for number in numbers)
        ]
        self._journal.write("sent", messages=len(sends))
        return sends

    async def _settle(self, checkpoint: int, sends: Sends) -> None:
        note_receipts(self._journal, await asyncio.gather(*sends), checkpoint)


class Airline(Publisher):
    async def publish(self, seed: str) -> None:
        """Publish everything that is not known to be stored."""
        random = Random(f"{seed}/{self._name}/{self._progress.read().sent}")
        while (checkpoint := self._progress.read().checkpoint) < len(self._originals):
            stop = min(checkpoint + random.randint(*LEG_FLIGHTS), len(self._originals))
            messages_max = random.choice(BATCH_MESSAGES)
            producer = self._producer(
                batching=Batching(messages_max=messages_max) if messages_max > 1 else None,
                compression=random.choice(list(Compression)),
            )
            async with producer:
                await self._leg(producer, self._rewound(checkpoint, random), stop, random)

    def _rewound(self, checkpoint: int, random: Random) -> int:
        if checkpoint == 0 or random.random() > REWIND_PROBABILITY:
            return checkpoint
        self._journal.write("rewound")
        return max(0, checkpoint - random.randint(1, REWIND_FLIGHTS_MAX))

    async def _leg(self, producer: Producer, start: int, stop: int, random: Random) -> None:
        in_flight: deque[tuple[int, Sends]] = deque()
        for first in range(start, stop, STRETCH_FLIGHTS):
            last = min(first + STRETCH_FLIGHTS, stop)
            numbers = list(range(first, last))
            if random.random() < LATE_PROBABILITY:
                numbers += random.choices(range(first, last), k=random.randint(1, LATE_FLIGHTS_MAX))
            in_flight.append((last, self._send(producer, numbers)))
            while len(in_flight) > STRETCHES_IN_FLIGHT_MAX:
                await self._settle(*in_flight.popleft())
        while in_flight:
            await self._settle(*in_flight.popleft())


class Station(Publisher):
    async def publish(self, chunk_bytes: str) -> None:
        """Publish the months that are not known to be stored, and the one before."""
        start = max(0, self._progress.read().checkpoint - 1)
        async with self._producer(chunking=Chunking(int(chunk_bytes))) as producer:
            for number in range(start, len(self._originals)):
                await self._settle(number + 1, self._send(producer, [number]))


def note_receipts(journal: Journal, receipts: Sequence[Receipt], checkpoint: int) -> None:
    """Record receipts and the checkpoint that they allow, in one line: no crash parts them."""
    journal.write(
        "stored",
        checkpoint=checkpoint,
        duplicates=sum(each.duplicate for each in receipts),
        receipts=[(each.sequence_id, str(each.message_id)) for each in receipts],
    )


def keep_originals(folder: Path, producer: str, originals: Sequence[Original]) -> None:
    originals_of(folder, producer).write_bytes(pickle.dumps(list(originals)))


def originals_of(folder: Path, producer: str) -> Path:
    return folder / f"{producer}.originals"


async def run(
    kind: type[Airline | Station], ledger: str, folder: Path, option: str, names: Sequence[str]
) -> None:
    async with connect(ledger) as client, asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(kind(client, folder, name).publish(option))


if __name__ == "__main__":
    what, address, where, given, *producers = sys.argv[1:]
    asyncio.run(
        run(Airline if what == "airline" else Station, address, Path(where), given, producers)
    )
