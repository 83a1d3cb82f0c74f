"""Parses arguments: names, keys, properties, and places in a topic.

Each parser raises WrongUsage for an invalid text.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.cli._declared import argument, option
from seqgate.cli._failure import WrongUsage
from seqgate.client import ChunkMessageId, MessageId
from seqgate.client._subscribing import Place, parse_id, parse_place, start_to_wire
from seqgate.types import (
    InvalidNameError,
    Position,
    TopicName,
    check_cursor_name,
    check_producer_name,
)

COUNT_MAX: Final = 2**63 - 1
"""The largest number that a service may count to."""


# ---- names


def _name(
    check: Callable[[str], str], *, reason: str, of: str = "", detail: str | None = None
) -> Callable[[str], str]:
    """A parser of names. `of` prefixes the message of `check`; `detail` is the text's key in the
    error's details."""

    def parse(text: str) -> str:
        try:
            return check(text)
        except InvalidNameError as error:
            details = {} if detail is None else {detail: text}
            raise WrongUsage(f"{of}{error}", reason=reason, details=details) from error

    return parse


topic_name = _name(
    lambda text: str(TopicName.expand(text)), reason="INVALID_TOPIC_NAME", detail="topic"
)

WILDCARDS: Final = "*?["


def topic_pattern(text: str, wildcards: str = WILDCARDS) -> str:
    """A topic, or a pattern of names. Without a slash it is one of names in public/default, as for
    `topic ls`, unless it begins with *: that stands for any tenant and namespace."""
    if not set(text) & set(wildcards):
        return topic_name(text)
    pattern = text.removeprefix("persistent://")
    is_whole = "/" in pattern or pattern.startswith("*")
    return pattern if is_whole else f"public/default/{pattern}"


producer_name = _name(check_producer_name, reason="INVALID_PRODUCER_NAME", detail="producer")
cursor_name = _name(check_cursor_name, reason="INVALID_CURSOR_NAME")
subscription_name = _name(check_cursor_name, reason="INVALID_SUBSCRIPTION_NAME", of="subscription ")

Topic = Annotated[str, argument("TOPIC", "The topic.", parse=topic_name)]
Cursor = Annotated[str, argument("NAME", "The cursor.", parse=cursor_name)]
Subscription = Annotated[str, argument("NAME", "The subscription.", parse=subscription_name)]
"""The arguments that name the subject of a command."""


# ---- keys and properties

Key = Annotated[str | None, option("KEY", "The key of each message.", "--key", "-k")]


def key_from_text(key: str) -> bytes:
    """A text key; bytes of the command line that are not UTF-8 are kept."""
    return key.encode(errors="surrogateescape")


def key_from_base64(option: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise WrongUsage(f"{option} is not base64", details={"given": text}) from None


def properties_of(option: str, given: Sequence[str]) -> dict[str, str]:
    """The properties of a repeatable option, each as NAME=VALUE."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise _wrong(option, "NAME=VALUE", each)
        found[name] = value
    return found


# ---- places


PLACE_HELP: Final = (
    "earliest, latest, the id of the first message, or a time: 2026-01-31T12:00:00Z, or with "
    "another offset. Without an offset it is UTC."
)


ID_EXPECTED: Final = "a message id (LEDGER:ENTRY, or as printed by read)"


def place(option: str, text: str) -> Place:
    """Earliest, latest, the id of the next message, or a time."""
    found = parse_place(text)
    if found is None:
        expected = f"earliest, latest, {ID_EXPECTED}, or a time (ISO 8601, 1970 or later)"
        raise _wrong(option, expected, text)
    return found


def start(option: str, text: str) -> common_pb2.Start:
    """A `place`, encoded for the service."""
    return start_to_wire(place(option, text))


def message_id(option: str, text: str) -> MessageId:
    found = parse_id(text)
    if found is None:
        raise _wrong(option, ID_EXPECTED, text)
    return found


def first_entry(found: MessageId) -> tuple[Position, int]:
    """The first entry of a message, and the message's index in its batch."""
    if isinstance(found, ChunkMessageId):
        return found.first_chunk.position, -1
    return found.position, found.batch_index


def _wrong(option: str, expected: str, text: str) -> WrongUsage:
    return WrongUsage(f"{option} must be {expected}", details={"given": text})
