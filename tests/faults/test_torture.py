"""Real processes under load and faults, for a short time in make test; and those parts of the
torture that need real processes."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from seqgate.dev.child import bound_to_us, tell
from seqgate.dev.stack import Stack
from tests.support.depth import deep
from tests.support.waiting import eventually
from tools.stack.forwarder import Ends
from tools.torture.clock import shift_clock
from tools.torture.limits import LIMITS
from tools.torture.links import Link, Way
from tools.torture.report import write_report
from tools.torture.torturing import RECORD, Options, torture

HOUR_S = 3_600.0

SECONDS = deep(quick=6.0, full=180.0)
"""Duration of the faults, in seconds."""

RATE = 10.0
"""Messages per second and producer: two cores have much other work in tests."""

SEEDS = range(deep(quick=1, full=5))

PATIENCE_S = 600 + 3 * SECONDS


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize("limits", deep(quick=["tiny"], full=list(LIMITS)))
@pytest.mark.parametrize("on_postgres", [False, pytest.param(True, marks=pytest.mark.deep)])
async def test_torture_finds_no_loss_duplicate_or_reordering(
    tmp_path: Path, seed: int, limits: str, number: int, on_postgres: bool
) -> None:
    options = Options(
        tmp_path / "run",
        SECONDS,
        f"{seed}-{number}",
        limits,
        RATE,
        on_postgres=on_postgres,
    )
    tortured = await torture(options)
    report = write_report(options, tortured)
    assert report["violations"] == [], f"{options}: {options.folder / 'index.html'}"
    assert sum(report["faults"].values()) > SECONDS / 8
    assert min(report["operations"][each] for each in ("receipt", "done", "read")) > 10 * SECONDS


@pytest.mark.timeout(400)
async def test_torture_loads_and_judges_an_existing_installation(tmp_path: Path, seed: int) -> None:
    async with Stack(tmp_path / "theirs") as stack:
        options = Options(
            tmp_path / "run",
            3.0,
            str(seed),
            rate=RATE,
            ledger=stack.address("ledger"),
            dispatcher=stack.address("dispatcher"),
            namespace="their/own",
        )
        tortured = await torture(options)
    report = json.loads(json.dumps(write_report(options, tortured)))
    assert report["violations"] == []
    assert report["faults"] == {}
    assert report["operations"]["done"] > 0


@pytest.mark.deep
@pytest.mark.timeout(400)
async def test_torture_leaves_no_process_after_sigterm(tmp_path: Path) -> None:
    options = ("--out", str(tmp_path), "--seed", "s", "--rate", str(RATE))
    command = [sys.executable, "-m", "tools.torture", *options]
    process = await asyncio.create_subprocess_exec(*bound_to_us(command), stdout=subprocess.DEVNULL)
    said = tmp_path / "s" / RECORD

    def something_fails() -> bool:
        assert process.returncode is None, "it ended by itself"
        return said.exists() and '"fault"' in said.read_text()

    await eventually(something_fails, "something fails", within_s=240)
    assert len(of_folder(tmp_path)) > 10
    tell(process, signal.SIGTERM)
    assert await process.wait() == 2
    await eventually(lambda: not of_folder(tmp_path), "all processes are gone")


def of_folder(folder: Path) -> list[str]:
    """Processes whose command names a folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder) in (command := each.read_text()):
                found.append(command)
    return found


class Teller:
    """A process that reports its clocks."""

    def __init__(self, file: Path) -> None:
        shift_clock(file, 0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.torture.clock", str(file), "tests.support.telling_time"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self) -> tuple[float, float, float]:
        """The offsets of its clocks from ours, in seconds: time(), time_ns() and monotonic()."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        told_s, told_ns, monotonic_s = self._process.stdout.readline().split()
        return (
            float(told_s) - time.time(),
            int(told_ns) / 1e9 - time.time(),
            float(monotonic_s) - time.monotonic(),
        )

    def end(self) -> None:
        """It ends when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def telling(*files: Path) -> Iterator[list[Teller]]:
    tellers = [Teller(file) for file in files]
    try:
        yield tellers
    finally:
        for each in tellers:
            each.end()


def test_setting_the_clock_affects_one_process(tmp_path: Path) -> None:
    ours_s = time.time()
    near: Any = pytest.approx(0, abs=60)
    with telling(tmp_path / "a", tmp_path / "b") as (one, other):
        assert one.tell() == (near, near, near)
        shift_clock(tmp_path / "a", -HOUR_S)
        set_back: Any = pytest.approx(-HOUR_S, abs=60)
        assert one.tell() == (set_back, set_back, near)
        assert other.tell() == (near, near, near)
        shift_clock(tmp_path / "a", 0)
        assert one.tell() == (near, near, near)
    assert time.time() - ours_s < HOUR_S / 2


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Ends]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_a_link_holds_slows_and_closes_connections_on_request() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(100):
            writer.write(some)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Link("a>b", 1, port) as link:  # the first one has no listener
        async with connected(link.port) as (reader, writer):
            writer.write(b"1")
            assert await reader.readexactly(1) == b"1"
            link.go(Way.SILENT)
            writer.write(b"2")
            link.go(Way.OPEN)
            assert await reader.readexactly(1) == b"2"
            link.go(Way.SLOW)
            writer.write(b"3" * 3_000)
            assert await reader.readexactly(3_000) == b"3" * 3_000
            link.go(Way.CLOSED)
            assert await reader.read() == b""
        async with connected(link.port) as (reader, _):
            assert await reader.read() == b""
        link.go(Way.OPEN)
        async with connected(link.port) as (reader, writer):
            writer.write(b"4")
            assert await reader.readexactly(1) == b"4"
            assert link.cut() == 1
            assert await reader.read() == b""
        await eventually(lambda: not link.connections, "the link has no connection")
