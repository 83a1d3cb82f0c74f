"""The dedup service's keys in Redis, and the encoding of their values.

One hash has all of a topic's state:

    seqgate:dedup:v1:{tenant/namespace/name}
        meta            MessagePack, see topic.lua
        p:<producer>    "<persisted> <pushed> <term> <active_ms>", the first two being marks

With one key, no failover, eviction or careless DEL can leave half a topic behind; the braces keep a
topic in one slot of a Redis Cluster. The version in the name changes with the layout, so that two
releases that share a Redis never misread each other.

Lua's numbers are doubles, exact up to 2^53 only, and sequence ids may be epoch nanoseconds. So ids
are sent and stored as text of fixed width, which compares as the numbers would. The mark of a
producer that has stored nothing is "-", shorter than any id; the scripts compare it as "", which
sorts before everything in any locale that Redis may run under.

A bare id as a mark means that its message is complete. Inside a large message the mark is
"<id>/<chunk>/<number of chunks>/<bytes>/<uuid>", with the uuid percent-encoded.
"""

from typing import Final
from urllib.parse import quote, unquote

from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import Persisted, Tracked
from seqgate.services.deduplication import NEVER
from seqgate.types import Chunk, Position, TopicName

POLICIES: Final = "seqgate:dedup:v1:policies"
"""The token of the policies, 32 hexadecimal digits. Belongs to no topic, and has another prefix."""

PREFIX: Final = "seqgate:dedup:v1:{"
SUFFIX: Final = "}"
META: Final = b"meta"
PRODUCER: Final = b"p:"


def topic_key(topic: TopicName) -> str:
    return f"{PREFIX}{topic}{SUFFIX}"


def topic_of(key: str) -> TopicName:
    return TopicName.parse(key.removeprefix(PREFIX).removesuffix(SUFFIX))


def encode_id(number: int) -> str:
    """19 digits; empty for NEVER."""
    return "" if number == NEVER else f"{number:019d}"


def decode_id(text: str) -> int:
    """The inverse of encode_id; also accepts the form in a producer's value."""
    return NEVER if text in ("", "-") else int(text)


def encode_mark(sequence_id: int, chunk: Chunk | None) -> str:
    """A mark at a message or, with a chunk, inside a large one."""
    if chunk is None:
        return encode_id(sequence_id)
    uuid, chunk_id, num_chunks, total_bytes = chunk
    return f"{sequence_id:019d}/{chunk_id}/{num_chunks}/{total_bytes}/{quote(uuid, safe='')}"


def decode_mark(text: str) -> tuple[int, Chunk | None]:
    """The inverse of encode_mark; also accepts the form in a producer's value."""
    if "/" not in text:
        return decode_id(text), None
    sequence_id, chunk_id, num_chunks, total_bytes, uuid = text.split("/")
    return int(sequence_id), Chunk(unquote(uuid), int(chunk_id), int(num_chunks), int(total_bytes))


def encode_position(position: Position | None) -> str:
    """38 digits; empty for the position before the first entry."""
    return "" if position is None else f"{position.ledger_id:019d}{position.entry_id:019d}"


def decode_position(text: str) -> Position | None:
    return Position(int(text[:19]), int(text[19:])) if text else None


def decode_producer(value: str, term: int) -> Tracked:
    """Decode a producer's value. Claims of an earlier term than the topic's `term` are
    withdrawn."""
    persisted_text, pushed_text, pushed_term, active_ms = value.split(" ")
    persisted, persisted_chunk = decode_mark(persisted_text)
    pushed, pushed_chunk = persisted, persisted_chunk
    if int(pushed_term) == term:
        pushed, pushed_chunk = decode_mark(pushed_text)
    return Tracked(Marks(persisted, pushed, persisted_chunk, pushed_chunk), int(active_ms))


def decode_persisted(field: bytes, value: bytes) -> Persisted | None:
    """A producer's durable state, from its field and value; None: it has stored nothing."""
    mark, _, _, active_ms = value.split(b" ")
    if mark == b"-":
        return None
    highest, unfinished = decode_mark(mark.decode())
    return Persisted(field.removeprefix(PRODUCER).decode(), highest, unfinished, int(active_ms))
