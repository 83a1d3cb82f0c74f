"""Deduplication's vocabulary: what a writer asks, and what it is answered.

The ledger asks and the dedup service answers; both use these values, and services/runtime/
deduplication.py carries them over the wire. The rules are in services/dedup/core.

    Writer        the asking process: incarnation, epoch, end of its log, last revision seen
    Claim         the ids of one publication, or one chunk
    Verdict       the answer to a claim
    Confirmation  what the log has stored since the last one
    Judged, Applied, Behind, Changed, Disabled
                  the outcome of a call

The fold is here too, because the ledger's store needs it for what it trims: a producer's mark after
an entry depends on the mark before it and on nothing else.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from typing import Final, NamedTuple

from seqgate.services.errors import DomainError, Kind
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position

NEVER: Final = -1
"""The mark of a producer that has stored nothing. Its first id may be 0."""


class TooManyProducers(DomainError):
    """The topic tracks as many producers as policy allows."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_PRODUCERS"


# ---- the fold


class Mark(NamedTuple):
    """How far a producer has come in a log: all of the message `highest`, or through this chunk of
    it."""

    highest: int = NEVER
    chunk: Chunk | None = None

    @property
    def decided(self) -> int:
        """The highest id of which nothing more is stored; NEVER: there is none."""
        return self.highest - 1 if self.chunk else self.highest


def advance(mark: Mark, highest: int, chunk: Chunk | None = None) -> Mark:
    """The mark after one more entry of the producer. This is the fold: the state at a position is
    `advance` over all entries up to it, live or replayed.

    The last entry decides, even when its id is lower than one before. That cannot happen while
    deduplication is on; in a stretch of the log that was written while it was off, it is the
    producer starting over, and its next ids must not be taken for duplicates. A chunk that
    continues nothing is part of no message: the same `mark` is returned.
    """
    assert 0 <= highest <= SEQUENCE_ID_MAX
    if chunk is None:
        return Mark(highest)
    if chunk.chunk_id > 0 and not (
        mark.chunk is not None and mark.highest == highest and continues(mark.chunk, chunk)
    ):
        return mark
    return Mark(highest, None if chunk.is_last else chunk)


def continues(before: Chunk, chunk: Chunk) -> bool:
    """Whether a chunk is the next one of the same attempt."""
    return before.layout == chunk.layout and before.chunk_id + 1 == chunk.chunk_id


# ---- the question


class Writer(NamedTuple):
    """The process that may append to the topic; see dedup.proto."""

    incarnation: int
    epoch: int
    position: Position | None
    revision: int | None = None


class Claim(NamedTuple):
    """The ids of one message (lowest = highest) or of a batch; or one chunk of a message."""

    lowest: int
    highest: int
    chunk: Chunk | None = None


class ProducerClaims(NamedTuple):
    """One producer's claims, in the order in which it sent them."""

    producer: str
    claims: tuple[Claim, ...]


class ProducerEntries(NamedTuple):
    """The highest ids of one producer's entries, in log order; by their place, those that are
    chunks."""

    producer: str
    highest: tuple[int, ...]
    last_append_ms: int
    chunks: Mapping[int, Chunk] = {}


class Confirmation(NamedTuple):
    """What the log holds after one position and through another; `remaining` entries follow."""

    after: Position | None
    through: Position
    producers: tuple[ProducerEntries, ...]
    entry_count: int
    remaining: int = 0


class Withdrawal(NamedTuple):
    """What one producer will not append: everything above `keep_through`."""

    producer: str
    keep_through: int


# ---- the answer


class Verdict(IntEnum):
    """What the writer must do with a claim; see dedup.proto. (An IntEnum for speed: there is one
    for each message, and its members hash as fast as numbers.)"""

    NEW = auto()
    IN_FLIGHT = auto()
    DUPLICATE = auto()
    PARTIAL = auto()
    HELD = auto()
    CHUNK_GAP = auto()
    LAYOUT_CONFLICT = auto()


class ProducerVerdicts(NamedTuple):
    """The answer to one producer's claims.

    Attributes:
        verdicts: one for each claim, in their order.
        decided: the highest id of which nothing more is stored; NEVER: there is none.
        aborts: by the place of a NEW claim, the attempt at a large message that it ends.
    """

    verdicts: Sequence[Verdict]
    decided: int
    aborts: Mapping[int, str]


class Judged(NamedTuple):
    """The claims were judged, producer by producer in the order of the call. `unsaved` is how many
    entries were confirmed since the newest snapshot."""

    revision: int
    producers: Sequence[ProducerVerdicts]
    unsaved: int = 0

    def tally(self) -> Counter[Verdict]:
        """How many claims got each verdict."""
        return Counter(verdict for each in self.producers for verdict in each.verdicts)


class Applied(NamedTuple):
    """A confirmation or a withdrawal was applied; `unsaved` is as for Judged."""

    revision: int
    unsaved: int = 0


class Behind(NamedTuple):
    """The state lacks entries after `confirmed`."""

    confirmed: Position | None


class Changed(NamedTuple):
    """The state is not the one that the writer last saw."""

    revision: int


class Disabled(NamedTuple):
    """Policy has switched deduplication off: nothing is judged, and nothing remembered."""


DISABLED: Final = Disabled()


def all_new(claims: Sequence[ProducerClaims], revision: int = 0) -> Judged:
    """Every claim is NEW, and nothing is known of its producer."""
    return Judged(
        revision, [ProducerVerdicts([Verdict.NEW] * len(each.claims), NEVER, {}) for each in claims]
    )
