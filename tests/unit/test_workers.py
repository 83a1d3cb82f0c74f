"""Several workers behind one port: the parts that need no service."""

import asyncio
import errno
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from structlog.testing import capture_logs

from seqgate.services.dedup.config import DedupConfig
from seqgate.services.filter.config import FilterConfig
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime import restarts, supervisor
from seqgate.services.runtime.config import (
    WORKERS_MAX,
    ServiceConfig,
    UnusableSetting,
    WorkersConfig,
)
from seqgate.services.runtime.held_port import held_port
from seqgate.services.runtime.merged_metrics import merged
from seqgate.services.runtime.process import EXIT_USAGE, run_service
from seqgate.services.runtime.restarts import (
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    STARTS_MAX,
    STEADY_S,
    Restarts,
)
from seqgate.services.runtime.supervisor import (
    Scrapes,
    Supervisor,
    environment_of,
    instance_of,
    supervise,
)
from tests.support.waiting import eventually
from tools.stack.processes import is_alive

# ---- the setting


@pytest.mark.parametrize("config", [DedupConfig, FilterConfig])
def test_one_process_serves_by_default(config: type[WorkersConfig]) -> None:
    assert (config().workers, config().shares_port) == (1, False)
    assert config(workers=2).shares_port


@pytest.mark.parametrize("workers", [0, WORKERS_MAX + 1])
def test_the_number_of_workers_is_bounded(workers: int) -> None:
    with pytest.raises(ValidationError):
        FilterConfig(workers=workers)


async def never(config: ServiceConfig) -> None:
    raise AssertionError("it runs")


@pytest.mark.parametrize("config", [FilterConfig, LedgerConfig])
def test_only_a_supervisor_starts_workers(
    config: type[ServiceConfig], capfd: pytest.CaptureFixture[str]
) -> None:
    """Pytest's standard input is no supervisor's."""
    assert run_service(config, never, ["--worker=1"]) == EXIT_USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert "--worker=1" in line


# ---- the port


def refused(listen: str, why: str) -> None:
    """Check that an address cannot be held, and that the error names it."""
    with pytest.raises(OSError, match=re.escape(f"cannot listen on {listen}: {why}")):
        ExitStack().enter_context(held_port(listen))


def test_a_held_port_is_free_for_those_who_share_it() -> None:
    with held_port("127.0.0.1:0") as listen:
        port = int(listen.removeprefix("127.0.0.1:"))
        for _ in range(2):
            with socket.socket() as one, socket.socket() as other:
                for each in (one, other):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    each.bind(("127.0.0.1", port))
                    each.listen()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]", "localhost"])
def test_a_held_port_is_in_use_for_others(host: str) -> None:
    with held_port(f"{host}:0") as listen:
        refused(listen, "Address already in use")
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError) as raised:
                other.bind(("127.0.0.1", int(listen.rpartition(":")[2])))
            assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("reuse", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_where_another_listens_is_not_held(reuse: int) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, reuse, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        refused(f"127.0.0.1:{other.getsockname()[1]}", "Address already in use")


def test_a_port_is_held_again_at_once() -> None:
    """Connections that a predecessor closed first linger, and do not count."""
    with held_port("127.0.0.1:0") as listen, socket.socket() as server:
        address = ("127.0.0.1", int(listen.rpartition(":")[2]))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as gRPC does
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(address)
        server.listen()
        client = socket.create_connection(address)
        served, _ = server.accept()
        served.close()
        assert client.recv(1) == b""
        client.close()
    with held_port(listen) as again:
        assert again == listen


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    refused("192.0.2.1:1", "Cannot assign requested address")


# ---- restarts


def test_a_worker_that_never_listens_is_given_up() -> None:
    starts = Restarts()
    pauses = [starts.ended(None) for _ in range(STARTS_MAX)]
    assert pauses == [*(PAUSE_MIN_S * 2**n for n in range(STARTS_MAX - 1)), None]


@pytest.mark.parametrize(
    ("listened_s", "pauses"),
    [
        (0.0, [PAUSE_MIN_S, 2 * PAUSE_MIN_S, 4 * PAUSE_MIN_S]),
        (STEADY_S - 1, [PAUSE_MIN_S, 2 * PAUSE_MIN_S, 4 * PAUSE_MIN_S]),
        (STEADY_S, [PAUSE_MIN_S] * 3),
    ],
)
def test_the_pause_grows_while_workers_do_not_last(listened_s: float, pauses: list[float]) -> None:
    starts = Restarts()
    assert [starts.ended(listened_s) for _ in pauses] == pauses


def test_a_worker_that_listens_is_never_given_up() -> None:
    starts = Restarts()
    for _ in range(100):
        assert None not in [starts.ended(None) for _ in range(STARTS_MAX - 1)]
        assert starts.ended(0.0) is not None
    assert starts.ended(0.0) == PAUSE_MAX_S


# ---- metrics

ONE = """\
# HELP calls_total Calls
# TYPE calls_total counter
calls_total{method="a b{}"} 1.0
calls_total 2.0
# HELP lag_seconds Lag
# TYPE lag_seconds histogram
lag_seconds_bucket{le="+Inf"} 3.0
lag_seconds_count 3.0
lag_seconds_sum 0.5
"""

OTHER = """\
# HELP calls_total Calls
# TYPE calls_total counter
calls_total{} 4.0
# HELP odd Only here
# TYPE odd gauge
odd 5.0
"""


def test_series_of_workers_are_labelled_and_stay_with_their_metric() -> None:
    assert merged({1: ONE, 2: OTHER}) == (
        "# HELP calls_total Calls\n"
        "# TYPE calls_total counter\n"
        'calls_total{worker="1",method="a b{}"} 1.0\n'
        'calls_total{worker="1"} 2.0\n'
        'calls_total{worker="2"} 4.0\n'
        "# HELP lag_seconds Lag\n"
        "# TYPE lag_seconds histogram\n"
        'lag_seconds_bucket{worker="1",le="+Inf"} 3.0\n'
        'lag_seconds_count{worker="1"} 3.0\n'
        'lag_seconds_sum{worker="1"} 0.5\n'
        "# HELP odd Only here\n"
        "# TYPE odd gauge\n"
        'odd{worker="2"} 5.0\n'
    )


def test_merged_series_parse() -> None:
    families = list(text_string_to_metric_families(merged({1: ONE, 2: ONE})))
    assert [each.name for each in families] == ["calls", "lag_seconds"]
    assert [each.labels["worker"] for each in families[0].samples] == ["1", "1", "2", "2"]


def test_a_scrape_fails_when_no_worker_answers() -> None:
    said: list[str] = []
    scrapes = Scrapes()
    assert b"".join(scrapes.app({}, lambda status, _: said.append(status))) == b""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        scrapes.ports[1] = deaf.getsockname()[1]
        assert b"".join(scrapes.app({}, lambda status, _: said.append(status))) == b""
    assert said == ["503 Service Unavailable"] * 2


# ---- environments


def test_a_worker_listens_where_its_supervisor_does() -> None:
    inherited = {"seqgate_filter_listen": "a:0", "SEQGATE_FILTER_CONFIG_FILE": "f", "PATH": "p"}
    assert environment_of(FilterConfig(workers=2), {"listen": "a:7"}, inherited, 2) == {
        "SEQGATE_FILTER_LISTEN": "a:7",
        "SEQGATE_FILTER_CONFIG_FILE": "f",
        "PATH": "p",
        "OTEL_RESOURCE_ATTRIBUTES": instance_of("", 2),
    }


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ("service.instance.id=pod", "service.instance.id=pod-2"),
        ("a=b, service.instance.id = pod ,c=d", "a=b,c=d,service.instance.id=pod-2"),
    ],
)
def test_a_worker_is_an_instance_of_its_own(attributes: str, told: str) -> None:
    assert instance_of(attributes, 2) == told


def test_a_worker_without_a_given_instance_is_named_for_its_supervisor() -> None:
    assert instance_of("", 1).startswith(f"service.instance.id={socket.gethostname()}-")
    assert instance_of("", 1) != instance_of("", 2)


# ---- supervision


def supervising(script: str, workers: int = 1, **settings: float) -> Supervisor:
    """A supervisor of shell scripts. Their standard input is the way to it."""

    def command(number: int) -> Sequence[str]:
        return ["sh", "-c", script, "worker", str(number)]

    def environment(number: int) -> Mapping[str, str]:
        return {"PATH": "/usr/bin:/bin"}

    config = FilterConfig.model_validate({"workers": workers, **settings})
    return Supervisor(config, command, environment, Scrapes())


async def kept(supervisor: Supervisor) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(1, supervisor.workers + 1):
            tasks.create_task(supervisor.keep(number))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_MIN_S", 0.001)


@pytest.mark.usefixtures("impatient")
async def test_workers_drain_when_one_does_not_start() -> None:
    running = supervising(
        'if [ "$1" = 2 ]; then echo "failed no disk" >&0; exit 3; fi;'
        "echo listening >&0; cat >/dev/null",
        workers=2,
    )
    with capture_logs() as logs:
        await kept(running)
    assert not running.is_sound
    assert [each for each in logs if each["log_level"] == "error"] == [
        {
            "event": "giving up: a worker does not start",
            "log_level": "error",
            "starts": STARTS_MAX,
            "worker": 2,
            "status": 3,
            "why": "no disk",
        }
    ]
    replaced = [each for each in logs if each["event"] == "worker ended, replacing it"]
    assert len(replaced) == STARTS_MAX - 1


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_ends_is_replaced(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    running = supervising(f"echo listening >&0; echo $$ >>{pids}; exec cat >/dev/null")
    keeping = asyncio.create_task(kept(running))

    def started() -> list[int]:
        lines = pids.read_text().splitlines() if pids.exists() else []
        return [int(each) for each in lines]

    for count in (1, 2, 3):
        await eventually(lambda: len(started()) >= count)  # noqa: B023 - runs in this iteration
        if count < 3:
            os.kill(started()[-1], signal.SIGKILL)
    running.signalled(signal.SIGTERM)
    await keeping
    assert running.is_sound
    assert not any(is_alive(each) for each in started())


async def test_a_second_signal_kills_workers_that_drain(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    running = supervising(f"touch {ready}; exec sleep 1000")
    keeping = asyncio.create_task(kept(running))
    await eventually(ready.exists)
    running.signalled(signal.SIGTERM)
    running.signalled(signal.SIGINT)
    await keeping
    assert running.killed_by == signal.SIGINT
    assert not running.is_sound


async def test_a_worker_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "FLUSH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(supervisor, "DRAIN_SPARE_S", 0.0)
    ready = tmp_path / "ready"
    running = supervising(
        f"touch {ready}; exec sleep 1000", drain_timeout_s=0.01, stop_grace_s=0.01
    )
    keeping = asyncio.create_task(kept(running))
    await eventually(ready.exists)
    running.signalled(signal.SIGTERM)
    await keeping
    assert running.killed_by is None
    assert not running.is_sound


async def test_a_worker_that_never_listens_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(supervisor, "START_MAX_S", 0.01)
    running = supervising("exec sleep 1000")
    await kept(running)
    assert not running.is_sound


async def test_a_command_that_cannot_run_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_MIN_S", 0.001)
    running = Supervisor(
        FilterConfig(workers=1), lambda _: ["/nonexistent"], lambda _: {}, Scrapes()
    )
    with capture_logs() as logs:
        await kept(running)
    assert "/nonexistent" in logs[-1]["why"]
    assert not running.is_sound


# ---- errors at the start


def test_an_invalid_setting_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQGATE_FILTER_WORKERS", "2")
    monkeypatch.setenv("SEQGATE_FILTER_PROGRAMS_MAX", "0")
    assert run_service(FilterConfig, never) == EXIT_USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert "SEQGATE_FILTER_PROGRAMS_MAX" in line


@pytest.mark.parametrize("setting", ["listen", "health_listen", "metrics_listen"])
def test_a_port_in_use_is_one_error(setting: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = {"listen": "127.0.0.1:0", setting: f"127.0.0.1:{port}"}
        error = f"SEQGATE_FILTER_{setting.upper()}: port {port} of 127.0.0.1 is in use"
        with capture_logs() as logs, pytest.raises(UnusableSetting, match=f"^{error}$"):
            supervise(FilterConfig.model_validate({"workers": 2, **settings}))
    assert logs == []
