"""Spans of jobs: of the driver, and of the workers.

Spark's Python workers are forked, run one task after the other, and are killed at the end. So a
worker begins to record with the first traced task, and a task's spans are exported before it ends.
A worker does not have the driver's current span: that is passed with the task, and the worker's
spans are `spans.joined` to it.
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
    """Run the process's main function, in a span if OTEL_* enable them. Returns the exit status.

    Args:
        service: service.name, unless OTEL_SERVICE_NAME sets another one.
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
    """The state that a worker keeps between tasks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._begun = False
        self._recording = False

    def begin(self) -> None:
        """Record from now on. The driver reports variables that select an unsupported exporter."""
        if not self._begun:
            self._begun = True
            with suppress(TelemetrySettingError):
                self._recording = self._stack.enter_context(tracing(WORKERS))

    def export(self) -> None:
        """Export the recorded spans. If that once takes too long, later tasks do not wait."""
        if not self._recording:
            return
        provider: Any = trace.get_tracer_provider()
        exporting = threading.Thread(target=provider.force_flush, daemon=True)
        exporting.start()
        exporting.join(EXPORT_S)
        self._recording = not exporting.is_alive()


_worker: Final = _Worker()
