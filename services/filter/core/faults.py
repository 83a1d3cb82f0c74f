"""The faults of an expression, with their positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from seqgate.services.errors import DomainError, Kind


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of an expression; `offset` is in characters from 0, `line` and `column` from 1."""

    offset: int
    line: int
    column: int
    message: str

    @classmethod
    def at(cls, text: str, offset: int, message: str) -> Self:
        before = text[:offset]
        line = before.count("\n") + 1
        return cls(offset, line, offset - (before.rfind("\n") + 1) + 1, message)

    @classmethod
    def in_line(cls, text: str, line: int, column: int, message: str) -> Self:
        """A fault at a line and column, both from 1. A place outside of the text is moved to its
        beginning or end."""
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
    """All faults; the message names the first."""

    @classmethod
    def of(cls, faults: Sequence[Fault], *, field: str = "expression", **details: object) -> Self:
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
