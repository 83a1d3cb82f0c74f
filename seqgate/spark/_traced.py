"""Spans of jobs: of the process that asks Spark, and of the processes that do the work.

Spark's Python workers are forked, do one task after the other, and are killed in the end. So a
worker begins to record with the first task that is followed, and what a task has recorded is
exported before the task is over. What is current in the driver is not in a worker: it is handed on
with the task, and what a worker does is `spans.joined` to it.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from opentelemetry import trace

from seqgate.telemetry import TelemetrySettingError, extract, names, spans, tracing

EXPORT_S: Final = 2.0
"""How long the end of a task waits for its spans to be exported."""

WORKERS: Final = "seqgate-spark"
"""The service.name of workers."""

WRONG: Final = 2
"""The exit status of a process that was called wrongly."""


def job(service: str, name: str, main: Callable[[], int]) -> int:
    """Do what this process was started for, and record it where OTEL_* ask for that. Returns the
    exit status.

    Args:
        service: service.name, where OTEL_SERVICE_NAME does not say another one.
        name: of the span.
        main: returns the exit status.
    """
    try:
        with tracing(service), spans.command(name, os.environ) as span:
            status = main()
            span.set_attribute(names.PROCESS_EXIT_CODE, status)
            return status
    except TelemetrySettingError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG


def executor_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Spark's settings with which executors on other machines record as this process does, and look
    for modules where it does: not in the current folder, if it does not. Headers for the collector
    stay here: they may be secrets, and Spark shows its settings."""
    return {
        f"spark.executorEnv.{name}": value
        for name, value in environment.items()
        if name == "PYTHONSAFEPATH" or (name.startswith("OTEL_") and not name.endswith("_HEADERS"))
    }


@contextmanager
def in_task(handed: Mapping[str, str]) -> Iterator[None]:
    """Around the work of a task, in a worker.

    Args:
        handed: the driver's `spans.handed_on()`.
    """
    if not extract(handed).trace_flags.sampled:
        yield
        return
    _worker.begin()
    try:
        yield
    finally:
        _worker.export()


class _Worker:
    """What a worker keeps from one task to the next."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._begun = False
        self._recording = False

    def begin(self) -> None:
        """Record from now on. Variables that ask for what there is not are told by the driver."""
        if not self._begun:
            self._begun = True
            with suppress(TelemetrySettingError):
                self._recording = self._stack.enter_context(tracing(WORKERS))

    def export(self) -> None:
        """Export what was recorded. Where that once takes too long no other task waits for it."""
        if not self._recording:
            return
        provider: Any = trace.get_tracer_provider()
        exporting = threading.Thread(target=provider.force_flush, daemon=True)
        exporting.start()
        exporting.join(EXPORT_S)
        self._recording = not exporting.is_alive()


_worker: Final = _Worker()
