"""Mistakes that were made once are made again, one at a time: histories of the whole system find
them without knowing them (tests/simulation/defects says what each does).

Each is looked for in the histories of one mix (tests/simulation/system/mixes.py), which says how
Seqgate is used and disturbed, in the order of their seeds. What breaks no promise and no bound is
seen by a test of its own."""

import subprocess
import sys
from collections.abc import Mapping
from itertools import count, islice
from typing import Final, NamedTuple

import pytest

from tests.simulation.defects import all_defects
from tests.simulation.system.mixes import MIXES
from tests.simulation.system.swarm import draw
from tests.simulation.test_system import ROOT, played
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
    "A15-given-back": Found(("EPOCH",), "clocks", 20, is_quick=True),
    "A16": Found(("OVERDRAWN",), "permits", 20),
    "B1": Found(("BUDGET",), "memory pressure", 10),
    "B2": Found(("BUDGET",), "rejections", 60),
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
    "A10": "unit/test_snapshots.py::test_no_cursor_is_made_for_a_state_that_does_not_fit",
    "A12": "unit/test_live_subscription.py::"
    "test_a_persist_that_is_refused_for_good_ends_in_the_subscription_being_taken_anew",
    "A17": "unit/test_holds.py::"
    "test_a_publication_that_is_refused_ends_a_hold_if_it_resumes_and_is_for_this_stream",
    "B3": "unit/test_look_ups.py::test_only_blocks_that_may_hold_what_is_asked_for_are_opened",
    "B4": "unit/test_sqlite_log.py::test_the_log_is_bounded_while_four_readers_read_on",
    "B5": "unit/test_trimming.py::test_who_opens_a_topic_does_not_wait_for_what_is_done_to_another",
    "B6-subscription": "unit/test_surprises.py::"
    "test_a_surprise_in_a_subscription_ends_its_streams_and_it_is_taken_anew",
    "C1": "unit/test_rights.py::test_producers_names_of_services_are_for_services",
    "C2": "unit/test_rights.py::test_a_list_shows_what_its_caller_may_read_one_by_one",
    "C4": "cli/test_jobs.py::test_a_job_is_ours_wherever_it_is_started",
    "D-gap": "integration/test_reader.py::"
    "test_messages_that_were_trimmed_before_they_were_read_are_never_passed_in_silence",
}
"""The tests that fail with the others, by their paths in `tests`."""


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


@pytest.mark.deep
@pytest.mark.timeout(FINDS_S)
@pytest.mark.parametrize("id_", OWN)
def test_a_mistake_that_breaks_no_promise_fails_a_test_of_its_own(id_: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.simulation.defects", id_, f"tests/{OWN[id_]}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
