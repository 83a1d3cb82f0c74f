"""Counting refusals, and when one has a line of the log."""

import logging

import pytest

from services.errors import InvalidTopicName
from services.runtime import refusals
from services.runtime.refusals import LOG_INTERVAL_S, Class, Refusals, during, in_stream

Printed = pytest.CaptureFixture[str]

BUSY, WRONG = Class("BUSY", "/s/Open"), Class("WRONG", "/s/Open")


class Clock:
    """A time that tests move."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def noted(clock: Clock) -> Refusals:
    return Refusals(clock)


def lines(printed: Printed) -> list[str]:
    return printed.readouterr().out.splitlines()


def test_the_first_of_a_class_has_a_line_and_a_storm_has_no_more(
    noted: Refusals, capsys: Printed
) -> None:
    for _ in range(1_000):
        noted.note("refused", BUSY, detail="in use")
    noted.note("refused", WRONG)
    noted.note("refused", Class("BUSY", "/s/Read"))
    first, second, third = lines(capsys)
    assert "reason=BUSY" in first
    assert "unsaid=0" in first
    assert "detail='in use'" in first
    assert "reason=WRONG" in second
    assert "method=/s/Read" in third
    assert noted.counts == {
        ("BUSY", "/s/Open"): 1_000,
        ("WRONG", "/s/Open"): 1,
        ("BUSY", "/s/Read"): 1,
    }


@pytest.mark.parametrize(
    ("after_s", "said"), [(LOG_INTERVAL_S - 0.1, False), (LOG_INTERVAL_S, True)]
)
def test_the_next_line_says_how_many_had_none(
    noted: Refusals, clock: Clock, capsys: Printed, *, after_s: float, said: bool
) -> None:
    for _ in range(10):
        noted.note("refused", BUSY)
    lines(capsys)
    clock.now_s = after_s
    noted.note("refused", BUSY, level=logging.ERROR)
    found = lines(capsys)
    assert len(found) == said
    if said:
        assert "unsaid=9" in found[0]
        assert "error" in found[0]


def test_in_an_hour_of_storm_a_class_has_a_line_a_minute(
    noted: Refusals, clock: Clock, capsys: Printed
) -> None:
    for tenth in range(36_000):
        clock.now_s = tenth / 10
        noted.note("refused", BUSY)
    assert len(lines(capsys)) == 60


def test_what_is_remembered_is_bounded_and_so_are_the_lines(
    noted: Refusals, clock: Clock, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "CLASSES_MAX", 5)
    for number in range(100):
        noted.note("denied", Class("NO", "/s/m", f"sub:{number}"))
        assert len(noted._said) <= 6
    assert len(lines(capsys)) == 6  # five, and one of those for which there is no room
    clock.now_s = LOG_INTERVAL_S
    noted.note("denied", Class("NO", "/s/m", "sub:new"))
    told, new = lines(capsys)
    assert "unsaid=94" in told
    assert "sub:new" in new


def test_a_storm_that_is_over_is_told_at_the_end(noted: Refusals, capsys: Printed) -> None:
    for _ in range(7):
        noted.note("refused", BUSY)
    noted.note("refused", WRONG)
    lines(capsys)
    noted.tell()
    (told,) = lines(capsys)
    assert "refused before" in told
    assert "BUSY" in told
    assert "unsaid=6" in told
    noted.tell()
    assert lines(capsys) == []


def test_a_refusal_within_a_stream_counts_as_one_of_its_method(
    noted: Refusals, capsys: Printed
) -> None:
    refusal = InvalidTopicName("no")
    in_stream(refusal)
    assert lines(capsys) == []  # no call
    with during(noted, "/s/Publish", "ipv4:1.2.3.4:5"):
        for _ in range(3):
            assert in_stream(refusal).message == "no"
    in_stream(refusal)
    (line,) = lines(capsys)
    assert "INVALID_ARGUMENT" in line
    assert "1.2.3.4" in line
    assert noted.counts == {("INVALID_TOPIC_NAME", "/s/Publish"): 3}
