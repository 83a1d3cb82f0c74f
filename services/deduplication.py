"""Deduplication's vocabulary: the calls of a writer, and their outcomes.

The ledger calls and the dedup service answers. Both use these values, which services/runtime/
deduplication.py carries over the wire. The rules are in services/dedup/core.

    Writer        the calling process: incarnation, epoch, end of its log, last revision seen
    Claim         the ids of one publication, or one chunk
    Verdict       the answer to a claim
    Confirmation  the entries stored since the last confirmation
    Judged, Applied, Behind, Changed, Disabled
                  the outcomes of a call

The fold is here because the ledger's store needs it, too, when it trims: a producer's mark after an
entry depends only on the mark before it and on the entry.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from typing import Final, NamedTuple

from seqgate.services.errors import DomainError, Kind
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position

NEVER: Final = -1
"""The mark of a producer that has stored nothing, below its first possible id, 0."""


class TooManyProducers(DomainError):
    """The topic tracks as many producers as its policy allows."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_PRODUCERS"


# ---- the fold


class Mark(NamedTuple):
    """A producer's progress in a log: through message `highest`, or through this chunk of it."""

    highest: int = NEVER
    chunk: Chunk | None = None

    @property
    def decided(self) -> int:
        """The highest id of which nothing more will be stored; NEVER: there is none."""
        return self.highest - 1 if self.chunk else self.highest


def advance(mark: Mark, highest: int, chunk: Chunk | None = None) -> Mark:
    """The mark after one more entry of the producer. This is the fold: the state at a position is
    `advance` over all entries up to it, live or replayed.

    The last entry decides, even if its id is below an earlier one. That is impossible while
    deduplication is on; in a part of the log written while it was off, it means that the producer
    started over, and its next ids must not be taken for duplicates. A chunk that continues nothing
    belongs to no message: `mark` is returned unchanged.
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
    """Whether `chunk` directly follows `before` in the same attempt."""
    return before.layout == chunk.layout and before.chunk_id + 1 == chunk.chunk_id


# ---- calls


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
    """One producer's claims, in the order in which they were sent."""

    producer: str
    claims: tuple[Claim, ...]


class ProducerEntries(NamedTuple):
    """The highest ids of one producer's entries, in log order. `chunks` has those entries that are
    chunks, by index."""

    producer: str
    highest: tuple[int, ...]
    last_append_ms: int
    chunks: Mapping[int, Chunk] = {}


class Confirmation(NamedTuple):
    """The entries of the log after one position and through another; `remaining` more follow."""

    after: Position | None
    through: Position
    producers: tuple[ProducerEntries, ...]
    entry_count: int
    remaining: int = 0


class Withdrawal(NamedTuple):
    """One producer's ids that will not be appended: all above `keep_through`."""

    producer: str
    keep_through: int


# ---- outcomes


class Verdict(IntEnum):
    """How the writer must treat a claim; see dedup.proto. (An IntEnum for speed: there is one per
    message, and its members hash as fast as numbers.)"""

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
        verdicts: one per claim, in order.
        decided: the highest id of which nothing more will be stored; NEVER: there is none.
        aborts: the uuid of the attempt at a large message that a NEW claim ends, by claim index.
    """

    verdicts: Sequence[Verdict]
    decided: int
    aborts: Mapping[int, str]


class Judged(NamedTuple):
    """The claims were judged; producers are in the order of the call. `unsaved` is the number of
    entries confirmed since the newest snapshot. `refuses_conflicts`: policy refuses messages whose
    id is stored with other content."""

    revision: int
    producers: Sequence[ProducerVerdicts]
    unsaved: int = 0
    refuses_conflicts: bool = False

    def tally(self) -> Counter[Verdict]:
        return Counter(verdict for each in self.producers for verdict in each.verdicts)


class Applied(NamedTuple):
    """The confirmation or withdrawal was applied; `unsaved` is as in Judged."""

    revision: int
    unsaved: int = 0


class Behind(NamedTuple):
    """The state lacks entries after `confirmed`."""

    confirmed: Position | None


class Changed(NamedTuple):
    """The state is not the one that the writer last saw."""

    revision: int


class Disabled(NamedTuple):
    """Policy has disabled deduplication: nothing is judged or remembered."""


DISABLED: Final = Disabled()


def all_new(claims: Sequence[ProducerClaims], revision: int = 0) -> Judged:
    """Every claim is NEW, and nothing is known of any producer."""
    return Judged(
        revision, [ProducerVerdicts([Verdict.NEW] * len(each.claims), NEVER, {}) for each in claims]
    )
