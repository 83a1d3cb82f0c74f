"""The weather stations' process, started again with other chunks each time, and their line."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Final

from tools.demo.applications import Application
from tools.demo.journal import Counter, Journal
from tools.demo.line import Line
from tools.demo.weather import Weather

CHUNK_BYTES: Final = (4 * 1024, 2 * 1024, 5 * 1024, 3 * 1024)
"""Chunk sizes, from one start of the process to the next: a month makes 12 to 33 chunks."""


class Stations:
    """One for each airport. See `stations`."""

    def __init__(
        self,
        application: Application,
        line: Line,
        journals: Mapping[str, Journal],
        months: Mapping[str, int],
    ) -> None:
        self._application = application
        self.line = line
        self._journals = journals
        self._months = months
        self.crashes = 0

    @property
    def publishing(self) -> set[str]:
        """The stations that have not published everything."""
        return {
            airport
            for airport, journal in self._journals.items()
            if journal[Counter.CHECKPOINT] < self._months[airport]
        }

    @property
    def stand(self) -> bool:
        """Whether every station that has not finished is stopped in the middle of a message."""
        return self.publishing <= {attempt.producer for attempt in self.line.standing}

    async def publish(self) -> None:
        """Run the process until every station has published everything.

        Raises:
            ApplicationFailed: it failed.
        """
        await self._application.run()

    async def kill(self) -> None:
        """SIGKILL the process, if it still has something to publish."""
        if self._application.runs and self.publishing:
            await self._application.end()
            self.line.forget()
            self.crashes += 1


@asynccontextmanager
async def stations(
    folder: Path, weather: Mapping[str, Sequence[Weather]], *, ledger: str, random: Random
) -> AsyncIterator[Stations]:
    """The stations, with their process; `random`: where the line interrupts messages."""
    months = {airport: len(own) for airport, own in weather.items()}
    chunk_bytes = cycle(CHUNK_BYTES)
    with ExitStack() as closed:
        journals = {
            airport: closed.enter_context(closing(Journal(folder, airport))) for airport in weather
        }
        async with Line(ledger, random) as line:

            def arguments() -> list[object]:
                return [line.address, folder, max(months.values()), next(chunk_bytes)]

            application = Application("tools.demo.station", arguments, folder / "stations.log")
            try:
                yield Stations(application, line, journals, months)
            finally:
                await application.end()
