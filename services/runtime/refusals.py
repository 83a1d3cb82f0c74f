"""What was refused, counted; and a line of the log for it now and then.

Refusals come in classes: of one reason, by one method, and where it matters who asked, of one
caller. The first of a class is logged. For a minute no other one is; the next one after that says
how many there were meanwhile. So a storm of refused calls is no storm of lines, and a class that
is new is seen at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import WARNING
from typing import Any, Final, NamedTuple

import structlog
from google.rpc import status_pb2
from opentelemetry.trace import get_current_span

from seqgate.status import code_of
from seqgate.telemetry import names
from services.errors import DomainError, ServiceBusy
from services.runtime.status import status_of

log = structlog.get_logger()

LOG_INTERVAL_S: Final = 60.0
"""How often a class has a line, at most."""

CLASSES_MAX: Final = 1_000
"""Of how many classes it is remembered when they had one. What is more shares one line."""


class Class(NamedTuple):
    """Refusals that are logged as one."""

    reason: str
    method: str
    of: str = ""
    """What else tells it from others: of denials the caller, of surprises their type."""


_MORE: Final = Class("", "")
"""All classes for which there is no room."""


class _Said(NamedTuple):
    """When a class had its last line, and how many there were since."""

    when_s: float
    unsaid: int


class Refusals:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """By the reason and the method."""
        self.busy: Counter[str] = Counter()
        """Those with SERVICE_BUSY, by the limit."""
        self._clock = clock
        self._said: dict[Class, _Said] = {}
        """In the order of their last lines."""

    def note(self, event: str, class_: Class, *, level: int = WARNING, **fields: Any) -> None:
        """Count a refusal, and log it if it is time for that.

        Args:
            event: the line's name.
            class_: its class.
            level: the line's, as the standard library's logging has it.
            fields: what else is in the line. `unsaid` is how many of its class had none since the
                last one that had.
        """
        self.counts[class_.reason, class_.method] += 1
        now_s = self._clock()
        counted = class_ if class_ in self._said or self._has_room(now_s) else _MORE
        said = self._said.get(counted)
        if said is not None and now_s - said.when_s < LOG_INTERVAL_S:
            self._said[counted] = said._replace(unsaid=said.unsaid + 1)
            return
        self._said.pop(counted, None)
        self._said[counted] = _Said(now_s, 0)
        unsaid = 0 if said is None else said.unsaid
        log.log(level, event, **_about(class_), **fields, unsaid=unsaid)

    def note_busy(self, refusal: DomainError) -> None:
        """Count a refusal by the limit that it names, if it is one with SERVICE_BUSY."""
        if isinstance(refusal, ServiceBusy):
            self.busy[str(refusal.details["limit"])] += 1

    def tell(self) -> None:
        """Log how many had no line so far. Then everything begins anew."""
        while self._said:
            self._forget_first()

    def _has_room(self, now_s: float) -> bool:
        while self._said:
            first = next(iter(self._said.values()))
            if now_s - first.when_s < LOG_INTERVAL_S:
                break
            self._forget_first()
        return len(self._said) < CLASSES_MAX

    def _forget_first(self) -> None:
        class_ = next(iter(self._said))
        unsaid = self._said.pop(class_).unsaid
        if unsaid:
            log.warning("refused before", **_about(class_), unsaid=unsaid)


def _about(class_: Class) -> dict[str, str | None]:
    return {"reason": class_.reason, "method": class_.method, "of": class_.of or None}


class _Call(NamedTuple):
    refusals: Refusals
    method: str
    peer: str


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


@contextmanager
def during(refusals: Refusals, method: str, peer: str) -> Iterator[None]:
    """Note where `in_stream` is to count what a call refuses."""
    token = _CALL.set(_Call(refusals, method, peer))
    try:
        yield
    finally:
        _CALL.reset(token)


def in_stream(refusal: DomainError) -> status_pb2.Status:
    """The status of a refusal that is one answer of a stream, and not the stream's end. It is
    counted as one of the stream's method."""
    status = status_of(refusal)
    get_current_span().set_attribute(names.REASON, refusal.reason)
    call = _CALL.get()
    if call is not None:
        call.refusals.note_busy(refusal)
        class_, code = Class(refusal.reason, call.method), code_of(status).name
        call.refusals.note("refused", class_, code=code, detail=refusal.message, peer=call.peer)
    return status
