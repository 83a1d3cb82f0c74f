"""Progress of a command whose standard error is no terminal."""

import json
from typing import Any

import pytest

from seqgate.cli._progress import Progress
from tests.support.waiting import eventually

Printed = pytest.CaptureFixture[str]


def lines(printed: Printed) -> list[dict[str, Any]]:
    captured = printed.readouterr()
    assert captured.out == ""
    return [json.loads(each)["progress"] for each in captured.err.splitlines()]


def test_the_last_line_has_the_counts_and_their_ends(capsys: Printed) -> None:
    with Progress("audit", topics=2, entries=None) as progress:
        progress.add(topics=1, entries=40)
        progress.add(entries=2)
    (last,) = lines(capsys)
    assert last.pop("entries_s") > 0
    assert last.pop("seconds") >= 0
    assert last == {"command": "audit", "topics": 1, "of_topics": 2, "entries": 42, "done": True}


async def test_lines_are_written_while_the_command_runs(capsys: Printed) -> None:
    polled: list[int] = []

    def poll(progress: Progress) -> None:
        polled.append(len(polled))
        progress.set(entries=len(polled))

    with Progress("audit", poll=poll, interval_s=0.001, entries=None):
        await eventually(lambda: len(polled) > 3, "it is polled")
    *before, last = lines(capsys)
    assert [each["entries"] for each in (*before, last)] == [each + 1 for each in polled]
    assert {each["done"] for each in before} == {False}
    assert last["done"]


def test_a_failed_command_is_not_done(capsys: Printed) -> None:
    with pytest.raises(ValueError, match="failed"), Progress("audit", entries=None):
        raise ValueError("failed")
    (last,) = lines(capsys)
    assert not last["done"]


def test_a_patient_one_says_nothing_of_what_is_done_at_once(capsys: Printed) -> None:
    with Progress("read", messages=None, is_patient=True) as progress:
        progress.add(messages=1)
    assert lines(capsys) == []


async def test_a_patient_one_shows_what_takes_longer(capsys: Printed) -> None:
    polled: list[Progress] = []
    poll = polled.append
    with Progress("read", poll=poll, interval_s=0.001, messages=3, is_patient=True) as progress:
        await eventually(lambda: polled, "it is shown")
        progress.add(messages=3)
    *_, last = lines(capsys)
    assert (last["messages"], last["of_messages"], last["done"]) == (3, 3, True)
