"""What became of letters, as properties of the subscription's cursor.

    settled     a bit for each letter that cannot be redriven any more
    discarded   a bit for each of them that was discarded
    mended      for each of them that was mended, the letter that took its place
    mending     for each letter whose mend has begun, what finds the mended letter

A page of bits covers PAGE_LETTERS positions of a dead letter topic, a page of successors
PAGE_SUCCESSORS.
"""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final, NamedTuple

from seqgate.services.dispatcher.ports import INTERNAL
from seqgate.types import Position, TopicName

_SETTLED: Final = f"{INTERNAL}settled."
_DISCARDED: Final = f"{INTERNAL}discarded."
_MENDED: Final = f"{INTERNAL}mended."

_MENDING: Final = f"{INTERNAL}mending."

NEXT_MEND: Final = f"{INTERNAL}mend.next"

MENDING_MAX: Final = 32
"""The most interrupted mends of a subscription, which the next mends of their letters end."""

PAGES_MAX: Final = 300
"""The most pages, of 2.8 kB each. Letters beyond them are not redriven, mended or discarded."""

PAGE_LETTERS: Final = 16_384
"""How many positions of the dead letter topic a page has a bit for."""

PAGE_SUCCESSORS: Final = 64
"""How many positions of the dead letter topic a page has successors for."""


class Fate(Enum):
    """What became of a settled letter."""

    REDRIVEN = "REDRIVEN"
    DISCARDED = "DISCARDED"
    MENDED = "MENDED"


@dataclass(slots=True)
class Pages:
    """Pages by the names of their properties."""

    bits: dict[str, int] = field(default_factory=dict)
    successors: dict[str, dict[int, Position]] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """The properties."""
        found = {name: _bits_text(bits) for name, bits in self.bits.items()}
        for name, successors in self.successors.items():
            found[name] = json.dumps([[place, *each] for place, each in successors.items()])
        return found


class Begun(NamedTuple):
    """A mend that has begun: the producer's name and the sequence id of the mended letter, and the
    last entry of the dead letter topic before it."""

    producer: str
    number: int
    after: Position | None

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> "Begun":
        producer, number, after = json.loads(text)
        return cls(producer, number, None if after is None else Position(*after))


def mending_name(topic: TopicName, letter: Position) -> str:
    """The property of a letter's mend that has begun."""
    return f"{_MENDING}{_digest(topic)}.{letter.ledger_id}.{letter.entry_id}"


class Marks:
    """What became of one subscription's letters."""

    def __init__(self) -> None:
        self._pages = Pages()
        self.mending: dict[str, Begun] = {}
        """The mends that have begun, by the names of their properties."""
        self.next_mend: tuple[str, int] | None = None
        """The producer's name and the sequence id of the next mended letter; None: none yet."""

    def load(self, properties: Mapping[str, str]) -> None:
        self._pages = pages = Pages()
        self.mending = {}
        following = properties.get(NEXT_MEND)
        self.next_mend = None if following is None else tuple(json.loads(following))
        for name, value in properties.items():
            if name.startswith(_MENDING):
                self.mending[name] = Begun.from_text(value)
            if name.startswith((_SETTLED, _DISCARDED)):
                pages.bits[name] = int.from_bytes(base64.b64decode(value), "little")
            elif name.startswith(_MENDED):
                pages.successors[name] = {
                    place: Position(*each) for place, *each in json.loads(value)
                }

    def fate(self, topic: TopicName, letter: Position) -> Fate | None:
        """What became of a letter; None: it is not settled."""
        if not self._has(_SETTLED, topic, letter):
            return None
        if self.successor(topic, letter) is not None:
            return Fate.MENDED
        return Fate.DISCARDED if self._has(_DISCARDED, topic, letter) else Fate.REDRIVEN

    def successor(self, topic: TopicName, letter: Position) -> Position | None:
        """The mended letter that took a letter's place."""
        name, place = _place(_MENDED, topic, letter, PAGE_SUCCESSORS)
        return self._pages.successors.get(name, {}).get(place)

    def _has(self, kind: str, topic: TopicName, letter: Position) -> bool:
        name, place = _place(kind, topic, letter, PAGE_LETTERS)
        return bool(self._pages.bits.get(name, 0) >> place & 1)

    def are_full_with(self, letters: Iterable[tuple[TopicName, Position]], fate: Fate) -> bool:
        """Whether there is no room for the marks of these letters."""
        new = {
            name
            for topic, letter in letters
            for name, _ in _places(topic, letter, fate)
            if name not in self._pages.bits and name not in self._pages.successors
        }
        have = len(self._pages.bits) + len(self._pages.successors)
        return bool(new) and have + len(new) > PAGES_MAX

    def with_letters(
        self,
        letters: Iterable[tuple[TopicName, Position]],
        fate: Fate = Fate.REDRIVEN,
        successor: Position | None = None,
    ) -> Pages:
        """The changed pages once these letters are settled. `successor`: of a mended one."""
        changed = Pages()
        for topic, letter in letters:
            for name, place in _places(topic, letter, fate):
                if name.startswith(_MENDED):
                    assert successor is not None
                    before = changed.successors.get(name, self._pages.successors.get(name, {}))
                    changed.successors[name] = before | {place: successor}
                else:
                    bits = changed.bits.get(name, self._pages.bits.get(name, 0))
                    changed.bits[name] = bits | 1 << place
        return changed

    def apply(self, changed: Pages) -> None:
        """Record changed pages that are durable."""
        self._pages.bits |= changed.bits
        self._pages.successors |= changed.successors


def _places(topic: TopicName, letter: Position, fate: Fate) -> list[tuple[str, int]]:
    """The marks of a letter: the names of their pages, and their places in them."""
    found = [_place(_SETTLED, topic, letter, PAGE_LETTERS)]
    match fate:
        case Fate.DISCARDED:
            found.append(_place(_DISCARDED, topic, letter, PAGE_LETTERS))
        case Fate.MENDED:
            found.append(_place(_MENDED, topic, letter, PAGE_SUCCESSORS))
    return found


def _place(kind: str, topic: TopicName, letter: Position, size: int) -> tuple[str, int]:
    page, place = divmod(letter.entry_id, size)
    return f"{kind}{_digest(topic)}.{letter.ledger_id}.{page}", place


def _digest(topic: TopicName) -> str:
    return blake2b(str(topic).encode(), digest_size=8).hexdigest()


def _bits_text(bits: int) -> str:
    return base64.b64encode(bits.to_bytes((bits.bit_length() + 7) // 8, "little")).decode()
