"""A service accepts a bounded amount of work at once, and refuses the rest before it has any
effect."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import apsw
import grpc
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2
from seqgate.client._status import error_of_call
from seqgate.errors import LimitExceededError
from seqgate.services.errors import ServiceBusy
from seqgate.services.filter import servicer as filter_servicer
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.core import room as filter_room
from seqgate.services.filter.core.memo import Memo
from seqgate.services.filter.service import Filters
from seqgate.services.filter.servicer import FilterServicer
from seqgate.services.runtime import server as server_module
from seqgate.services.runtime import sqlite
from seqgate.services.runtime import waiting as queues
from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.interceptors import Interceptor, logged, translated
from seqgate.services.runtime.load import ASKED_BYTES, Load, weighed
from seqgate.services.runtime.refusal_log import RefusalLog, in_stream
from seqgate.services.runtime.sqlite import connections
from tests.support.raw_channel import RawChannel
from tests.support.waiting import eventually

PATH = "/seqgate.api.test.Service/"


class Serving:
    """A service whose handlers can be blocked."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.refusals = RefusalLog()
        self.on = asyncio.Event()
        self.began = 0

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.began += 1
        await self.on.wait()
        return b"done"

    async def stream(self, requests: Any, context: Any) -> None:
        self.began += 1
        async for request in requests:
            try:
                with weighed(request):
                    await self.on.wait()
            except ServiceBusy as refusal:
                in_stream(refusal)
                await context.write(b"busy")
            else:
                await context.write(b"done")

    async def large(self, request: bytes, context: Any) -> bytes:
        return b"x" * 2000

    async def __aenter__(self) -> "Serving":
        arounds = [logged(self.refusals), translated(self.refusals)]
        self._server = aio.server(interceptors=[Interceptor(arounds, Drain(), load=self.load)])
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary, bytes, bytes),
            "Large": grpc.unary_unary_rpc_method_handler(self.large, bytes, bytes),
            "Stream": grpc.stream_stream_rpc_method_handler(self.stream, bytes, bytes),
        }
        self._server.add_registered_method_handlers("seqgate.api.test.Service", handlers)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.channel: RawChannel = aio.insecure_channel(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.on.set()
        await self.channel.close()
        await self._server.stop(None)

    def ask(self, request: bytes = b"") -> Any:
        return self.channel.unary_unary(PATH + "Unary")(request)

    def open(self) -> Any:
        return self.channel.stream_stream(PATH + "Stream")()

    async def have_begun(self, count: int) -> None:
        await eventually(lambda: self.began == count, f"{count} have begun")


async def refusal_of(call: Any) -> LimitExceededError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    error = error_of_call(caught.value)
    assert isinstance(error, LimitExceededError)
    assert error.reason == "SERVICE_BUSY"
    assert error.retry_after_s
    return error


async def test_a_call_beyond_the_limit_is_refused_before_anything_happens() -> None:
    async with Serving(Load(calls_max=2)) as serving:
        served = [serving.ask(), serving.ask()]
        await serving.have_begun(2)
        assert (await refusal_of(serving.ask())).details["limit"] == "calls_max"
        assert serving.refusals.busy == {"calls_max": 1}
        assert serving.began == 2
        serving.on.set()
        assert [await each for each in served] == [b"done"] * 2
        assert await serving.ask() == b"done"
        await eventually(lambda: not serving.load.calls, "calls that end let go")
    assert serving.load.asked_bytes == 0


def test_a_caller_with_half_of_the_limit_leaves_an_eighth_to_others() -> None:
    load = Load(calls_max=16, streams_max=16)
    for kind in (load.call, load.stream):
        with ExitStack() as one, ExitStack() as others:
            for _ in range(14):
                one.enter_context(kind(0, "one"))
            with pytest.raises(ServiceBusy):
                one.enter_context(kind(0, "one"))
            for host in ("two", "three"):
                others.enter_context(kind(0, host))
            with pytest.raises(ServiceBusy):
                others.enter_context(kind(0, "four"))
            one.close()
            for _ in range(7):
                others.enter_context(kind(0, "two"))
    assert (load.calls, load.streams) == (0, 0)


async def test_a_request_without_room_is_refused_and_the_largest_fits_alone() -> None:
    async with Serving(Load(bytes_max=1000)) as serving:
        served = serving.ask(b"x" * 3000)
        await serving.have_begun(1)
        assert serving.load.asked_bytes == 3000
        assert (await refusal_of(serving.ask(b"x"))).details["limit"] == "calls_bytes_max"
        served.cancel()
        await eventually(lambda: not serving.load.asked_bytes, "a call that ends lets go")
        served = serving.ask(b"x" * 600)
        await serving.have_begun(2)
        await refusal_of(serving.ask(b"x" * 401))
        serving.on.set()
        assert await serving.ask(b"x" * 400) == b"done"
        assert await served == b"done"
        await eventually(lambda: not serving.load.asked_bytes, "calls that end let go")


async def test_an_answer_counts_until_its_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    load, weighed_at = Load(bytes_max=1000), list[int]()
    answered = load.answered

    def noting(size_bytes: int) -> Any:
        let_go = answered(size_bytes)
        weighed_at.append(load.asked_bytes)
        return let_go

    monkeypatch.setattr(load, "answered", noting)
    async with Serving(load) as serving:
        large = serving.channel.unary_unary(PATH + "Large")
        assert await large(b"xy") == b"x" * 2000
        await eventually(lambda: load.asked_bytes == 0, "it is over")
        calls = [large(b"", timeout=60) for _ in range(20)]
        for each in calls[::2]:
            each.cancel()
        await asyncio.wait([asyncio.ensure_future(each.code()) for each in calls])
        await eventually(lambda: load.asked_bytes == 0, "all are over")
    assert weighed_at[0] == 2002


async def test_a_stream_beyond_the_limit_is_refused_and_unary_calls_are_not() -> None:
    async with Serving(Load(streams_max=2)) as serving:
        streams = [serving.open(), serving.open()]
        await serving.have_begun(2)
        third = serving.open()
        assert (await refusal_of(_read_to_end(third))).details["limit"] == "streams_max"
        assert serving.refusals.busy == {"streams_max": 1}
        serving.on.set()
        assert await serving.ask() == b"done"
        for each in streams:
            await each.done_writing()
            assert await each.code() is StatusCode.OK
        await eventually(lambda: serving.load.streams == 0, "they have gone")
        again = serving.open()
        await again.write(b"x")
        assert await again.read() == b"done"


async def _read_to_end(call: Any) -> None:
    async for _ in call:
        pass


async def test_requests_on_a_stream_count_and_the_stream_continues() -> None:
    async with Serving(Load(bytes_max=1000)) as serving:
        first, second = serving.open(), serving.open()
        await first.write(b"x" * 900)
        await eventually(lambda: serving.load.asked_bytes == 900, "it is being served")
        await second.write(b"x" * 101)
        assert await second.read() == b"busy"
        assert serving.refusals.busy == {"calls_bytes_max": 1}
        serving.on.set()
        assert await first.read() == b"done"
        await second.write(b"x" * 101)
        assert await second.read() == b"done"


async def test_health_is_served_under_full_load() -> None:
    async with Serving(Load(calls_max=1)) as serving:
        served = serving.ask()
        await serving.have_begun(1)
        await refusal_of(serving.ask())
        channel: Any = serving.channel
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        serving.on.set()
        await served


async def test_grpc_refuses_calls_beyond_all_limits_before_it_reads_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(server_module, "SPARE_CALLS", 5)
    make = aio.server

    def noting(*given: Any, **named: Any) -> Any:
        taken.append(named["maximum_concurrent_rpcs"])
        return make(*given, **named)

    monkeypatch.setattr(aio, "server", noting)
    config = ServiceConfig(calls_max=1, streams_max=2)
    drain = Drain()
    async with server_module.grpc_server(
        config, drain, register=lambda _: None, services=[], checks={}
    ):
        assert taken == [1 + 2 + 5, 5]


# ---- work queued for a store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[sqlite.Connections]:
    async with connections(tmp_path / "db", readers=1, prepare=_prepare) as opened:
        yield opened


def _prepare(connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE written (number INTEGER)")


class Held:
    """Work that can be blocked."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self, _: apsw.Connection) -> None:
        self.begun.set()
        assert self._go.wait(60)

    def go(self) -> None:
        self._go.set()


@pytest.mark.parametrize("way", ["write", "read"])
async def test_a_store_with_a_full_queue_refuses_more(
    store: sqlite.Connections, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "WAITING_MAX", 2)
    do = getattr(store, way)
    done: list[int] = []
    held = Held()
    waiting = [asyncio.create_task(do(held)) for _ in range(2)]
    await eventually(held.begun.is_set, "the first has begun")
    with pytest.raises(ServiceBusy):
        await do(lambda _: done.append(1))
    waiting[1].cancel()  # it continues, or is skipped when its turn comes
    await asyncio.wait([waiting[1]])
    with pytest.raises(ServiceBusy):
        await do(lambda _: done.append(2))
    held.go()
    await waiting[0]
    await eventually(lambda: _counted(store) == 0, "nothing waits")
    await do(lambda _: done.append(3))
    assert done == [3]


async def test_the_queue_of_a_store_counts_the_requested_bytes(
    store: sqlite.Connections,
) -> None:
    store._writes._budget.bytes_max = 1000
    held = Held()
    ASKED_BYTES.set(900)
    waiting = asyncio.create_task(store.write(held))
    await eventually(held.begun.is_set, "it has begun")
    ASKED_BYTES.set(101)
    with pytest.raises(ServiceBusy):
        await store.write(lambda _: None)
    held.go()
    await waiting
    await store.write(lambda _: None)


def _counted(store: sqlite.Connections) -> int:
    return store._writes.count + store._reads.count


# ---- chains of filters


async def test_the_chains_of_all_streams_share_one_budget() -> None:
    filters = Filters(
        CelEngine(), Memo(0, 0), programs_max=10, program_bytes_max=2**20, chain_bytes_max=1
    )
    servicer: Any = FilterServicer(filters, Drain())
    first, second = Asking(), Asking()
    streams = [asyncio.create_task(servicer.Evaluate(None, each)) for each in (first, second)]
    assert (await first.ask(chain("true"))).HasField("chain_set")  # alone, any size is accepted
    taken = filters.chain_room.used
    assert taken > 0
    refused = await second.ask(chain("false"))
    assert "SERVICE_BUSY" in str(refused.error)
    assert (await first.ask(chain("true"))).HasField("chain_set")  # replacing the previous one
    assert filters.chain_room.used == taken
    first.end()
    await streams[0]
    assert filters.chain_room.used == 0
    assert (await second.ask(chain("false"))).HasField("chain_set")
    second.end()
    await streams[1]
    assert filters.chain_room.used == 0


async def test_a_long_batch_yields_to_other_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filter_servicer, "TURN_STEPS", 1)
    monkeypatch.setattr(filter_room, "KEPT_S", 0.0)
    filters = Filters(
        CelEngine(), Memo(0, 0), programs_max=10, program_bytes_max=2**20, chain_bytes_max=1
    )
    servicer: Any = FilterServicer(filters, Drain())
    first, second = Asking(), Asking()
    streams = [asyncio.create_task(servicer.Evaluate(None, each)) for each in (first, second)]
    assert (await first.ask(chain("sequence_id > 0"))).HasField("chain_set")
    assert (await first.ask(batch(1))).HasField("verdicts")
    answer = asyncio.create_task(first.ask(batch(10_000)))
    assert (await second.ask(chain("sequence_id > 1"))).HasField("chain_set")
    await streams[0]  # it has ended, and its caller retries on another one
    assert not answer.done()
    answer.cancel()
    second.end()
    await streams[1]
    assert filters.chain_room.used == 0


def batch(entries: int) -> filter_pb2.EvaluateRequest:
    metadata = [EntryMetadata(sequence_id=each) for each in range(entries)]
    return filter_pb2.EvaluateRequest(batch=filter_pb2.Batch(metadata=metadata))


def chain(expression: str) -> filter_pb2.EvaluateRequest:
    given = filter_pb2.Filter(name="f", expression=expression)
    return filter_pb2.EvaluateRequest(
        set_chain=filter_pb2.SetChain(chain=filter_pb2.Chain(filters=[given]))
    )


class Asking:
    """A stream's context, from its caller's side."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        return await self._asked.get()

    async def write(self, response: Any) -> None:
        await self._answers.put(response)

    async def ask(self, request: Any) -> Any:
        await self._asked.put(request)
        return await self._answers.get()

    def end(self) -> None:
        self._asked.put_nowait(aio.EOF)
