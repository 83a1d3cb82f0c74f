"""The faults of an expression, with their positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from seqgate.services.errors import DomainError, Kind


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        offset: where, in characters from 0.
        line: the same, from 1.
        column: in that line, in characters from 1.
        message: one sentence for people.
    """

    offset: int
    line: int
    column: int
    message: str

    @classmethod
    def at(cls, text: str, offset: int, message: str) -> Self:
        """A fault at a place of the text."""
        before = text[:offset]
        line = before.count("\n") + 1
        return cls(offset, line, offset - (before.rfind("\n") + 1) + 1, message)

    @classmethod
    def in_line(cls, text: str, line: int, column: int, message: str) -> Self:
        """A fault at a place that is given by line and column, both from 1; a place that the text
        does not have is its beginning or its end."""
        lines = text.split("\n")
        if line < 1:
            return cls.at(text, 0, message)
        before = sum(len(each) + 1 for each in lines[: line - 1])
        return cls.at(text, max(0, min(len(text), before + column - 1)), message)


class InvalidExpression(DomainError):
    """An expression does not compile, has the wrong type, or costs too much."""

    kind = Kind.INVALID
    reason = "INVALID_EXPRESSION"
    faults: tuple[Fault, ...] = ()
    """All that is wrong with it; the refusal names the first."""

    @classmethod
    def of(cls, faults: Sequence[Fault], *, field: str = "expression", **details: object) -> Self:
        """The refusal of an expression that has these faults."""
        first = faults[0]
        refusal = cls(
            f"line {first.line}, column {first.column}: {first.message}",
            field=field,
            offset=first.offset,
            line=first.line,
            column=first.column,
        )
        refusal.details |= details
        refusal.faults = tuple(faults)
        return refusal
