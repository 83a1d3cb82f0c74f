"""Counts of refusals, and the ones that are logged."""

import logging

import pytest

from seqgate.services.errors import InvalidTopicName
from seqgate.services.runtime import refusal_log
from seqgate.services.runtime.refusal_log import (
    LOG_INTERVAL_S,
    Group,
    RefusalLog,
    during,
    in_stream,
)

Printed = pytest.CaptureFixture[str]

BUSY, WRONG = Group("BUSY", "/s/Open"), Group("WRONG", "/s/Open")


class Clock:
    """A clock that tests move."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(clock: Clock) -> RefusalLog:
    return RefusalLog(clock)


def lines(printed: Printed) -> list[str]:
    return printed.readouterr().out.splitlines()


def test_only_the_first_refusal_of_a_group_is_logged_in_a_storm(
    refusals: RefusalLog, capsys: Printed
) -> None:
    for _ in range(1_000):
        refusals.record("refused", BUSY, detail="in use")
    refusals.record("refused", WRONG)
    refusals.record("refused", Group("BUSY", "/s/Read"))
    first, second, third = lines(capsys)
    assert "reason=BUSY" in first
    assert "suppressed=0" in first
    assert "detail='in use'" in first
    assert "reason=WRONG" in second
    assert "method=/s/Read" in third
    assert refusals.counts == {
        ("BUSY", "/s/Open"): 1_000,
        ("WRONG", "/s/Open"): 1,
        ("BUSY", "/s/Read"): 1,
    }


@pytest.mark.parametrize(
    ("after_s", "logged"), [(LOG_INTERVAL_S - 0.1, False), (LOG_INTERVAL_S, True)]
)
def test_the_next_line_counts_the_suppressed_refusals(
    refusals: RefusalLog, clock: Clock, capsys: Printed, *, after_s: float, logged: bool
) -> None:
    for _ in range(10):
        refusals.record("refused", BUSY)
    lines(capsys)
    clock.now_s = after_s
    refusals.record("refused", BUSY, level=logging.ERROR)
    found = lines(capsys)
    assert len(found) == logged
    if logged:
        assert "suppressed=9" in found[0]
        assert "error" in found[0]


def test_a_group_is_logged_once_a_minute(
    refusals: RefusalLog, clock: Clock, capsys: Printed
) -> None:
    for tenth in range(36_000):
        clock.now_s = tenth / 10
        refusals.record("refused", BUSY)
    assert len(lines(capsys)) == 60


def test_groups_and_their_lines_are_bounded(
    refusals: RefusalLog, clock: Clock, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_log, "GROUPS_MAX", 5)
    for number in range(100):
        refusals.record("denied", Group("NO", "/s/m", f"sub:{number}"))
        assert len(refusals._groups) <= 6
    assert len(lines(capsys)) == 6  # five, and one shared by all others
    clock.now_s = LOG_INTERVAL_S
    refusals.record("denied", Group("NO", "/s/m", "sub:new"))
    told, new = lines(capsys)
    assert "suppressed=94" in told
    assert "sub:new" in new


def test_flush_logs_suppressed_refusals(refusals: RefusalLog, capsys: Printed) -> None:
    for _ in range(7):
        refusals.record("refused", BUSY)
    refusals.record("refused", WRONG)
    lines(capsys)
    refusals.flush()
    (told,) = lines(capsys)
    assert "refusals suppressed" in told
    assert "BUSY" in told
    assert "suppressed=6" in told
    refusals.flush()
    assert lines(capsys) == []


def test_a_refusal_in_a_stream_counts_for_its_method(refusals: RefusalLog, capsys: Printed) -> None:
    refusal = InvalidTopicName("no")
    in_stream(refusal)
    assert lines(capsys) == []  # no call
    with during(refusals, "/s/Publish", "ipv4:1.2.3.4:5"):
        for _ in range(3):
            assert in_stream(refusal).message == "no"
    in_stream(refusal)
    (line,) = lines(capsys)
    assert "INVALID_ARGUMENT" in line
    assert "1.2.3.4" in line
    assert refusals.counts == {("INVALID_TOPIC_NAME", "/s/Publish"): 3}
