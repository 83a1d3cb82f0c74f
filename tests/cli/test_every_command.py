"""Every command: without a server, with a wrong one, with a silent one, and with values of each of
its arguments that a variable may have by accident."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, get_args

import grpc
import pytest
from typer.main import get_command

from seqgate.cli import _command, _main, _waiting
from seqgate.cli._main import app
from seqgate.cli._output import Output
from seqgate.cli._settings import SERVICES
from seqgate.dev.ports import free_ports
from tests.cli.command_line import Ended

Inside = Callable[..., Ended]

ASKING: Final = (
    "admin renew",
    "bench --messages 1",
    "consume t s",
    "cursor create t c",
    "cursor export t c FILE",
    "cursor import t c INFO",
    "cursor ls",
    "cursor reset t c --to latest",
    "cursor rm t c --yes",
    "cursor show t c",
    "dead-letter discard t s 1:0 --yes",
    "dead-letter log t s",
    "dead-letter ls t s",
    "dead-letter mend t s 1:0 --payload x",
    "dead-letter redrive t s 1:0",
    "dead-letter show t s 1:0",
    "dedup explain t p 1",
    "dedup policy rm t",
    "dedup policy set t --disabled",
    "dedup policy show t",
    "dedup producers t",
    "dedup snapshot t",
    "dedup status t",
    "filter check true",
    "filter explain true INFO",
    "filter test true INFO",
    "message life t p 1",
    "publish t m",
    "read t",
    "redrive ls t s",
    "redrive show t s 1",
    "redrive stop t s 1",
    "subscription analyze t s",
    "subscription create t s",
    "subscription explain t s --key k",
    "subscription filter set t s --none",
    "subscription filter shadow t s --none",
    "subscription filter show t s",
    "subscription ls t",
    "subscription release-key t s k",
    "subscription replay t s",
    "subscription report t s",
    "subscription reset t s --to latest",
    "subscription rm t s --yes",
    "subscription set t s --put a=b",
    "subscription show t s",
    "top t --once --interval 0.1",
    "topic create t",
    "topic ls",
    "topic rm t --yes",
    "topic show t",
    "topic tail t",
    "topic trim t 1:0 --yes",
)
"""The commands that ask services, with valid arguments."""

SHARED: Final = tuple(each.name for each in _command.SHARED if each.name != "output")

OTHERS: Final = (
    *("admin copy", "dedup diff", "dedup rebuild", "dev", "topic audit"),  # processes of their own
    *("context add", "context ls", "context rm", "context show", "context use"),
)
"""The commands that ask none."""

LISTS_WHO_IS_AWAY: Final = "top "
"""Prints who does not answer, with exit code 3, whatever the reason is."""


def leaves(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands of a group, with their names."""
    for name, each in getattr(command, "commands", {}).items():
        if hasattr(each, "commands"):
            yield from leaves(each, *names, name)
        else:
            yield (*names, name), each


ROOT: Final = get_command(app)
COMMANDS: Final = {" ".join(names): each for names, each in leaves(ROOT)}


def name_of(line: str) -> str:
    return max((each for each in COMMANDS if f"{line} ".startswith(f"{each} ")), key=len)


def test_the_table_has_every_command() -> None:
    assert sorted([*map(name_of, ASKING), *OTHERS]) == sorted(COMMANDS)


@pytest.fixture
def run(inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs a line of the table, with all services at one address."""
    monkeypatch.setattr(_main, "app", ROOT)  # typer would make it anew for each run
    info = tmp_path / "info"
    info.write_bytes(b"{}\n")
    files = {"INFO": str(info), "FILE": str(tmp_path / "file")}

    def run(line: str | Sequence[str], port: int, *options: str) -> Ended:
        words = line.split() if isinstance(line, str) else line
        addresses = {f"SEQGATE_{name.upper()}": f"127.0.0.1:{port}" for name in SERVICES}
        arguments = [files.get(each, each) for each in words]
        as_json = () if "-o" in arguments else ("-o", "json")
        return inside(*arguments, *options, *as_json, **addresses)

    return run


# ---- servers


class Silent:
    """A port that accepts connections, and says nothing."""

    def __init__(self) -> None:
        self._accepted: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the server is closed
            while True:
                self._accepted.append(self._server.accept()[0])

    def hang_up(self) -> None:
        """Close the connections, and accept no more."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        for each in self._accepted:
            each.close()


@contextmanager
def of_another_kind() -> Iterator[int]:
    """A gRPC server that is none of the services."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def of_web_pages() -> Iterator[int]:
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


# ---- without the service


@pytest.mark.parametrize("line", ASKING)
def test_without_a_server_the_address_and_the_cause_are_said(run: Any, line: str) -> None:
    (port,) = free_ports(1)
    ended = run(line, port, "--timeout", "0.3")
    assert ended.code == 3
    if line.startswith(LISTS_WHO_IS_AWAY):
        return
    assert ended.out == ""
    assert ended.error["reason"] == "UNREACHABLE"
    assert f"service at 127.0.0.1:{port} does not answer" in ended.error["message"]
    assert "connection refused" in ended.error["details"]["cause"]


@pytest.mark.parametrize("line", ASKING)
def test_a_web_server_behind_the_address_is_said(run: Any, line: str) -> None:
    with of_web_pages() as port:
        ended = run(line, port, "--timeout", "1")
    assert ended.code == 3
    if not line.startswith(LISTS_WHO_IS_AWAY):
        assert ended.error["reason"] == "UNREACHABLE"
        assert "does not speak gRPC" in ended.error["details"]["cause"]


@pytest.mark.parametrize("line", ASKING)
def test_another_service_behind_the_address_is_said(run: Any, line: str) -> None:
    with of_another_kind() as port:
        ended = run(line, port)
    if line.startswith(LISTS_WHO_IS_AWAY):
        assert ended.code == 3
        return
    assert (ended.code, ended.out) == (1, "")
    assert ended.error["reason"] == "WRONG_SERVICE"
    service = ended.error["details"]["service"]
    assert service in SERVICES
    assert ended.error["details"]["address"] == f"127.0.0.1:{port}"
    assert f"127.0.0.1:{port} is not the {service} service" in ended.error["message"]


@pytest.mark.parametrize("line", ASKING)
def test_a_wait_for_a_silent_server_is_said_after_a_second(
    run: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command goes on until it has said it, and is interrupted then."""
    assert _waiting.FIRST_S == 1
    monkeypatch.setattr(_waiting, "FIRST_S", 0.02)
    silent, note = Silent(), Output.note

    def noting(output: Output, *about: Any) -> None:
        note(output, *about)
        os.kill(os.getpid(), signal.SIGINT)
        silent.hang_up()  # gRPC ends a cancelled call only with its attempt to connect

    monkeypatch.setattr(Output, "note", noting)
    ended = run(line, silent.port, "--timeout", "60")
    assert (ended.code, ended.out) == (130, "")
    (first,) = ended.waits
    assert f"service at 127.0.0.1:{silent.port}" in first, first
    assert '"for":"the ' in first, first


@pytest.mark.parametrize("line", ["topic ls", "publish t m", "consume t s", "read t"])
def test_a_time_out_ends_the_wait_for_a_silent_server(run: Any, line: str) -> None:
    silent = Silent()
    ended = run(line, silent.port, "--timeout", "0.2")
    silent.hang_up()
    assert (ended.code, ended.out) == (3, "")
    assert ended.error["reason"] == "UNREACHABLE"


# ---- values

HUGE: Final = "9" * 40

NUMBERS: Final = ("-1", HUGE, "x", "nan", "1e400", "0x1")
CHOICES: Final = ("-1", HUGE, "x")
TEXTS: Final = ("-1", HUGE, "x" * 100_000, "\udcff", "\n", "x\x1b[31m", "1:-1", "../..")
"""Values that a variable may have by accident, besides an empty one."""


def values(kind: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Values for an argument of a type, and the exit codes that they may have. Without a server, a
    value that is taken ends with 3."""
    kinds = {*get_args(kind), kind}
    yield "", (2,)
    if kinds & {int, float}:
        yield from ((each, (2,)) for each in NUMBERS)
    elif any(isinstance(each, type) and issubclass(each, StrEnum) for each in kinds):
        yield from ((each, (2,)) for each in CHOICES)
    else:
        yield from ((each, (1, 2, 3)) for each in TEXTS)


def with_value(line: str, parameter: Any, value: str) -> list[str]:
    """A line of the table with a value for one of its arguments or options."""
    name = name_of(line)
    given = line.split()[len(name.split()) :]
    if parameter.param_type_name == "option":
        return [*name.split(), *given, f"{max(parameter.opts, key=len)}={value}"]
    place = [
        each.name for each in COMMANDS[name].params if each.param_type_name == "argument"
    ].index(parameter.name)
    first = next((at for at, each in enumerate(given) if each.startswith("-")), len(given))
    operands, options = given[:first], given[first:]
    operands[place : place + 1] = [value]
    return [*name.split(), *options, "--", *operands]


@pytest.mark.parametrize("line", ASKING)
def test_odd_values_of_arguments_are_refused_or_sent(run: Any, line: str) -> None:
    """An empty value is always refused. None is a crash, and none is taken for another value."""
    (port,) = free_ports(1)
    for parameter in COMMANDS[name_of(line)].params:
        if parameter.name in ("help", *SHARED) or getattr(parameter, "is_flag", False):
            continue
        for value, codes in values(parameter.type_descriptor.annotation):
            given = with_value(line, parameter, value)
            words = len(name_of(line).split())
            ended = run([*given[:words], "--timeout", "0.05", "-o", "json", *given[words:]], port)
            what = f"{parameter.name}={value[:50]!r}: {ended}"
            assert ended.code in codes, what
            assert line.startswith(LISTS_WHO_IS_AWAY) or ended.error["message"], what


@pytest.mark.parametrize("option", SHARED)
def test_odd_values_of_shared_options_are_refused(run: Any, option: str) -> None:
    for value in ("", "\n", "x" * 100_000):
        ended = run(["topic", "ls", f"--{option.replace('_', '-')}={value}"], 1)
        assert (ended.code, ended.out) == (2, ""), value
        assert ended.error["message"], value
