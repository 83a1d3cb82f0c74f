"""Services that run as several workers behind one port, through crashes, to their end."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.dev.child import bound_to_us, tell
from seqgate.dev.ports import free_ports
from seqgate.telemetry.metrics import SERVER_CALLS
from tests.integration.services import channel_to, serving
from tests.support.redis_server import RedisServer
from tests.support.scrape import Scrape, scraped
from tests.support.stubs import dedup_stub
from tests.support.waiting import eventually
from tools.stack.processes import children, is_alive

WORKERS = 2

Call = Callable[[aio.Channel], Awaitable[object]]


async def ask_dedup(channel: aio.Channel) -> object:
    request = dedup_pb2.ListProducersRequest(topic="public/default/workers")
    try:
        return await dedup_stub(channel).ListProducers(request)
    except aio.AioRpcError as error:
        if error.code() is not StatusCode.NOT_FOUND:
            raise
        return error


async def ask_filter(channel: aio.Channel) -> object:
    stub: Any = FilterServiceStub(channel)
    return await stub.Compile(filter_pb2.CompileRequest())


CALLS_OF: Mapping[str, Call] = {"dedup": ask_dedup, "filter": ask_filter}


@dataclass(frozen=True, slots=True)
class Running:
    """A service whose supervisor runs."""

    service: str
    supervisor: Process
    address: str
    metrics_port: int
    log: Path

    async def scrape(self) -> Scrape:
        """The workers' metrics; without those that do not answer in time."""
        try:
            return await scraped(self.metrics_port)
        except OSError:
            return Scrape({})

    async def workers(self, without: int = 0) -> dict[str, int]:
        """Wait until all workers serve their metrics, none of them with the process id `without`.
        Returns their ids, by number."""
        found: dict[str, int] = {}

        async def all_serve() -> bool:
            found.clear()
            target = (await self.scrape()).families.get("target_info")
            for each in target.samples if target else ():
                found[each.labels["worker"]] = int(each.labels["process_pid"])
            return len(found) == WORKERS and without not in found.values()

        await eventually(all_serve, f"{WORKERS} workers of {self.service} serve")
        return found

    async def have_answered(self) -> None:
        """Make calls until each worker has answered one."""

        async def all_have() -> bool:
            await self.call()
            scrape = await self.scrape()
            numbers = range(1, WORKERS + 1)
            return all(scrape.value(SERVER_CALLS, worker=str(each)) for each in numbers)

        await eventually(all_have, "connections are divided")

    async def call(self) -> None:
        """Make a call on a connection of its own. A worker that is killed resets its."""

        async def answered() -> bool:
            async with channel_to(self.address) as channel:
                try:
                    await CALLS_OF[self.service](channel)
                except aio.AioRpcError as error:
                    if error.code() is not StatusCode.UNAVAILABLE:
                        raise
                    return False
            return True

        await eventually(answered, f"{self.service} answers a call")

    def lines(self) -> list[dict[str, Any]]:
        """What supervisor and workers have logged; every line is a JSON object."""
        return [json.loads(each) for each in self.log.read_text().splitlines()]


@asynccontextmanager
async def running(service: str, folder: Path, redis: RedisServer) -> AsyncIterator[Running]:
    """A supervisor whose workers are all ready. Its end is the test's."""
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    log = folder / f"{service}.log"
    with log.open("wb") as stderr:
        supervisor = await asyncio.create_subprocess_exec(
            *bound_to_us([sys.executable, "-m", f"seqgate.services.{service}"]),
            stderr=stderr,
            env={**os.environ, **settings(service, address, metrics_port, redis)},
        )
    run = Running(service, supervisor, address, metrics_port, log)
    try:
        await run.workers()
        await serving(address)
        yield run
    finally:
        pids = children(supervisor.pid)
        tell(supervisor, signal.SIGKILL)
        await supervisor.wait()
        await eventually(lambda: not any(map(is_alive, pids)), "the workers end")


def settings(service: str, address: str, metrics_port: int, redis: RedisServer) -> dict[str, str]:
    mine = {
        "LISTEN": address,
        "METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
        "WORKERS": str(WORKERS),
    }
    if service == "dedup":
        mine |= {"REDIS_URL": redis.url, "CURSOR_TARGET": ""}
    return {f"SEQGATE_{service.upper()}_{name}": value for name, value in mine.items()}


@pytest.mark.parametrize("service", ["dedup", "filter"])
async def test_workers_serve_are_replaced_and_drain(
    service: str, tmp_path: Path, redis: RedisServer
) -> None:
    async with running(service, tmp_path, redis) as run:
        first = await run.workers()
        assert sorted(children(run.supervisor.pid)) == sorted(first.values())
        await run.have_answered()

        os.kill(first["1"], signal.SIGKILL)
        await run.call()
        second = await run.workers(without=first["1"])
        assert second["2"] == first["2"]
        await run.have_answered()

        tell(run.supervisor, signal.SIGTERM)
        assert await run.supervisor.wait() == 0
        assert not any(map(is_alive, (*first.values(), *second.values())))
        lines = run.lines()
        assert {each.get("worker") for each in lines if each["event"] == "listening"} == {1, 2}
        assert [each for each in lines if each["level"] == "error"] == []
        (ended,) = [each for each in lines if each["event"].startswith("worker ended")]
        assert (ended["worker"], ended["status"]) == (1, -signal.SIGKILL)


async def test_workers_end_with_their_supervisor(tmp_path: Path, redis: RedisServer) -> None:
    async with running("filter", tmp_path, redis) as run:
        workers = await run.workers()
        tell(run.supervisor, signal.SIGKILL)
        assert await run.supervisor.wait() == -signal.SIGKILL
        await eventually(
            lambda: not any(map(is_alive, workers.values())), "the workers end by themselves"
        )
        stopped = [each for each in run.lines() if each["event"] == "stopped"]
        assert sorted(each["worker"] for each in stopped) == [1, 2]
