"""Parsers of request parts that services share: names, numbers, positions, places, times, pages.

Each function returns the value, or refuses the request with an error that names the field and the
limit. `refusal` is the error's class, where services have reasons of their own.
"""

from typing import Any, Final, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from seqgate.api.common.v1 import common_pb2
from seqgate.services.errors import (
    DomainError,
    InvalidPage,
    InvalidProducerName,
    InvalidSequenceId,
    InvalidTopicName,
)
from seqgate.times import CLOCKS_MS, MS_NS, TIME_MAX_MS, milliseconds
from seqgate.types import (
    SEQUENCE_ID_MAX,
    Chunk,
    InvalidChunkError,
    InvalidNameError,
    Position,
    TopicName,
    check_chunk,
    check_cursor_name,
    check_producer_name,
)

DAY_MS: Final = 86_400_000
"""The longest delay, timeout or deadline that the dispatcher accepts: a day, in milliseconds."""

Refusal = type[DomainError]


# ---- names and numbers


def read_topic(text: str) -> TopicName:
    """A topic name. Raises InvalidTopicName."""
    try:
        return TopicName.parse(text)
    except InvalidNameError as error:
        raise InvalidTopicName(str(error), field="topic") from error


def read_producer(name: str) -> str:
    """A producer name. Raises InvalidProducerName."""
    try:
        return check_producer_name(name)
    except InvalidNameError as error:
        raise InvalidProducerName(str(error), field="producer_name") from error


def read_name(field: str, name: str, refusal: Refusal) -> str:
    """The name of a cursor, subscription, consumer, filter or lease owner."""
    try:
        return check_cursor_name(name)
    except InvalidNameError as error:
        raise refusal(
            f"{field} must be 1 to 255 bytes of UTF-8 without control characters", field=field
        ) from error


def read_number(field: str, number: int, refusal: Refusal, most: int = SEQUENCE_ID_MAX) -> int:
    if number > most:
        limit = "2^63 - 1" if most == SEQUENCE_ID_MAX else f"{most:,}"
        raise refusal(f"{field} must be at most {limit}", field=field, given=number)
    return number


def read_sequence_id(field: str, number: int) -> int:
    """A sequence id. Raises InvalidSequenceId."""
    return read_number(field, number, InvalidSequenceId)


def read_chunk(field: str, chunk: common_pb2.Chunk, refusal: Refusal) -> Chunk:
    try:
        return check_chunk(Chunk(chunk.uuid, chunk.chunk_id, chunk.num_chunks, chunk.total_bytes))
    except InvalidChunkError as error:
        raise refusal(str(error), field=field) from error


# ---- positions and places


def read_position(field: str, position: common_pb2.Position, refusal: Refusal) -> Position:
    ledger_id, entry_id = position.ledger_id, position.entry_id
    if max(ledger_id, entry_id) > SEQUENCE_ID_MAX:
        raise refusal(
            f"{field}: ledger_id and entry_id must be at most 2^63 - 1",
            field=field,
            ledger_id=ledger_id,
            entry_id=entry_id,
        )
    return Position(ledger_id, entry_id)


def read_optional_position(request: Any, field: str, refusal: Refusal) -> Position | None:
    """The position in a field; None: the field is absent."""
    if not request.HasField(field):
        return None
    return read_position(field, getattr(request, field), refusal)


class Earliest(NamedTuple):
    """Before the first entry."""


class Latest(NamedTuple):
    """After the last entry."""


class At(NamedTuple):
    """At an entry, or at the next one in the log."""

    position: Position


class After(NamedTuple):
    """After an entry."""

    position: Position


class AtTime(NamedTuple):
    """At the first entry appended at this time or later, in milliseconds since 1970."""

    append_ms: int


Start = Earliest | Latest | At | After | AtTime


def read_start(start: common_pb2.Start, refusal: Refusal) -> Start:
    """A place in a log, from the required field `start`."""
    match start.WhichOneof("start"):
        case "earliest":
            return Earliest()
        case "latest":
            return Latest()
        case "at":
            return At(read_position("start.at", start.at, refusal))
        case "after":
            return After(read_position("start.after", start.after, refusal))
        case "time":
            return AtTime(read_time_ms("start.time", start.time, refusal))
    raise refusal("start is required: set one of earliest, latest, at, after, time", field="start")


def check_start(
    start: Start, last: Position | None, now_ms: int, refusal: Refusal, *, field: str = "start"
) -> None:
    """Refuse a place beyond the end of a log: after an entry that it does not have yet, or a time
    to come. The end itself is a place: right after the last entry, which is `last`; None: the log
    never had one."""
    match start:
        case After(position):
            is_beyond = last is None or position > last
        case At(position):
            end = Position(1, 0) if last is None else last._replace(entry_id=last.entry_id + 1)
            is_beyond = position > end
        case AtTime(append_ms):
            is_beyond = append_ms > now_ms + CLOCKS_MS
        case _:
            is_beyond = False
    if is_beyond:
        where = "which is empty" if last is None else f"whose last entry is {last}"
        raise refusal(
            f"{field} is beyond the end of the log, {where}: give latest to start at the end",
            field=field,
            last="" if last is None else str(last),
        )


# ---- times


def read_time_ms(field: str, time: Timestamp, refusal: Refusal) -> int:
    """A time in milliseconds since 1970, rounded up."""
    if not 0 <= time.nanos < 1000 * MS_NS or not 0 <= milliseconds(time) <= TIME_MAX_MS:
        raise refusal(f"{field} must be from 1970 to 9999", field=field)
    return milliseconds(time)


def read_duration_ms(
    field: str, duration: Duration, refusal: Refusal, *, least_ms: int, most_ms: int
) -> int:
    """A duration in milliseconds, rounded up."""
    is_valid = 0 <= duration.nanos < 1000 * MS_NS
    if not is_valid or not least_ms <= milliseconds(duration) <= most_ms:
        raise refusal(f"{field} must be {_in_words(least_ms)} to {_in_words(most_ms)}", field=field)
    return milliseconds(duration)


def _in_words(duration_ms: int) -> str:
    return f"{duration_ms:,} ms" if duration_ms % 1000 else f"{duration_ms // 1000:,} s"


# ---- pages


def read_limit(asked: int, default: int, most: int, field: str = "page_size") -> int:
    """The most items to return; 0 requests the default. Raises InvalidPage."""
    if not 0 <= asked <= most:
        raise InvalidPage(f"{field} must be 1 to {most:,}", field=field, given=asked)
    return asked or default


def read_position_token(token: str) -> Position | None:
    """The position after which a page begins; None: the first page. Raises InvalidPage."""
    if not token:
        return None
    parts = token.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidPage("page_token is invalid", field="page_token")
    ledger_id, entry_id = map(int, parts)
    if max(ledger_id, entry_id) > SEQUENCE_ID_MAX:
        raise InvalidPage("page_token is invalid", field="page_token")
    return Position(ledger_id, entry_id)


def to_position_token(after: Position | None) -> str:
    """The token of the page after a position; None: there is none."""
    return "" if after is None else f"{after.ledger_id}:{after.entry_id}"
