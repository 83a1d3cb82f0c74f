"""Counts of verdicts: kept for each chain, reported for each filter.

A tally covers all entries with the same verdict of the same filter of the same chain. So counting
an entry adds to one pair of numbers, and a cached verdict has its tally with it.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
RESCHEDULED: Final = "rescheduled"

CHAINS_MAX: Final = 100
"""The most chains counted by filter; the counts of older ones not in use are merged."""

Names = tuple[tuple[str, int], ...]
"""Names and versions of a chain's filters."""


class Tally:
    """A number of entries, and of their messages."""

    __slots__ = ("entries", "messages")

    def __init__(self) -> None:
        self.entries = 0
        self.messages = 0

    def add(self, entries: int, messages: int) -> None:
        self.entries += entries
        self.messages += messages


class Row(NamedTuple):
    """The reported counts of a filter, or, without a name, of a whole mode; failures by reason."""

    is_shadow: bool
    name: str
    version: int
    accepted: Tally
    rejected: Tally
    rescheduled: Tally
    failed: dict[str, Tally]

    def include(self, said: str, tally: Tally) -> None:
        """Add a tally of a verdict, or of a failure given by its reason."""
        match said:
            case "accepted":
                mine = self.accepted
            case "rejected":
                mine = self.rejected
            case "rescheduled":
                mine = self.rescheduled
            case reason:
                mine = self.failed.setdefault(reason, Tally())
        mine.add(tally.entries, tally.messages)

    @property
    def processed(self) -> Tally:
        return _sum((self.accepted, self.rejected, self.rescheduled, *self.failed.values()))

    @property
    def failed_all(self) -> Tally:
        return _sum(self.failed.values())


class Tallies:
    def __init__(self) -> None:
        self._of: dict[tuple[bool, Names], dict[tuple[int | None, str], Tally]] = {}
        self._past = {is_shadow: _row(is_shadow=is_shadow) for is_shadow in (False, True)}

    def of(self, names: Names, place: int | None, said: str, *, is_shadow: bool) -> Tally:
        """The tally of a verdict of the filter at this place; None: of the whole chain. A failure
        is given by its reason."""
        of_chain = self._of.setdefault((is_shadow, names), {})
        tally = of_chain.get((place, said))
        if tally is None:
            tally = of_chain[place, said] = Tally()
        return tally

    def trim(self, judging: Collection[tuple[bool, Names]]) -> None:
        """Keep the newest chains, and those in use (mode and filters), whose tallies still grow."""
        for is_shadow, names in list(self._of)[: max(0, len(self._of) - CHAINS_MAX)]:
            if (is_shadow, names) not in judging:
                for (_, said), tally in self._of.pop((is_shadow, names)).items():
                    self._past[is_shadow].include(said, tally)

    def rows(self) -> list[Row]:
        """Of each mode the total, then each filter, in the order in which they were added."""
        rows: dict[tuple[bool, str, int], Row] = {}
        for is_shadow, past in self._past.items():
            row = rows[is_shadow, "", 0] = _row(is_shadow=is_shadow)
            for said, tally in _parts(past):
                row.include(said, tally)
            for (shadows, names), tallies in self._of.items():
                if shadows is not is_shadow:
                    continue
                for name, version in names:
                    rows.setdefault(
                        (is_shadow, name, version), _row(name, version, is_shadow=is_shadow)
                    )
                for (place, said), tally in tallies.items():
                    row.include(said, tally)
                    for (name, version), what in _said_by(names, place, said):
                        rows[is_shadow, name, version].include(what, tally)
        return [row for (_, name, _), row in rows.items() if name or row.processed.entries]


def _said_by(names: Names, place: int | None, said: str) -> Iterable[tuple[tuple[str, int], str]]:
    """The verdict of each filter that was evaluated."""
    if place is None:
        return [(name, said) for name in names] if said == ACCEPTED else []
    return [*((name, ACCEPTED) for name in names[:place]), (names[place], said)]


def _sum(tallies: Iterable[Tally]) -> Tally:
    found = Tally()
    for each in tallies:
        found.add(each.entries, each.messages)
    return found


def _row(name: str = "", version: int = 0, *, is_shadow: bool) -> Row:
    return Row(is_shadow, name, version, Tally(), Tally(), Tally(), {})


def _parts(row: Row) -> Iterable[tuple[str, Tally]]:
    yield ACCEPTED, row.accepted
    yield REJECTED, row.rejected
    yield RESCHEDULED, row.rescheduled
    yield from row.failed.items()
