"""Whether a message that is sent again is the one that is stored.

Deduplication goes by sequence ids. A producer that starts its numbers again under an old name has
its messages answered with the ids of others; only their content shows it:

    both have digests      each message is compared by its digest
    one of them has none   entries are compared by checksum and size, if both are compressed alike
                           and cut alike: into one message, the same number of messages, or chunks

A checksum of several messages does not tell which of them differs, so where it does, they are not
compared.
"""

from enum import Enum, auto
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 8
"""The size of a message's digest, in bytes."""


class Comparison(Enum):
    """The outcome for one message."""

    SAME = auto()
    DIFFERS = auto()
    NOT_COMPARED = auto()


class Content(NamedTuple):
    """What the metadata of an entry says of the content of one of its messages.

    Attributes:
        digest: DIGEST_BYTES; empty: there is none.
        place: the message's index in the batch, from 0.
        messages: the number of messages of the entry; None: it is not a batch.
        compression: the compression of the payload.
        is_chunk: whether the next two are of a large message as a whole.
        size_bytes: the stored size of the payload.
        crc32c: the checksum of the payload; None: unknown.
    """

    digest: bytes
    place: int
    messages: int | None
    compression: int
    is_chunk: bool
    size_bytes: int
    crc32c: int | None

    @property
    def shape(self) -> tuple[int, int | None, int, bool]:
        """How its entry is cut and compressed."""
        return self.place, self.messages, self.compression, self.is_chunk


def compared(given: Content, stored: Content) -> Comparison:
    """Compare a message that is sent again with a stored one."""
    if given.digest and stored.digest:
        return Comparison.SAME if given.digest == stored.digest else Comparison.DIFFERS
    if given.shape != stored.shape:
        return Comparison.NOT_COMPARED
    is_known = given.crc32c is not None and stored.crc32c is not None
    if given.size_bytes == stored.size_bytes and (not is_known or given.crc32c == stored.crc32c):
        return Comparison.SAME if is_known else Comparison.NOT_COMPARED
    return Comparison.DIFFERS if (given.messages or 1) == 1 else Comparison.NOT_COMPARED
