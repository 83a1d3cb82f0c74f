"""Checks a history of deliveries under faults: consumers' deliveries, requests and answers.

    LOST         acknowledged by the subscription, and requested by no consumer
    REORDERED    first delivered after a later message of its key
    OVERTAKEN    a later message of its key was acknowledged before its own was requested
    SHARED       delivered while another consumer held a message of its key, which it settled later
    RESURRECTED  delivered again after its acknowledgement was confirmed as durable

Every delivery has a token: the subscription's epoch, and a number that grows within it. Tokens give
the order of deliveries by the service, however late a stream is read.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from seqgate.types import Position

SHOWN_MAX = 10
"""Anomalies shown in a report."""


class Token(NamedTuple):
    """Identifies a delivery."""

    epoch: int
    number: int


@dataclass(slots=True)
class Given:
    """A delivery and its fate. Times are indexes into the history."""

    token: Token
    consumer: str
    key: str
    position: Position
    delivered: int
    asked: int | None = None
    done: int | None = None


@dataclass
class Deliveries:
    """A history, in the order of its consumers' observations."""

    given: dict[Token, Given] = field(default_factory=dict)
    _now: int = 0

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def delivered(self, consumer: str, token: Token, key: str, position: Position) -> None:
        """A consumer received a message."""
        assert token not in self.given, f"{token} names two deliveries"
        self.given[token] = Given(token, consumer, key, position, self._tick())

    def asked(self, token: Token) -> None:
        """A consumer requests its acknowledgement."""
        self.given[token].asked = self._tick()

    def done(self, token: Token) -> None:
        """The acknowledgement was confirmed as durable."""
        self.given[token].done = self._tick()


def anomalies(history: Deliveries, published: Iterable[Position]) -> list[str]:
    """All anomalies of a history that ends with every published message acknowledged."""
    found: list[str] = []
    in_order = sorted(history.given.values(), key=lambda each: each.token)
    asked = {each.position for each in in_order if each.asked is not None}
    found += [f"LOST {position}" for position in published if position not in asked]
    keys: dict[str, list[Given]] = defaultdict(list)
    for each in in_order:
        keys[each.key].append(each)
    for key, of_key in keys.items():
        found += (f"{text} of {key}" for text in _of_key(of_key))
    return found


def _of_key(of_key: list[Given]) -> Iterable[str]:
    highest: Position | None = None
    seen: set[Position] = set()
    durable: dict[Position, Token] = {}
    for each in of_key:
        if each.position in durable:
            yield f"RESURRECTED {each.position} by {each.token} after {durable[each.position]}"
        if each.position not in seen and highest is not None and each.position < highest:
            yield f"REORDERED {each.position} behind {highest}"
        seen.add(each.position)
        highest = each.position if highest is None else max(highest, each.position)
        if each.done is not None:
            durable[each.position] = each.token
    settled = [each for each in of_key if each.done is not None and each.asked is not None]
    first_asked: dict[Position, int] = {}
    for each in of_key:
        if each.asked is not None:
            before = first_asked.get(each.position, each.asked)
            first_asked[each.position] = min(before, each.asked)
    for each in settled:
        for position in seen:
            asked = first_asked.get(position)
            if position < each.position and (asked is None or asked > (each.done or 0)):
                yield f"OVERTAKEN {position} by {each.position}"
    for each in settled:
        assert each.asked is not None
        for other in of_key:
            is_later = each.token < other.token and each.delivered < other.delivered < each.asked
            if is_later and other.consumer != each.consumer:
                yield f"SHARED {each.position} at {each.consumer}, {other.position} at {other}"


def check(history: Deliveries, published: Iterable[Position]) -> None:
    """Fail with a report if there are anomalies."""
    found = anomalies(history, published)
    shown = "\n".join(found[:SHOWN_MAX])
    assert not found, f"{len(found)} anomalies:\n{shown}"
