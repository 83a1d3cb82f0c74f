"""Every key of the dedup service in Redis, and how values are written.

One hash holds all of a topic:

    seqgate:dedup:v1:{tenant/namespace/name}
        meta            MessagePack, see topic.lua
        p:<producer>    "<persisted> <pushed> <term> <active_ms>"

One key, so that nothing a failover, an eviction or a careless DEL takes away can leave half a
topic behind; the braces keep a topic in one slot of a Redis Cluster. The version in the name
changes when a layout does: two releases that share a Redis never misread each other.

Lua's numbers are doubles, exact up to 2^53 only, and sequence ids may be epoch nanoseconds. Ids
therefore travel and rest as text of fixed width, which compares as the numbers would. The mark of
a producer that has stored nothing is "-": shorter than any id, and replaced by "" where the
scripts compare, because "" sorts before everything in any locale that Redis may run under.
"""

from typing import Final

from seqgate.types import Position, TopicName
from services.dedup.core.sequence import NEVER, Marks
from services.dedup.core.topic import Tracked

PREFIX: Final = "seqgate:dedup:v1:{"
SUFFIX: Final = "}"
META: Final = b"meta"
PRODUCER: Final = b"p:"


def topic_key(topic: TopicName) -> str:
    """The hash of a topic."""
    return f"{PREFIX}{topic}{SUFFIX}"


def topic_of(key: str) -> TopicName:
    """The topic of a hash."""
    return TopicName.parse(key.removeprefix(PREFIX).removesuffix(SUFFIX))


def encode_id(number: int) -> str:
    """19 digits, or nothing for NEVER."""
    return "" if number == NEVER else f"{number:019d}"


def decode_id(text: str) -> int:
    """The number that encode_id, or a producer's value, wrote."""
    return NEVER if text in ("", "-") else int(text)


def encode_position(position: Position | None) -> str:
    """38 digits, or nothing for the place before the first entry."""
    return "" if position is None else f"{position.ledger_id:019d}{position.entry_id:019d}"


def decode_position(text: str) -> Position | None:
    """The position that encode_position wrote."""
    return Position(int(text[:19]), int(text[19:])) if text else None


def decode_producer(value: str, term: int) -> Tracked:
    """A producer's value; `term` is the topic's. What was let through in an earlier term is
    withdrawn."""
    persisted_text, pushed_text, pushed_term, active_ms = value.split(" ")
    persisted = decode_id(persisted_text)
    pushed = decode_id(pushed_text) if int(pushed_term) == term else persisted
    return Tracked(Marks(persisted, max(persisted, pushed)), int(active_ms))
