"""Structured logs on standard error: one JSON object a line, or readable text on a terminal.

Every line has the service's name, a worker's number, and the current trace and span, if any.
Libraries that use the standard library's logging get the same format. No line contains a payload, a
key, a property's value or a secret: messages are logged by position. For the same reason,
tracebacks contain no values of variables.
"""

import logging
import sys
from typing import Any, Final, Literal

import structlog
from grpc._cython import cygrpc
from opentelemetry import trace
from structlog.typing import EventDict

LogFormat = Literal["auto", "json", "text"]

LIBRARIES_LEVEL: Final = logging.WARNING
"""The lowest level at which libraries' messages are logged, unless ours is higher."""


def configure_logs(
    service: str, *, level: str, format_: LogFormat, worker: int | None = None
) -> None:
    """Set up structlog, and the standard library's logging, for this process.

    Args:
        service: the service's name, for every line.
        level: the lowest level that is logged.
        format_: auto: text if standard error is a terminal, otherwise JSON.
        worker: this worker's number, for every line; None: the process is none.
    """
    names = {"service": service} | ({} if worker is None else {"worker": worker})
    least = logging.getLevelNamesMapping()[level.upper()]

    def name_service(_: object, __: str, event: EventDict) -> EventDict:
        return {**names, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_service,
            name_span,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderer(format_),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        # One write per line: several workers share the stream.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.root.handlers[:] = [_Libraries(max(least, LIBRARIES_LEVEL))]
    logging.captureWarnings(True)  # noqa: FBT003 - the standard library's


def name_span(_: object, __: str, event: EventDict) -> EventDict:
    """Add the current trace and span, in hexadecimal, if any."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    return event


def _renderer(format_: LogFormat) -> list[Any]:
    is_terminal = sys.stderr.isatty()
    if format_ == "json" or (format_ == "auto" and not is_terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # structlog's default tracebacks show values of variables.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=plain)]


def _is_of_caller_gone(record: logging.LogRecord) -> bool:
    """Whether gRPC could not send an answer because the caller disconnected, which is no failure.
    (An answer that is too large is detected earlier, in interceptors.py.)"""
    error = record.exc_info[1] if record.exc_info else None  # some libraries set False
    return isinstance(error, cygrpc.ExecuteBatchError)


class _Libraries(logging.Handler):
    """Logs the records of libraries in our format."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = logging.DEBUG if _is_of_caller_gone(record) else record.levelno
            structlog.get_logger().log(
                level, record.getMessage(), logger=record.name, exc_info=record.exc_info
            )
        except Exception:  # as the standard library's handlers do
            self.handleError(record)
