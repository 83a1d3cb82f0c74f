"""A crew refuses the cancelled flights for good, until they are mended and redriven.

A cancelled flight has no time of arrival. The crew refuses it, it becomes a dead letter, and the
later flights of its aircraft are held behind it. The dispatcher is killed. Then, until no flight is
left, an operator mends the dead letters, with a property that says that they are cancelled, and
redrives those that have it: each is delivered once more, before the later flights of its aircraft.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Final

from seqgate.client import (
    Admin,
    AfterDeadLetter,
    DeadLetter,
    Received,
    RetryPolicy,
    SubscriptionOptions,
    connect,
    process_by_key,
)
from seqgate.dev.stack import Stack
from seqgate.errors import InUseError
from seqgate.types import Position
from tools.demo.dataset import ABSENT, Original
from tools.demo.delivery import publish_all
from tools.demo.report import Screen, Step

TOPIC: Final = "nyc/2013/arrivals"
SUBSCRIPTION: Final = "logbook"
CANCELLED: Final = "cancelled"  # the property of a mended flight
NOT_ARRIVED: Final = "the flight did not arrive"  # why the crew refuses one
FLIGHTS_MAX: Final = 10_000  # flights that are published for it
AT_ONCE: Final = 32  # aircraft that the crew works on at a time

POLL_S: Final = 0.05
PATIENCE_S: Final = 30.0  # when no flight was ended for so long, none will be


async def mend_flights(
    stack: Stack, flights: Sequence[Original], screen: Screen
) -> dict[str, float]:
    """Publish flights, have them delivered, mended and redriven, and return the figures.

    Returns:
        Among others: `doubled` mended flights were ended twice, and `key_order_violations` flights
        were first ended after a later one of their aircraft.
    """
    started = time.monotonic()
    flights = flights[:FLIGHTS_MAX]
    crew = _Crew(screen.step("mending", len(flights)))
    async with connect(stack.target("ledger"), stack.target("dispatcher")) as client:
        await publish_all(client, TOPIC, flights)
        options = SubscriptionOptions(max_redeliveries=1, after_dead_letter=AfterDeadLetter.HOLD)
        async with client.consumer(
            TOPIC,
            SUBSCRIPTION,
            name="crew",
            options=options,
            retry=RetryPolicy(min_s=0.05, max_s=0.05),
        ) as consumer:
            working = asyncio.create_task(
                process_by_key(consumer, crew.work, concurrency=AT_ONCE, on_failure=lambda *_: None)
            )
            operator = _Operator(client.admin())
            free = _before_the_first_cancelled(flights)
            await crew.until(free)
            reason = await operator.first_reason()
            screen.tell(f"{len(flights) - free:,} flights wait behind cancelled ones: {reason}")
            screen.tell("kill -9 of the dispatcher; the cancelled flights are mended and redriven")
            await stack.kill("dispatcher")
            await stack.run("dispatcher")
            await crew.until(len(flights), operator)
            working.cancel()
            await asyncio.wait([working])
            letters = [each async for each in operator.letters()]
    return {
        "cancelled": sum(map(_is_cancelled, flights)),
        "dead_letters": sum(each.mend is None for each in letters),
        "explained": sum(map(_is_explained, letters)),
        "redriven": operator.redriven,
        "missing": len(flights) - len(crew.ended),
        "doubled": crew.mended.total() - len(crew.mended),
        "key_order_violations": crew.key_order_violations,
        "seconds": round(time.monotonic() - started, 1),
    }


def _is_cancelled(flight: Original | Received) -> bool:
    row: dict[str, str] = json.loads(flight.payload)
    return row["arr_time"] == ABSENT


def _is_explained(letter: DeadLetter) -> bool:
    """Whether a dead letter says why the crew refused its flight. Others do not: the dispatcher was
    killed between the failures and the letter."""
    reasons = {each.reason for each in letter.failures}
    return letter.mend is None and f"ValueError: {NOT_ARRIVED}" in reasons


def _before_the_first_cancelled(flights: Sequence[Original]) -> int:
    """How many flights are before the first cancelled one of their aircraft."""
    held: set[str | None] = set()
    free = 0
    for flight in flights:
        if _is_cancelled(flight):
            held.add(flight.key)
        free += flight.key not in held
    return free


class _Crew:
    """Ends flights, and refuses those that are cancelled and do not say so."""

    def __init__(self, step: Step) -> None:
        self.ended: dict[Position, None] = {}
        self.mended: Counter[Position] = Counter()
        self.key_order_violations = 0
        self._latest: dict[str | bytes | None, Position] = {}
        self._step = step

    async def work(self, flight: Received) -> None:
        if _is_cancelled(flight):
            if CANCELLED not in flight.properties:
                raise ValueError(NOT_ARRIVED)
            self.mended[flight.id.position] += 1
        self._end(flight.key, flight.id.position)

    def _end(self, aircraft: str | bytes | None, flight: Position) -> None:
        if flight in self.ended:
            return  # its acknowledgement was lost with the dispatcher
        self.ended[flight] = None
        latest = self._latest.setdefault(aircraft, flight)
        self.key_order_violations += flight < latest
        self._latest[aircraft] = max(latest, flight)

    async def until(self, ended: int, operator: "_Operator | None" = None) -> None:
        """Return when so many flights are ended, or when none was for PATIENCE_S. Meanwhile, an
        operator works."""
        before, since = -1, time.monotonic()
        while len(self.ended) < ended and time.monotonic() - since <= PATIENCE_S:
            if operator is not None:
                await operator.work()
            if len(self.ended) != before:
                before, since = len(self.ended), time.monotonic()
                self._step(before)
            await asyncio.sleep(POLL_S)
        self._step(len(self.ended))


class _Operator:
    """Mends dead letters, and redrives the mended ones."""

    def __init__(self, admin: Admin) -> None:
        self.redriven = 0
        self._admin = admin
        self._round = 1

    def letters(self) -> AsyncIterator[DeadLetter]:
        return self._admin.dead_letters(TOPIC, SUBSCRIPTION)

    async def first_reason(self) -> str:
        """Why the crew refused the flight of the first dead letter, once there is one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async for letter in self.letters():
                    return letter.failures[-1].reason
                await asyncio.sleep(POLL_S)

    async def work(self) -> None:
        """What is not possible yet is done next time. By request ids, all is done once."""
        with suppress(InUseError):
            async for letter in self.letters():
                if letter.state in ("DEAD", "MENDING") and letter.mend is None:
                    await self._admin.mend(
                        TOPIC,
                        SUBSCRIPTION,
                        letter.id,
                        put={CANCELLED: "yes"},
                        request_id=f"mend-{letter.id}",
                    )
            await self._redrive()

    async def _redrive(self) -> None:
        redrive = await self._admin.start_redrive(
            TOPIC,
            SUBSCRIPTION,
            expression=f"'{CANCELLED}' in properties",
            request_id=f"round-{self._round}",
        )
        while redrive.is_running:
            await asyncio.sleep(POLL_S)
            redrive = await self._admin.redrive_info(TOPIC, SUBSCRIPTION, redrive.number)
        self.redriven += redrive.outcomes.get("REDRIVEN", 0)
        self._round += 1
