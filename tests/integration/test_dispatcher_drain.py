"""A dispatcher that is told to stop under load ends when its consumers have left, whatever other
streams wait for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
from grpc import aio

from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.client import Client, connect
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.telemetry.metrics import STREAMS
from tests.integration.services import log_lines, paused
from tests.support.scrape import scraped
from tests.support.waiting import eventually

NEVER_S = 600
"""Longer than a test may last: a stream that is waited for ends it."""

ENVIRONMENT = {
    "SEQGATE_DISPATCHER_DRAIN_TIMEOUT_S": str(NEVER_S),
    "SEQGATE_DISPATCHER_FIRST_MESSAGE_TIMEOUT_S": str(NEVER_S),
    "SEQGATE_DISPATCHER_CALL_TIMEOUT_S": str(NEVER_S),
    "SEQGATE_DISPATCHER_KEEPALIVE_S": str(NEVER_S),
}

CONSUMERS = 3
MESSAGES = 200


@asynccontextmanager
async def loaded(stack: Stack) -> AsyncIterator[list[bytes]]:
    """Consumers with messages in flight, and messages that wait for them. One never acknowledges.
    The value is what was acknowledged."""
    acknowledged: list[bytes] = []

    async def consume(client: Client, *, acknowledges: bool) -> None:
        async with client.consumer("orders", "s") as consumer:
            while True:
                message = await consumer.receive()
                if acknowledges:
                    await consumer.ack(message)
                    acknowledged.append(message.payload)

    async with connect(stack.address("ledger"), dispatcher=stack.address("dispatcher")) as client:
        async with client.producer("orders", name="p") as producer:
            sent = (producer.send(b"%d" % n, key=f"key-{n}") for n in range(MESSAGES))
            await asyncio.gather(*sent)
        tasks = [
            asyncio.create_task(consume(client, acknowledges=number > 0))
            for number in range(CONSUMERS)
        ]
        try:
            await eventually(lambda: acknowledged, "messages are acknowledged")
            yield acknowledged
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def installed(folder: Path) -> tuple[Stack, int]:
    """A stack, and the port of the dispatcher's metrics."""
    (port,) = free_ports(1)
    listen = {"SEQGATE_DISPATCHER_METRICS_LISTEN": f"127.0.0.1:{port}"}
    return Stack(folder, environment=ENVIRONMENT | listen), port


async def has_streams(port: int, count: int) -> None:
    async def has() -> bool:
        return (await scraped(port)).value(STREAMS) == count

    await eventually(has, f"{count} streams")


async def told_to_stop(stack: Stack) -> None:
    """The dispatcher ends in an orderly way, and cuts no stream."""
    stack.signal("dispatcher", SIGTERM)
    await eventually(
        lambda: any(each["event"] == "draining" for each in log_lines(stack, "dispatcher")),
        "it drains",
    )
    assert await stack.ended("dispatcher") == 0
    events = [each["event"] for each in log_lines(stack, "dispatcher")]
    assert events[-1] == "stopped"
    assert "streams cut at the end of drain_timeout_s" not in events


@pytest.mark.timeout(120)
async def test_a_stream_that_has_not_spoken_holds_nothing_up(tmp_path: Path) -> None:
    made, metrics = installed(tmp_path)
    async with (
        made as stack,
        loaded(stack),
        aio.insecure_channel(stack.address("dispatcher")) as channel,
    ):
        stub: Any = DispatcherServiceStub(channel)
        silent = stub.Consume()
        await has_streams(metrics, CONSUMERS + 1)
        await told_to_stop(stack)
        with pytest.raises(aio.AioRpcError):
            await silent.read()


@pytest.mark.timeout(120)
async def test_a_stream_that_waits_for_the_cursor_service_holds_nothing_up(tmp_path: Path) -> None:
    made, metrics = installed(tmp_path)
    async with made as stack:
        addresses = stack.address("ledger"), stack.address("dispatcher")
        async with connect(addresses[0], dispatcher=addresses[1]) as client:
            async with client.producer("orders", name="p") as producer:
                await producer.send(b"1")
            with paused(stack, "cursor"):
                opening = asyncio.create_task(client.consumer("orders", "s").__aenter__())
                await has_streams(metrics, 1)
                await told_to_stop(stack)
                assert not opening.done()
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
