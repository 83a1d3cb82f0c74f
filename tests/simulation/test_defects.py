"""Mistakes that were made once are made again, one at a time: histories of the whole system find
them without knowing them (tests/simulation/defects says what each does).

Each is looked for in the histories of one mix (tests/simulation/system/mixes.py), which says how
Seqgate is used and disturbed, in the order of their seeds. What breaks no promise and no bound is
seen by a test of its own."""

from collections.abc import Mapping
from itertools import count, islice
from typing import Final, NamedTuple

import pytest

from tests.simulation.defects import all_defects
from tests.simulation.system.mixes import MIXES
from tests.simulation.system.swarm import draw
from tests.simulation.test_system import played
from tests.support.depth import deep

FINDS_S: Final = 1_200
"""How long looking for one may take on a busy machine."""


class Found(NamedTuple):
    """How histories show a defect: the violations, one of which they end in, and within how many
    histories of which mix. The mix is named as far as its name tells it from others."""

    violations: tuple[str, ...]
    mix: str
    histories: int
    is_quick: bool = False


FOUND: Final[Mapping[str, Found]] = {
    "A1": Found(("SKIPPED",), "memory pressure", 40),
    "A2": Found(("CUT",), "trims amid messages", 40),
    "A3": Found(("FOLD",), "policies", 20),
    "A4": Found(("LOST", "MISPLACED"), "takeovers", 60),
    "A5": Found(("FORGOTTEN",), "idle producers", 20, is_quick=True),
    "A6": Found(("HEADLESS",), "chunks interleaved", 30),
    "A7": Found(("LETTER_EARLY", "STUCK"), "chunks interleaved", 40),
    "A8": Found(("STUCK",), "timers", 60),
    "A9": Found(("SKIPPED",), "deletions", 20),
    "A11": Found(("EPOCH",), "deletions", 10, is_quick=True),
    "A13": Found(("REFUSED",), "smaller limits", 20, is_quick=True),
    "A14": Found(("BACKWARDS",), "clocks", 10, is_quick=True),
    "A15": Found(("STUCK",), "clocks", 60),
    "A16": Found(("OVERDRAWN",), "permits", 20),
    "B1": Found(("BUDGET",), "memory pressure", 10),
    "B2": Found(("BUDGET",), "rejections", 20),
    "B6": Found(("BUDGET",), "floods", 20),
    "F1": Found(("FOLD", "TWICE"), "two on one store", 60),
    "F2": Found(("RESURRECTED",), "batches in part", 40),
    "F3": Found(("HELD",), "held keys", 120),
    "F4": Found(("STUCK",), "dead letters", 20),
    "F5": Found(("HEADLESS",), "chunks interleaved", 30),
    "F6": Found(("LETTER_EARLY",), "joins", 30),
    "F7": Found(("EXPLAINED",), "held keys", 30),
    "F8": Found(("STUCK",), "mended filters", 20),
    "F9": Found(("COPIED",), "circles", 5, is_quick=True),
    "F10": Found(("STUCK",), "silent callers", 5, is_quick=True),
    "F11": Found(("STUCK",), "memory pressure", 60),
}

OWN: Final[Mapping[str, str]] = {
    "A10": "tests/unit/test_snapshots.py",
    "A12": "tests/unit/test_live_subscription.py",
    "A17": "tests/unit/test_holds.py",
    "B3": "tests/unit/test_look_ups.py",
    "B4": "tests/unit/test_sqlite_log.py",
    "B5": "tests/unit/test_trimming.py",
    "B6-subscription": "tests/unit/test_surprises.py",
    "C1": "tests/unit/test_rights.py",
    "C2": "tests/unit/test_rights.py",
    "C4": "tests/cli/test_jobs.py",
    "D-gap": "tests/integration/test_reader.py",
}
"""Where the tests are that fail with the others."""


def seeds_of(mix: str, histories: int) -> list[int]:
    """The first seeds of histories that have a mix."""
    (name,) = {each.name for each in MIXES if each.name.startswith(mix)}
    return list(islice((seed for seed in count(1) if draw(seed).mix == name), histories))


def test_every_defect_is_found_somewhere() -> None:
    assert not FOUND.keys() & OWN.keys()
    assert FOUND.keys() | OWN.keys() == all_defects().keys()


def tried() -> list[str]:
    """Some defects, or at full depth all."""
    return [id_ for id_, found in FOUND.items() if deep(quick=found.is_quick, full=True)]


@pytest.mark.timeout(FINDS_S)
@pytest.mark.parametrize("id_", tried())
def test_a_mistake_that_was_made_once_is_found_by_histories_that_do_not_know_it(id_: str) -> None:
    found = FOUND[id_]
    for finished in played(seeds_of(found.mix, found.histories), defect=id_):
        if finished["violations"]:
            first = finished["violations"][0]
            assert first.partition(":")[0] in found.violations, first
            return
    pytest.fail(f"{id_} is not found in {found.histories} histories: {found.mix}")
