"""Crews get the flights of each aircraft in order, while things go wrong.

Three crews begin. One more joins, one is killed, the dispatcher is killed; one refuses some flights
all the time. In the end one sticks on one flight, and all others go on. What the crews wrote down
is then held against the data set.
"""

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.client import connect
from tools.demo.applications import Application
from tools.demo.crew import TOPIC
from tools.demo.flights import Flight
from tools.demo.screen import Screen, Step
from tools.stack.stack import Stack

FLIGHTS_MAX: Final = 40_000
"""Flights that are delivered: a crew works longer on one than it takes to publish it."""

SHARE_REFUSED: Final = 0.01

POLL_S: Final = 0.05

PATIENCE_S: Final = 30.0  # when no crew has ended a flight for so long, none will
WINDOW_S: Final = 2.0
"""Over how long the speed of the others is measured, before one sticks, and then."""

IN_FLIGHT_MAX: Final = 100_000  # flights that are being published at a time
STUCK: Final = "crew-3"


class Delivered(NamedTuple):
    """What the crews did.

    Attributes:
        delivered: flights that a crew ended.
        deliveries: flights that crews began, repeated ones included.
        refused: flights that were refused, and came again.
        missing: flights that no crew ended.
        key_order_violations: flights of an aircraft that were begun for the first time, or ended,
            after a later one of it.
        exclusivity_violations: flights that were begun while another crew had one of the same
            aircraft.
        keys_blocked_by_the_stuck_one: aircraft whose flights waited while one crew stuck.
        others_slowdown: how many times as fast the others were before.
        dispatcher_crashes, crew_crashes: what was killed.
    """

    delivered: int
    deliveries: int
    refused: int
    missing: int
    key_order_violations: int
    exclusivity_violations: int
    keys_blocked_by_the_stuck_one: int
    others_slowdown: float
    dispatcher_crashes: int
    crew_crashes: int
    seconds: float

    @property
    def broken(self) -> bool:
        """Whether a promise is."""
        return bool(
            self.missing
            or self.key_order_violations
            or self.exclusivity_violations
            or self.keys_blocked_by_the_stuck_one > 1
        )


Place = tuple[int, int]


class Note(NamedTuple):
    """A line that a crew wrote."""

    at_ns: int
    what: str
    crew: str
    position: Place
    key: str


async def deliver(
    stack: Stack, folder: Path, flights: Sequence[Flight], seed: int, screen: Screen
) -> Delivered:
    """Publish flights, have them delivered, and judge how."""
    mine = chosen(flights)
    async with (
        connect(stack.address("ledger")) as client,
        client.producer(TOPIC, name="tower", max_pending_messages=IN_FLIGHT_MAX) as producer,
    ):
        await asyncio.gather(
            *(
                producer.send_nowait(each.payload, key=each.key, properties=each.properties)
                for each in mine
            )
        )
    crews = _Crews(stack, folder, seed, mine, screen.step("delivering", len(mine)))
    started = time.monotonic()
    try:
        stuck_ns, blocked = await _deliver(stack, crews, screen)
    finally:
        await crews.end()
    notes = sorted(note for name in crews.names for note in _notes(folder, name)[0])
    delivered = _judged(notes, crews.killed_ns, len(mine))
    return delivered._replace(
        keys_blocked_by_the_stuck_one=blocked,
        others_slowdown=_slowdown(notes, stuck_ns),
        seconds=round(time.monotonic() - started, 1),
    )


def chosen(flights: Sequence[Flight]) -> list[Flight]:
    """The flights that are published for crews."""
    return [each for each in flights[: min(FLIGHTS_MAX, len(flights) // 2)] if each.key]


class _Crews:
    """Their processes, and how far they are."""

    def __init__(
        self, stack: Stack, folder: Path, seed: int, flights: Sequence[Flight], step: Step
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._seed = seed
        self._total = len(flights)
        self._step = step
        self._running: dict[str, Application] = {}
        self._read: dict[str, int] = {}
        """How far the notes of each crew were read."""
        self._ended: set[Place] = set()
        self.left = Counter(each.key for each in flights if each.key)
        """Flights of each aircraft that no crew has ended."""
        self.stuck = False
        self.killed_ns: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All crews, killed ones included."""
        return list(self._read)

    async def begin(self, name: str, share_refused: float = 0.0) -> None:
        """Start one."""
        addresses = [self._stack.address(each) for each in ("ledger", "dispatcher")]
        arguments = [*addresses, self._folder, name, share_refused, self._seed]
        log = self._folder / f"{name}.log"
        self._running[name] = Application("tools.demo.crew", lambda: arguments, log)
        await self._running[name].start()
        self._read[name] = 0

    async def kill(self, name: str) -> None:
        """SIGKILL one."""
        await self._running.pop(name).end()
        self.killed_ns[name] = time.monotonic_ns()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send one a signal."""
        self._running[name].send(number)

    async def end(self) -> None:
        """Let all go home."""
        await asyncio.gather(*(each.end(signal.SIGTERM) for each in self._running.values()))

    async def until(self, share: float = 1, enough: Callable[[], bool] | None = None) -> None:
        """Return when this share of the flights was ended or it is enough, or when none was ended
        for PATIENCE_S.

        Raises:
            ApplicationFailed: a crew ended by itself.
        """
        before, since = -1, time.monotonic()
        while time.monotonic() - since <= PATIENCE_S:
            await asyncio.to_thread(self._look)
            ended = len(self._ended)
            self._step(ended)
            if enough() if enough else ended >= share * self._total:
                return
            if ended != before:
                before, since = ended, time.monotonic()
            await asyncio.sleep(POLL_S)

    def _look(self) -> None:
        for crew in self._running.values():
            crew.check()
        for name, offset in self._read.items():
            notes, self._read[name] = _notes(self._folder, name, offset)
            for note in notes:
                if note.what == "end" and note.position not in self._ended:
                    self._ended.add(note.position)
                    self.left[note.key] -= 1
            self.stuck |= any(note.what == "stuck" for note in notes)
        self.left = +self.left


async def _deliver(stack: Stack, crews: _Crews, screen: Screen) -> tuple[int, int]:
    """What happens on the way. Returns when one crew stuck, and how many aircraft then waited."""
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
    crews.send(STUCK, signal.SIGUSR1)
    await crews.until(enough=lambda: len(crews.left) <= crews.stuck)
    waiting = len(crews.left)
    screen.tell(f"everything else is delivered; {waiting} aircraft wait; the crew goes on")
    crews.send(STUCK, signal.SIGUSR2)
    await crews.until()
    return stuck_ns, waiting


def _notes(folder: Path, crew: str, offset: int = 0) -> tuple[list[Note], int]:
    """What a crew wrote from an offset on, and where the next line begins."""
    file = folder / f"{crew}.work"
    if not file.exists():
        return [], offset
    with file.open("rb") as work:
        work.seek(offset)
        lines = work.read()
    lines = lines[: lines.rfind(b"\n") + 1]  # a crash may have cut off the last one
    notes = []
    for line in lines.decode().splitlines():
        what, at_ns, message_id, _, key = line.split(" ")
        ledger_id, entry_id = message_id.split(":")[:2]
        notes.append(Note(int(at_ns), what, crew, (int(ledger_id), int(entry_id)), key))
    return notes, offset + len(lines)


class _Order:
    """Positions that each come for the first time, in their order for each key."""

    def __init__(self) -> None:
        self.seen: set[Place] = set()
        self.violations = 0
        self._last: dict[str, Place] = {}

    def see(self, key: str, position: Place) -> None:
        if position not in self.seen:
            self.seen.add(position)
            last = self._last.get(key, (0, 0))
            self.violations += position < last
            self._last[key] = max(position, last)


def _judged(notes: Sequence[Note], killed_ns: dict[str, int], total: int) -> Delivered:
    """What the notes say; not how long it took, nor how the stuck crew held up others."""
    begun, ended = _Order(), _Order()
    working: dict[str, dict[Place, str]] = defaultdict(dict)
    exclusivity = 0
    for note in notes:
        mine = working[note.key]
        if note.what == "begin":
            exclusivity += any(
                crew != note.crew and killed_ns.get(crew, note.at_ns + 1) > note.at_ns
                for crew in mine.values()
            )
            mine[note.position] = note.crew
            begun.see(note.key, note.position)
        elif note.what in ("end", "refuse"):
            mine.pop(note.position, None)
            if note.what == "end":
                ended.see(note.key, note.position)
    return Delivered(
        delivered=len(ended.seen),
        deliveries=sum(note.what == "begin" for note in notes),
        refused=sum(note.what == "refuse" for note in notes),
        missing=total - len(ended.seen),
        key_order_violations=begun.violations + ended.violations,
        exclusivity_violations=exclusivity,
        keys_blocked_by_the_stuck_one=0,
        others_slowdown=0,
        dispatcher_crashes=1,
        crew_crashes=len(killed_ns),
        seconds=0,
    )


def _slowdown(notes: Sequence[Note], stuck_ns: int) -> float:
    """How many times as fast the other crews were before one stuck."""
    window_ns = int(WINDOW_S * 1e9)
    others = [note.at_ns - stuck_ns for note in notes if note.what == "end" and note.crew != STUCK]
    before = sum(-window_ns < at_ns <= 0 for at_ns in others)
    after = sum(0 < at_ns <= window_ns for at_ns in others)
    return round(before / max(1, after), 2)
