"""Peers in the benchmarks: their servers, and what happens without them."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from tools.bench import peers
from tools.bench.bench import Bench
from tools.bench.servers import program, server
from tools.stack.child import ChildFailed
from tools.stack.processes import is_alive


async def test_a_peer_that_is_not_installed_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    stack = Stack(tmp_path)
    bench = Bench(stack, stack, seconds=0.01)
    async with AsyncExitStack() as used:
        assert await peers._jetstream(bench, tmp_path, used, messages=1) == []
        assert await peers._rabbitmq(bench, tmp_path, used, messages=1) == []
    left_out = [each.partition(",")[0] for each in bench.left_out]
    assert left_out == ["NATS JetStream", "RabbitMQ streams"]


def test_a_program_beside_python_goes_before_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, other = tmp_path / "beside", tmp_path / "other"
    for folder, names in ((beside, ["both"]), (other, ["both", "alone"])):
        folder.mkdir()
        for name in names:
            (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(other))
    assert program("both") == str(beside / "both")
    assert program("alone") == str(other / "alone")
    assert program("none") is None


async def test_a_server_runs_for_as_long_as_it_is_used(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    async with server(command, port, tmp_path / "http.log") as pid:
        assert is_alive(pid)
    assert not is_alive(pid)


async def test_a_server_that_ends_before_it_is_ready_fails_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "print('no room')"]
    with pytest.raises(ChildFailed, match="peer ended: no room"):
        async with server(command, port, tmp_path / "peer.log"):
            raise AssertionError("it is ready")
