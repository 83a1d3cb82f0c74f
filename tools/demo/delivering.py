"""Crews get the flights of each aircraft in order, while things go wrong.

Three crews begin. One more joins, one is killed, the dispatcher is killed; one refuses some flights
all the time. In the end one sticks on one flight, and everybody else goes on. What the crews wrote
down is then held against the data set.
"""

import asyncio
import signal
import sys
import time
from asyncio.subprocess import Process
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.client import connect
from tools.demo.application import LOG_LINES, ApplicationFailed
from tools.demo.crew import TOPIC
from tools.demo.flights import Flight
from tools.demo.screen import Screen, Step
from tools.stack.child import bound_to_us, tell
from tools.stack.stack import Stack

FLIGHTS_MAX: Final = 40_000
"""How many flights are delivered: it takes a crew longer to work on one than to publish it."""

SHARE_REFUSED: Final = 0.01
"""How many flights the crew refuses that does."""

POLL_S: Final = 0.05
"""How often it is looked how far the crews are."""

PATIENCE_S: Final = 30.0
"""After how long without a flight that was ended nothing more is going to be."""

WINDOW_S: Final = 2.0
"""Over how long it is measured how fast the others are, before one sticks, and then."""

IN_FLIGHT_MAX: Final = 100_000
"""How many flights are under way to the log at a time."""


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
        seconds: how long it took.
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


class Note(NamedTuple):
    """A line that a crew wrote."""

    at_ns: int
    what: str
    crew: str
    position: tuple[int, int]
    key: str


async def deliver(
    stack: Stack, folder: Path, flights: Sequence[Flight], seed: int, screen: Screen
) -> Delivered:
    """Publish flights, have them delivered, and judge how."""
    mine = chosen(flights)
    await _publish(stack, mine)
    step = screen.step("delivering", len(mine))
    crews = Crews(stack, folder, seed, Counter(each.key for each in mine if each.key))
    started = time.monotonic()
    try:
        stuck_ns, blocked = await _deliver(stack, crews, len(mine), screen, step)
    finally:
        await crews.end()
    notes = sorted(note for name in crews.names for note in _notes(folder, name)[0])
    return _judged(notes, crews, len(mine), stuck_ns, blocked, time.monotonic() - started)


def chosen(flights: Sequence[Flight]) -> list[Flight]:
    """The flights that are published for crews."""
    return [each for each in flights[: min(FLIGHTS_MAX, len(flights) // 2)] if each.key]


class Crews:
    """Their processes, and how far they are."""

    def __init__(self, stack: Stack, folder: Path, seed: int, flights: Counter[str]) -> None:
        self.left = flights
        """Of each aircraft that has some: how many flights nobody ended yet."""
        self._stack = stack
        self._folder = folder
        self._seed = seed
        self._processes: dict[str, Process] = {}
        self._read: dict[str, int] = {}
        self._ended: set[tuple[int, int]] = set()
        self.names: list[str] = []
        self.stuck = False
        self.killed_ns: dict[str, int] = {}

    async def begin(self, name: str, *, share_refused: float = 0.0) -> None:
        """Start one."""
        addresses = [self._stack.address(each) for each in ("ledger", "dispatcher")]
        arguments = [*addresses, str(self._folder), name, str(share_refused), str(self._seed)]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *bound_to_us([sys.executable, "-m", "tools.demo.crew", *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.names.append(name)

    async def kill(self, name: str) -> None:
        """SIGKILL one."""
        process = self._processes.pop(name)
        tell(process, signal.SIGKILL)
        await process.wait()
        self.killed_ns[name] = time.monotonic_ns()

    def say(self, name: str, number: signal.Signals) -> None:
        """Send one a signal."""
        tell(self._processes[name], number)

    async def end(self) -> None:
        """Let all go home."""
        for process in self._processes.values():
            tell(process, signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    def ended(self) -> int:
        """How many flights were ended so far, by whomever.

        Raises:
            ApplicationFailed: a crew went home by itself.
        """
        for name, process in self._processes.items():
            if process.returncode is not None:
                lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
                raise ApplicationFailed(f"{name} ended: {' '.join(lines[-LOG_LINES:])}")
        for name in self.names:
            notes, self._read[name] = _notes(self._folder, name, self._read.get(name, 0))
            for note in notes:
                if note.what == "end" and note.position not in self._ended:
                    self._ended.add(note.position)
                    self.left[note.key] -= 1
            self.stuck |= any(note.what == "stuck" for note in notes)
        self.left = +self.left
        return len(self._ended)


async def _publish(stack: Stack, flights: Sequence[Flight]) -> None:
    async with connect(stack.address("ledger")) as client:
        producer = client.producer(TOPIC, name="tower", max_pending_messages=IN_FLIGHT_MAX)
        async with producer:
            await asyncio.gather(
                *(
                    producer.send_nowait(each.payload, key=each.key, properties=each.properties)
                    for each in flights
                )
            )


async def _deliver(
    stack: Stack, crews: Crews, total: int, screen: Screen, step: Step
) -> tuple[int, int]:
    """What happens on the way. Returns when one crew stuck, and how many aircraft then waited."""

    async def until(share: float) -> None:
        await _until(crews, lambda ended: ended >= share * total, step)

    def is_only_the_stuck_left(_: int) -> bool:
        return not crews.left or (crews.stuck and len(crews.left) == 1)

    await crews.begin("crew-1")
    await crews.begin("crew-2", share_refused=SHARE_REFUSED)
    await crews.begin("crew-3")
    await until(0.15)
    screen.tell("a fourth crew joins")
    await crews.begin("crew-4")
    await until(0.3)
    screen.tell("kill -9 of the dispatcher")
    await stack.kill("dispatcher")
    await stack.run("dispatcher")
    await until(0.45)
    screen.tell("kill -9 of a crew")
    await crews.kill("crew-1")
    await until(0.6)
    screen.tell("one crew sticks on one flight")
    stuck_ns = time.monotonic_ns()
    crews.say("crew-3", signal.SIGUSR1)
    await _until(crews, is_only_the_stuck_left, step)
    rest = len(crews.left)
    screen.tell(f"everything else is delivered; {rest} aircraft wait; the crew goes on")
    crews.say("crew-3", signal.SIGUSR2)
    await until(1.0)
    return stuck_ns, rest


async def _until(crews: Crews, done: Callable[[int], bool], step: Step) -> None:
    """Return when this many flights were ended, or none was for so long that none will be."""
    before, since = -1, time.monotonic()
    while True:
        ended = await asyncio.to_thread(crews.ended)
        step.at(ended)
        if ended != before:
            before, since = ended, time.monotonic()
        if done(ended) or time.monotonic() - since > PATIENCE_S:
            return
        await asyncio.sleep(POLL_S)


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


def _judged(
    notes: Sequence[Note],
    crews: Crews,
    total: int,
    stuck_ns: int,
    blocked: int,
    seconds: float,
) -> Delivered:
    begun: dict[str, tuple[int, int]] = {}
    ended: dict[str, tuple[int, int]] = {}
    working: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    first: set[tuple[int, int]] = set()
    done: set[tuple[int, int]] = set()
    order = exclusivity = 0
    for note in notes:
        mine = working[note.key]
        if note.what == "begin":
            exclusivity += any(
                crew != note.crew and crews.killed_ns.get(crew, note.at_ns + 1) > note.at_ns
                for crew in mine.values()
            )
            mine[note.position] = note.crew
            if note.position not in first:
                first.add(note.position)
                order += note.position < begun.get(note.key, (0, 0))
                begun[note.key] = max(note.position, begun.get(note.key, (0, 0)))
        elif note.what in ("end", "refuse"):
            mine.pop(note.position, None)
            if note.what == "end" and note.position not in done:
                done.add(note.position)
                order += note.position < ended.get(note.key, (0, 0))
                ended[note.key] = max(note.position, ended.get(note.key, (0, 0)))
    return Delivered(
        delivered=len(done),
        deliveries=sum(note.what == "begin" for note in notes),
        refused=sum(note.what == "refuse" for note in notes),
        missing=total - len(done),
        key_order_violations=order,
        exclusivity_violations=exclusivity,
        keys_blocked_by_the_stuck_one=blocked,
        others_slowdown=_slowdown(notes, stuck_ns),
        dispatcher_crashes=1,
        crew_crashes=len(crews.killed_ns),
        seconds=round(seconds, 1),
    )


def _slowdown(notes: Sequence[Note], stuck_ns: int) -> float:
    """How many times as fast the other crews were before one stuck."""
    window_ns = int(WINDOW_S * 1e9)
    others = [
        note.at_ns - stuck_ns for note in notes if note.what == "end" and note.crew != "crew-3"
    ]
    before = sum(-window_ns < at_ns <= 0 for at_ns in others)
    after = sum(0 < at_ns <= window_ns for at_ns in others)
    return round(before / max(1, after), 2)
