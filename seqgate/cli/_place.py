"""Places in a topic as people write them, for subscriptions."""

from datetime import UTC, datetime
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._failure import WrongUsage
from seqgate.client import EARLIEST, LATEST, ChunkMessageId, MessageId
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import InvalidRequestError
from seqgate.types import Position

PLACE_HELP: Final = (
    "earliest, latest, the id of the first message, or a time: 2026-01-31T12:00:00Z, or with "
    "another offset. Without an offset it is UTC."
)


def place(option: str, text: str) -> Place:
    """Earliest, latest, the message that will be the next one, or a time.

    Raises:
        WrongUsage: it is none of these.
    """
    found = _read(text)
    if found is None:
        raise WrongUsage(
            f"{option} must be earliest, latest, a message id (LEDGER:ENTRY, or as printed by "
            "read), or a time (ISO 8601, 1970 or later)",
            details={"given": text},
        )
    return found


def start(option: str, text: str) -> pb.Start:
    """The same, as the service takes it."""
    return start_to_wire(place(option, text))


def message_id(option: str, text: str) -> MessageId:
    """A message.

    Raises:
        WrongUsage: it is none.
    """
    found = parsed_id(text)
    if found is None:
        raise WrongUsage(
            f"{option} must be a message id (LEDGER:ENTRY, or as printed by read)",
            details={"given": text},
        )
    return found


def parsed_id(text: str) -> MessageId | None:
    """A message, if it is one."""
    try:
        found = MessageId.parse(text)
    except ValueError:
        return None
    return found if min(found.position) >= 0 else None


def first_entry(found: MessageId) -> tuple[Position, int]:
    """The entry that a message begins in, and its place in its batch."""
    if isinstance(found, ChunkMessageId):
        return found.first_chunk.position, -1
    return found.position, found.batch_index


def _read(text: str) -> Place | None:
    match text:
        case "earliest":
            return EARLIEST
        case "latest":
            return LATEST
    try:
        MessageId.parse(text)
    except ValueError:
        return _time(text)
    return parsed_id(text)


def _time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        start_to_wire(moment)
    except (ValueError, OverflowError, InvalidRequestError):  # no time, or before 1970
        return None
    return moment
