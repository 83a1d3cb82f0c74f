"""Times at the ends of what producers may store, and what Timestamp and datetime can have."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from seqgate.cli._output import time_shown
from seqgate.client._fields import time_of
from seqgate.client._producer import delivery_time
from seqgate.client._subscribing import start_to_wire
from seqgate.errors import InvalidRequestError
from seqgate.times import (
    TIME_MAX_MS,
    milliseconds,
    milliseconds_of,
    moment,
    moment_of,
    timestamp,
)

LAST = datetime(9999, 12, 31, 23, 59, 59, 999_000, UTC)
LAST_OF_ALL = datetime.max.replace(tzinfo=UTC)
BEYOND = [TIME_MAX_MS + 1, 10 * TIME_MAX_MS, 2**63 - 1, 2**64 - 1]


@pytest.mark.parametrize(
    "time_ms", [0, 1, 999, 1_000, 1_750_000_000_123, TIME_MAX_MS - 1, TIME_MAX_MS]
)
def test_a_time_up_to_the_year_9999_is_kept_to_the_millisecond(time_ms: int) -> None:
    assert milliseconds(timestamp(time_ms)) == time_ms
    assert milliseconds_of(moment(time_ms)) == time_ms
    assert moment_of(timestamp(time_ms)) == moment(time_ms) == timestamp(time_ms).ToDatetime(UTC)
    shown = time_shown(time_ms)
    assert shown is not None
    assert datetime.fromisoformat(shown) == moment(time_ms)


@pytest.mark.parametrize("time_ms", BEYOND)
def test_a_time_after_the_year_9999_is_its_end(time_ms: int) -> None:
    assert moment(time_ms) == LAST
    assert timestamp(time_ms).ToMilliseconds() == TIME_MAX_MS  # which checks the Timestamp
    assert time_shown(time_ms) == str(time_ms)


@pytest.mark.parametrize(
    "wire",
    [
        Timestamp(seconds=253_402_300_799, nanos=999_999_999),
        Timestamp(seconds=253_402_300_800),
        Timestamp(seconds=2**63 // 1000),
        Timestamp(seconds=2**63 - 1, nanos=2**31 - 1),
    ],
)
def test_a_time_that_another_version_sent_is_decoded_whatever_it_is(wire: Timestamp) -> None:
    assert time_of(wire) == LAST


def test_a_time_before_1970_is_its_beginning() -> None:
    assert moment(-1) == moment_of(Timestamp(seconds=-(2**62))) == datetime(1970, 1, 1, tzinfo=UTC)
    assert timestamp(-1) == Timestamp()


@pytest.mark.parametrize(
    "at",
    [LAST, LAST_OF_ALL, datetime.max.replace(tzinfo=timezone(-timedelta(hours=23, minutes=59)))],
)
def test_the_last_time_of_delivery_can_be_stored_and_shown(at: datetime) -> None:
    delivery = delivery_time(at, None)
    assert delivery is not None
    assert delivery.at_ms >= TIME_MAX_MS
    assert moment(delivery.at_ms) == moment_of(timestamp(delivery.at_ms)) == LAST


def test_a_place_is_a_time_rounded_up() -> None:
    """The first entry at or after half a millisecond is at the next whole one."""
    half = datetime(2026, 1, 31, 12, 0, 0, 500, UTC)
    assert start_to_wire(half).time == start_to_wire(half.replace(microsecond=1_000)).time


def test_a_place_before_1970_is_refused_and_one_at_the_end_of_9999_is_a_time() -> None:
    far = timezone(timedelta(hours=-23, minutes=-59))
    for late in (LAST_OF_ALL, datetime.max.replace(tzinfo=far)):
        assert milliseconds(start_to_wire(late).time) == TIME_MAX_MS
    before = datetime(1969, 12, 31, tzinfo=UTC)
    for early in (before, before.replace(tzinfo=None), datetime.min.replace(tzinfo=far)):
        with pytest.raises(InvalidRequestError, match="1970 to 9999"):
            start_to_wire(early)
