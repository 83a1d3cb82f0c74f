"""Checks a history of publishing under faults: what was sent, the receipts, and the final log.

    LOST        acknowledged, and not in the log
    MISPLACED   acknowledged, and not at the receipt's position (for a duplicate, the original's)
    ALTERED     stored with another content than sent
    TWICE       a producer's sequence id is stored at two positions
    REORDERED   stored behind a higher id of its producer, its entry, or its key
    INVENTED    in the log, and never sent
    NOT_STALE   refused as stale, although it is in the log or nothing overtook it
    FORGOTTEN   dedup's marks are below the log
    IMAGINED    dedup's marks are above the log

Everything here is a function on values. tests/unit/test_checkers.py shows that each anomaly is
found.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import NamedTuple

from seqgate.message_id import MessageId
from seqgate.types import Position

SHOWN_MAX = 10
"""Anomalies shown in a report."""


class Identity(NamedTuple):
    """A message's identity."""

    producer: str
    sequence_id: int

    def __str__(self) -> str:
        return f"{self.producer}#{self.sequence_id}"


class Content(NamedTuple):
    """A message's content."""

    payload: bytes
    key: str | None = None


class Stored(NamedTuple):
    """A stored message."""

    id: MessageId
    identity: Identity
    content: Content


class Acknowledgement(NamedTuple):
    """A receipt: the message, or the original that it duplicates, is at this position."""

    identity: Identity
    id: MessageId
    duplicate: bool


class Marks(NamedTuple):
    """A producer's marks in the dedup state; None if it has none."""

    persisted: int | None
    pushed: int | None


@dataclass
class History:
    """What clients observed. A message that is resent unchanged is one message."""

    sent: dict[Identity, Content] = field(default_factory=dict)
    acknowledged: list[Acknowledgement] = field(default_factory=list)
    stale: list[Identity] = field(default_factory=list)
    failed: list[tuple[Identity, str]] = field(default_factory=list)
    """Messages that producers gave up, with reasons; their outcome is unknown."""

    def send(self, identity: Identity, content: Content) -> None:
        """Record a message before it is sent, since its outcome is open."""
        assert self.sent.setdefault(identity, content) == content, "one id is one message"


class Kind(StrEnum):
    """Kinds of anomalies: see the module."""

    LOST = auto()
    MISPLACED = auto()
    ALTERED = auto()
    TWICE = auto()
    REORDERED = auto()
    INVENTED = auto()
    NOT_STALE = auto()
    FORGOTTEN = auto()
    IMAGINED = auto()


class Anomaly(NamedTuple):
    """A violated invariant, and where."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.what}"


def log_anomalies(history: History, log: Sequence[Stored]) -> list[Anomaly]:
    """All anomalies of a log, by kind."""
    return [
        *_lost(history, log),
        *_stored_wrongly(history, log),
        *_reordered(log),
        *_not_stale(history, log),
    ]


def state_anomalies(log: Sequence[Stored], state: Mapping[str, Marks]) -> list[Anomaly]:
    """All anomalies of a topic's dedup state with nothing in flight: it must equal the fold over
    the log."""
    anomalies = []
    folded: dict[str, int] = {}
    for stored in log:
        producer, sequence_id = stored.identity
        folded[producer] = max(sequence_id, folded.get(producer, -1))
    for producer in sorted(folded.keys() | state.keys()):
        highest = folded.get(producer, -1)
        marks = state.get(producer, Marks(None, None))
        for name, mark in marks._asdict().items():
            found = -1 if mark is None else mark
            if found != highest:
                kind = Kind.FORGOTTEN if found < highest else Kind.IMAGINED
                anomalies.append(
                    Anomaly(kind, f"{producer}: {name} is {mark}, and the log ends at {highest}")
                )
    return anomalies


def report(anomalies: Sequence[Anomaly], context: str = "") -> str:
    """A readable report."""
    lines = [f"{len(anomalies)} anomalies", context]
    lines += [f"  {each}" for each in anomalies[:SHOWN_MAX]]
    if len(anomalies) > SHOWN_MAX:
        lines.append(f"  and {len(anomalies) - SHOWN_MAX} more")
    return "\n".join(filter(None, lines))


def _lost(history: History, log: Sequence[Stored]) -> Iterable[Anomaly]:
    places: dict[Identity, list[MessageId]] = defaultdict(list)
    for stored in log:
        places[stored.identity].append(stored.id)
    for identity, told, duplicate in history.acknowledged:
        found = places.get(identity)
        kind = "a duplicate of what is" if duplicate else "stored"
        if not found:
            yield Anomaly(Kind.LOST, f"{identity} was told to be {kind} at {told}")
        elif told not in found:
            where = ", ".join(map(str, found))
            yield Anomaly(
                Kind.MISPLACED, f"{identity} was told to be {kind} at {told}: it is at {where}"
            )


def _stored_wrongly(history: History, log: Sequence[Stored]) -> Iterable[Anomaly]:
    first: dict[Identity, Stored] = {}
    for stored in log:
        earlier = first.setdefault(stored.identity, stored)
        if earlier is not stored:
            what = "the same" if earlier.content == stored.content else "another message"
            yield Anomaly(
                Kind.TWICE, f"{stored.identity} at {earlier.id}, and {what} at {stored.id}"
            )
        sent = history.sent.get(stored.identity)
        if sent is None:
            yield Anomaly(Kind.INVENTED, f"{stored.identity} at {stored.id}: {stored.content}")
        elif sent != stored.content:
            yield Anomaly(
                Kind.ALTERED,
                f"{stored.identity} at {stored.id}: sent {sent}, stored {stored.content}",
            )


def _reordered(log: Sequence[Stored]) -> Iterable[Anomaly]:
    """Batching by key stores a flush as several entries with interleaved ids, ordered by their
    highest ids. So entries are compared by these, and messages within an entry and a key."""
    entries: dict[tuple[str, Position], list[Stored]] = defaultdict(list)
    keys: dict[tuple[str, str], Stored] = {}
    for stored in log:
        producer, sequence_id = stored.identity
        entry = entries[producer, stored.id.position]
        if entry and entry[-1].identity.sequence_id >= sequence_id:
            yield _behind(stored, entry[-1], "in its entry")
        entry.append(stored)
        if stored.content.key is not None:
            before = keys.get((producer, stored.content.key))
            if before is not None and before.identity.sequence_id >= sequence_id:
                yield _behind(stored, before, f"of key {stored.content.key}")
            keys[producer, stored.content.key] = stored
    last: dict[str, Stored] = {}
    for (producer, _), messages in entries.items():
        highest = max(messages, key=lambda each: each.identity.sequence_id)
        before = last.get(producer)
        if before is not None and before.identity.sequence_id >= highest.identity.sequence_id:
            yield _behind(highest, before, "of its producer")
        last[producer] = highest


def _behind(stored: Stored, before: Stored, among: str) -> Anomaly:
    return Anomaly(
        Kind.REORDERED,
        f"{stored.identity} at {stored.id} is behind {before.identity} at {before.id} {among}",
    )


def _not_stale(history: History, log: Sequence[Stored]) -> Iterable[Anomaly]:
    places = {stored.identity: stored.id for stored in log}
    highest: dict[str, int] = {}
    for producer, sequence_id in places:
        highest[producer] = max(sequence_id, highest.get(producer, -1))
    for identity in history.stale:
        if identity in places:
            yield Anomaly(Kind.NOT_STALE, f"{identity} is at {places[identity]}")
        elif highest.get(identity.producer, -1) < identity.sequence_id:
            yield Anomaly(Kind.NOT_STALE, f"{identity}: nothing of its producer is above it")
