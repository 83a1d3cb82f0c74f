"""Converts protobuf's times and durations. Seqgate counts whole milliseconds, since 1970 UTC."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

MS_NS = 1_000_000
TIME_MAX_MS = 253_402_300_799_999
"""The last millisecond of a Timestamp: the end of the year 9999."""


def timestamp(time_ms: int) -> Timestamp:
    seconds, rest_ms = divmod(time_ms, 1000)
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
