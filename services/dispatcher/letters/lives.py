"""The earlier lives of a redriven message: its letters before, and the failed deliveries of each.

They travel as a property from letter to letter. Consumers do not get it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import FailedDelivery, How, Why
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.letters.forged import FORGED, number_of, text_of
from seqgate.services.dispatcher.ports import ATTEMPTS, FAILURES, LIVES, REASON
from seqgate.times import milliseconds
from seqgate.types import Position

FAILURES_BYTES_MAX: Final = 3_000
"""The longest property with the failed deliveries of a letter, in bytes: with its reason it fits
into a property of a cursor."""

NOTED_BYTES_MAX: Final = 1_000
"""The longest text with the failed deliveries of an entry that a cursor keeps until the entry is
settled, in bytes."""

LIVES_BYTES_MAX: Final = 16 * 1024
"""The longest property with the lives of a message, in bytes. REDRIVES_MAX bounds their number."""


class Life(NamedTuple):
    """A time between two redrives of a message.

    Attributes:
        letter: the letter that ended it, in its dead letter topic, at `at_ms`.
        why: why it was dead-lettered; None: not known.
        attempts, failures: its failed deliveries; the latest of them.
    """

    letter: Position
    at_ms: int
    why: Why | None
    attempts: int
    failures: tuple[FailedDelivery, ...]

    def to_json(self) -> list[Any]:
        why = "" if self.why is None else self.why.value
        failures = [each.to_json() for each in self.failures]
        return [*self.letter, self.at_ms, why, self.attempts, failures]

    def without_reasons(self) -> "Life":
        return self._replace(failures=tuple(each._replace(reason="") for each in self.failures))


def with_life(letter: StoredEntry) -> str:
    """The property of a letter's message once it is redriven: its lives, this one included. Beyond
    LIVES_BYTES_MAX, reasons for the failures of the oldest are left out, and then the oldest."""
    properties = letter.metadata.properties
    life = Life(
        position_of(letter),
        milliseconds(letter.append_time),
        _why(properties.get(REASON, "")),
        _number(properties.get(ATTEMPTS, "")),
        failures_of(properties.get(FAILURES, "")),
    )
    lives = [*lives_of(properties), life]
    bare = 0  # how many have no reasons any more
    while True:
        text = json.dumps([each.to_json() for each in lives], ensure_ascii=False)
        if len(text.encode()) <= LIVES_BYTES_MAX or not lives:
            return text
        if bare < len(lives) - 1:
            lives[bare] = lives[bare].without_reasons()
            bare += 1
        else:
            del lives[0]


def noted(failures: Sequence[FailedDelivery], bytes_max: int = NOTED_BYTES_MAX) -> str:
    """Failed deliveries as JSON. Beyond `bytes_max` the reasons of the oldest are left out, and
    then the oldest; empty: there are none."""
    kept = list(failures)
    for place, each in enumerate(kept):
        if len(fitting(kept, bytes_max)) == len(kept):
            break
        kept[place] = each._replace(reason="")
    values = [each.to_json() for each in fitting(kept, bytes_max)]
    return json.dumps(values, ensure_ascii=False) if values else ""


def fitting(
    failures: Sequence[FailedDelivery], bytes_max: int = FAILURES_BYTES_MAX
) -> tuple[FailedDelivery, ...]:
    """The latest failed deliveries, without the oldest ones beyond `bytes_max`."""
    size_bytes, fit = 2, 0
    for each in reversed(failures):
        size_bytes += len(json.dumps(each.to_json(), ensure_ascii=False).encode()) + 2
        if size_bytes > bytes_max:
            break
        fit += 1
    return tuple(failures[len(failures) - fit :])


def lives_of(properties: Mapping[str, str]) -> tuple[Life, ...]:
    """The earlier lives of a letter's message, the oldest first; none if the property is forged."""
    try:
        given = json.loads(properties.get(LIVES, "[]"))
        return tuple(
            Life(
                Position(number_of(ledger_id), number_of(entry_id)),
                int(at_ms),
                _why(why),
                int(attempts),
                failures_of(failures),
            )
            for ledger_id, entry_id, at_ms, why, attempts, failures in given
        )
    except FORGED:
        return ()


def failures_of(given: str | list[Any]) -> tuple[FailedDelivery, ...]:
    """Failed deliveries, as in the property FAILURES; those before the first forged one."""
    found: list[FailedDelivery] = []
    try:
        for how, at_ms, *texts in json.loads(given or "[]") if isinstance(given, str) else given:
            found.append(FailedDelivery(How(how), int(at_ms), *map(text_of, texts)))
    except FORGED:
        pass
    return tuple(found)


def _why(text: str) -> Why | None:
    return next((each for each in Why if each.value == text), None)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
