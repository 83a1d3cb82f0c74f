"""A chain of filters: the first verdict other than ACCEPT is the chain's.

A chain sees only the *key* of an entry: a tuple of the values that its filters read. Equal keys
have equal decisions, for all chains of the same content, so decisions are cached by key.

    key = (the chain's digest, the properties that are read, the other variables that are read)

The properties are None for a batch that carries none: its messages may have some, but a batch is
never opened, so filters that read properties accept it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from seqgate.services.filter.core.cost import PROPERTIES_MAX, TEXT_BYTES_MAX
from seqgate.services.filter.core.program import Failure, FailureReason, Program
from seqgate.services.filter.core.reads import PROPERTIES, SUBSCRIPTION, Reads

FILTERS_MAX: Final = 16
"""The most filters of a chain."""

DELAY_MAX_MS: Final = 86_400_000
"""The longest delay, in milliseconds: a day."""

MICROSECONDS: Final = 1_000
"""In a millisecond."""

NUMBER_MAX: Final = 2**63 - 1
"""The largest integer of expressions."""

TOPIC: Final = "topic"
CONSTANT: Final = frozenset({TOPIC, SUBSCRIPTION})
"""Variables that are the same for all entries of a chain: its digest covers them."""

NUMBERS: Final = frozenset({"sequence_id", "publish_time_ms", "num_messages"})


class Verdict(Enum):
    ACCEPT = auto()
    REJECT = auto()
    RESCHEDULE = auto()
    """Judge the entry again after a delay."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a chain on an entry.

    Attributes:
        filter: the index in the chain of the deciding filter, from 0; None: all accepted.
        delay_ms: with RESCHEDULE, the delay; 1 to DELAY_MAX_MS.
    """

    result: Verdict | Failure
    filter: int | None = None
    delay_ms: int = 0


ACCEPTED: Final = Decision(Verdict.ACCEPT)

Key = tuple[object, ...]


class Chain:
    """Filters in their order, for a topic and a subscription."""

    def __init__(
        self, digest: bytes, programs: Sequence[Program], constants: Mapping[str, object]
    ) -> None:
        """`digest` covers the content: chains with equal digests decide alike. `constants` are the
        values of `topic` and `subscription`."""
        self.digest = digest
        self.programs = tuple(programs)
        self.reads = Reads.together(each.reads for each in programs)
        self.steps = sum(each.cost.steps for each in programs)
        """The upper bound of a decision's cost."""
        self.size_bytes = sum(each.compiled.size_bytes for each in programs)
        """The memory of the filters, approximately."""
        self.names = None if self.reads.properties is None else sorted(self.reads.properties)
        """The properties that keys hold; None: all of the entry's, with their names."""
        self.fields = sorted(self.reads.variables - CONSTANT - {PROPERTIES})
        """The other variables that keys hold."""
        self._constants = {
            name: _needed(constants[name], self.reads.subscription)
            for name in self.reads.variables & CONSTANT
        }
        self._asked = [
            (each.compiled.evaluate, PROPERTIES in each.reads.variables) for each in programs
        ]
        self._is_bounded = self.names is not None and not NUMBERS.intersection(self.fields)
        """Whether only the texts of a key can exceed a limit."""
        self._rejected = [Decision(Verdict.REJECT, index) for index in range(len(programs))]

    @property
    def reads_properties(self) -> bool:
        return PROPERTIES in self.reads.variables

    def decide(self, key: Key, weight: int) -> Decision:
        """The decision for all entries with this key; `weight` is its `weight_of`."""
        if weight > TEXT_BYTES_MAX or not self._is_bounded:
            wrong = self._wrong(key, weight)
            if wrong is not None:
                return Decision(wrong)
        values = self.values(key)
        unseen = key[1] is None
        for index, (evaluate, reads_properties) in enumerate(self._asked):
            if unseen and reads_properties:
                continue
            value = evaluate(values)
            if value is True:
                continue
            if value is False:
                return self._rejected[index]
            result = value if isinstance(value, Failure) else delay_ms_of(value)
            if isinstance(result, Failure):
                return Decision(result, index)
            if result:
                return Decision(Verdict.RESCHEDULE, index, result)
        return ACCEPTED

    def can_ask(self, key: Key) -> bool:
        """Whether all filters can be evaluated for this key."""
        return key[1] is not None and self._wrong(key, weight_of(key)) is None

    def values(self, key: Key) -> dict[str, object]:
        """The values of the variables. Those of a batch without properties lack `properties`."""
        values = self._constants.copy()
        if self.fields:
            values.update(zip(self.fields, key[2:], strict=True))
        properties: Any = key[1]
        if properties:
            # Built in one step if no property is absent: this runs for each entry not cached.
            found = dict(properties if self.names is None else zip(self.names, properties))  # noqa: B905
            if None in properties:
                found = {name: value for name, value in found.items() if value is not None}
            values[PROPERTIES] = found
        elif properties is not None:
            values[PROPERTIES] = {}
        return values

    def _wrong(self, key: Key, weight: int) -> Failure | None:
        """The failure of an entry with a field above its limit for expressions."""
        if self.names is None and key[1] is not None:
            properties: Any = key[1]
            if len(properties) > PROPERTIES_MAX:
                return Failure(
                    FailureReason.INVALID_METADATA,
                    f"entry has {len(properties)} properties (limit {PROPERTIES_MAX})",
                )
        for number in key[2:]:
            if isinstance(number, int) and not 0 <= number <= NUMBER_MAX:
                return Failure(
                    FailureReason.INVALID_METADATA, "a number is negative or above 2^63 - 1"
                )
        if weight > TEXT_BYTES_MAX and (size := text_bytes(key[1:])) > TEXT_BYTES_MAX:
            return Failure(
                FailureReason.INVALID_METADATA,
                f"entry has {size:,} bytes of text for filters (limit {TEXT_BYTES_MAX:,})",
            )
        return None


def _needed(value: object, names: frozenset[str] | None) -> object:
    """A text; of a map, only the part that is read, since the engine copies it for each entry."""
    if not isinstance(value, Mapping) or names is None:
        return value
    return {name: each for name, each in value.items() if name in names}


def delay_ms_of(microseconds: int) -> int | Failure:
    """The delay in milliseconds, rounded up, after which an entry is judged again; 0: accept."""
    if not 0 <= microseconds <= DELAY_MAX_MS * MICROSECONDS:
        return Failure(
            FailureReason.INVALID_DELAY,
            f"delay of {microseconds / MICROSECONDS:,.0f} ms is out of range (0 to "
            f"{DELAY_MAX_MS:,})",
        )
    return -(-microseconds // MICROSECONDS)


def weight_of(key: Key) -> int:
    """An upper bound of `text_bytes`, and of the texts' memory, that is quicker to compute."""
    weight = 0
    for part in key:
        for each in part if isinstance(part, tuple) else (part,):
            if isinstance(each, str):
                weight += len(each) if each.isascii() else 4 * len(each)
            elif isinstance(each, tuple):  # a name and a value
                weight += 4 * sum(map(len, each))
    return weight


def text_bytes(part: object) -> int:
    """The total length of a key's texts, in bytes of UTF-8."""
    match part:
        case str():
            return len(part.encode())
        case tuple():
            return sum(map(text_bytes, part))
        case _:
            return 0


ReadKey = Callable[[object], Key]
"""Makes the key of an entry."""
