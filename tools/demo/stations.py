"""The weather stations' process, started again with other chunks each time, and their line."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

from tools.demo.application import Application
from tools.demo.journal import Counter, Journal
from tools.demo.line import Line, Standing
from tools.demo.weather import Weather

CHUNK_BYTES: Final = (4 * 1024, 2 * 1024, 5 * 1024, 3 * 1024)
"""How large chunks are, from one start of the process to the next: a month makes 12 to 33."""


class Stations:
    """One for each airport."""

    def __init__(
        self, folder: Path, weather: Mapping[str, list[Weather]], *, ledger: str, random: Random
    ) -> None:
        """
        Args:
            folder: where the stations keep their journals.
            weather: what each airport has to publish.
            ledger: the address to publish to.
            random: where messages are interrupted.
        """
        self._folder = folder
        self._months = {airport: len(own) for airport, own in weather.items()}
        self._journals = {airport: Journal(folder, airport) for airport in weather}
        self._line = Line(ledger, random)
        self._chunk_bytes = cycle(CHUNK_BYTES)
        log = folder / "stations.log"
        self._application = Application("tools.demo.station", self._arguments, log)
        self.crashes = 0

    @property
    def standing(self) -> list[Standing]:
        """The messages in whose middle the line has stopped."""
        return self._line.standing

    @property
    def stand(self) -> bool:
        """Whether every station that has not finished is in the middle of a message, and stopped
        there."""
        stopped = {attempt.producer for attempt in self.standing}
        return all(
            airport in stopped for airport in self._months if not self._has_finished(airport)
        )

    @property
    def finished(self) -> bool:
        """Whether every station has published everything."""
        return all(map(self._has_finished, self._months))

    def go_on(self, attempts: Sequence[Standing]) -> None:
        """Let these attempts pass, up to the middle of the next."""
        self._line.release(attempts)

    def finish(self) -> None:
        """Stop at nothing any more."""
        self._line.open()

    async def __aenter__(self) -> Self:
        await self._line.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._application.kill()
        await self._line.__aexit__(kind, error, trace)
        for journal in self._journals.values():
            journal.close()

    async def publish(self) -> None:
        """Run the process until every station has published everything.

        Raises:
            ApplicationFailed: it ended otherwise than well, or by being killed.
        """
        await self._application.run()

    async def kill(self) -> None:
        """SIGKILL the process, if it has something to publish still."""
        if self._application.runs and not self.finished:
            await self._application.kill()
            self._line.forget()
            self.crashes += 1

    def _has_finished(self, airport: str) -> bool:
        return self._journals[airport][Counter.CHECKPOINT] == self._months[airport]

    def _arguments(self) -> Sequence[str]:
        months = max(self._months.values())
        given = (self._line.address, self._folder, months, next(self._chunk_bytes))
        return [str(each) for each in given]
