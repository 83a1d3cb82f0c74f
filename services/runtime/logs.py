"""Structured logs on standard error: one JSON object a line, or readable text on a terminal.

Every line names its service, and the trace and the span within which it was written, if any. What
libraries say by the standard library's logging comes the same way. No line has a payload, a key, a
property's value or a secret in it: what is logged of a message is where it is. So tracebacks come
without the values of variables.
"""

import logging
import sys
from typing import Any, Final, Literal

import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from opentelemetry import trace
from structlog.typing import EventDict

LogFormat = Literal["auto", "json", "text"]

LIBRARIES_LEVEL: Final = logging.WARNING
"""The least severe messages of libraries that are logged, unless ours are to be more severe."""


def configure_logs(service: str, *, level: str, format_: LogFormat) -> None:
    """Set up structlog, and the standard library's logging, for this process.

    Args:
        service: is named in every line.
        level: of the least severe messages that are logged.
        format_: auto: text if standard error is a terminal, JSON otherwise.
    """
    least = logging.getLevelNamesMapping()[level.upper()]

    def name_service(_: object, __: str, event: EventDict) -> EventDict:
        return {"service": service, **event}

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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.root.handlers[:] = [_Libraries(max(least, LIBRARIES_LEVEL))]
    logging.captureWarnings(True)  # noqa: FBT003 - the standard library's


def name_span(_: object, __: str, event: EventDict) -> EventDict:
    """Add the trace and the span that are current, in hexadecimal; nothing where there is none."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    return event


def _renderer(format_: LogFormat) -> list[Any]:
    is_terminal = sys.stderr.isatty()
    if format_ == "json" or (format_ == "auto" and not is_terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Its own way with tracebacks would show what the variables hold.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=plain)]


def _is_of_caller_gone(record: logging.LogRecord) -> bool:
    """Whether gRPC tells that it could not send an answer. Its caller has gone, which is no
    failure: an answer that is too large is noticed before (interceptors.py)."""
    error = record.exc_info[1] if record.exc_info else None  # some libraries say False for none
    return isinstance(error, cygrpc.ExecuteBatchError)


class _Libraries(logging.Handler):
    """What libraries say, as lines like ours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = logging.DEBUG if _is_of_caller_gone(record) else record.levelno
            structlog.get_logger().log(
                level, record.getMessage(), logger=record.name, exc_info=record.exc_info
            )
        except Exception:  # as every handler of the standard library does it
            self.handleError(record)
