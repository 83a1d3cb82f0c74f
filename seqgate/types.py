"""The values that every part of Seqgate shares: names, positions, ids, limits.

Nothing here depends on a service, a store or the wire.
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

SEQUENCE_ID_MAX: Final = 2**63 - 1
"""The highest sequence id, ledger id and entry id. Pulsar's ids are signed 64-bit integers; one of
2^63 or more on the wire compares as negative there (PIP-6), so it is refused here."""

TOPIC_NAME_BYTES_MAX: Final = 255

PRODUCER_NAME_BYTES_MAX: Final = 255
"""In bytes of UTF-8."""

CURSOR_NAME_BYTES_MAX: Final = 255
"""The longest name of a cursor or of its lease's holder, in bytes of UTF-8."""

DEDUP_CURSOR: Final = "seqgate.dedup"
"""The cursor whose position carries the snapshots of a topic's deduplication state."""

_TOPIC_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=-]*", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


CHUNK_UUID_BYTES_MAX: Final = 320
"""The longest uuid of an attempt at a large message, in bytes of UTF-8."""

NACK_REASON_BYTES_MAX: Final = 256
"""The longest reason of a negative acknowledgement, in bytes of UTF-8."""

LARGE_MESSAGE_BYTES_MAX: Final = 2**31 - 1
"""The largest message in chunks, in bytes: Pulsar's total_chunk_msg_size is a signed 32-bit
integer. No message has more chunks than bytes."""


class InvalidChunkError(ValueError):
    """A chunk's numbers or uuid are invalid."""


class InvalidNameError(ValueError):
    """A topic, producer or cursor name is invalid."""


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """tenant/namespace/name, the unit of order and of ownership.

    Each part consists of ASCII letters, digits and _.:=- and starts with a letter, a digit or an
    underscore; the whole is at most 255 bytes long.
    """

    tenant: str
    namespace_part: str
    local: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a full name. Raises InvalidNameError if it is not tenant/namespace/name."""
        text = _exact("topic", text)
        parts = text.split("/")
        if (
            len(text) > TOPIC_NAME_BYTES_MAX
            or len(parts) != 3
            or not all(_TOPIC_PART.fullmatch(part) for part in parts)
        ):
            raise InvalidNameError(
                "topic must be tenant/namespace/name: ASCII letters, digits and _.:=- in each "
                f"part, at most {TOPIC_NAME_BYTES_MAX} bytes"
            )
        return cls(*parts)

    @classmethod
    def expand(cls, text: str) -> Self:
        """Parse a name as people write it: `name` alone means public/default/name, and Pulsar's
        persistent:// is accepted. Raises InvalidNameError for any other form."""
        text = _exact("topic", text).removeprefix("persistent://")
        return cls.parse(text if "/" in text else f"public/default/{text}")

    @property
    def namespace(self) -> str:
        """tenant/namespace."""
        return f"{self.tenant}/{self.namespace_part}"

    @property
    def is_system(self) -> bool:
        """Whether a system keeps its own records in the topic: the last part starts with two
        underscores, as in Pulsar. A system topic never deduplicates."""
        return self.local.startswith("__")

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace_part}/{self.local}"


def check_producer_name(name: str) -> str:
    """Return a valid producer name unchanged. Raises InvalidNameError if it is empty, longer than
    255 bytes, or contains control characters."""
    return _check_name("producer name", name, PRODUCER_NAME_BYTES_MAX)


def check_cursor_name(name: str) -> str:
    """Return a valid name of a cursor, or of its lease's holder, unchanged. Raises the same as
    check_producer_name."""
    return _check_name("name", name, CURSOR_NAME_BYTES_MAX)


def _exact(what: str, name: object) -> str:
    """A name's characters, also if it is of a subclass of str, as the members of a StrEnum."""
    if not isinstance(name, str):
        raise InvalidNameError(f"{what} must be text, not {type(name).__name__}")
    return str.__str__(name)


def _check_name(what: str, name: str, bytes_max: int) -> str:
    name = _exact(what, name)
    if not name or _CONTROL.search(name) or len(name.encode()) > bytes_max:
        raise InvalidNameError(
            f"{what} must be 1 to {bytes_max} bytes of UTF-8 without control characters"
        )
    return name


Layout = tuple[str, int, int]
"""How an attempt cuts a large message: its uuid, the number of chunks, and their total bytes."""


class Chunk(NamedTuple):
    """The place of one chunk in a large message; entry.proto has the details."""

    uuid: str
    chunk_id: int
    num_chunks: int
    total_bytes: int

    @property
    def layout(self) -> Layout:
        """The fields that all chunks of one attempt share. The uuid alone does not identify it: a
        producer that cuts a message in another way may reuse it."""
        return self.uuid, self.num_chunks, self.total_bytes

    @property
    def is_last(self) -> bool:
        """Whether the chunk completes the message."""
        return self.chunk_id == self.num_chunks - 1


def check_chunk(chunk: Chunk) -> Chunk:
    """Return a valid chunk unchanged. Raises InvalidChunkError if its numbers contradict each other
    or a limit, or its uuid is invalid."""
    uuid, chunk_id, num_chunks, total_bytes = chunk
    if not uuid or _CONTROL.search(uuid) or len(uuid.encode()) > CHUNK_UUID_BYTES_MAX:
        raise InvalidChunkError(
            f"uuid must be 1 to {CHUNK_UUID_BYTES_MAX} bytes of UTF-8 without control characters"
        )
    if not 2 <= num_chunks <= total_bytes <= LARGE_MESSAGE_BYTES_MAX:
        raise InvalidChunkError(
            "a chunked message must have 2 chunks or more of at least one byte each, and at most "
            f"{LARGE_MESSAGE_BYTES_MAX:,} bytes"
        )
    if not 0 <= chunk_id < num_chunks:
        raise InvalidChunkError(f"chunk_id must be 0 to {num_chunks - 1}")
    return chunk


class Position(NamedTuple):
    """An entry's place in its topic. None stands for the place before the first entry."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"
