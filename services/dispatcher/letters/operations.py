"""The record of the latest redrives, mends and discards of a subscription's letters.

Each is a property of the subscription's cursor, written in the change that it describes. Requests
that are repeated find their answer here.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.positions import runs_of
from seqgate.services.dispatcher.ports import INTERNAL
from seqgate.types import Position, TopicName

_OPERATION: Final = f"{INTERNAL}operation."

OPERATIONS_MAX: Final = 64
"""How many operations are remembered: the latest, of TEXT_BYTES_MAX each at most."""

TEXT_BYTES_MAX: Final = 3_500
"""The longest text of an operation, in bytes. Letters beyond it are counted and not named."""

CALLER_BYTES_MAX: Final = 512
"""The longest name of a caller that is recorded, in bytes; a longer one is cut."""


class Action(Enum):
    """What an operation does."""

    REDRIVE = "REDRIVE"
    MEND = "MEND"
    DISCARD = "DISCARD"


class Operation(NamedTuple):
    """An operation on letters.

    Attributes:
        number: counts the subscription's operations; 0: not recorded yet.
        topic, letters: the dead letter topic, and the letters in it; the first ones, if they are
            too many for the record.
        size: the number of letters.
        reason: of a discard, why.
        successor: of a mend, the mended letter.
    """

    number: int
    action: Action
    request_id: str
    caller: str
    at_ms: int
    topic: TopicName
    letters: tuple[Position, ...]
    size: int
    reason: str = ""
    successor: Position | None = None

    def to_text(self) -> str:
        runs = [[*run.first, run.size] for run in runs_of(self.letters)]
        caller = self.caller.encode()[:CALLER_BYTES_MAX].decode(errors="ignore")
        about = [self.action.value, self.request_id, caller, self.at_ms, str(self.topic)]
        rest = [self.size, self.reason, self.successor]
        while True:
            text = json.dumps([*about, runs, *rest], ensure_ascii=False)
            if len(text.encode()) <= TEXT_BYTES_MAX or not runs:
                return text
            del runs[len(runs) // 2 :]

    @classmethod
    def from_text(cls, number: int, text: str) -> "Operation":
        action, request_id, caller, at_ms, topic, runs, count, reason, after = json.loads(text)
        letters = [
            Position(ledger_id, each)
            for ledger_id, first, size in runs
            for each in range(first, first + size)
        ]
        return cls(
            number,
            Action(action),
            request_id,
            caller,
            at_ms,
            TopicName.parse(topic),
            tuple(letters),
            count,
            reason,
            None if after is None else Position(*after),
        )


class Operations:
    """The latest operations of one subscription, the oldest first."""

    def __init__(self) -> None:
        self.latest: list[Operation] = []

    def load(self, properties: Mapping[str, str]) -> None:
        names = {
            int(name.removeprefix(_OPERATION)): name
            for name in properties
            if name.startswith(_OPERATION)
        }
        self.latest = [
            Operation.from_text(number, properties[names[number]]) for number in sorted(names)
        ]

    def repeated(self, action: Action, request_id: str) -> Operation | None:
        """The operation that a request made before; None: it made none that is remembered."""
        wanted = (action, request_id)
        return next(
            (each for each in self.latest if (each.action, each.request_id) == wanted), None
        )

    def numbered(self, operation: Operation) -> Operation:
        """The operation with the next number."""
        number = 1 + (self.latest[-1].number if self.latest else 0)
        return operation._replace(number=number)

    def change(self, operation: Operation) -> tuple[dict[str, str], list[str]]:
        """The properties to put and to remove when a numbered operation is recorded."""
        forgotten = self.latest[: max(0, len(self.latest) + 1 - OPERATIONS_MAX)]
        put = {f"{_OPERATION}{operation.number}": operation.to_text()}
        return put, [f"{_OPERATION}{each.number}" for each in forgotten]

    def record(self, operation: Operation) -> None:
        """Record an operation that is durable."""
        kept = Operation.from_text(operation.number, operation.to_text())
        self.latest = [*self.latest, kept][-OPERATIONS_MAX:]
