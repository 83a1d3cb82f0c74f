"""The network of simulations: cuts, resets, silence, and messages of dead processes."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from tests.simulation.ground import Network, Process, installed, passes, run, uniform, virtual_loop
from tests.support.raw_channel import RawChannel

PATH = "/test.Service/"

Body = Callable[[Network, Process], Awaitable[None]]


class Served:
    """A server that counts its requests."""

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()
        self.ends: list[str] = []

    async def run(self, port: int = 7000) -> None:
        """A process's main coroutine."""
        server = aio.server()
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "Chat": grpc.stream_stream_rpc_method_handler(self._chat),
        }
        server.add_registered_method_handlers("test.Service", handlers)
        assert server.add_insecure_port(f"[::]:{port}") == port
        await server.start()
        await server.wait_for_termination()

    async def _echo(self, request: bytes, context: Any) -> bytes:
        self.asked[request] += 1
        return request

    async def _chat(self, requests: Any, context: Any) -> None:
        try:
            while (request := await context.read()) is not aio.EOF:
                self.asked[request] += 1
                await context.write(request)
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        self.ends.append("closed")


def play(body: Callable[[Network, Served, Process], Awaitable[None]], seed: int = 1) -> None:
    """Run a body with a network and a process that serves."""

    async def main() -> None:
        network = Network(virtual_loop())
        with installed(network):
            served, process = Served(), Process("server")
            process.start(served.run)
            await passes(0.1)
            await body(network, served, process)

    run(main, seed=seed, limit_s=10_000)


async def error_of(awaited: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await awaited
    return caught.value


FAST = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 1000)]

KEEPALIVE = [
    *FAST,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
]


def channel(options: Any = FAST, target: str = "dns:///server:7000") -> RawChannel:
    return aio.insecure_channel(target, options=options)


def test_calls_take_the_delay_of_their_links() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        network.link("world", "server").delay = uniform(1, 2)
        network.link("server", "world").delay = uniform(3, 4)
        async with channel() as to_server:
            await to_server.channel_ready()
            began = time.monotonic()
            await to_server.unary_unary(PATH + "Echo")(b"")
            assert 4 <= time.monotonic() - began <= 6

    play(body)


def test_traffic_on_a_cut_link_waits_until_it_heals() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel() as to_server:
            echo = to_server.unary_unary(PATH + "Echo")
            await echo(b"")
            network.cut("world", "server")
            call = echo(b"late")
            late = await error_of(echo(b"later", timeout=3))
            assert late.code() is StatusCode.DEADLINE_EXCEEDED
            assert not call.done()
            network.heal("world", "server")
            assert await call == b"late"

    play(body)


def test_replies_may_be_cut_off_alone() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel() as to_server:
            echo = to_server.unary_unary(PATH + "Echo")
            await echo(b"")
            network.cut("server", "world", both_ways=False)
            late = await error_of(echo(b"acted", timeout=3))
            assert late.code() is StatusCode.DEADLINE_EXCEEDED
            assert served.asked[b"acted"] == 1

    play(body)


def test_a_reset_ends_calls_and_the_channel_connects_again() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel() as to_server:
            call = to_server.stream_stream(PATH + "Chat")()
            await call.write(b"1")
            assert await call.read() == b"1"
            network.reset("world", "server")
            assert (await error_of(call.read())).code() is StatusCode.UNAVAILABLE
            assert await to_server.unary_unary(PATH + "Echo")(b"2") == b"2"
            assert served.ends == ["CancelledError"]

    play(body)


def test_a_half_open_connection_ends_by_keepalive_at_each_end() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel(KEEPALIVE) as to_server:
            call = to_server.stream_stream(PATH + "Chat")()
            await call.write(b"1")
            assert await call.read() == b"1"
            network.half_open("world", "server")
            began = time.monotonic()
            await call.write(b"2")
            assert (await error_of(call.read())).code() is StatusCode.UNAVAILABLE
            assert 5 <= time.monotonic() - began <= 15
            assert served.asked[b"2"] == 0
            assert served.ends == []  # the server has no keepalive of its own
            await passes(900)
            assert served.ends == ["CancelledError"]

    play(body)


def test_a_vanished_machine_closes_no_connection() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel(KEEPALIVE) as to_server:
            call = to_server.stream_stream(PATH + "Chat")()
            await call.write(b"1")
            assert await call.read() == b"1"
            began = time.monotonic()
            network.vanish(process)
            assert (await error_of(call.read())).code() is StatusCode.UNAVAILABLE
            assert time.monotonic() - began >= 5
            began = time.monotonic()
            echo = to_server.unary_unary(PATH + "Echo")
            error = await error_of(echo(b"", wait_for_ready=True, timeout=60))
            assert error.code() is StatusCode.DEADLINE_EXCEEDED  # no process refuses the connection
            Process("server").start(served.run)
            assert await echo(b"back", wait_for_ready=True) == b"back"

    play(body)


def test_a_killed_process_breaks_its_connections_and_its_name_can_return() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel() as to_server:
            echo = to_server.unary_unary(PATH + "Echo")
            call = to_server.stream_stream(PATH + "Chat")()
            await call.write(b"1")
            assert await call.read() == b"1"
            began = time.monotonic()
            process.kill()
            assert (await error_of(call.read())).code() is StatusCode.UNAVAILABLE
            assert time.monotonic() - began < 1
            await passes(1)
            assert (await error_of(echo(b""))).code() is StatusCode.UNAVAILABLE
            Process("server").start(Served().run)
            assert await echo(b"back", wait_for_ready=True) == b"back"
            assert served.ends == []

    play(body)


def test_messages_sent_before_a_crash_may_arrive() -> None:
    arrived = set()

    for seed in range(40):

        async def body(network: Network, served: Served, process: Process) -> None:
            network.link("client", "server").delay = uniform(0.5, 1)
            client = Process("client")

            async def ask() -> None:
                to_server = channel()
                call = to_server.stream_stream(PATH + "Chat")()
                await call.write(b"1")
                for _ in range(3):
                    await call.write(b"2")
                await client.die()

            client.start(ask)
            await client.ended()
            await passes(10)
            arrived.add(served.asked[b"2"])

        play(body, seed)
    assert {0, 3} <= arrived


def test_a_paused_process_answers_when_it_resumes() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel() as to_server:
            echo = to_server.unary_unary(PATH + "Echo")
            await echo(b"")
            process.stop()
            call = echo(b"1")
            await passes(5)
            assert not call.done()
            process.cont()
            assert await call == b"1"

    play(body)


def test_a_request_may_arrive_twice_and_is_answered_once() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        network.link("world", "server").duplicates = 1.0
        async with channel() as to_server:
            for number in range(10):
                assert await to_server.unary_unary(PATH + "Echo")(b"%d" % number) == b"%d" % number
            await passes(10)
            assert set(served.asked.values()) == {2}

    play(body)


def test_a_reply_may_be_lost_after_the_server_has_acted() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel() as to_server:
            echo = to_server.unary_unary(PATH + "Echo")
            await echo(b"")
            network.link("server", "world").lost_replies = 1.0
            assert (await error_of(echo(b"1"))).code() is StatusCode.UNAVAILABLE
            assert served.asked[b"1"] == 1

    play(body)


def test_messages_held_at_a_cut_may_arrive_after_their_sender_died() -> None:
    arrived = set()

    for seed in range(20):

        async def body(network: Network, served: Served, process: Process) -> None:
            client = Process("client")

            async def ask() -> None:
                to_server = channel()
                call = to_server.stream_stream(PATH + "Chat")()
                await call.write(b"1")
                assert await call.read() == b"1"
                network.cut("client", "server")
                await call.write(b"2")
                await client.die()

            network.link("client", "server").delay = uniform(0, 0.1)
            client.start(ask)
            await client.ended()
            await passes(10)
            assert served.asked[b"2"] == 0
            network.heal_all()
            await passes(10)
            assert len(served.ends) == 1
            arrived.add(served.asked[b"2"])

        play(body, seed)
    assert arrived == {0, 1}


def test_a_stopping_server_answers_every_call() -> None:
    for seed in range(20):

        async def body(network: Network, served: Served, process: Process) -> None:
            for way in (("world", "other"), ("other", "world")):
                network.link(*way).delay = uniform(0, 2)
            other, go_on = Process("other"), asyncio.Event()

            async def slow(request: bytes, context: Any) -> bytes:
                await go_on.wait()
                return request

            async def serve() -> None:
                server = aio.server()
                handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
                    slow
                )
                server.add_registered_method_handlers("test.Service", {"Slow": handler})
                server.add_insecure_port("[::]:9000")
                await server.start()
                await passes(20)
                await server.stop(30)

            other.start(serve)
            await passes(1)
            async with channel(target="other:9000") as to_other:
                call = to_other.unary_unary(PATH + "Slow")(b"1")
                await passes(25)
                assert other.is_alive
                go_on.set()
                assert await call == b"1"
                await other.ended()
                assert other.failure is None

        play(body, seed)


def test_loss_breaks_connections_without_reordering() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        for way in (("world", "server"), ("server", "world")):
            network.link(*way).loss = 0.02
            network.link(*way).delay = uniform(0.001, 0.5)
        ends = 0
        async with channel() as to_server:
            for _ in range(20):
                call = to_server.stream_stream(PATH + "Chat")(wait_for_ready=True)
                got: list[int] = []
                try:
                    for number in range(20):
                        await call.write(b"%d" % number)
                    await call.done_writing()
                    while (each := await call.read()) is not aio.EOF:
                        assert isinstance(each, bytes)
                        got.append(int(each))
                except (aio.AioRpcError, asyncio.InvalidStateError):
                    ends += 1
                assert got == list(range(len(got)))
        assert 0 < ends < 20
        assert network.counts["lost"] > 0

    play(body)


def test_nothing_sent_after_a_loss_arrives() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        there, back = network.link("world", "server"), network.link("server", "world")
        there.delay = back.delay = uniform(0.1, 0.1)
        async with channel() as to_server:
            call = to_server.stream_stream(PATH + "Chat")(wait_for_ready=True)
            await call.write(b"1")
            assert await call.read() == b"1"
            await call.write(b"2")
            await passes(0.1)
            there.loss, there.delay, back.delay = 1.0, uniform(1, 1), uniform(1, 1)
            await call.write(b"lost")  # both ends notice within a second
            there.loss, there.delay = 0.0, uniform(0.1, 0.1)
            await call.write(b"3")
            await passes(10)
            assert served.asked.keys() == {b"1", b"2"}
            assert await call.code() is StatusCode.UNAVAILABLE

    play(body)


def test_names_may_resolve_to_other_addresses_later() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        other = Served()
        Process("other").start(other.run)
        await passes(0.1)
        network.name("service", ["server", "other"])
        options = [*FAST, ("grpc.lb_policy_name", "round_robin")]
        async with channel(options, "dns:///service:7000") as to_both:
            await to_both.channel_ready()
            await passes(1)
            echo = to_both.unary_unary(PATH + "Echo")
            for _ in range(10):
                await echo(b"1")
            assert served.asked[b"1"] == other.asked[b"1"] == 5
            network.name("service", ["other"])
            process.kill()
            await passes(60)
            await echo(b"1")
            assert other.asked[b"1"] == 6

    play(body)


def test_calls_to_a_closed_port_fail_and_across_a_cut_they_time_out() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async with channel(target="server:7001") as to_nobody:
            began = time.monotonic()
            error = await error_of(to_nobody.unary_unary(PATH + "Echo")(b""))
            assert error.code() is StatusCode.UNAVAILABLE
            assert "Connection refused" in (error.details() or "")
            assert time.monotonic() - began < 1
        network.cut("world", "server")
        async with channel([*FAST, ("grpc.min_reconnect_backoff_ms", 5000)]) as to_server:
            error = await error_of(to_server.unary_unary(PATH + "Echo")(b""))
            assert error.code() is StatusCode.UNAVAILABLE
            assert 5 <= time.monotonic() - began <= 7

    play(body)


def test_a_port_has_one_listener() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async def bind() -> None:
            with pytest.raises(RuntimeError):
                aio.server().add_insecure_port("0.0.0.0:7000")

        await process.spawn(bind)

    play(body)


def test_a_connection_has_a_maximum_age_and_its_calls_outlive_it() -> None:
    async def body(network: Network, served: Served, process: Process) -> None:
        async def serve() -> None:
            server = aio.server(options=[("grpc.max_connection_age_ms", 1000)])
            handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
                "Chat": grpc.stream_stream_rpc_method_handler(served._chat)
            }
            server.add_registered_method_handlers("test.Service", handlers)
            server.add_insecure_port("[::]:8000")
            await server.start()
            await server.wait_for_termination()

        Process("aging").start(serve)
        await passes(0.1)
        async with channel(target="aging:8000") as to_server:
            first = to_server.stream_stream(PATH + "Chat")()
            await first.write(b"1")
            assert await first.read() == b"1"
            await passes(5)
            assert len(network.connections()) == 2
            await first.write(b"2")
            assert await first.read() == b"2"
            await first.done_writing()
            assert await first.read() is aio.EOF
            await passes(1)
            assert len(network.connections()) == 1

    play(body)
