"""Spans of jobs: of the driver, and of the workers.

Spark's Python workers are forked, run one task after the other, and are killed at the end. So a
worker starts recording with its first traced task, and exports a task's spans before the task ends.
The driver's current span is passed with the task, and the worker's spans are `spans.joined` to it.
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
"""How long the end of a task waits for the export of its spans."""

WORKERS: Final = "seqgate-spark"

WRONG: Final = 2
"""The exit status for invalid arguments or settings."""


def job(service: str, name: str, main: Callable[[], int]) -> int:
    """Run a process's main function, in a span if OTEL_* enable them. Returns its exit status.
    `service` is the service.name, unless OTEL_SERVICE_NAME is set."""
    try:
        with tracing(service), spans.command(name, os.environ) as span:
            status = main()
            span.set_attribute(names.PROCESS_EXIT_CODE, status)
            return status
    except TelemetrySettingError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG


def executor_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Spark settings that make executors on other machines record like this process, and keep the
    current folder off their import path if this process does. Headers for the collector are not
    passed: they may be secrets, and Spark shows its settings."""
    return {
        f"spark.executorEnv.{name}": value
        for name, value in environment.items()
        if name == "PYTHONSAFEPATH" or (name.startswith("OTEL_") and not name.endswith("_HEADERS"))
    }


@contextmanager
def in_task(handed: Mapping[str, str]) -> Iterator[None]:
    """Wrap the work of a task, in a worker. `handed` is the driver's `spans.handed_on()`."""
    if not extract(handed).trace_flags.sampled:
        yield
        return
    _worker.begin()
    try:
        yield
    finally:
        _worker.export()


class _Worker:
    def __init__(self) -> None:
        self._stack = ExitStack()
        self._begun = False
        self._recording = False

    def begin(self) -> None:
        """Start recording. The driver reports variables that select an unsupported exporter."""
        if not self._begun:
            self._begun = True
            with suppress(TelemetrySettingError):
                self._recording = self._stack.enter_context(tracing(WORKERS))

    def export(self) -> None:
        """Export the recorded spans. After one slow export, later tasks do not wait."""
        if not self._recording:
            return
        provider: Any = trace.get_tracer_provider()
        exporting = threading.Thread(target=provider.force_flush, daemon=True)
        exporting.start()
        exporting.join(EXPORT_S)
        self._recording = not exporting.is_alive()


_worker: Final = _Worker()
