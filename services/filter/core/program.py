"""An expression that may be a filter: of the right type, within the limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from seqgate.services.filter.core.cost import Cost, cost_of
from seqgate.services.filter.core.faults import Fault, InvalidExpression
from seqgate.services.filter.core.reads import Reads
from seqgate.services.filter.core.syntax import Node

EXPRESSION_BYTES_MAX: Final = 4 * 1024
"""The longest expression, in bytes of UTF-8. Literals are a part of it."""

_BLANK: Final = "\t\n\r"

Values = Mapping[str, object]
"""The values of variables."""


class Type(Enum):
    """The type of an expression."""

    BOOL = auto()
    """True accepts an entry, false rejects it."""
    DURATION = auto()
    """The delay after which an entry is judged again; zero accepts it."""


class FailureReason(Enum):
    """Why there is no verdict."""

    PROPERTY_ABSENT = auto()
    """The filter looked up a property that the entry lacks."""
    EVALUATION_FAILED = auto()
    """An invalid conversion, a division by zero, a number out of range, ..."""
    INVALID_DELAY = auto()
    """The delay is negative, or longer than a day."""
    INVALID_METADATA = auto()
    """The metadata that the chain reads exceeds the limit."""


@dataclass(frozen=True, slots=True)
class Failure:
    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class Shown:
    """The value of a sub-expression, for people."""

    type_name: str
    text: str
    is_failure: bool


class Compiled(Protocol):
    """An expression, compiled by an engine."""

    @property
    def type(self) -> Type: ...

    @property
    def tree(self) -> Node: ...

    @property
    def size_bytes(self) -> int:
        """Its approximate memory."""
        ...

    def check_constants(self) -> None:
        """Raises InvalidExpression, with the part's place, if a constant part always fails."""
        ...

    def evaluate(self, values: Values) -> bool | int | Failure:
        """Its value for an entry; a duration in microseconds."""
        ...

    def show(self, node: Node, values: Values) -> Shown:
        """The value of a sub-expression outside of loops."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    text: str
    compiled: Compiled
    reads: Reads
    cost: Cost

    @property
    def type(self) -> Type:
        return self.compiled.type


def check_text(text: str) -> None:
    """Raises InvalidExpression if the text is too long, or has control characters."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > EXPRESSION_BYTES_MAX:
        message = f"expression is {size:,} bytes long (limit {EXPRESSION_BYTES_MAX:,})"
        raise InvalidExpression.of([Fault.at(text, 0, message)])
    for offset, character in enumerate(text):
        if (character < " " and character not in _BLANK) or character == "\x7f":
            raise InvalidExpression.of([Fault.at(text, offset, "control character in expression")])


def program_of(text: str, compiled: Compiled) -> Program:
    """Raises InvalidExpression if the expression costs too much, or a constant part always
    fails."""
    cost = cost_of(text, compiled.tree)
    compiled.check_constants()
    return Program(text, compiled, Reads.of(compiled.tree), cost)
