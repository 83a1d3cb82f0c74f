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
"""The values of the variables that are read."""


class Type(Enum):
    """The type of an expression."""

    BOOL = auto()
    """Whether an entry is wanted."""
    DURATION = auto()
    """After how long an entry is asked about again; zero: it is wanted."""


class FailureReason(Enum):
    """Why there is no verdict."""

    PROPERTY_ABSENT = auto()
    """A property was looked up that the entry does not have."""
    EVALUATION_FAILED = auto()
    """A text is no number, a division by zero, a number out of its bounds, ..."""
    INVALID_DELAY = auto()
    """A delay is negative, or longer than a day."""
    INVALID_METADATA = auto()
    """The metadata that the chain reads exceeds the limit."""


@dataclass(frozen=True, slots=True)
class Failure:
    """There is no verdict, and why."""

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
    def type(self) -> Type:
        """The type of its value."""
        ...

    @property
    def tree(self) -> Node:
        """Its tree."""
        ...

    @property
    def size_bytes(self) -> int:
        """How much memory it takes, roughly."""
        ...

    def check_constants(self) -> None:
        """Return if no part that depends on nothing must fail.

        Raises:
            InvalidExpression: one must; with its place.
        """
        ...

    def evaluate(self, values: Values) -> bool | int | Failure:
        """Its value for an entry; a duration in microseconds."""
        ...

    def show(self, node: Node, values: Values) -> Shown:
        """The value of a part of it; one outside of loops."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """See the module."""

    text: str
    compiled: Compiled
    reads: Reads
    cost: Cost

    @property
    def type(self) -> Type:
        """The type of its value."""
        return self.compiled.type


def check_text(text: str) -> None:
    """Return if the text may be handed to an engine.

    Raises:
        InvalidExpression: it is too long, or holds control characters.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > EXPRESSION_BYTES_MAX:
        message = f"expression is {size:,} bytes long (limit {EXPRESSION_BYTES_MAX:,})"
        raise InvalidExpression.of([Fault.at(text, 0, message)])
    for offset, character in enumerate(text):
        if (character < " " and character not in _BLANK) or character == "\x7f":
            raise InvalidExpression.of([Fault.at(text, offset, "control character in expression")])


def program_of(text: str, compiled: Compiled) -> Program:
    """The compiled expression, if it is a valid filter.

    Raises:
        InvalidExpression: it costs too much, or a constant part of it always fails.
    """
    cost = cost_of(text, compiled.tree)
    compiled.check_constants()
    return Program(text, compiled, Reads.of(compiled.tree), cost)
