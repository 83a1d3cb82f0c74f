"""The behaviour of channels and servers of grpc.aio, on the real and on the simulated network.

The simulation of the whole system depends on the simulated one: if the two differ, the real one is
right.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from tests.support.either_channel import KEEPALIVE, SERVICE, World, either
from tests.support.raw_channel import RawChannel

PATH = f"/{SERVICE}/"

KIB = 1024

SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def unary(behaviour: Any) -> Any:
    """A handler of unary requests and responses."""
    return grpc.unary_unary_rpc_method_handler(behaviour)


def serving(behaviour: Any) -> Any:
    """A handler of unary requests and streamed responses."""
    return grpc.unary_stream_rpc_method_handler(behaviour)


def taking(behaviour: Any) -> Any:
    """A handler of streamed requests and unary responses."""
    return grpc.stream_unary_rpc_method_handler(behaviour)


def chat(behaviour: Any) -> Any:
    """A handler of streamed requests and responses."""
    return grpc.stream_stream_rpc_method_handler(behaviour)


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def echo_each(requests: Any, context: Any) -> None:
    while (request := await context.read()) is not aio.EOF:
        await context.write(request)


async def wait_for_ever(request: Any, context: Any) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


class Kept:
    """A handler that records its starts and ends."""

    def __init__(self, handle: Any = wait_for_ever) -> None:
        self._handle = handle
        self.began = 0
        self.ends: list[str] = []
        self.context: Any = None

    @property
    def behaviour(self) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            self.began += 1
            self.context = context
            try:
                answer = await self._handle(request, context)
            except BaseException as error:
                self.ends.append(type(error).__name__)
                raise
            self.ends.append("returned")
            return answer

        return handle


async def error_of(awaited: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await awaited
    return caught.value


# ---- the four styles


@either
async def test_one_message_is_answered_with_one(world: World) -> None:
    await world.serve({"Echo": unary(echo)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Echo")(b"hello")
        assert await call == b"hello"
        assert await call == b"hello"
        assert await call.code() is StatusCode.OK
        assert await call.details() == ""
        assert call.done()
        assert not call.cancelled()
        assert not call.cancel()


@either
async def test_messages_are_serialised_and_parsed(world: World) -> None:
    async def add(request: int, context: Any) -> int:
        return request + 1

    handler: grpc.RpcMethodHandler[int, int] = grpc.unary_unary_rpc_method_handler(
        add, request_deserializer=int, response_serializer=lambda value: str(value).encode()
    )
    await world.serve({"Add": handler})
    async with world.channel() as channel:
        add_at: aio.UnaryUnaryMultiCallable[int, int] = channel.unary_unary(
            PATH + "Add", lambda value: str(value).encode(), int
        )
        assert await add_at(41) == 42


@either
async def test_one_message_is_answered_with_a_stream(world: World) -> None:
    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    await world.serve({"Count": serving(count)})
    async with world.channel() as channel:
        method = channel.unary_stream(PATH + "Count")
        assert [each async for each in method(b"3")] == [b"0", b"1", b"2"]
        call = method(b"1")
        assert await call.read() == b"0"
        assert await call.read() is aio.EOF
        assert await call.read() is aio.EOF
        assert await call.code() is StatusCode.OK


@either
async def test_a_stream_is_answered_with_one_message(world: World) -> None:
    async def join(requests: Any, context: Any) -> bytes:
        return b" ".join([each async for each in requests])

    await world.serve({"Join": taking(join)})
    async with world.channel() as channel:
        method = channel.stream_unary(PATH + "Join")
        call = method()
        for each in (b"a", b"b"):
            await call.write(each)
        await call.done_writing()
        assert await call == b"a b"

        async def words() -> AsyncIterator[bytes]:
            yield b"c"
            yield b"d"

        assert await method(words()) == b"c d"
        assert await method(iter([b"e"])) == b"e"


@either
async def test_a_stream_is_answered_with_a_stream(world: World) -> None:
    await world.serve({"Chat": chat(echo_each)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Chat")()
        for number in range(10):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        await call.done_writing()
        assert await call.read() is aio.EOF
        assert await call.code() is StatusCode.OK


@either
async def test_concurrent_streams_keep_their_order(world: World) -> None:
    await world.serve({"Chat": chat(echo_each)})

    async def talk(channel: RawChannel, name: int) -> None:
        call = channel.stream_stream(PATH + "Chat")()
        sent = [b"%d/%d" % (name, number) for number in range(50)]

        async def write() -> None:
            for each in sent:
                await call.write(each)
            await call.done_writing()

        writing = asyncio.ensure_future(write())
        assert [each async for each in call] == sent
        await writing

    async with world.channel() as channel:
        await asyncio.gather(*(talk(channel, name) for name in range(5)))


@either
async def test_an_unknown_method_is_unimplemented(world: World) -> None:
    await world.serve({"Echo": unary(echo)})
    async with world.channel() as channel:
        error = await error_of(channel.unary_unary(PATH + "Other")(b""))
        assert error.code() is StatusCode.UNIMPLEMENTED
        error = await error_of(channel.stream_stream(PATH + "Other")().read())
        assert error.code() is StatusCode.UNIMPLEMENTED


# ---- half-close


@either
async def test_a_half_closed_caller_still_receives(world: World) -> None:
    async def count(requests: Any, context: Any) -> None:
        read = 0
        while await context.read() is not aio.EOF:
            read += 1
        assert await context.read() is aio.EOF
        for _ in range(read):
            await context.write(b"x")

    await world.serve({"Count": chat(count)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Count")()
        await call.write(b"")
        await call.write(b"")
        await call.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"")
        assert [each async for each in call] == [b"x", b"x"]


@either
async def test_a_handler_may_answer_before_its_requests_end(world: World) -> None:
    async def first(requests: Any, context: Any) -> None:
        await context.write(await context.read())

    await world.serve({"First": chat(first)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "First")()
        await call.write(b"1")
        assert await call.read() == b"1"
        assert await call.read() is aio.EOF
        assert await call.code() is StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"2")
        await call.done_writing()


async def write_on(call: Any) -> None:
    for _ in range(1000):
        await call.write(b"2")
        await asyncio.sleep(0.001)


@either
async def test_a_write_into_a_stream_that_has_ended_unread_fails(world: World) -> None:
    async def first(requests: Any, context: Any) -> None:
        await context.write(await context.read())

    kept = Kept(first)
    await world.serve({"First": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "First")()
        await call.write(b"1")
        await world.until(lambda: kept.ends == ["returned"])
        with pytest.raises((aio.AioRpcError, asyncio.InvalidStateError)):
            await write_on(call)


# ---- errors


@either
async def test_an_abort_is_an_error_with_details_and_metadata(world: World) -> None:
    async def refuse(request: Any, context: Any) -> None:
        trailing = (("key", "value"), ("details-bin", b"\x00\xff"))
        await context.abort(StatusCode.FAILED_PRECONDITION, "not so", trailing)

    async def refuse_stream(requests: Any, context: Any) -> None:
        await refuse(requests, context)

    await world.serve({"Unary": unary(refuse), "Chat": chat(refuse_stream)})
    async with world.channel() as channel:
        for call in (
            channel.unary_unary(PATH + "Unary")(b""),
            channel.stream_stream(PATH + "Chat")().read(),
        ):
            error = await error_of(call)
            assert error.code() is StatusCode.FAILED_PRECONDITION
            assert error.details() == "not so"
            assert dict(error.trailing_metadata()) == {"key": "value", "details-bin": b"\x00\xff"}


@either
async def test_messages_sent_before_an_error_are_delivered_first(world: World) -> None:
    async def fail(requests: Any, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)
        await context.abort(StatusCode.ABORTED, "enough")

    kept = Kept(fail)
    await world.serve({"Fail": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Fail")()
        await world.until(lambda: kept.ends)
        for number in range(3):
            assert not call.done()
            assert await call.read() == b"%d" % number
        for _ in range(2):
            assert (await error_of(call.read())).code() is StatusCode.ABORTED
        assert await call.code() is StatusCode.ABORTED
        assert await call.details() == "enough"
        with pytest.raises((aio.AioRpcError, asyncio.InvalidStateError)):
            await call.write(b"")


@either
async def test_an_iteration_ends_with_the_error(world: World) -> None:
    async def fail(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        raise ValueError("unforeseen")

    await world.serve({"Fail": serving(fail)})
    async with world.channel() as channel:
        each = aiter(channel.unary_stream(PATH + "Fail")(b""))
        assert await anext(each) == b"1"
        assert (await error_of(anext(each))).code() is StatusCode.UNKNOWN


@either
async def test_an_exception_is_an_unknown_error(world: World) -> None:
    async def fail(request: Any, context: Any) -> None:
        raise ValueError("unforeseen")

    await world.serve({"Fail": unary(fail)})
    async with world.channel() as channel:
        error = await error_of(channel.unary_unary(PATH + "Fail")(b""))
        assert error.code() is StatusCode.UNKNOWN
        assert error.details() == "Unexpected <class 'ValueError'>: unforeseen"


@either
async def test_a_status_may_be_set_and_returned(world: World) -> None:
    async def refuse(request: Any, context: Any) -> bytes:
        context.set_code(StatusCode.NOT_FOUND)
        context.set_details("nowhere")
        context.set_trailing_metadata((("where", "nowhere"),))
        assert context.code() is StatusCode.NOT_FOUND
        assert context.details() == "nowhere"
        return b"ignored"

    await world.serve({"Refuse": unary(refuse)})
    async with world.channel() as channel:
        error = await error_of(channel.unary_unary(PATH + "Refuse")(b""))
        assert (error.code(), error.details()) == (StatusCode.NOT_FOUND, "nowhere")
        assert dict(error.trailing_metadata()) == {"where": "nowhere"}


@either
async def test_an_abort_ends_the_handler_and_its_later_writes(world: World) -> None:
    tried = []

    async def refuse(requests: Any, context: Any) -> None:
        try:
            await context.abort(StatusCode.ABORTED, "first")
        except aio.AbortError:
            for attempt in (
                lambda: context.write(b""),
                context.read,
                lambda: context.abort(StatusCode.INTERNAL, "second"),
            ):
                try:
                    await attempt()
                except BaseException as error:
                    tried.append(type(error).__name__)
            raise

    await world.serve({"Refuse": chat(refuse)})
    async with world.channel() as channel:
        error = await error_of(channel.stream_stream(PATH + "Refuse")().read())
        assert (error.code(), error.details()) == (StatusCode.ABORTED, "first")
        await world.until(lambda: len(tried) == 3)
        assert tried == ["AbortError", "AbortError", "UsageError"]


@either
async def test_a_handler_that_cancels_itself_sends_no_answer(world: World) -> None:
    async def vanish(request: Any, context: Any) -> None:
        raise asyncio.CancelledError

    kept, chatting = Kept(vanish), Kept(vanish)
    await world.serve({"Vanish": unary(kept.behaviour), "Chat": chat(chatting.behaviour)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Vanish")(b"", timeout=0.5)
        stream = channel.stream_stream(PATH + "Chat")(timeout=0.5)
        await world.until(lambda: kept.ends == chatting.ends == ["CancelledError"])
        for error in (await error_of(call), await error_of(stream.read())):
            assert error.code() is StatusCode.DEADLINE_EXCEEDED


@either
async def test_answers_of_a_handler_that_outlives_its_call_are_dropped(world: World) -> None:
    async def stubborn(request: Any, context: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert not context.done()
            with pytest.raises(aio.BaseError):
                await context.abort(StatusCode.ABORTED, "too late")
            raise

    kept = Kept(stubborn)
    await world.serve({"Wait": unary(kept.behaviour)})
    async with world.channel() as channel:
        error = await error_of(channel.unary_unary(PATH + "Wait")(b"", timeout=0.3))
        assert error.code() is StatusCode.DEADLINE_EXCEEDED
        await world.until(lambda: kept.ends == ["CancelledError"])


# ---- metadata


@either
async def test_metadata_travels_both_ways(world: World) -> None:
    seen = {}

    async def answer(request: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        await context.send_initial_metadata((("initial", "i"),))
        with pytest.raises(aio.UsageError):
            await context.send_initial_metadata(())
        context.set_trailing_metadata((("trailing", "t"),))
        return request

    await world.serve({"Answer": unary(answer)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Answer")(
            b"", metadata=(("text", "x"), ("bytes-bin", b"\x01"))
        )
        assert dict(await call.initial_metadata()) == {"initial": "i"}
        assert dict(await call.trailing_metadata()) == {"trailing": "t"}
        await call
    assert seen["text"] == "x"
    assert seen["bytes-bin"] == b"\x01"
    assert "user-agent" in seen


@either
async def test_initial_metadata_arrive_before_the_first_message(world: World) -> None:
    go_on = asyncio.Event()

    async def slow(requests: Any, context: Any) -> None:
        await context.send_initial_metadata((("early", "yes"),))
        await go_on.wait()
        await context.write(b"late")

    await world.serve({"Slow": chat(slow)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Slow")()
        await call.wait_for_connection()
        assert dict(await call.initial_metadata()) == {"early": "yes"}
        go_on.set()
        assert await call.read() == b"late"


# ---- cancellation


@either
async def test_a_caller_that_cancels_cancels_the_handler(world: World) -> None:
    kept = Kept()
    await world.serve({"Wait": unary(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Wait")(b"")
        await world.until(lambda: kept.began)
        assert call.cancel()
        assert not call.cancel()
        assert call.cancelled()
        assert call.done()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await call.code() is StatusCode.CANCELLED
        assert await call.details() == "Locally cancelled by application!"
        await world.until(lambda: kept.ends == ["CancelledError"])


@either
async def test_a_task_that_is_cancelled_cancels_its_call(world: World) -> None:
    kept, chatting = Kept(), Kept()
    await world.serve({"Wait": unary(kept.behaviour), "Chat": chat(chatting.behaviour)})
    async with world.channel() as channel:

        async def ask() -> None:
            await channel.unary_unary(PATH + "Wait")(b"")

        call = channel.stream_stream(PATH + "Chat")()
        await call.write(b"")
        asking, reading = asyncio.ensure_future(ask()), asyncio.ensure_future(call.read())
        await world.until(lambda: kept.began and chatting.began)
        asking.cancel()
        reading.cancel()
        await asyncio.wait([asking, reading])
        assert asking.cancelled()
        assert reading.cancelled()
        assert call.cancelled()
        await world.until(lambda: kept.ends == chatting.ends == ["CancelledError"])


@either
async def test_using_a_cancelled_stream_raises(world: World) -> None:
    kept = Kept()
    await world.serve({"Chat": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Chat")()
        reading = asyncio.ensure_future(call.read())
        await world.until(lambda: kept.began)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"")
        await call.done_writing()
        assert await call.code() is StatusCode.CANCELLED
        await world.until(lambda: kept.ends == ["CancelledError"])


@either
async def test_a_call_that_is_cancelled_at_once_never_began(world: World) -> None:
    kept = Kept()
    await world.serve({"Wait": unary(kept.behaviour), "Echo": unary(echo)})
    async with world.channel() as channel:
        await channel.unary_unary(PATH + "Echo")(b"")
        call = channel.unary_unary(PATH + "Wait")(b"")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await channel.unary_unary(PATH + "Echo")(b"")
        assert kept.began == 0


@either
async def test_a_handler_that_writes_to_a_closed_call_gets_an_error(world: World) -> None:
    async def write(requests: Any, context: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            assert await context.read() is aio.EOF
            await context.write(b"")

    kept = Kept(write)
    await world.serve({"Write": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Write")()
        await call.write(b"")
        await world.until(lambda: kept.began)
        call.cancel()
        await world.until(lambda: kept.ends == ["ExecuteBatchError"])


@either
async def test_a_cancelled_read_of_a_handler_loses_its_message(world: World) -> None:
    got = []

    async def impatient(requests: Any, context: Any) -> None:
        reading = asyncio.ensure_future(context.read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading.cancel()
        await context.send_initial_metadata(())
        got.append(await context.read())  # the cancelled read is still pending in the core
        await context.write(b"")

    await world.serve({"Impatient": chat(impatient)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Impatient")()
        await call.wait_for_connection()
        await call.initial_metadata()
        assert await call.read() == b""
        assert got == [aio.EOF]


@either
async def test_done_callbacks_run_at_both_ends(world: World) -> None:
    ends = []
    kept = Kept()
    await world.serve({"Wait": unary(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Wait")(b"")
        call.add_done_callback(lambda call: ends.append("client"))
        await world.until(lambda: kept.began)
        kept.context.add_done_callback(lambda context: ends.append("server"))
        call.cancel()
        assert ends == ["client"]
        call.add_done_callback(lambda call: ends.append("late"))
        assert ends == ["client", "late"]
        await world.until(lambda: ends == ["client", "late", "server"])


# ---- deadlines


@either
async def test_a_deadline_ends_a_call_at_both_ends(world: World) -> None:
    kept, chatting = Kept(), Kept()
    await world.serve({"Wait": unary(kept.behaviour), "Chat": chat(chatting.behaviour)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Wait")(b"", timeout=0.3)
        stream = channel.stream_stream(PATH + "Chat")(timeout=0.3)
        await world.until(lambda: kept.began and chatting.began)
        left_s = kept.context.time_remaining()
        assert 0 < left_s <= 0.3
        call_left_s = call.time_remaining()
        assert call_left_s is not None
        assert 0 < call_left_s <= 0.3
        for error in (await error_of(call), await error_of(stream.read())):
            assert error.code() is StatusCode.DEADLINE_EXCEEDED
        await world.until(lambda: kept.ends == chatting.ends == ["CancelledError"])
        assert call.time_remaining() == 0


@either
async def test_a_call_without_a_deadline_has_no_time_remaining(world: World) -> None:
    left = []

    async def answer(request: bytes, context: Any) -> bytes:
        left.append(context.time_remaining())
        return request

    await world.serve({"Answer": unary(answer)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Answer")(b"")
        assert call.time_remaining() is None
        await call
        assert left == [None]


@either
async def test_a_past_deadline_ends_a_call_at_once(world: World) -> None:
    kept = Kept()
    await world.serve({"Wait": unary(kept.behaviour)})
    async with world.channel() as channel:
        for timeout_s in (0.0, -1.0):
            error = await error_of(channel.unary_unary(PATH + "Wait")(b"", timeout=timeout_s))
            assert error.code() is StatusCode.DEADLINE_EXCEEDED


@either
async def test_messages_are_not_read_after_the_deadline(world: World) -> None:
    async def write(requests: Any, context: Any) -> None:
        await context.write(b"1")
        await context.write(b"2")
        await asyncio.Event().wait()

    await world.serve({"Write": chat(write)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Write")(timeout=0.3)
        assert await call.read() == b"1"
        assert await call.code() is StatusCode.DEADLINE_EXCEEDED
        assert (await error_of(call.read())).code() is StatusCode.DEADLINE_EXCEEDED


# ---- flow control


@either
async def test_a_caller_blocks_when_the_handler_does_not_read(world: World) -> None:
    go_on = asyncio.Event()
    read = []

    async def slow(requests: Any, context: Any) -> None:
        await go_on.wait()
        while (message := await context.read()) is not aio.EOF:
            read.append(len(message))

    await world.serve({"Slow": chat(slow)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Slow")()
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(200):
                await call.write(b"x" * 100_000)
                written += 1
            await call.done_writing()

        writing = asyncio.ensure_future(write())
        await world.until(lambda: written >= 35)
        seen = -1
        while seen != written:
            seen = written
            await asyncio.sleep(0.09)
        assert 35 <= written < 200  # gRPC measures how large its windows are to be
        go_on.set()
        await writing
        assert await call.read() is aio.EOF
        assert read == [100_000] * 200


@either
async def test_a_handler_blocks_when_the_caller_does_not_read(world: World) -> None:
    written = 0

    async def write(requests: Any, context: Any) -> None:
        nonlocal written
        for _ in range(200):
            await context.write(b"x" * 100_000)
            written += 1

    kept = Kept(write)
    await world.serve({"Write": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Write")()
        await world.until(lambda: written >= 35)
        seen = -1
        while seen != written:
            seen = written
            await asyncio.sleep(0.09)
        assert 35 <= written < 200  # gRPC measures how large its windows are to be
        assert kept.ends == []
        count = 0
        while await call.read() is not aio.EOF:
            count += 1
        assert count == 200
        await world.until(lambda: kept.ends == ["returned"])


@either
async def test_messages_larger_than_the_window_get_through(world: World) -> None:
    await world.serve({"Chat": chat(echo_each), "Echo": unary(echo)}, options=SIZES)
    large = b"x" * 5_000_000
    async with world.channel(SIZES) as channel:
        assert await channel.unary_unary(PATH + "Echo")(large) == large
        call = channel.stream_stream(PATH + "Chat")()
        for _ in range(3):
            await call.write(large)
            assert await call.read() == large
        await call.done_writing()
        assert await call.read() is aio.EOF


@either
async def test_a_status_waits_behind_unread_messages(world: World) -> None:
    async def write(requests: Any, context: Any) -> None:
        for _ in range(40):
            await context.write(b"x" * KIB)

    kept = Kept(write)
    await world.serve({"Write": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Write")()
        await world.until(lambda: kept.ends == ["returned"])
        assert await call.read() == b"x" * KIB
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.code(), 0.09)
        assert not call.done()
        for _ in range(39):
            assert await call.read() == b"x" * KIB
        assert await call.code() is StatusCode.OK


@either
async def test_a_blocked_writer_learns_of_the_end(world: World) -> None:
    kept, refused = Kept(), asyncio.Event()

    async def refuse(requests: Any, context: Any) -> None:
        await refused.wait()
        await context.abort(StatusCode.ABORTED, "enough")

    await world.serve({"Wait": chat(kept.behaviour), "Refuse": chat(refuse)})
    async with world.channel() as channel:

        async def write(call: Any, ends: list[Any]) -> None:
            try:
                while True:
                    await call.write(b"x" * 100_000)
            except BaseException as error:
                ends.append(error)

        ends: list[Any] = []
        call = channel.stream_stream(PATH + "Refuse")()
        writing = asyncio.ensure_future(write(call, ends))
        await asyncio.sleep(0.09)
        refused.set()
        await writing
        assert isinstance(ends[0], aio.AioRpcError | asyncio.InvalidStateError), ends
        # grpc.aio may report the failed write in place of the status that caused it.
        assert await call.code() in (StatusCode.INTERNAL, StatusCode.ABORTED)

        ends = []
        call = channel.stream_stream(PATH + "Wait")()
        writing = asyncio.ensure_future(write(call, ends))
        await asyncio.sleep(0.09)
        call.cancel()
        await writing
        assert isinstance(ends[0], asyncio.CancelledError | asyncio.InvalidStateError), ends


# ---- sizes


@either
async def test_a_message_above_the_limit_is_refused(world: World) -> None:
    async def grow(request: bytes, context: Any) -> bytes:
        return request * 100

    async def grow_each(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(request * 100)

    kept = Kept(grow_each)
    await world.serve(
        {"Grow": unary(grow), "Chat": chat(kept.behaviour)},
        options=[("grpc.max_receive_message_length", 1000)],
    )
    limits = [("grpc.max_receive_message_length", 5000), ("grpc.max_send_message_length", 2000)]
    async with world.channel(limits) as channel:
        grow_at = channel.unary_unary(PATH + "Grow")
        assert len(await grow_at(b"x" * 10)) == 1000
        for size in (1500, 2500, 60):  # the server's limit, the client's two
            error = await error_of(grow_at(b"x" * size))
            assert error.code() is StatusCode.RESOURCE_EXHAUSTED, size
        for size in (1500, 60):
            call = channel.stream_stream(PATH + "Chat")()
            await call.write(b"x" * size)
            assert (await error_of(call.read())).code() is StatusCode.RESOURCE_EXHAUSTED
        await world.until(lambda: len(kept.ends) == 2)
        call = channel.stream_stream(PATH + "Chat")()
        with pytest.raises(aio.AioRpcError):
            await call.write(b"x" * 2500)


# ---- connections


@either
async def test_a_broken_connection_ends_its_calls_and_is_made_again(world: World) -> None:
    kept, chatting = Kept(), Kept()
    await world.serve(
        {"Wait": unary(kept.behaviour), "Chat": chat(chatting.behaviour), "Echo": unary(echo)}
    )
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Wait")(b"")
        stream = channel.stream_stream(PATH + "Chat")()
        await world.until(lambda: kept.began and chatting.began)
        world.break_connections()
        for error in (await error_of(call), await error_of(stream.read())):
            assert error.code() is StatusCode.UNAVAILABLE
        with pytest.raises((aio.AioRpcError, asyncio.InvalidStateError)):
            await stream.write(b"")
        await world.until(lambda: kept.ends == chatting.ends == ["CancelledError"])
        echo_at = channel.unary_unary(PATH + "Echo")
        assert await echo_at(b"again", wait_for_ready=True) == b"again"


@either
async def test_unread_messages_are_lost_with_their_connection(world: World) -> None:
    async def write(requests: Any, context: Any) -> None:
        await context.write(b"1")
        await context.write(b"2")
        await asyncio.Event().wait()

    kept = Kept(write)
    await world.serve({"Write": chat(kept.behaviour)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Write")()
        assert await call.read() == b"1"
        await asyncio.sleep(0.05)
        world.break_connections()
        assert await call.code() is StatusCode.UNAVAILABLE
        assert (await error_of(call.read())).code() is StatusCode.UNAVAILABLE


@either
async def test_calls_without_a_server_fail_or_wait_for_it(world: World) -> None:
    async with world.channel() as channel:
        echo_at = channel.unary_unary(PATH + "Echo")
        assert (await error_of(echo_at(b""))).code() is StatusCode.UNAVAILABLE
        late = await error_of(echo_at(b"", wait_for_ready=True, timeout=0.3))
        assert late.code() is StatusCode.DEADLINE_EXCEEDED
        stream = channel.stream_stream(PATH + "Chat")()
        with pytest.raises(aio.AioRpcError) as caught:
            await stream.wait_for_connection()
        assert caught.value.code() is StatusCode.UNAVAILABLE
        waiting = echo_at(b"at last", wait_for_ready=True)
        chatting = channel.stream_stream(PATH + "Chat")(wait_for_ready=True)
        await world.serve({"Echo": unary(echo), "Chat": chat(echo_each)})
        assert await waiting == b"at last"
        await chatting.write(b"1")
        assert await chatting.read() == b"1"


@either
async def test_a_channel_reports_its_state(world: World) -> None:
    await world.serve({"Echo": unary(echo)})
    channel = world.channel()
    assert channel.get_state() is grpc.ChannelConnectivity.IDLE
    await channel.channel_ready()
    assert channel.get_state() is grpc.ChannelConnectivity.READY
    world.break_connections()
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    await channel.channel_ready()
    await channel.close()
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    with pytest.raises(aio.UsageError):
        channel.unary_unary(PATH + "Echo")(b"")
    await channel.close()


@either
async def test_closing_a_channel_cancels_its_calls(world: World) -> None:
    kept, chatting = Kept(), Kept()
    await world.serve({"Wait": unary(kept.behaviour), "Chat": chat(chatting.behaviour)})
    channel = world.channel()
    call = channel.unary_unary(PATH + "Wait")(b"")
    stream = channel.stream_stream(PATH + "Chat")()
    reading = asyncio.ensure_future(stream.read())
    await world.until(lambda: kept.began and chatting.began)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(asyncio.CancelledError):
        await reading
    await world.until(lambda: kept.ends == chatting.ends == ["CancelledError"])


@either
async def test_a_silent_connection_ends_by_keepalive(world: World) -> None:
    kept = Kept()
    await world.serve({"Chat": chat(kept.behaviour)}, options=KEEPALIVE)
    async with world.channel(KEEPALIVE) as channel:
        call = channel.stream_stream(PATH + "Chat")()
        await call.write(b"")
        await world.until(lambda: kept.began)
        world.hold(held=True)
        assert (await error_of(call.read())).code() is StatusCode.UNAVAILABLE
        await world.until(lambda: kept.ends == ["CancelledError"])
        world.hold(held=False)


# ---- servers that stop


@either
async def test_a_stopping_server_finishes_calls_and_refuses_new_ones(world: World) -> None:
    go_on = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        await go_on.wait()
        return request

    kept = Kept(slow)
    await world.serve({"Slow": unary(kept.behaviour), "Echo": unary(echo)})
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Slow")(b"done")
        await world.until(lambda: kept.began)
        stopping = asyncio.ensure_future(world.stop(30))
        echo_at = channel.unary_unary(PATH + "Echo")

        async def is_refused() -> bool:
            try:
                await echo_at(b"")
            except aio.AioRpcError as error:
                return error.code() is StatusCode.UNAVAILABLE
            return False

        while not await is_refused():
            await asyncio.sleep(0.01)
        assert not stopping.done()
        go_on.set()
        assert await call == b"done"
        await stopping


@either
async def test_a_server_cancels_remaining_calls_after_its_grace(world: World) -> None:
    for grace in (None, 0.2):
        kept, chatting = Kept(), Kept()
        await world.serve({"Wait": unary(kept.behaviour), "Chat": chat(chatting.behaviour)})
        async with world.channel() as channel:
            call = channel.unary_unary(PATH + "Wait")(b"")
            stream = channel.stream_stream(PATH + "Chat")()
            await stream.write(b"")
            reading = asyncio.ensure_future(stream.read())
            await world.until(lambda: kept.began and chatting.began)  # noqa: B023
            await world.stop(grace)
            for error in (await error_of(call), await error_of(reading)):
                assert error.code() is StatusCode.UNAVAILABLE
            await world.until(
                lambda: kept.ends == chatting.ends == ["CancelledError"]  # noqa: B023
            )


# ---- interceptors


@either
async def test_a_callers_interceptor_changes_the_call(world: World) -> None:
    seen = {}

    async def answer(request: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        seen["left"] = context.time_remaining()
        return request

    class Changing(aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            metadata = aio.Metadata(("added", "yes"))
            details = client_call_details._replace(timeout=5, metadata=metadata)
            return await continuation(details, request + b"!")

    await world.serve({"Answer": unary(answer), "Wait": unary(wait_for_ever)})
    async with world.channel(interceptors=[Changing()]) as channel:
        call = channel.unary_unary(PATH + "Answer")(b"hello")
        assert await call == b"hello!"
        assert await call.code() is StatusCode.OK
        assert seen["added"] == "yes"
        assert 0 < seen["left"] <= 5
        waiting = channel.unary_unary(PATH + "Wait")(b"")
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@either
async def test_a_servers_interceptors_stand_before_the_handler(world: World) -> None:
    seen = []

    class Noting(aio.ServerInterceptor):
        def __init__(self, name: str) -> None:
            self._name = name

        async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            metadata = dict(handler_call_details.invocation_metadata)
            seen.append((self._name, handler_call_details.method, metadata.get("who")))
            handler = await continuation(handler_call_details)
            if handler is None:
                return None

            async def shout(request: bytes, context: Any) -> bytes:
                answer: bytes = await handler.unary_unary(request, context)
                return answer.upper()

            return grpc.unary_unary_rpc_method_handler(shout)

    await world.serve({"Echo": unary(echo)}, interceptors=[Noting("outer"), Noting("inner")])
    async with world.channel() as channel:
        call = channel.unary_unary(PATH + "Echo")(b"hello", metadata=(("who", "me"),))
        assert await call == b"HELLO"
        assert seen == [("outer", PATH + "Echo", "me"), ("inner", PATH + "Echo", "me")]
        error = await error_of(channel.unary_unary(PATH + "Other")(b""))
        assert error.code() is StatusCode.UNIMPLEMENTED


@either
async def test_reading_and_iterating_a_stream_do_not_mix(world: World) -> None:
    await world.serve({"Chat": chat(echo_each)})
    async with world.channel() as channel:
        call = channel.stream_stream(PATH + "Chat")()
        await call.write(b"1")
        assert await call.read() == b"1"
        with pytest.raises(aio.UsageError):
            call.__aiter__()


@either
async def test_concurrent_writes_are_an_error(world: World) -> None:
    kept = Kept()
    await world.serve({"Wait": chat(kept.behaviour)})
    async with world.channel(SIZES) as channel:
        call = channel.stream_stream(PATH + "Wait")()
        await call.wait_for_connection()
        large = b"x" * 5_000_000
        results = await asyncio.gather(
            asyncio.wait_for(call.write(large), 0.5),
            asyncio.wait_for(call.write(large), 0.5),
            return_exceptions=True,
        )
        assert [isinstance(each, BaseException) for each in results] != [False, False]
