"""Past defects, put back one at a time, and mistakes that are easily made with redrives: general
histories of the whole system find them (tests/simulation/defects describes each).

Each is searched for in the histories of one mix (tests/simulation/system/mixes.py), in the order of
their seeds. A defect that breaks no promise and no bound is found by a test of its own.
"""

import subprocess
import sys
from collections.abc import Mapping
from itertools import count, islice
from typing import Final, NamedTuple

import pytest

from tests.simulation.defects import all_defects
from tests.simulation.system.mixes import MIXES, REDRIVES
from tests.simulation.system.swarm import draw
from tests.simulation.test_system import ROOT, played

FINDS_S: Final = 1_200
"""The limit of one search on a busy machine."""


class Found(NamedTuple):
    """The evidence of a defect: one of these violations, within this many histories of a mix, which
    is named by the start of its name."""

    violations: tuple[str, ...]
    mix: str
    histories: int


FOUND: Final[Mapping[str, Found]] = {
    "A1": Found(("SKIPPED",), "memory pressure", 40),
    "A2": Found(("CUT",), "trims amid messages", 40),
    "A3": Found(("FOLD",), "policies", 20),
    "A4": Found(("LOST", "MISPLACED"), "takeovers", 60),
    "A5": Found(("FORGOTTEN",), "idle producers", 20),
    "A6": Found(("HEADLESS",), "chunks interleaved", 30),
    "A7": Found(("LETTER_EARLY", "STUCK"), "chunks interleaved", 40),
    "A8": Found(("STUCK",), "timers", 60),
    "A9": Found(("SKIPPED",), "deletions", 20),
    "A11": Found(("EPOCH",), "deletions", 10),
    "A13": Found(("REFUSED",), "smaller limits", 20),
    "A14": Found(("BACKWARDS",), "clocks", 10),
    "A15": Found(("STUCK", "EPOCH"), "clocks", 60),
    "A15-given-back": Found(("EPOCH",), "clocks", 20),
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
    "F9": Found(("COPIED",), "circles", 5),
    "F10": Found(("STUCK",), "silent callers", 5),
    "F11": Found(("STUCK",), "memory pressure", 60),
    "R1": Found(("MISCOUNTED",), "redrives", 5),
    "R2": Found(("LETTER_EARLY",), "redrives", 10),
    "R3": Found(("STUCK",), "redrives", 40),
    "R4": Found(("SETTLED", "REDRIVEN_TWICE"), "redrives", 20),
    "R5": Found(("LETTER_TWICE", "SETTLED"), "redrives", 400),
    "R7": Found(("REDRIVEN_TWICE",), "redrives", 20),
    "R8": Found(("NOT_DURABLE", "RESURRECTED"), "redrives", 5),
    "R9": Found(("SETTLED", "REDRIVEN_TWICE"), "redrives", 20),
}

_REDRIVES: Final = (
    "simulation/test_redrives.py::test_redriven_messages_are_acknowledged_once_more_and_in_order"
)

OWN: Final[Mapping[str, str]] = {
    "A10": "unit/test_snapshots.py::test_no_cursor_is_created_for_a_state_that_does_not_fit",
    "A12": "unit/test_live_subscription.py::"
    "test_a_permanently_refused_persist_makes_the_subscription_reopen",
    "A17": "unit/test_holds.py::test_a_refused_publication_with_resume_on_this_stream_ends_a_hold",
    "B3": "unit/test_look_ups.py::test_a_look_up_decodes_only_blocks_that_may_hold_its_ids",
    "B4": "unit/test_sqlite_log.py::test_the_write_ahead_log_is_bounded_beside_four_long_readers",
    "B5": "unit/test_trimming.py::test_opening_a_topic_does_not_wait_for_another_topic",
    "B6-subscription": "unit/test_surprises.py::"
    "test_an_unexpected_error_ends_a_subscriptions_streams_and_reopens_it",
    "C1": "unit/test_rights.py::test_producer_names_of_services_are_reserved",
    "C2": "unit/test_rights.py::test_a_list_shows_only_items_that_its_caller_may_get",
    "C4": "cli/test_jobs.py::test_a_job_starts_the_installed_module_from_any_folder",
    "F12": "conformance/test_ledgers_on_one_store.py::"
    "test_a_zombie_does_not_deny_what_its_successor_stored",
    "R6": _REDRIVES,
    "R10": _REDRIVES,
    "D-gap": "integration/test_reader.py::test_unread_messages_that_were_trimmed_are_reported",
}
"""The tests that find the other defects, by their paths below `tests`."""


def seeds_of(mix: str, histories: int) -> list[int]:
    """The first seeds whose histories have a mix."""
    (name,) = {each.name for each in (*MIXES, REDRIVES) if each.name.startswith(mix)}
    return list(islice((seed for seed in count(1) if draw(seed).mix == name), histories))


def test_every_defect_is_found_somewhere() -> None:
    assert not FOUND.keys() & OWN.keys()
    assert FOUND.keys() | OWN.keys() == all_defects().keys()


@pytest.mark.deep
@pytest.mark.timeout(FINDS_S)
@pytest.mark.parametrize("id_", FOUND)
def test_general_histories_find_a_past_defect(id_: str) -> None:
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
def test_a_defect_that_breaks_no_promise_fails_its_own_test(id_: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.simulation.defects", id_, f"tests/{OWN[id_]}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
