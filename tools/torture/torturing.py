"""A whole torture: load, faults, quiet, and judgement."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

from tools.torture.applications import Applications
from tools.torture.cast import FILTERED, HELD, NAMESPACE, TAILING, TRIMMED, Cast, cast
from tools.torture.faults import Places, plan
from tools.torture.happening import Happened, Happening
from tools.torture.installation import Installation
from tools.torture.journal import SUFFIX, Journal
from tools.torture.judging import Judge
from tools.torture.links import Way
from tools.torture.settling import all_acknowledged
from tools.torture.shown import At, Shown
from tools.torture.upkeep import Trimming, prepare, release_forever
from tools.torture.violation import Violation

RECORD: Final = "torture.jsonl"
"""What the torture itself writes down, in its folder."""

FINISH_S: Final = 120.0
"""How long producers may take until everything has its receipt."""

READ_S: Final = 30.0
"""How long readers may take to get to the end."""

WATCH_S: Final = 0.2
"""How often it is looked whether a process has ended."""

LOG_LINES: Final = 12


class Options(NamedTuple):
    """What is asked for.

    Attributes:
        folder: where everything goes.
        seconds: how long faults go on.
        limits: one of limits.LIMITS.
        rate: how many messages a second each producer publishes.
        ledger, dispatcher, cursor: an installation of somebody else's; empty: one of our own. The
            cursor service need not be given.
        namespace: of the topics.
        shown: what is shown to services of somebody else.
    """

    folder: Path
    seconds: float
    seed: str
    limits: str = "default"
    rate: float = 25.0
    ledger: str = ""
    dispatcher: str = ""
    cursor: str = ""
    namespace: str = NAMESPACE
    shown: Shown = Shown()


class Tortured(NamedTuple):
    """What came of it. Times in nanoseconds of the monotonic clock."""

    violations: list[Violation]
    happened: list[Happened]
    began_ns: int
    quiet_ns: int
    ended_ns: int


async def torture(options: Options) -> Tortured:
    """Torture an installation: one of our own, or put load on somebody else's and judge it."""
    (options.folder / "journals").mkdir(parents=True)
    journal = Journal(options.folder, RECORD.removesuffix(SUFFIX))
    async with AsyncExitStack() as life:
        if options.ledger:
            scene = Scene(options, None, journal)
        else:
            installation = Installation(
                options.folder / "services", limits=options.limits, seed=options.seed
            )
            await life.enter_async_context(installation)
            installation.write_endpoints()
            scene = Scene(options, installation, journal)
        life.push_async_callback(scene.applications.kill_all)
        began_ns = time.monotonic_ns()
        await scene.begin()
        await scene.suffer()
        quiet_ns = time.monotonic_ns()
        violations = await scene.settle()
    happened = scene.happening.happened if scene.happening is not None else []
    return Tortured(violations, happened, began_ns, quiet_ns, time.monotonic_ns())


class Scene:
    """Who is there, and what is done with them in turn."""

    def __init__(
        self, options: Options, installation: Installation | None, journal: Journal
    ) -> None:
        self._options = options
        self._there = installation
        self._journal = journal
        ours = installation is not None
        theirs = {"ledger": options.ledger, "dispatcher": options.dispatcher}
        theirs["cursor"] = options.cursor
        self.ledger, self.dispatcher, self.cursor = (
            At(installation.straight(name)) if installation else At(address, options.shown)
            for name, address in theirs.items()
        )
        self.cast: Cast = cast(
            options.seed,
            str(options.folder / "journals"),
            installation.ledgers if installation else [options.ledger],
            installation.dispatchers if installation else [options.dispatcher],
            rate=options.rate,
            shown=options.shown,
            is_tiny=options.limits != "default",
            namespace=options.namespace,
        )
        self.applications = Applications(options.folder, self.cast.applications)
        self._trimming = Trimming(self.ledger, options.folder / "journals", journal)
        self.happening = (
            Happening(installation, self.applications, self._trimming.trim, journal, options.seed)
            if ours and installation is not None
            else None
        )
        self._violations: list[Violation] = []

    def _in(self, topic: str) -> str:
        return f"{self._options.namespace}/{topic.rpartition('/')[2]}"

    async def begin(self) -> None:
        """Make topics, and start everybody."""
        filtered = {(self._in(topic), name): place for (topic, name), place in FILTERED.items()}
        await prepare(self.ledger, self.dispatcher, self.cast.topics, filtered)
        for name in self.cast.applications:
            await self.applications.start(name)

    async def suffer(self) -> None:
        """Faults, for as long as was asked for; or, of somebody else's installation, load."""
        watching = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._release_forever()),
        ]
        try:
            if self.happening is None or self._there is None:
                await asyncio.sleep(self._options.seconds)
            else:
                places = Places(
                    services=self._there.processes,
                    applications=list(self.cast.applications),
                    links=list(self._there.links),
                    stores=["ledger", "cursor"],
                    topics=[self._in(TRIMMED)],
                )
                faults = plan(self._options.seed, places, self._options.seconds)
                await self.happening.carry_out(faults)
                await self._heal()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _release_forever(self) -> None:
        holding = [(self._in(topic), name) for topic, name in (HELD, TAILING)]
        await release_forever(self.dispatcher, holding)

    async def _heal(self) -> None:
        """Everything runs, and everybody gets through; connections begin anew."""
        assert self._there is not None
        there = self._there
        for name in (*there.processes, *there.stack.redis):
            if there.pid(name) is not None:
                await there.stack.ready(name)
        for link in there.links.values():
            link.go(Way.OPEN)
            link.cut()

    async def _watch(self) -> None:
        """Who ends without having been told to is noted, and started again."""
        while True:
            await asyncio.sleep(WATCH_S)
            for name, status in self.applications.ended().items():
                tail = _tail(self.applications.log(name))
                self._note("ENDED", name, f"exit status {status}: {tail}")
                await self.applications.start(name)
            if self._there is None or self.happening is None:
                continue
            for name in (*self._there.processes, *self._there.stack.redis):
                process = self._there.stack.process(name)
                if process is None or process.returncode is None or name in self.happening.down:
                    continue
                status = await self._there.stack.ended(name)
                tail = _tail(self._there.log(name))
                self._note("ENDED", name, f"exit status {status}: {tail}")
                await self._there.stack.spawn(name)

    def _note(self, kind: str, where: str, what: str) -> None:
        self._journal.write("violation", kind=kind, where=where, what=what)
        self._violations.append(Violation(kind, where, what, time.monotonic_ns()))

    async def settle(self) -> list[Violation]:
        """Everything is to be stored, delivered, acknowledged and read; what is wrong."""
        self._journal.write("quiet")
        options = self._options
        releasing = asyncio.create_task(self._release_forever())
        watching = asyncio.create_task(self._watch())
        judge = Judge(
            self.cast,
            options.folder / "journals",
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            cursor=self.cursor,
            namespace=options.namespace,
        )
        try:
            await self._finish([each for each in self.cast.applications if "producers" in each])
            self._journal.write("published")
            stuck = await all_acknowledged(
                self.ledger,
                self.cast.subscriptions,
                judge.progress,
                lambda *where: self._journal.write("settled", where=" ".join(where)),
            )
            self._journal.write("delivered", stuck=stuck)
            found = await judge.explain(stuck)
            self._violations += await judge.wait_for_readers(READ_S)
        finally:
            for task in (releasing, watching):
                task.cancel()
            await asyncio.gather(releasing, watching, return_exceptions=True)
        await self._finish([each for each in self.cast.applications if "producers" not in each])
        self._journal.write("ended")
        if self.happening is not None:
            self._violations += [
                Violation("ENDED", each.partition(" ")[0], each)
                for each in self.happening.misbehaved
            ]
        return [*self._violations, *found, *await judge.verdict()]

    async def _finish(self, names: Sequence[str]) -> None:
        async def finish(name: str) -> None:
            status = await self.applications.finish(name, FINISH_S)
            if status != 0:
                how = "did not finish" if status is None else f"ended with {status}"
                tail = _tail(self.applications.log(name))
                self._note("UNFINISHED", name, f"{how} within {FINISH_S:.0f} s: {tail}")

        await asyncio.gather(*(finish(name) for name in names))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LOG_LINES:])
