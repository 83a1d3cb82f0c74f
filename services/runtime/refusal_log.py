"""Counts refusals and logs a sample of them.

Refusals are grouped by reason and method, and denials also by caller. The first of a group is
logged. The group is then silent for a minute; its next line has the number of refusals suppressed
meanwhile. So a storm of refused calls is no storm of lines, and a new group shows up at once.
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

from seqgate.services.errors import DomainError, ServiceBusy
from seqgate.services.runtime.status import status_of
from seqgate.status import code_of
from seqgate.telemetry import names

log = structlog.get_logger()

LOG_INTERVAL_S: Final = 60.0
"""The shortest time between two lines of a group, in seconds."""

GROUPS_MAX: Final = 1_000
"""The most groups; all others share one line."""


class Group(NamedTuple):
    """Refusals that are logged together."""

    reason: str
    method: str
    of: str = ""
    """A further criterion: the caller of a denial, or the type of an unexpected exception."""


_OTHERS: Final = Group("", "")
"""All groups beyond GROUPS_MAX."""


class _LastLine(NamedTuple):
    """The time of a group's last line, and the number of refusals since."""

    logged_s: float
    suppressed: int


class RefusalLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """By reason and method."""
        self.busy: Counter[str] = Counter()
        """Refusals with SERVICE_BUSY, by limit."""
        self._clock = clock
        self._groups: dict[Group, _LastLine] = {}
        """Ordered by the time of the last line."""

    def record(self, event: str, group: Group, *, level: int = WARNING, **fields: Any) -> None:
        """Count a refusal, and log it unless its group was logged within the interval.

        Args:
            event: the name of the line.
            group: the group of the refusal.
            level: the level of the line, one of the standard library's.
            fields: the fields of the line. It also gets `suppressed`: the number of the group's
                refusals not logged since its last line.
        """
        self.counts[group.reason, group.method] += 1
        now_s = self._clock()
        counted = group if group in self._groups or self._has_room(now_s) else _OTHERS
        last = self._groups.get(counted)
        if last is not None and now_s - last.logged_s < LOG_INTERVAL_S:
            self._groups[counted] = last._replace(suppressed=last.suppressed + 1)
            return
        self._groups.pop(counted, None)
        self._groups[counted] = _LastLine(now_s, 0)
        suppressed = 0 if last is None else last.suppressed
        log.log(level, event, **_fields(group), **fields, suppressed=suppressed)

    def record_busy(self, refusal: DomainError) -> None:
        """Count a refusal with SERVICE_BUSY by the limit that it names; ignore others."""
        if isinstance(refusal, ServiceBusy):
            self.busy[str(refusal.details["limit"])] += 1

    def flush(self) -> None:
        """Log the number of suppressed refusals of each group, and reset the groups."""
        while self._groups:
            self._forget_oldest()

    def _has_room(self, now_s: float) -> bool:
        while self._groups:
            oldest = next(iter(self._groups.values()))
            if now_s - oldest.logged_s < LOG_INTERVAL_S:
                break
            self._forget_oldest()
        return len(self._groups) < GROUPS_MAX

    def _forget_oldest(self) -> None:
        group = next(iter(self._groups))
        suppressed = self._groups.pop(group).suppressed
        if suppressed:
            log.warning("refusals suppressed", **_fields(group), suppressed=suppressed)


def _fields(group: Group) -> dict[str, str | None]:
    return {"reason": group.reason, "method": group.method, "of": group.of or None}


class _Call(NamedTuple):
    refusals: RefusalLog
    method: str
    peer: str


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


@contextmanager
def during(refusals: RefusalLog, method: str, peer: str) -> Iterator[None]:
    """Have `in_stream` count refusals of a call in `refusals`."""
    token = _CALL.set(_Call(refusals, method, peer))
    try:
        yield
    finally:
        _CALL.reset(token)


def in_stream(refusal: DomainError) -> status_pb2.Status:
    """The status with which an open stream refuses a request, counted for the stream's method."""
    status = status_of(refusal)
    get_current_span().set_attribute(names.REASON, refusal.reason)
    call = _CALL.get()
    if call is not None:
        call.refusals.record_busy(refusal)
        group, code = Group(refusal.reason, call.method), code_of(status).name
        call.refusals.record("refused", group, code=code, detail=refusal.message, peer=call.peer)
    return status
