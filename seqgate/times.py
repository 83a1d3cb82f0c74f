"""Converts times and durations. Seqgate counts whole milliseconds, since 1970 UTC.

Producers choose some of the times that are stored, up to 2^64 - 1 ms: Timestamp and datetime end
with the year 9999. There every later time is that year's last millisecond, so that whatever is
stored can be shown.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

MS_NS: Final = 1_000_000
TIME_MAX_MS: Final = 253_402_300_799_999
"""The last millisecond of a Timestamp, and of a datetime: the end of the year 9999."""

CLOCKS_MS: Final = 60_000
"""How far a place's time may be ahead of the clock that judges it: clocks differ, and "now" is not
beyond the end of a log."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


def timestamp(time_ms: int) -> Timestamp:
    """Encode a time. One after the year 9999 becomes its end, and one before 1970 its beginning."""
    seconds, rest_ms = divmod(_bounded(time_ms), 1000)
    return Timestamp(seconds=seconds, nanos=rest_ms * MS_NS)


def duration(duration_ms: int) -> Duration:
    """Encode a duration. Raises ValueError if it is negative."""
    if duration_ms < 0:
        raise ValueError("a duration must not be negative")
    seconds, rest_ms = divmod(duration_ms, 1000)
    return Duration(seconds=seconds, nanos=rest_ms * MS_NS)


def milliseconds(message: Timestamp | Duration) -> int:
    """Decode a time or duration in milliseconds, rounded up."""
    return message.seconds * 1000 - (-message.nanos // MS_NS)


def moment(time_ms: int) -> datetime:
    """A time in UTC. One after the year 9999 becomes its end, and one before 1970 its beginning."""
    return EPOCH + _bounded(time_ms) * _MS


def moment_of(message: Timestamp) -> datetime:
    """Decode a time, as `moment` does."""
    return moment(milliseconds(message))


def milliseconds_of(time: datetime) -> int:
    """A time with a zone in milliseconds, rounded up; negative before 1970."""
    return -((EPOCH - time) // _MS)


def _bounded(time_ms: int) -> int:
    return min(max(0, time_ms), TIME_MAX_MS)
