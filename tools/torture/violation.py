"""A broken promise, and the facts about it."""

from collections.abc import Iterable
from typing import NamedTuple

Found = Iterable[tuple[str, str, int | None]]
"""A checker's findings in one place: Violations without `where`, as tuples."""


class Violation(NamedTuple):
    """A broken promise.

    Attributes:
        kind: in upper case; log_checker.py, delivery_checker.py and settling.py list them.
        where: a topic, a topic and subscription, or a process.
        what: a sentence with the places and ids concerned.
        at_ns: when a client saw it, on the machine's monotonic clock; None if found at the end.
    """

    kind: str
    where: str
    what: str
    at_ns: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.where}: {self.what}"


def violations(where: str, found: Found) -> list[Violation]:
    return [Violation(kind, where, what, at_ns) for kind, what, at_ns in found]
