"""A whole torture: load, faults, recovery, and verdict."""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Final, NamedTuple

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.dev.child import tail
from tools.stack.application import Application
from tools.stack.journal import SUFFIX, Journal
from tools.torture.cast import NAMESPACE, cast
from tools.torture.evidence import last_position
from tools.torture.happening import Happened, Happening
from tools.torture.installation import Installation
from tools.torture.judging import Judge
from tools.torture.limits import RATE
from tools.torture.roles import Assignment
from tools.torture.settling import all_acknowledged
from tools.torture.shown import NOTHING, At, Services, Shown, asking
from tools.torture.upkeep import prepare, release_forever, trim
from tools.torture.violation import Violation

RECORD: Final = "torture.jsonl"
"""The torture's own journal, in its folder."""

FINISH_S: Final = 120.0
"""How long producers may take to get every receipt."""

READ_S: Final = 30.0
"""How long readers may take to reach the end."""

WATCH_S: Final = 0.2


class Options(NamedTuple):
    """The options of a torture.

    Attributes:
        folder: the output folder.
        seconds: the duration of the faults.
        limits: one of limits.LIMITS.
        rate: messages a second of each producer.
        ledger, dispatcher, cursor: addresses of a running installation, where the cursor service is
            optional; empty to start one.
        namespace: the topics' tenant/namespace.
        shown: the credentials for a running installation.
        on_postgres: whether the installation stores in PostgreSQL, and not in SQLite.
        topics: the number of topics besides the usual ones.
    """

    folder: Path
    seconds: float
    seed: str
    limits: str = "default"
    rate: float = RATE
    ledger: str = ""
    dispatcher: str = ""
    cursor: str = ""
    namespace: str = NAMESPACE
    shown: Shown = NOTHING
    on_postgres: bool = False
    topics: int = 0


class Tortured(NamedTuple):
    """The result of a torture. Times in nanoseconds of the monotonic clock."""

    violations: list[Violation]
    happened: list[Happened]
    began_ns: int
    quiet_ns: int
    ended_ns: int

    def since_s(self, at_ns: int) -> float:
        return (at_ns - self.began_ns) / 1e9


async def torture(options: Options) -> Tortured:
    """Start an installation and torture it, or put load on a running one, and check it."""
    (options.folder / "journals").mkdir(parents=True)
    (options.folder / "logs").mkdir()
    async with AsyncExitStack() as life:
        installation = None
        if not options.ledger:
            folder = options.folder / "services"
            installation = Installation(
                folder,
                limits=options.limits,
                seed=options.seed,
                on_postgres=options.on_postgres,
            )
            await life.enter_async_context(installation)
        scene = Scene(options, installation)
        life.push_async_callback(scene.end)
        began_ns = time.monotonic_ns()
        await scene.begin()
        await scene.suffer()
        quiet_ns = time.monotonic_ns()
        violations = await scene.settle()
    happened = scene.happening.happened if scene.happening else []
    return Tortured(violations, happened, began_ns, quiet_ns, time.monotonic_ns())


class Scene:
    """An installation with its applications, and the phases of a torture."""

    def __init__(self, options: Options, installation: Installation | None) -> None:
        self._options = options
        self._there = installation
        self._journal = journal = Journal(options.folder, RECORD.removesuffix(SUFFIX))
        self._journals = options.folder / "journals"
        self._services = Services(
            *(
                At(installation.target(name)) if installation else At(address, options.shown)
                for name, address in (
                    ("ledger", options.ledger),
                    ("dispatcher", options.dispatcher),
                    ("cursor", options.cursor),
                )
            )
        )
        self._cast = cast(
            self._journals,
            installation.ledgers if installation else [options.ledger],
            installation.dispatchers if installation else [options.dispatcher],
            rate=options.rate,
            shown=options.shown,
            is_tiny=options.limits != "default",
            namespace=options.namespace,
            crowd=options.topics,
        )
        self._applications = {
            name: self._application(name, each) for name, each in self._cast.assignments.items()
        }
        self.happening: Happening | None = None
        if installation:
            trimming = partial(trim, self._services.ledger, self._journals, journal)
            self.happening = Happening(
                installation,
                self._applications,
                trimming,
                self._cast.trimmed,
                journal,
                options.seed,
            )
        self._violations: list[Violation] = []

    def _application(self, name: str, assignment: Assignment) -> Application:
        file = self._options.folder / f"{name}.pickle"
        file.write_bytes(pickle.dumps(assignment))
        log = self._options.folder / "logs" / f"{name}.log"
        return Application("tools.torture.application", lambda: [file], log)

    async def begin(self) -> None:
        services = self._services
        await prepare(services.ledger, services.dispatcher, self._cast.topics, self._cast.filtered)
        for application in self._applications.values():
            await application.start()

    async def end(self) -> None:
        for application in self._applications.values():
            application.send(Signals.SIGCONT)
            await application.end()

    async def suffer(self) -> None:
        """Inject faults for the given time; a running installation only gets load."""
        async with self._attended():
            if self.happening is None:
                await asyncio.sleep(self._options.seconds)
            else:
                await self.happening.carry_out(self._options.seconds)

    @asynccontextmanager
    async def _attended(self) -> AsyncIterator[None]:
        """Release held keys, and restart processes that end unexpectedly, which are violations."""
        tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(release_forever(self._services.dispatcher, self._cast.holding)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        there = self._there
        while True:
            await asyncio.sleep(WATCH_S)
            for name, application in self._applications.items():
                if (status := application.ended()) is not None:
                    self._note("ENDED", name, f"exit status {status}: {tail(application.log)}")
                    await application.start()
            for name in (*there.services, *there.redis) if there else ():
                process = there.process(name) if there else None
                if there and process is not None and process.returncode is not None:
                    status = await there.ended(name)
                    self._note("ENDED", name, f"exit status {status}: {there.log_tail(name)}")
                    await there.spawn(name)

    def _note(self, kind: str, where: str, what: str) -> None:
        self._journal.write("violation", kind=kind, where=where, what=what)
        self._violations.append(Violation(kind, where, what, time.monotonic_ns()))

    async def settle(self) -> list[Violation]:
        """Wait until everything is stored, acknowledged and read. Returns the violations."""
        write = self._journal.write
        write("quiet")
        judge = Judge(self._cast, self._journals, self._services)
        async with self._attended():
            await self._finish([each for each in self._applications if "producers" in each])
            write("published")
            async with asking(self._services.ledger, LedgerServiceStub) as stub:
                stuck = await all_acknowledged(
                    self._cast.subscriptions,
                    partial(last_position, stub),
                    judge.progress,
                    lambda *where: write("settled", where=" ".join(where)),
                )
            write("delivered", stuck=stuck)
            found = await judge.explain(stuck)
            self._violations += await judge.wait_for_readers(READ_S)
        await self._finish([each for each in self._applications if "producers" not in each])
        write("ended")
        for each in self.happening.misbehaved if self.happening else ():
            self._violations.append(Violation("ENDED", each.partition(" ")[0], each))
        return [*self._violations, *found, *await judge.verdict()]

    async def _finish(self, names: Sequence[str]) -> None:
        async def finish(name: str) -> None:
            application = self._applications[name]
            status = await application.end(Signals.SIGTERM, FINISH_S)
            if status != 0:
                how = "did not finish" if status is None else f"ended with {status}"
                said = tail(application.log)
                self._note("UNFINISHED", name, f"{how} within {FINISH_S:.0f} s: {said}")

        await asyncio.gather(*map(finish, names))
