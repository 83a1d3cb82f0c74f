"""The life of a service's process, from its command line to its exit status."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog
from pydantic import ValidationError

from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.logs import configure_logs
from seqgate.services.runtime.security import check_exposure, check_files
from seqgate.services.runtime.usage import faults, usage, wrong_values
from seqgate.telemetry import tracing
from seqgate.telemetry.setup import exporter_asked_for

C = TypeVar("C", bound=ServiceConfig)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

log = structlog.get_logger()


def run_service(
    config_type: type[C],
    run: Callable[[C], Awaitable[None]],
    arguments: Sequence[str] = (),
    *,
    migrate: Callable[[C], Awaitable[None]] | None = None,
) -> int:
    """Read the settings and run until SIGTERM or SIGINT; or `migrate`, if --migrate is given.
    Returns the exit status: 0 after a signal, --help or --migrate, 1 after a failure, 2 for invalid
    arguments or settings."""
    if "--help" in arguments:
        sys.stdout.write(usage(config_type))
        return EXIT_OK
    if not __debug__:
        sys.stderr.write("assertions guard this service's state: run Python without -O\n")
        return EXIT_USAGE
    if migrate is not None and list(arguments) == ["--migrate"]:
        arguments, run = (), migrate
    fault = next(faults(config_type, arguments, os.environ), None)
    if fault is not None:
        sys.stderr.write(f"{config_type.service}: {fault}\n")
        return EXIT_USAGE
    try:
        config = config_type()
        config.check()
        check_exposure(config)
        check_files(config)
        exporter_asked_for("TRACES")
        exporter_asked_for("METRICS")
    except ValidationError as error:
        for wrong in wrong_values(config_type, error):
            sys.stderr.write(f"{config_type.service}: {wrong}\n")
        return EXIT_USAGE
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{config_type.service}: {error}\n")
        return EXIT_USAGE
    configure_logs(config.service, level=config.log_level, format_=config.log_format)
    try:
        with tracing(config.service):
            asyncio.run(_run(run, config))
    except Exception:
        log.exception("failed")
        return EXIT_FAILED
    log.info("stopped")
    return EXIT_OK


async def _run(run: Callable[[C], Awaitable[None]], config: C) -> None:
    await run(config)
