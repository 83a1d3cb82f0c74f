"""Cuts the publications of a stream into units: runs, and publications that stand alone."""

from collections.abc import Sequence
from typing import Final

from seqgate.services.ledger.core.entry import Entry, Unit, run_of, unit_of
from seqgate.services.ledger.core.writer import Limits

RUN_ENTRIES_MAX: Final = 500
RUN_BYTES_MAX: Final = 1024 * 1024
"""The most publications of a run, and their bytes; a group's limits, if those are lower, since a
run is admitted and appended whole."""


class Runs:
    """The units of publications that are added one by one, in order."""

    def __init__(self, session: int, limits: Limits) -> None:
        self._session = session
        self._entries_max = min(RUN_ENTRIES_MAX, limits.group_entries_max)
        self._bytes_max = min(RUN_BYTES_MAX, limits.group_bytes_max)
        self._units: list[Unit] = []
        self._run: list[Entry] = []
        self._resume = False
        self._size_bytes = 0
        self._next_request_id = -1

    def add(
        self, request_id: int, entries: Sequence[Entry], *, resume: bool, alone: bool = False
    ) -> None:
        """Add a publication. `alone`: it must not be part of a run."""
        entry = entries[0]
        if alone or len(entries) > 1 or entry.marker or entry.chunk is not None:
            self._end_run()
            self._units.append(unit_of(self._session, request_id, entries, resume=resume))
            return
        run, size_bytes = self._run, len(entry.metadata) + len(entry.payload)
        if run and (
            resume
            or request_id != self._next_request_id
            or entry.lowest <= run[-1].highest
            or len(run) == self._entries_max
            or self._size_bytes + size_bytes > self._bytes_max
        ):
            self._end_run()
        if not run:
            self._resume = resume
        run.append(entry)
        self._size_bytes += size_bytes
        self._next_request_id = request_id + 1

    def end(self) -> list[Unit]:
        """The units of all that was added."""
        self._end_run()
        return self._units

    def _end_run(self) -> None:
        run = self._run
        if not run:
            return
        request_id = self._next_request_id - len(run)
        make = run_of if len(run) > 1 else unit_of
        self._units.append(make(self._session, request_id, run, resume=self._resume))
        run.clear()
        self._size_bytes = 0
