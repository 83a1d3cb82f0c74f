"""Which of a producer's messages are new?

A producer numbers its messages with increasing sequence ids. Two marks say how far each producer
has come (PIP-6's two maps):

    persisted   the highest id of the producer's last entry in the log
    pushed      every id up to here has been let through, durable or not

so an id falls into one of three zones:

      DUPLICATE        IN_FLIGHT          NEW
    ------------|------------------|-------------->
             persisted          pushed

IN_FLIGHT is not caution for its own sake. The earlier copy may still fail to be written: answering
DUPLICATE would lose the message, answering NEW could store it twice. The caller waits and asks
again.

A claim is a range, because a batch carries the ids of all its messages. A claim that starts at or
below `persisted` and ends above it is PARTIAL: some of its messages are in the log, others are
not, and only the producer can cut it.

adapters/lua/admit.lua and confirm.lua compute the same functions inside Redis, and
tests/conformance holds the two to the same answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, NamedTuple

from seqgate.types import SEQUENCE_ID_MAX

NEVER: Final = -1
"""The mark of a producer that has stored nothing. Its first id may be 0."""


class Verdict(Enum):
    """What the caller must do with a claim; dedup.proto says it in full."""

    NEW = auto()
    IN_FLIGHT = auto()
    DUPLICATE = auto()
    PARTIAL = auto()
    HELD = auto()


class Claim(NamedTuple):
    """The ids of one message (lowest = highest) or of a batch."""

    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Marks:
    """How far one producer has come."""

    persisted: int = NEVER
    pushed: int = NEVER

    def __post_init__(self) -> None:
        assert NEVER <= self.persisted <= self.pushed <= SEQUENCE_ID_MAX

    @property
    def in_flight(self) -> bool:
        """Whether something was let through and not yet confirmed."""
        return self.pushed > self.persisted


def admit(marks: Marks, claims: Sequence[Claim]) -> tuple[Marks, list[Verdict]]:
    """Judge one producer's claims in the order in which it sent them.

    The marks returned include what was let through. After the first claim that must wait, or be
    cut, nothing of this producer is let through any more: it would overtake, and so lose, what is
    still to come. (Rules N1 to N4 of Pulsar's MessageDeduplication, with PARTIAL for the batch that
    Pulsar drops whole, apache/pulsar#6273.)
    """
    persisted, pushed = marks.persisted, marks.pushed
    verdicts = []
    held = False
    for lowest, highest in claims:
        assert 0 <= lowest <= highest <= SEQUENCE_ID_MAX
        if highest <= persisted:
            verdicts.append(Verdict.DUPLICATE)
        elif held:
            verdicts.append(Verdict.HELD)
        elif lowest > pushed:
            verdicts.append(Verdict.NEW)
            pushed = highest
        else:
            verdicts.append(Verdict.IN_FLIGHT if pushed > persisted else Verdict.PARTIAL)
            held = True
    return replace(marks, pushed=pushed), verdicts


def advance(marks: Marks, highest: int) -> Marks:
    """Take note of one entry of the log. This is the fold: state(P) is `advance` over all entries
    up to P, live or replayed.

    The last entry decides, even when its id is lower than one before. That cannot happen while
    deduplication is on; in a stretch of the log that was written while it was off, it is the
    producer starting over, and its next ids must not be taken for duplicates.
    """
    assert 0 <= highest <= SEQUENCE_ID_MAX
    pushed = max(marks.pushed, highest) if marks.in_flight else highest
    return Marks(persisted=highest, pushed=pushed)


def withdraw(marks: Marks, keep_through: int = NEVER) -> Marks:
    """Forget what was let through above `keep_through`: those ids are NEW again."""
    return replace(marks, pushed=max(marks.persisted, min(marks.pushed, keep_through)))
