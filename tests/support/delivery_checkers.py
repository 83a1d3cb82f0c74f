"""What must hold of deliveries, whatever fails, said of a history: what consumers received, asked,
and were answered.

    LOST         the subscription has moved over it, and nobody ever asked to acknowledge it
    REORDERED    delivered first after a later message of its key was
    OVERTAKEN    acknowledged, and an earlier message of its key was not asked to be
    SHARED       delivered while another consumer had a message of its key, which it settled later
    RESURRECTED  delivered again after its acknowledgement was answered as durable

Every delivery has a token: the subscription's epoch, and a number that grows within it. So tokens
say in which order the service delivered, however late a stream is read.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from seqgate.types import Position

SHOWN_MAX = 10
"""How many anomalies a report shows."""


class Token(NamedTuple):
    """Names a delivery."""

    epoch: int
    number: int


@dataclass(slots=True)
class Given:
    """A delivery, and what became of it. Times are places in the history."""

    token: Token
    consumer: str
    key: str
    position: Position
    delivered: int
    asked: int | None = None
    done: int | None = None


@dataclass
class Deliveries:
    """A history, in the order in which its consumers saw it."""

    given: dict[Token, Given] = field(default_factory=dict)
    _now: int = 0

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def delivered(self, consumer: str, token: Token, key: str, position: Position) -> None:
        """Somebody was given a message."""
        assert token not in self.given, f"{token} names two deliveries"
        self.given[token] = Given(token, consumer, key, position, self._tick())

    def asked(self, token: Token) -> None:
        """Somebody asks to acknowledge it."""
        self.given[token].asked = self._tick()

    def done(self, token: Token) -> None:
        """It was told that it is acknowledged, durably."""
        self.given[token].done = self._tick()


def anomalies(history: Deliveries, published: Iterable[Position]) -> list[str]:
    """All that is wrong with a history, after which all that was published is acknowledged."""
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
    """Fail, and say why, when anything is wrong."""
    found = anomalies(history, published)
    shown = "\n".join(found[:SHOWN_MAX])
    assert not found, f"{len(found)} anomalies:\n{shown}"
