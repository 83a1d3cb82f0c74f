"""A promise that was broken, and what is known of it."""

from typing import NamedTuple


class Violation(NamedTuple):
    """One of them.

    Attributes:
        kind: upper case; log_checker.py, delivery_checker.py and settling.py say which there are.
        where: the topic, topic and subscription, or process.
        what: a sentence with the places and ids that it is about.
        at_ns: when a client saw it, by the machine's monotonic clock; None: in the end.
    """

    kind: str
    where: str
    what: str
    at_ns: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.where}: {self.what}"
