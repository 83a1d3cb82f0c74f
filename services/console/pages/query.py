"""What a URL asks for. Each function raises InvalidRequestError for a wrong value."""

import base64
from datetime import UTC, datetime
from urllib.parse import urlencode

from seqgate.errors import InvalidRequestError
from seqgate.message_id import MessageId
from seqgate.services.console.pages.visit import Query, Values
from seqgate.times import EPOCH
from seqgate.types import Position, TopicName


def topic_of(query: Query) -> str:
    return str(TopicName.expand(query.get("topic", "")))


def subscription_of(query: Query) -> Values:
    """The fields `topic` and `subscription` of a request."""
    return {"topic": topic_of(query), "subscription": query.get("subscription", "")}


def position_of(text: str) -> Position:
    return parsed_id(text).position


def parsed_id(text: str) -> MessageId:
    try:
        return MessageId.parse(text)
    except ValueError as error:
        raise InvalidRequestError(f"a position is LEDGER:ENTRY, not {text!r}") from error


def number_of(query: Query, name: str) -> int | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) >= 2**63:
        raise InvalidRequestError(f"{name} must be 0 to 2^63 - 1")
    return int(text)


def start_of(query: Query) -> Position | datetime | None:
    """Where to begin, `at` a position or a `time`; None: neither is given."""
    at = query.get("at", "").strip()
    return position_of(at) if at else time_given(query.get("time", "").strip())


def time_given(moment: str) -> datetime | None:
    """None: empty. Without a zone, in UTC."""
    if not moment:
        return None
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError as error:
        raise InvalidRequestError(f"time must be like 2026-05-31T12:30, not {moment!r}") from error
    parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    if parsed < EPOCH:
        raise InvalidRequestError("time must be 1970 or later")
    return parsed


def key_of(query: Query) -> bytes:
    """`key`, or `key64` for one that is not UTF-8."""
    coded = query.get("key64", "")
    if not coded:
        return query.get("key", "").encode()
    try:
        return base64.b64decode(coded, altchars=b"-_", validate=True)
    except ValueError as error:
        raise InvalidRequestError("key64 must be base64url") from error


def key_query(key: bytes) -> str:
    """A key as a part of a URL, which key_of reads."""
    try:
        return urlencode({"key": key.decode()})
    except UnicodeDecodeError:
        return urlencode({"key64": base64.urlsafe_b64encode(key).decode()})


def pattern_of(prefix: str) -> str:
    """The pattern of names that begin with a prefix, whose wildcards stand for themselves."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in prefix) + "*"
