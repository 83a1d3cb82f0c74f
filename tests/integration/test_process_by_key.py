"""process_by_key: whatever a handler raises, its message is acknowledged or refused, and the other
messages are processed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial, wraps
from typing import Any

import pytest

from seqgate.client import Client, Received, RetryPolicy, connect, process_by_key
from seqgate.errors import NotFoundError
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.waiting import WITHIN_S, eventually

TOPIC = "public/default/orders"
AT_ONCE = RetryPolicy(min_s=0, max_s=0)


@pytest.fixture
async def fake() -> AsyncIterator[FakeDispatcher]:
    async with serving_fake() as fake:
        yield fake


@pytest.fixture
async def client(fake: FakeDispatcher) -> AsyncIterator[Client]:
    async with connect("127.0.0.1:1", fake.address) as client:
        yield client


def refused(fake: FakeDispatcher) -> list[str]:
    """The reasons of refusals."""
    return [
        each.reason
        for request in fake.requests
        for each in request.negative_acknowledge.negative_acknowledgements
    ]


class _SaysNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")

    __repr__ = __str__

    @property
    def reason(self) -> str:
        raise RuntimeError("cannot say")


async def inner_cancelled() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


async def own_task_cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()


async def group_of_tasks() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raising(ValueError("one")))
        group.create_task(raising(LookupError("two")))


async def raising(error: BaseException) -> None:
    raise error


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "an exception": (lambda: raising(ValueError("bad")), "ValueError: bad"),
    "an inner task that was cancelled": (inner_cancelled, "CancelledError"),
    "its own task, cancelled": (own_task_cancelled, "CancelledError"),
    "cancelled with a text": (lambda: raising(asyncio.CancelledError("x")), "CancelledError: x"),
    "an exception that cannot say what it is": (lambda: raising(_SaysNothing()), "_SaysNothing"),
    "an error of the client": (lambda: raising(NotFoundError("none")), "NotFoundError: none"),
    "a group": (
        group_of_tasks,
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions",
    ),
    "a group of cancellations": (
        lambda: raising(BaseExceptionGroup("all", [asyncio.CancelledError()])),
        "BaseExceptionGroup: all (1 sub-exception)",
    ),
    "the end of an iteration": (
        lambda: raising(StopIteration()),
        "RuntimeError: coroutine raised StopIteration",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "logged"])
async def test_whatever_a_handler_raises_its_message_is_refused_and_work_goes_on(
    client: Client,
    fake: FakeDispatcher,
    failure: str,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More failures than workers: each goes on. The message comes before later ones of its key."""
    for at in range(10):
        fake.publish(b"%d" % at, key=f"key-{at % 5}")
    fail, reason = FAILURES[failure]
    seen: list[tuple[bytes, int]] = []
    told: list[BaseException] = []

    async def handle(message: Received) -> None:
        seen.append((message.payload, message.attempts))
        if not message.attempts:
            await fail()

    async with client.consumer(TOPIC, "s", retry=AT_ONCE, breaker=None) as consumer:
        on_failure = (lambda message, error: told.append(error)) if is_told else None
        with caplog.at_level(logging.WARNING):
            processing = asyncio.create_task(
                process_by_key(consumer, handle, concurrency=2, on_failure=on_failure)
            )
            await eventually(lambda: len(fake.done) == 10)
        assert not processing.done()
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
    assert len(told if is_told else caplog.records) == 10
    assert [each[: len(reason)] for each in refused(fake)] == [reason] * 10
    for key in range(5):
        of_key = [each for each in seen if int(each[0]) % 5 == key]
        first, second = b"%d" % key, b"%d" % (key + 5)
        assert of_key == [(first, 0), (first, 1), (second, 0), (second, 1)]


class _Fatal(BaseException): ...


@pytest.mark.parametrize(
    "fatal",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        _Fatal(),
        BaseExceptionGroup("both", [ValueError(), KeyboardInterrupt()]),
    ],
    ids=["KeyboardInterrupt", "SystemExit", "another", "group"],
)
async def test_an_exception_that_is_to_end_the_process_refuses_its_message_and_ends_the_processing(
    client: Client, fake: FakeDispatcher, fatal: BaseException
) -> None:
    for at in range(6):
        fake.publish(b"%d" % at, key=f"key-{at}")
    go_on = asyncio.Event()

    async def handle(message: Received) -> None:
        if message.payload == b"1" and not message.attempts:
            asyncio.get_running_loop().call_soon(go_on.set)
            raise fatal
        await go_on.wait()

    async with client.consumer(TOPIC, "s", retry=AT_ONCE) as consumer:
        with pytest.raises(type(fatal)) as raised:
            await process_by_key(consumer, handle, concurrency=2)
        assert raised.value is fatal
        assert len(refused(fake)) <= 1
        await process_by_key_until(consumer, handle, lambda: len(fake.done) == 6)
    assert refused(fake) == [refused(fake)[0]]


async def process_by_key_until(consumer: Any, handle: Any, state: Callable[[], object]) -> None:
    processing = asyncio.create_task(process_by_key(consumer, handle))
    await eventually(state)
    processing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await processing


# ---- what a handler is


class _Asynchronous:
    async def __call__(self, message: Received) -> None:
        await asyncio.sleep(0)

    async def method(self, message: Received) -> None:
        await asyncio.sleep(0)

    def plain(self, message: Received) -> None: ...


class _Unknown:
    """Only a call shows what it returns."""

    def __init__(self, returned: Callable[[], Any]) -> None:
        self.calls = 0
        self._returned = returned

    def __call__(self, message: Received) -> Any:
        self.calls += 1
        return self._returned()


async def asynchronous(message: Received) -> None:
    await asyncio.sleep(0)


async def with_more(message: Received, more: int) -> None:
    await asyncio.sleep(0)


def plain(message: Received) -> None: ...


def says_so(message: Received) -> "asyncio.Future[None]":
    return asyncio.ensure_future(asynchronous(message))


@wraps(asynchronous)
def decorated(*args: Any) -> Any:
    return asynchronous(*args)


ASYNCHRONOUS: dict[str, Any] = {
    "function": asynchronous,
    "partial": partial(with_more, more=1),
    "partial of a partial": partial(partial(with_more), more=1),
    "object": _Asynchronous(),
    "partial of an object": partial(_Asynchronous()),
    "method": _Asynchronous().method,
    "lambda": lambda message: asynchronous(message),
    "decorated": decorated,
    "annotated": says_so,
    "unknown": _Unknown(lambda: asyncio.sleep(0)),
    "unknown future": _Unknown(lambda: asyncio.ensure_future(asyncio.sleep(0))),
}


@pytest.mark.parametrize("handler", ASYNCHRONOUS)
async def test_whatever_returns_an_awaitable_is_a_handler(
    client: Client, fake: FakeDispatcher, handler: str
) -> None:
    for at in range(3):
        fake.publish(b"%d" % at, key=f"key-{at}")
    async with client.consumer(TOPIC, "s") as consumer:
        await process_by_key_until(consumer, ASYNCHRONOUS[handler], lambda: len(fake.done) == 3)
    assert refused(fake) == []


async def generator(message: Received) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    "handler",
    [plain, partial(plain), _Asynchronous().plain, generator, 5, None],
    ids=["function", "partial", "method", "generator", "number", "None"],
)
async def test_a_function_that_is_not_asynchronous_is_refused_before_anything_is_received(
    client: Client, fake: FakeDispatcher, handler: Any
) -> None:
    fake.publish(b"0")
    async with client.consumer(TOPIC, "s") as consumer:
        with pytest.raises(TypeError, match=r"^handler .*must be"):
            await process_by_key(consumer, handler)
        await eventually(lambda: consumer.buffered == 1)


@pytest.mark.parametrize("returned", [None, 5, []])
async def test_a_handler_that_turns_out_not_to_be_asynchronous_is_called_once(
    client: Client, fake: FakeDispatcher, returned: object
) -> None:
    """And its message is lost to nobody: it is the next one, and has not failed."""
    for at in range(40):
        fake.publish(b"%d" % at, key=f"key-{at}")
    handler: Any = _Unknown(lambda: returned)
    async with client.consumer(TOPIC, "s") as consumer:
        await eventually(lambda: consumer.buffered == 40)
        with pytest.raises(TypeError, match="must be asynchronous"):
            await process_by_key(consumer, handler, concurrency=16)
        assert handler.calls == 1
        async with asyncio.timeout(WITHIN_S):
            messages = [await consumer.receive() for _ in range(40)]
    assert sorted(int(each.payload) for each in messages) == [*range(40)]
    assert {each.attempts for each in messages} == {0}
    assert refused(fake) == []


# ---- on_failure


async def test_an_asynchronous_on_failure_is_awaited(client: Client, fake: FakeDispatcher) -> None:
    fake.publish(b"0", key="a")
    told: list[str] = []

    async def handle(message: Received) -> None:
        if not message.attempts:
            raise ValueError("bad")

    async def tell(message: Received, failure: Exception) -> None:
        await asyncio.sleep(0)
        told.append(str(failure))

    async with client.consumer(TOPIC, "s", retry=AT_ONCE) as consumer:
        processing = asyncio.create_task(process_by_key(consumer, handle, on_failure=tell))
        await eventually(lambda: len(fake.done) == 1)
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
    assert told == ["bad"]


@pytest.mark.parametrize("error", [LookupError("told"), asyncio.CancelledError(), SystemExit(1)])
@pytest.mark.parametrize("is_asynchronous", [True, False])
async def test_an_exception_of_on_failure_ends_the_processing_with_the_message_refused(
    client: Client, fake: FakeDispatcher, error: BaseException, is_asynchronous: bool
) -> None:
    fake.publish(b"0", key="a")

    async def handle(message: Received) -> None:
        raise ValueError("bad")

    def fail(message: Received, failure: Exception) -> None:
        raise error

    async def fail_later(message: Received, failure: Exception) -> None:
        raise error

    async with client.consumer(TOPIC, "s") as consumer:
        with pytest.raises(type(error)):
            await process_by_key(
                consumer, handle, on_failure=fail_later if is_asynchronous else fail
            )
        await eventually(lambda: refused(fake) == ["ValueError: bad"])


# ---- cancellation


async def test_a_message_whose_handler_was_cancelled_is_received_again(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(3):
        fake.publish(b"%d" % at, key="a")
    begun = asyncio.Event()

    async def handle(message: Received) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with client.consumer(TOPIC, "s") as consumer:
        processing = asyncio.create_task(process_by_key(consumer, handle, stop_timeout_s=0))
        await begun.wait()
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
        async with asyncio.timeout(WITHIN_S):
            messages = [await consumer.receive() for _ in range(3)]
    assert [each.payload for each in messages] == [b"0", b"1", b"2"]
    assert refused(fake) == []
