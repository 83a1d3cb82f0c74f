"""Shared fields of requests are parsed, or refused with the field and the limit."""

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from seqgate.api.common.v1 import common_pb2
from seqgate.services.errors import DomainError, InvalidPage, Kind
from seqgate.services.runtime.requests import (
    After,
    At,
    AtTime,
    Earliest,
    Latest,
    read_duration_ms,
    read_limit,
    read_position_token,
    read_start,
    read_time_ms,
    to_position_token,
)
from seqgate.times import TIME_MAX_MS, duration, milliseconds, timestamp
from seqgate.types import SEQUENCE_ID_MAX, Position


class Wrong(DomainError):
    """A service's own refusal."""

    kind = Kind.INVALID
    reason = "INVALID_START"


WIRE = common_pb2.Position(ledger_id=3, entry_id=4)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (common_pb2.Start(earliest=common_pb2.Earliest()), Earliest()),
        (common_pb2.Start(latest=common_pb2.Latest()), Latest()),
        (common_pb2.Start(at=WIRE), At(Position(3, 4))),
        (common_pb2.Start(after=WIRE), After(Position(3, 4))),
        (common_pb2.Start(time=timestamp(0)), AtTime(0)),
        (common_pb2.Start(time=timestamp(TIME_MAX_MS)), AtTime(TIME_MAX_MS)),
        (common_pb2.Start(time=Timestamp(nanos=1)), AtTime(1)),
    ],
)
def test_a_start_is_read(start: common_pb2.Start, expected: object) -> None:
    found = read_start(start, Wrong)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (common_pb2.Start(), "start"),
        (common_pb2.Start(at=common_pb2.Position(ledger_id=2**63)), "start.at"),
        (common_pb2.Start(after=common_pb2.Position(entry_id=2**63)), "start.after"),
        (common_pb2.Start(time=Timestamp(seconds=-1)), "start.time"),
        (common_pb2.Start(time=Timestamp(seconds=2**60)), "start.time"),
        (common_pb2.Start(time=Timestamp(nanos=-1)), "start.time"),
        (common_pb2.Start(time=Timestamp(nanos=1_000_000_000)), "start.time"),
    ],
)
def test_a_start_out_of_bounds_is_refused(start: common_pb2.Start, field: str) -> None:
    with pytest.raises(Wrong) as refused:
        read_start(start, Wrong)
    assert refused.value.field == field


@pytest.mark.parametrize("time_ms", [0, 1, 999, 1_000, 1_750_000_000_123, TIME_MAX_MS])
def test_a_time_is_converted_both_ways(time_ms: int) -> None:
    assert read_time_ms("time", timestamp(time_ms), Wrong) == time_ms
    assert timestamp(time_ms).ToMilliseconds() == time_ms


@pytest.mark.parametrize("duration_ms", [100, 101, 1_500, 86_400_000])
def test_a_duration_is_converted_both_ways(duration_ms: int) -> None:
    given = duration(duration_ms)
    assert read_duration_ms("d", given, Wrong, least_ms=100, most_ms=86_400_000) == duration_ms
    assert given.ToMilliseconds() == duration_ms == milliseconds(given)


def test_fractions_of_a_millisecond_round_up() -> None:
    assert milliseconds(Duration(nanos=1)) == 1
    assert milliseconds(Duration(seconds=1, nanos=999_999_999)) == 2_000


@pytest.mark.parametrize(
    "given",
    [
        Duration(),
        Duration(nanos=98_000_000),
        Duration(seconds=86_400, nanos=1),
        Duration(seconds=-1),
        Duration(seconds=1, nanos=-1),
        Duration(nanos=1_000_000_000),
        Duration(seconds=2**62),
    ],
)
def test_a_duration_out_of_bounds_is_refused(given: Duration) -> None:
    with pytest.raises(Wrong, match=r"d must be 100 ms to 86,400 s") as refused:
        read_duration_ms("d", given, Wrong, least_ms=100, most_ms=86_400_000)
    assert refused.value.field == "d"


def test_negative_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        duration(-1)


@pytest.mark.parametrize(("asked", "limit"), [(0, 10), (1, 1), (20, 20)])
def test_a_page_size_is_read(asked: int, limit: int) -> None:
    assert read_limit(asked, 10, 20) == limit


@pytest.mark.parametrize("asked", [-1, 21])
def test_a_page_size_out_of_bounds_is_refused(asked: int) -> None:
    with pytest.raises(InvalidPage, match="max_keys must be 1 to 20"):
        read_limit(asked, 10, 20, "max_keys")


@pytest.mark.parametrize("after", [None, Position(0, 0), Position(SEQUENCE_ID_MAX, 7)])
def test_a_page_token_is_decoded_unchanged(after: Position | None) -> None:
    assert read_position_token(to_position_token(after)) == after


@pytest.mark.parametrize("token", ["1", "1:", ":", "1:2:3", "-1:2", "a:b", "²:1", f"{2**63}:1"])
def test_a_page_token_of_another_kind_is_refused(token: str) -> None:
    with pytest.raises(InvalidPage, match="page_token"):
        read_position_token(token)
