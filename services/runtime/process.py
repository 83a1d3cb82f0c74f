"""The life of a service's process, from its command line to its exit status."""

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import structlog
from pydantic import ValidationError

from seqgate.services.errors import DomainError
from seqgate.services.runtime.config import (
    ProcessConfig,
    ServiceConfig,
    UnusableSetting,
    WorkersConfig,
)
from seqgate.services.runtime.logs import configure_logs
from seqgate.services.runtime.security import check_exposure, check_files
from seqgate.services.runtime.startup import check_ports, check_read_files
from seqgate.services.runtime.store_config import StoreConfig
from seqgate.services.runtime.supervisor import supervise
from seqgate.services.runtime.usage import faults, usage, wrong_values
from seqgate.services.runtime.worker import FAILED, WORKER, tell_supervisor, worker_of
from seqgate.telemetry import tracing
from seqgate.telemetry.setup import exporter_asked_for

COLLECTED_OBJECTS: Final = 50_000
"""The new objects after which the garbage collector looks at them. Python's default, 700, is less
than a group of messages, so that the collector looked at every message while it was in use."""

C = TypeVar("C", bound=ProcessConfig)

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
    check: Callable[[C], None] = lambda _: None,
) -> int:
    """Read the settings and run until SIGTERM or SIGINT, in several processes if `workers` says so;
    or `migrate`, if --migrate is given. `check` raises OSError or ValueError for what is wrong with
    the settings, before anything runs. Returns the exit status: 0 after a signal, --help or
    --migrate, 1 after a failure, 2 for invalid arguments or settings."""
    if "--help" in arguments:
        sys.stdout.write(usage(config_type))
        return EXIT_OK
    if not __debug__:
        sys.stderr.write("assertions guard this service's state: run Python without -O\n")
        return EXIT_USAGE
    migrates = migrate is not None and list(arguments) == ["--migrate"]
    if migrates:
        arguments = ()
    worker = None
    if issubclass(config_type, WorkersConfig):
        try:
            worker, arguments = worker_of(arguments)
        except ValueError as error:
            return _refused(config_type, str(error))
        WORKER.set(worker)
    try:
        config = _settings(config_type, arguments)
        if not migrates:
            _check_serving(config)
            check(config)
            if worker is None:  # a supervisor holds its workers' ports
                check_ports(config)
    except ValidationError as error:
        return _refused(config_type, *wrong_values(config_type, error))
    except (OSError, ValueError) as error:
        return _refused(config_type, str(error))
    if migrates and not (isinstance(config, StoreConfig) and config.postgres_url):
        return _refused(config_type, "--migrate changes tables in PostgreSQL: set postgres_url")
    configure_logs(
        config.service,
        level=config.log_level,
        format_=config.log_format,
        worker=None if worker is None else worker.number,
    )
    if migrate is not None and migrates:
        return _status_of(config_type, lambda: _migrate(migrate, config))
    if isinstance(config, WorkersConfig) and config.shares_port and worker is None:
        return _status_of(config_type, lambda: supervise(config))
    return _status_of(config_type, lambda: _serve(run, config))


def _settings(config_type: type[C], arguments: Sequence[str]) -> C:
    """The settings, consistent. Raises ValidationError, OSError or ValueError for what is wrong."""
    fault = next(faults(config_type, arguments, os.environ), None)
    if fault is not None:
        raise ValueError(fault)
    config = config_type()
    config.check()
    return config


def _check_serving(config: ProcessConfig) -> None:
    """Check what only a process that serves and calls needs. Raises OSError or ValueError."""
    if isinstance(config, ServiceConfig):
        check_exposure(config)
    check_read_files(config)
    if isinstance(config, ServiceConfig):
        check_files(config)
    exporter_asked_for("TRACES")
    exporter_asked_for("METRICS")


def _migrate(migrate: Callable[[C], Awaitable[None]], config: C) -> bool:
    """Without the certificates of a process that serves, nor spans, which are sent with them."""
    asyncio.run(_run(migrate, config))
    return True


def _serve(run: Callable[[C], Awaitable[None]], config: C) -> bool:
    with tracing(config.service):
        _collect_rarely()
        asyncio.run(_run(run, config))
    return True


def _status_of(config_type: type[ProcessConfig], work: Callable[[], bool]) -> int:
    """The exit status of work that logs its failure and returns False, or raises."""
    try:
        if not work():
            return EXIT_FAILED
    except UnusableSetting as error:
        return _refused(config_type, str(error))
    except DomainError as error:
        about = {**error.details, "reason": error.reason, "why": error.message}
        log.critical("failed", **about)
        tell_supervisor(FAILED, repr(error))
        return EXIT_FAILED
    except Exception as error:
        log.exception("failed")
        tell_supervisor(FAILED, repr(error))
        return EXIT_FAILED
    log.info("stopped")
    return EXIT_OK


def _refused(config_type: type[ProcessConfig], *faults: str) -> int:
    """Say why the process does not start. Returns its exit status."""
    for each in faults:
        sys.stderr.write(f"{config_type.service}: {each}\n")
    tell_supervisor(FAILED, "; ".join(faults))
    return EXIT_USAGE


def _collect_rarely() -> None:
    """Leave what was imported out of all collections, and collect less often what comes after.
    Messages form no cycles, so they are freed without the collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_OBJECTS, 20, 50)


async def _run(run: Callable[[C], Awaitable[None]], config: C) -> None:
    await run(config)
