"""Is every message in the log, once, in order, as it was, and where its receipt says?

The log is held against the data set, message by message. Nothing that a service or a producer says
about itself is believed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from seqgate.client import Message
from tools.demo.flights import Flight
from tools.demo.weather import Weather

EXAMPLES_MAX: Final = 3  # examples of each broken promise that are kept


@dataclass(slots=True, kw_only=True)
class Noted:
    """Counters of broken promises, with examples."""

    examples: dict[str, list[str]] = field(default_factory=dict)

    def note(self, anomaly: str, example: str) -> None:
        """Count a broken promise, and keep an example."""
        setattr(self, anomaly, getattr(self, anomaly) + 1)
        examples = self.examples.setdefault(anomaly, [])
        if len(examples) < EXAMPLES_MAX:
            examples.append(example)


@dataclass(slots=True)
class Findings(Noted):
    """What was found. All but `stored` and `receipts` should be 0."""

    stored: int = 0
    stored_twice: int = 0
    lost: int = 0
    out_of_order: int = 0
    altered: int = 0
    unknown: int = 0
    receipts: int = 0
    receipts_wrong: int = 0
    marks_wrong: int = 0

    @property
    def broken(self) -> int:
        """How many promises are broken."""
        of_messages = (
            self.stored_twice + self.lost + self.out_of_order + self.altered + self.unknown
        )
        return of_messages + self.receipts_wrong + self.marks_wrong


class Proof:
    """Collects evidence; `findings` judges it."""

    def __init__(self, originals: Iterable[Flight | Weather]) -> None:
        self._expected = {(each.producer, each.sequence_id): each for each in originals}
        self._where: dict[tuple[str, int], str] = {}
        self._last: dict[str, int] = {}
        self._findings = Findings()

    def see_message(self, message: Message) -> None:
        """The log holds this, after what was seen before."""
        identity = (message.producer_name, message.sequence_id)
        where = str(message.id)
        original = self._expected.get(identity)
        if original is None:
            self._findings.note("unknown", f"{identity} at {where}")
            return
        if identity in self._where:
            self._findings.note("stored_twice", f"{identity} at {self._where[identity]}, {where}")
            return
        self._where[identity] = where
        self._findings.stored += 1
        if message.sequence_id <= self._last.get(message.producer_name, -1):
            self._findings.note("out_of_order", f"{identity} at {where}")
        self._last[message.producer_name] = message.sequence_id
        given = (message.payload, message.key, message.properties)
        if given != (original.payload, original.key, original.properties):
            self._findings.note("altered", f"{identity} at {where}")

    def see_receipt(self, producer: str, sequence_id: int, message_id: str) -> None:
        """A producer has this receipt. Comes after all messages."""
        self._findings.receipts += 1
        where = self._where.get((producer, sequence_id))
        if where != message_id:
            example = f"({producer}, {sequence_id}): {message_id}, is at {where}"
            self._findings.note("receipts_wrong", example)

    def see_mark(self, producer: str, persisted: int | None) -> None:
        """Deduplication has this as the producer's last id. Comes after all messages."""
        if persisted != self._last.get(producer):
            self._findings.note("marks_wrong", f"{producer}: {persisted}")

    def findings(self) -> Findings:
        """The verdict, once everything was seen."""
        for identity in self._expected.keys() - self._where.keys():
            self._findings.note("lost", str(identity))
        return self._findings
