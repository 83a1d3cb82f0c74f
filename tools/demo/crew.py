"""A consumer of the demo: a crew that works on flights, those of each aircraft in their order.

It writes down what it begins and what it ends, so that the demo can judge afterwards. The crew that
is told to refuses some flights at first; one that gets SIGUSR1 sticks on the next flight that it is
given, and goes on with all others, until it gets SIGUSR2.

    python -m tools.demo.crew LEDGER DISPATCHER FOLDER NAME SHARE_REFUSED SEED
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Final

from seqgate.client import Received, RetryPolicy, connect, process_by_key

TOPIC: Final = "nyc/2013/aircraft"
SUBSCRIPTION: Final = "crews"

AT_ONCE: Final = 32  # aircraft that a crew works on at a time
QUEUE_MESSAGES: Final = 200  # flights that wait at a crew
WORK_S: Final = 0.001  # of work on a flight, at least


class Refused(Exception):
    """A flight that a crew does not manage at first."""


class Crew:
    """What it does with a flight."""

    def __init__(self, folder: Path, name: str, share_refused: float, random: Random) -> None:
        self._log = os.open(folder / f"{name}.work", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._share_refused = share_refused
        self._random = random
        self._sticks = False
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.stick)
        loop.add_signal_handler(signal.SIGUSR2, self._may_go_on.set)

    def stick(self) -> None:
        """Stop at the next flight."""
        self._sticks = True
        self._may_go_on.clear()

    async def work(self, flight: Received) -> None:
        """Begin a flight, and end it."""
        self._write("begin", flight)
        if self._sticks:
            self._sticks = False
            self._write("stuck", flight)
            await self._may_go_on.wait()
        await asyncio.sleep(WORK_S)
        if flight.attempts == 0 and self._random.random() < self._share_refused:
            self._write("refuse", flight)
            raise Refused
        self._write("end", flight)

    def _write(self, what: str, flight: Received) -> None:
        line = f"{what} {time.monotonic_ns()} {flight.id} {flight.attempts} {flight.key or '-'}\n"
        os.write(self._log, line.encode())


async def run(
    ledger: str, dispatcher: str, folder: Path, name: str, share_refused: float, seed: str
) -> None:
    """Work until SIGTERM."""
    crew = Crew(folder, name, share_refused, Random(f"{seed}/{name}"))
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
