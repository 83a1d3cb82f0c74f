"""A consumer: a crew that works on flights, those of each aircraft in order.

    python -m tools.demo.crew LEDGER DISPATCHER FOLDER NAME SHARE_REFUSED SEED

It records in its journal what it begins, refuses and ends. It refuses a share of the flights at
first. After SIGUSR1 it sticks on the next flight that it begins, and goes on with all others, until
SIGUSR2. It ends on SIGTERM.
"""

import asyncio
import signal
import sys
from pathlib import Path
from random import Random
from typing import Final

from seqgate.client import Received, RetryPolicy, connect, process_by_key
from tools.stack.journal import Journal

TOPIC: Final = "nyc/2013/aircraft"
SUBSCRIPTION: Final = "crews"

AT_ONCE: Final = 32  # aircraft that a crew works on at a time
QUEUE_MESSAGES: Final = 200  # flights that wait at a crew
WORK_S: Final = 0.001  # of work on a flight, at least


class Refused(Exception):
    """A crew does not manage a flight at first."""


class Crew:
    def __init__(self, journal: Journal, share_refused: float, random: Random) -> None:
        self._journal = journal
        self._share_refused = share_refused
        self._random = random
        self._sticks = False
        self._may_go_on = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._stick)
        loop.add_signal_handler(signal.SIGUSR2, self._may_go_on.set)

    async def work(self, flight: Received) -> None:
        self._write("begin", flight)
        if self._sticks:
            self._sticks = False
            self._write("stuck", flight)
            await self._may_go_on.wait()
        await asyncio.sleep(WORK_S)
        if flight.attempts == 0 and self._random.random() < self._share_refused:
            self._write("refuse", flight)
            raise Refused("by chance, at the first attempt")
        self._write("end", flight)

    def _stick(self) -> None:
        self._sticks = True

    def _write(self, what: str, flight: Received) -> None:
        self._journal.write(what, id=str(flight.id), key=flight.key)


async def run(
    ledger: str, dispatcher: str, folder: Path, name: str, share_refused: float, seed: str
) -> None:
    crew = Crew(Journal(folder, name), share_refused, Random(f"{seed}/{name}"))
    async with connect(ledger, dispatcher) as client:
        consumer = client.consumer(
            TOPIC,
            SUBSCRIPTION,
            name=name,
            receiver_queue=QUEUE_MESSAGES,
            retry=RetryPolicy(min_s=0.1, max_s=1.0),
            open_timeout_s=60,
        )
        async with consumer:
            working = asyncio.create_task(
                process_by_key(consumer, crew.work, concurrency=AT_ONCE, on_failure=lambda *_: None)
            )
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
            await asyncio.wait([working])


if __name__ == "__main__":
    address, other, where, who, share, number = sys.argv[1:]
    asyncio.run(run(address, other, Path(where), who, float(share), number))
