"""Crews get the flights of each aircraft in order, while things go wrong.

Three crews begin. One more joins, one is killed, the dispatcher is killed; one refuses some flights
all the time. In the end one sticks on one flight, and all others go on. The crews' journals are
then compared with the data set.
"""

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from seqgate.client import Batching, Client, MessageId, Receipt, connect
from seqgate.dev.stack import Stack
from seqgate.types import Position
from tools.demo.crew import TOPIC
from tools.demo.dataset import Original
from tools.demo.report import Screen, Step
from tools.stack.application import Application
from tools.stack.journal import Tail, path_of

FLIGHTS_MAX: Final = 40_000  # a crew works longer on one than it takes to publish it
IN_FLIGHT_MAX: Final = 100_000  # flights that are being published at a time
SHARE_REFUSED: Final = 0.01
STUCK: Final = "crew-3"

POLL_S: Final = 0.05
PATIENCE_S: Final = 30.0  # when no crew has ended a flight for so long, none will

WINDOW_NS: Final = 2_000_000_000  # to measure the other crews' speed, before one sticks and after


class Note(NamedTuple):
    at_ns: int
    what: str
    crew: str
    position: Position
    key: str


def chosen(flights: Sequence[Original]) -> list[Original]:
    """The flights that are published for consumers."""
    return [each for each in flights[: min(FLIGHTS_MAX, len(flights) // 2)] if each.key]


async def publish_all(
    client: Client, topic: str, flights: Sequence[Original], batching: Batching | None = None
) -> list[Receipt]:
    """Publish flights in their order."""
    async with client.producer(
        topic, name="tower", batching=batching, max_pending_messages=IN_FLIGHT_MAX
    ) as producer:
        return await asyncio.gather(
            *(
                producer.send_nowait(each.payload, key=each.key, properties=each.properties)
                for each in flights
            )
        )


async def deliver(
    stack: Stack, folder: Path, flights: Sequence[Original], seed: int, screen: Screen
) -> dict[str, Any]:
    """Publish flights, have them delivered, and return the figures."""
    async with connect(stack.target("ledger")) as client:
        await publish_all(client, TOPIC, flights)
    crews = _Crews(stack, folder, seed, flights, screen.step("delivering", len(flights)))
    started = time.monotonic()
    try:
        stuck_ns, waiting = await _deliver(stack, crews, screen)
    finally:
        await crews.end()
    notes = sorted(crews.notes)
    return {
        **_judged(notes, crews.killed_ns, len(flights)),
        "keys_blocked_by_the_stuck_one": waiting,
        "others_slowdown": _slowdown(notes, stuck_ns),
        "dispatcher_crashes": 1,
        "crew_crashes": len(crews.killed_ns),
        "seconds": round(time.monotonic() - started, 1),
    }


async def _deliver(stack: Stack, crews: "_Crews", screen: Screen) -> tuple[int, int]:
    """Deliver while things go wrong. Returns when one crew stuck, and how many aircraft waited."""
    await crews.begin("crew-1")
    await crews.begin("crew-2", SHARE_REFUSED)
    await crews.begin(STUCK)
    await crews.until(0.15)
    screen.tell("a fourth crew joins")
    await crews.begin("crew-4")
    await crews.until(0.3)
    screen.tell("kill -9 of the dispatcher")
    await stack.kill("dispatcher")
    await stack.run("dispatcher")
    await crews.until(0.45)
    screen.tell("kill -9 of a crew")
    await crews.kill("crew-1")
    await crews.until(0.6)
    screen.tell("one crew sticks on one flight")
    stuck_ns = time.monotonic_ns()
    crews.running[STUCK].send(signal.SIGUSR1)
    await crews.until(enough=lambda: len(crews.left) <= crews.stuck)
    waiting = len(crews.left)
    screen.tell(f"everything else is delivered; {waiting} aircraft wait; the crew goes on")
    crews.running[STUCK].send(signal.SIGUSR2)
    await crews.until()
    return stuck_ns, waiting


class _Crews:
    """The crews' processes, and what they noted."""

    def __init__(
        self, stack: Stack, folder: Path, seed: int, flights: Sequence[Original], step: Step
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._seed = seed
        self._total = len(flights)
        self._step = step
        self.running: dict[str, Application] = {}
        self._journals: dict[str, Tail] = {}
        self._ended: set[Position] = set()
        self.notes: list[Note] = []  # each crew's in its order
        self.left = Counter(each.key for each in flights)  # flights that no crew has ended
        self.stuck = False  # whether a crew sticks, or did
        self.killed_ns: dict[str, int] = {}

    async def begin(self, name: str, share_refused: float = 0.0) -> None:
        addresses = [self._stack.target(each) for each in ("ledger", "dispatcher")]
        arguments = [*addresses, self._folder, name, share_refused, self._seed]
        log = self._folder / f"{name}.log"
        crew = self.running[name] = Application("tools.demo.crew", lambda: arguments, log)
        await crew.start()
        self._journals[name] = Tail(path_of(self._folder, name))

    async def kill(self, name: str) -> None:
        await self.running.pop(name).end()
        self.killed_ns[name] = time.monotonic_ns()

    async def end(self) -> None:
        """End all in good order, and read the rest of their journals."""
        await asyncio.gather(*(each.end(signal.SIGTERM) for each in self.running.values()))
        self._read()

    async def until(self, share: float = 1, enough: Callable[[], bool] | None = None) -> None:
        """Return when this share of the flights was ended or it is enough, or when none was ended
        for PATIENCE_S.

        Raises:
            ApplicationFailed: a crew ended by itself.
        """
        before, since = -1, time.monotonic()
        while time.monotonic() - since <= PATIENCE_S:
            for crew in self.running.values():
                crew.check()
            await asyncio.to_thread(self._read)
            ended = len(self._ended)
            self._step(ended)
            if enough() if enough else ended >= share * self._total:
                return
            if ended != before:
                before, since = ended, time.monotonic()
            await asyncio.sleep(POLL_S)

    def _read(self) -> None:
        for crew, journal in self._journals.items():
            for line in journal.read():
                position = MessageId.parse(line["id"]).position
                self.notes.append(Note(line["t"], line["e"], crew, position, line["key"]))
                self.stuck |= line["e"] == "stuck"
                if line["e"] == "end" and position not in self._ended:
                    self._ended.add(position)
                    self.left[line["key"]] -= 1
        self.left = +self.left


def _judged(notes: Sequence[Note], killed_ns: Mapping[str, int], total: int) -> dict[str, int]:
    begun = [note for note in notes if note.what == "begin"]
    ended = [note for note in notes if note.what == "end"]
    delivered = len({note.position for note in ended})
    return {
        "delivered": delivered,
        "deliveries": len(begun),
        "refused": sum(note.what == "refuse" for note in notes),
        "missing": total - delivered,
        "key_order_violations": _out_of_order(begun) + _out_of_order(ended),
        "exclusivity_violations": _shared(notes, killed_ns),
    }


def _out_of_order(notes: Sequence[Note]) -> int:
    """How many flights were noted for the first time after a later one of their aircraft."""
    firsts: dict[str, dict[Position, None]] = defaultdict(dict)
    for note in notes:
        firsts[note.key].setdefault(note.position)
    return sum(
        position < latest
        for positions in firsts.values()
        for position, latest in zip(positions, accumulate(positions, max), strict=True)
    )


def _shared(notes: Sequence[Note], killed_ns: Mapping[str, int]) -> int:
    """How many flights were begun while another crew worked on one of the same aircraft."""
    shared = 0
    working: dict[str, dict[Position, str]] = defaultdict(dict)
    for note in notes:
        flights = working[note.key]
        if note.what == "begin":
            shared += any(
                crew != note.crew and killed_ns.get(crew, note.at_ns + 1) > note.at_ns
                for crew in flights.values()
            )
            flights[note.position] = note.crew
        elif note.what in ("end", "refuse"):
            flights.pop(note.position, None)
    return shared


def _slowdown(notes: Sequence[Note], stuck_ns: int) -> float:
    """How many times as fast the other crews were before one stuck."""
    others = [note.at_ns - stuck_ns for note in notes if note.what == "end" and note.crew != STUCK]
    before = sum(-WINDOW_NS < at_ns <= 0 for at_ns in others)
    after = sum(0 < at_ns <= WINDOW_NS for at_ns in others)
    return round(before / max(1, after), 2)
