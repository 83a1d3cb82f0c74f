"""Places in a topic as people write them, for subscriptions."""

from datetime import UTC, datetime
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._failure import WrongUsage
from seqgate.client import EARLIEST, LATEST, MessageId
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import InvalidRequestError

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
            f"{option} is earliest, latest, a message's id (LEDGER:ENTRY, or as read shows it), "
            "or a time (ISO 8601, 1970 or later)",
            details={"given": text},
        )
    return found


def start(option: str, text: str) -> pb.Start:
    """The same, as the service takes it."""
    return start_to_wire(place(option, text))


def _read(text: str) -> Place | None:
    match text:
        case "earliest":
            return EARLIEST
        case "latest":
            return LATEST
    try:
        message_id = MessageId.parse(text)
    except ValueError:
        return _time(text)
    return message_id if min(message_id.position) >= 0 else None


def _time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        start_to_wire(moment)
    except (ValueError, OverflowError, InvalidRequestError):  # no time, or before 1970
        return None
    return moment
