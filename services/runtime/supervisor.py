"""Several worker processes of one service behind its ports.

    supervisor   holds the ports, serves no calls ──┬─▶ worker 1: the whole service
                 GET /metrics: all workers' series  └─▶ worker 2: the whole service

The kernel gives each connection to one of the workers that listen (SO_REUSEPORT). So it does with
probes of the service's health, and a worker that has not started, or died, is never asked. All
workers depend on the same servers and check them at the same interval: what they report may differ
for `health_interval_s`, for which a probe may see either. A worker that hangs fails its share of
the probes, not all; once a probe's threshold is reached, the whole pod is restarted, as one process
would be.

The supervisor reads and checks the settings, so that an invalid one is one error. It starts the
workers as processes of their own, by the command that started it, and replaces those that end
(restarts.py); one that ends STARTS_MAX times in a row before it listens ends them all. On SIGTERM
or SIGINT it has all drain, and ends when they have; a second signal kills them. Workers that lose
their supervisor drain and end (worker.py).
"""

import asyncio
import http.client
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog

from seqgate.services.runtime.config import WorkersConfig
from seqgate.services.runtime.merged_metrics import merged
from seqgate.services.runtime.metrics import FLUSH_TIMEOUT_S, READING_TIMEOUT_S, scraped
from seqgate.services.runtime.restarts import STARTS_MAX, Restarts
from seqgate.services.runtime.security import metrics_context
from seqgate.services.runtime.startup import held_for, listening
from seqgate.services.runtime.tasks import end
from seqgate.services.runtime.worker import ARGUMENT, FAILED, LISTENING, METRICS

log = structlog.get_logger()

START_MAX_S: Final = 120.0
"""The time in which a worker must listen, in seconds; then it is killed."""

DRAIN_SPARE_S: Final = 10.0
"""The time that a worker may take to end beyond the limits of what it does then, in seconds."""

SCRAPE_TIMEOUT_S: Final = READING_TIMEOUT_S + 3.0
"""The time limit of a worker's answer to a scrape, in seconds: more than it waits for a reading,
and less than Prometheus waits for the supervisor."""

ATTRIBUTES: Final = "OTEL_RESOURCE_ATTRIBUTES"

INSTANCE: Final = "service.instance.id"
"""OpenTelemetry's name of a process among those of a service."""


def supervise(config: WorkersConfig) -> bool:
    """Run the workers until SIGTERM or SIGINT. Returns whether they drained then; False if they
    were not able to start.

    Raises:
        UnusableSetting: a port is in use, or an address is none of this machine.
    """
    with ExitStack() as held:
        listen = held.enter_context(held_for(config, "listen"))
        health = config.health_listen and held.enter_context(held_for(config, "health_listen"))
        scrapes = Scrapes()
        context = metrics_context(config)
        with listening(config, "metrics_listen"):
            held.enter_context(scraped(config.metrics_listen, scrapes.app, context))
        log.info("supervising", address=listen, workers=config.workers)
        settings = {
            "listen": listen,
            "health_listen": health,
            "metrics_listen": config.metrics_listen and "127.0.0.1:0",
            "metrics_tls": "false",
            "workers": str(config.workers),
        }

        def command(number: int) -> list[str]:
            return [
                sys.executable,
                "-m",
                f"seqgate.services.{config.service}",
                f"{ARGUMENT}{number}",
            ]

        def environment(number: int) -> dict[str, str]:
            return environment_of(config, settings, os.environ, number)

        return asyncio.run(_run(Supervisor(config, command, environment, scrapes)))


def environment_of(
    config: WorkersConfig, settings: Mapping[str, str], inherited: Mapping[str, str], number: int
) -> dict[str, str]:
    """The variables of a worker: those of the supervisor, with these settings and with an
    OpenTelemetry instance of its own."""
    prefix = str(config.model_config["env_prefix"])
    ours = {f"{prefix}{name}".upper(): value for name, value in settings.items()}
    others = {name: value for name, value in inherited.items() if name.upper() not in ours}
    attributes = instance_of(inherited.get(ATTRIBUTES, ""), number)
    return {**others, **ours, ATTRIBUTES: attributes}


async def _run(supervisor: "Supervisor") -> bool:
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, supervisor.signalled, each)
    async with asyncio.TaskGroup() as tasks:
        for number in range(1, supervisor.workers + 1):
            tasks.create_task(supervisor.keep(number))
    if supervisor.killed_by is not None:  # end as a process that handles no second signal does
        signal.signal(supervisor.killed_by, signal.SIG_DFL)
        os.kill(os.getpid(), supervisor.killed_by)
    if supervisor.is_sound:
        log.info("stopped")
    return supervisor.is_sound


Command = Callable[[int], Sequence[str]]
"""The command of the worker with a number."""

Environment = Callable[[int], Mapping[str, str]]
"""Its variables."""


@dataclass(slots=True)
class _Life:
    """What is known of a worker process.

    Attributes:
        status: its exit status, negative for a signal; None: it did not start.
        listening_at_s: since when it listens, by the event loop's clock.
        why: why it ended, in its own words.
    """

    status: int | None = None
    listening_at_s: float | None = None
    why: str = ""


class Supervisor:
    """
    Attributes:
        workers: the number of workers; `keep` runs each.
        is_sound: whether no worker had to be given up, and none failed to drain.
        killed_by: the second signal, which killed the workers.
    """

    def __init__(
        self, config: WorkersConfig, command: Command, environment: Environment, scrapes: "Scrapes"
    ) -> None:
        self.workers = config.workers
        self._config = config
        self._command = command
        self._environment = environment
        self._scrapes = scrapes
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self.is_sound = True
        self.killed_by: signal.Signals | None = None

    def signalled(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self.killed_by = number
            self._killing.set()
            return
        log.info("draining", workers=self._config.workers)
        self._stopping.set()

    async def keep(self, number: int) -> None:
        """Run a worker, and its successors, until told to stop."""
        loop = asyncio.get_running_loop()
        restarts = Restarts()
        while not self._stopping.is_set():
            life = await self._live(number)
            listened_s = life.listening_at_s and loop.time() - life.listening_at_s
            how = {"worker": number, "status": life.status, "why": life.why}
            if self._stopping.is_set():
                if life.status:
                    self.is_sound = False
                    log.error("worker not drained", **how)
                return
            pause_s = restarts.ended(listened_s)
            if pause_s is None:
                self.is_sound = False
                log.error("giving up: a worker does not start", starts=STARTS_MAX, **how)
                self._stopping.set()
                return
            log.warning("worker ended, replacing it", pause_s=pause_s, **how)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _live(self, number: int) -> _Life:
        """Run a worker process to its end."""
        life = _Life()
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(number), stdin=theirs.fileno(), env=self._environment(number)
            )
        except OSError as error:
            ours.close()
            life.why = str(error)
            return life
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        hearing = asyncio.create_task(self._hear(number, reader, life))
        try:
            await self._until_ended(number, process, writer, life)
        finally:
            if process.returncode is None:  # this task was cancelled
                _kill(process)
            life.status = await process.wait()
            await asyncio.wait([hearing], timeout=1)  # its last words are there already
            await end(hearing)
            self._scrapes.ports.pop(number, None)
            writer.close()
        return life

    async def _until_ended(
        self, number: int, process: Process, writer: asyncio.StreamWriter, life: _Life
    ) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_task(process.wait())
        stopping = loop.create_task(self._stopping.wait())
        killing = loop.create_task(self._killing.wait())
        try:
            await _first(ended, stopping, timeout_s=START_MAX_S)
            if not ended.done() and not stopping.done() and life.listening_at_s is None:
                log.error("worker does not listen, killed", worker=number, seconds=START_MAX_S)
                _kill(process)
            await _first(ended, stopping)
            if ended.done():
                return
            with suppress(OSError):  # it ends just now
                writer.write_eof()
            if not await _first(ended, killing, timeout_s=self._drain_max_s):
                log.error("worker does not end, killed", worker=number, seconds=self._drain_max_s)
            if not ended.done():
                _kill(process)
            await ended
        finally:
            await end(ended, stopping, killing)

    async def _hear(self, number: int, reader: asyncio.StreamReader, life: _Life) -> None:
        async for line in reader:
            what, _, detail = line.decode(errors="replace").strip().partition(" ")
            if what == LISTENING:
                life.listening_at_s = asyncio.get_running_loop().time()
            elif what == METRICS:
                self._scrapes.ports[number] = int(detail)
            elif what == FAILED:
                life.why = detail

    @property
    def _drain_max_s(self) -> float:
        """The longest orderly end of a service: its streams, its calls on each of its ports, its
        last work, and its telemetry."""
        config = self._config
        return 2 * (config.drain_timeout_s + config.stop_grace_s + FLUSH_TIMEOUT_S) + DRAIN_SPARE_S


def instance_of(attributes: str, number: int) -> str:
    """The value of ATTRIBUTES for a worker: as given, with an instance's id of its own."""
    pairs = [each for each in attributes.split(",") if each.strip()]
    named = [each.partition("=")[2] for each in pairs if each.partition("=")[0].strip() == INSTANCE]
    others = [each for each in pairs if each.partition("=")[0].strip() != INSTANCE]
    instance = named[-1].strip() if named else f"{socket.gethostname()}-{os.getpid()}"
    return ",".join([*others, f"{INSTANCE}={instance}-{number}"])


def _kill(process: Process) -> None:
    """Send SIGKILL, if the process runs. Process.kill() may take the exit status away from its
    waiter (Python 3.11)."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def _first(*tasks: "asyncio.Task[Any]", timeout_s: float | None = None) -> bool:
    """Wait until one of the tasks is done. Returns False on timeout."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


class Scrapes:
    """Answers scrapes with the metrics of all workers.

    Attributes:
        ports: where workers serve theirs, by number.
    """

    def __init__(self) -> None:
        self.ports: dict[int, int] = {}

    def app(
        self, environ: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """The WSGI app. Without an answer of any worker, the status is 503."""
        query = environ.get("QUERY_STRING", "")
        ports = dict(sorted(self.ports.copy().items()))
        if not ports:
            texts = {}
        else:
            with ThreadPoolExecutor(len(ports)) as threads:
                answers = threads.map(lambda port: _scrape(port, query), ports.values())
                texts = {n: text for n, text in zip(ports, answers, strict=True) if text}
        status = "200 OK" if texts else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
        return [merged(texts).encode()]


def _scrape(port: int, query: str) -> str:
    """A worker's metrics; "" if it does not answer, which is logged."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", f"/metrics?{query}")
        with connection.getresponse() as answer:
            text: str = answer.read().decode()
            return text if answer.status == http.client.OK else ""
    except (OSError, http.client.HTTPException) as error:
        log.warning("metrics of a worker left out", port=port, error=repr(error))
        return ""
    finally:
        connection.close()
