"""Structured logs on standard error: one JSON object a line, or readable text."""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict


def configure_logs(service: str, *, level: str, format_: str) -> None:
    """Set up structlog for this process; every line names the service."""
    renderer: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if format_ == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )

    def name_service(_: object, __: str, event: EventDict) -> EventDict:
        return {"service": service, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
