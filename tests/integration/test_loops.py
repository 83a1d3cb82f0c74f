"""A client belongs to the event loop in which it was made: used elsewhere, it raises at once."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from seqgate.client import Client, Outgoing, connect
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.waiting import WITHIN_S

TOPIC = "public/default/orders"
NOBODY = "127.0.0.1:1"
SPECIAL = ("__aenter__", "__aexit__", "__anext__")


@pytest.fixture
async def fake() -> AsyncIterator[FakeDispatcher]:
    async with serving_fake() as fake:
        yield fake


async def made(dispatcher: str = NOBODY) -> dict[str, Any]:
    client = connect(NOBODY, dispatcher, dedup=NOBODY, cursor=NOBODY)
    return {
        "client": client,
        "producer": client.producer(TOPIC),
        "reader": client.reader(TOPIC),
        "consumer": client.consumer(TOPIC, "s"),
        "admin": client.admin(),
    }


def public_methods(of: object) -> Iterator[str]:
    for name in dir(of):
        member = inspect.getattr_static(of, name)
        if inspect.isfunction(member) and (not name.startswith("_") or name in SPECIAL):
            yield name


def call(method: Any) -> Any:
    """Call a method with some value for each argument it needs."""
    needed = [
        each
        for each in inspect.signature(method).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return method(
        *(None for each in needed if each.kind is not each.KEYWORD_ONLY),
        **{each.name: None for each in needed if each.kind is each.KEYWORD_ONLY},
    )


async def awaited(method: Any) -> None:
    returned = call(method)
    if inspect.isasyncgen(returned):
        await anext(returned)
    elif inspect.isawaitable(returned):
        await returned


def test_each_method_raises_at_once_in_another_event_loop() -> None:
    objects = asyncio.run(made())
    tried = 0

    async def elsewhere() -> None:
        nonlocal tried
        for what, each in objects.items():
            for name in public_methods(each):
                with pytest.raises(RuntimeError, match=rf"this {what} was made in another event"):
                    async with asyncio.timeout(WITHIN_S):
                        await awaited(getattr(each, name))
                tried += 1

    asyncio.run(elsewhere())
    assert tried > 80


async def test_each_method_raises_at_once_in_a_thread_without_an_event_loop() -> None:
    async with connect(NOBODY, NOBODY) as client:
        producer, consumer = client.producer(TOPIC), client.consumer(TOPIC, "s")
        for method in (
            client.admin,
            lambda: client.reader(TOPIC),
            lambda: producer.send_nowait(b"0"),
            consumer.pause,
            consumer.resume,
        ):
            with pytest.raises(RuntimeError, match=r"make a client of seqgate\.client\.blocking"):
                await asyncio.to_thread(method)


def test_a_client_needs_an_event_loop() -> None:
    with pytest.raises(RuntimeError, match="no event loop is running in this thread: make"):
        connect(NOBODY)
    with pytest.raises(RuntimeError, match="no event loop is running in this thread: make"):
        Client(NOBODY)


async def test_methods_stay_what_they_were() -> None:
    """Their kinds, names, arguments and docstrings."""
    producer, consumer = (await made())["producer"], (await made())["consumer"]
    assert inspect.iscoroutinefunction(producer.send)
    assert not inspect.iscoroutinefunction(producer.send_nowait)
    assert list(inspect.signature(consumer.receive).parameters) == ["timeout_s"]
    assert consumer.receive.__doc__.startswith("Wait for the next message.")
    assert list(inspect.signature(type(producer)).parameters)[:2] == ["channel", "topic"]
    assert Outgoing(b"0").payload == b"0"


async def test_properties_may_be_read_anywhere(fake: FakeDispatcher) -> None:
    objects = await made(fake.address)
    consumer = objects["consumer"]
    await consumer.open()
    assert await asyncio.to_thread(lambda: consumer.subscription) == "s"
    assert await asyncio.to_thread(lambda: consumer.buffered) == 0
    await consumer.close()
    await objects["client"].close()
