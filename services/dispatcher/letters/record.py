"""The durable record of a redrive of many: a property of the subscription's cursor.

A step of the redrive is one change of properties: the returns that it makes, and the record with
their number counted and the position behind them. So each message is redriven once.
"""

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from seqgate.services.dispatcher.ports import INTERNAL
from seqgate.types import Position, TopicName

RECORD: Final = f"{INTERNAL}redrive."
"""The prefix of the records' names."""

RECORDS_MAX: Final = 16
"""The most redrives of many that a subscription remembers, of at most 4 kB each."""

KEY_BYTES_MAX: Final = 512
EXPRESSION_BYTES_MAX: Final = 1_024
"""The longest key and the longest expression that select messages, in bytes: with the rest of a
record they fit into a property."""

TEXT_MAX: Final = 100
"""The most characters of a record's failure, and of its caller."""


class State(Enum):
    RUNNING = auto()
    DONE = auto()
    STOPPED = auto()
    FAILED = auto()


class RedriveOutcome(Enum):
    """What a redrive does with a message: see RedriveOutcome in dispatcher.proto."""

    REDRIVEN = auto()
    NOT_SELECTED = auto()
    EXPRESSION_FAILED = auto()
    FILTERED = auto()
    UNACKNOWLEDGED = auto()
    RETURNING = auto()
    SETTLED = auto()
    REDRIVEN_TOO_OFTEN = auto()
    INCOMPLETE = auto()
    TOO_LARGE = auto()


class Selection(NamedTuple):
    """The messages with this key (None: any), and for which the expression is true (empty: any)."""

    key: bytes | None = None
    expression: str = ""


class Extent(NamedTuple):
    """The entries of a log after one position (None: from the first) through another (None: there
    are none)."""

    after: Position | None
    through: Position | None


@dataclass(frozen=True, slots=True)
class RedriveRecord:
    """A redrive of many.

    Attributes:
        source: the topic that its messages are read from: a dead letter topic or, for a replay, the
            subscription's own.
        stretch: the part of the source.
        after: everything up to here was examined; None: nothing.
        letters_s: the most messages a second; 0: no limit.
        total, scanned: the number of entries in the stretch, and of those examined.
        counts: the number of messages by outcome.
        started_ms, ended_ms: when it started and ended, in ms since 1970; 0: it runs.
    """

    number: int
    request_id: str
    caller: str
    source: TopicName
    selection: Selection
    stretch: Extent
    letters_s: int
    total: int
    started_ms: int
    after: Position | None = None
    scanned: int = 0
    counts: Mapping[RedriveOutcome, int] = field(default_factory=dict)
    state: State = State.RUNNING
    failure: str = ""
    ended_ms: int = 0

    @property
    def name(self) -> str:
        """The name of its property."""
        return f"{RECORD}{self.number}"

    def to_text(self) -> str:
        key, expression = self.selection
        return json.dumps(
            {
                "id": base64.b64encode(self.request_id.encode()).decode(),
                "by": _short(self.caller),
                "source": str(self.source),
                "key": None if key is None else base64.b64encode(key).decode(),
                "expression": base64.b64encode(expression.encode()).decode(),
                "stretch": self.stretch,
                "rate": self.letters_s,
                "total": self.total,
                "started": self.started_ms,
                "after": self.after,
                "scanned": self.scanned,
                "counts": {each.name: count for each, count in self.counts.items()},
                "state": self.state.name,
                "failure": _short(self.failure),
                "ended": self.ended_ms,
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_text(cls, name: str, text: str) -> "RedriveRecord":
        found = json.loads(text)
        key = found["key"]
        return cls(
            number=int(name.removeprefix(RECORD)),
            request_id=base64.b64decode(found["id"]).decode(),
            caller=found["by"],
            source=TopicName.parse(found["source"]),
            selection=Selection(
                None if key is None else base64.b64decode(key),
                base64.b64decode(found["expression"]).decode(),
            ),
            stretch=Extent(*map(_position, found["stretch"])),
            letters_s=found["rate"],
            total=found["total"],
            started_ms=found["started"],
            after=_position(found["after"]),
            scanned=found["scanned"],
            counts={RedriveOutcome[each]: count for each, count in found["counts"].items()},
            state=State[found["state"]],
            failure=found["failure"],
            ended_ms=found["ended"],
        )


def records_of(properties: Mapping[str, str]) -> dict[int, RedriveRecord]:
    """The records in a cursor's properties by number, the oldest first."""
    found = (
        RedriveRecord.from_text(name, text)
        for name, text in properties.items()
        if name.startswith(RECORD)
    )
    return {each.number: each for each in sorted(found, key=lambda each: each.number)}


def forgotten(records: Collection[RedriveRecord]) -> list[RedriveRecord]:
    """The oldest records, to be removed for a new one. (The newest stays, and the next number
    follows its number.)"""
    return sorted(records, key=lambda each: each.number)[: max(0, len(records) - RECORDS_MAX + 1)]


def _short(text: str) -> str:
    """The start of a text, with at most four bytes a character in JSON."""
    return "".join(each if each.isprintable() else "?" for each in text[:TEXT_MAX])


def _position(value: list[int] | None) -> Position | None:
    return None if value is None else Position(*value)
