"""Peers: what others do to the same end, and Seqgate beside it, in rounds that take turns.

A peer that is not installed is left out, and the report says so.
"""

import asyncio
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from grpc import aio

from seqgate.client import connect
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from tools.bench.bench import Bench
from tools.bench.clients import OneAtATime, Publish, workload
from tools.bench.figures import MEDIAN, Measurement
from tools.bench.parts import CLAIMS, DEDUP_TIMEOUT_S, REDIS_TIMEOUT_S, groups
from tools.bench.rounds import Call, Case, Meter, Repeated, Round, check
from tools.bench.servers import program

PIPELINED: Final = {1: "one at a time", 1_000: "1,000 at a time"}  # claims, and keys
DATABASE: Final = 1  # of keys: the dedup service has the other one
REMEMBERED_S: Final = 120  # as long as JetStream does, by default


MESSAGES: Final = 10_000  # of a backlog: JetStream syncs for each
PUBLISH: Final = "publish, unbatched"
ONE: Final = "publish, one at a time"
RECEIVE: Final = "receive a backlog"
RABBITMQ: Final = "RabbitMQ streams, never synced"
SYNCED: Final = {"always": "JetStream, synced always", "2m": "JetStream, synced every 2 minutes"}
"""By the server's setting; the second is the default, whose receipts are for memory."""


async def peers(bench: Bench) -> list[Measurement]:
    return [*await _deduplicators(bench), *await _logs(bench)]


# ---- deduplication by hand: SET key NX EX, on the services' own Redis. The dedup service's claims
# also survive that Redis loses its data, that the caller dies before it has stored anything, and a
# resend after the keys expired


async def _deduplicators(bench: Bench) -> list[Measurement]:
    url = f"redis://{bench.stack.address('redis')}/{DATABASE}"
    async with (
        connect_redis(url, timeout_s=REDIS_TIMEOUT_S, connections_max=1) as redis,
        aio.insecure_channel(bench.address("dedup")) as channel,
    ):
        line = GrpcDeduplicator(channel, timeout_s=DEDUP_TIMEOUT_S)
        numbers = count()
        cases: list[Case] = []
        for claims, text in PIPELINED.items():
            name = f"Redis: SET NX EX, {text}"
            admit = await groups(f"bench/peers/admit-{claims}", claims, line.rollback, line.admit)
            how: dict[str, Any] = {"units": {"claims": claims}}
            how["shares"] = [MEDIAN] if claims == 1 else []
            cases += [
                Repeated(name, _set(redis, numbers, claims), pids=bench.pids("redis"), **how),
                Repeated(
                    f"Seqgate: {CLAIMS[claims]} on a stream",
                    admit,
                    limits=[name],
                    pids=bench.pids("dedup", "redis"),
                    **how,
                ),
            ]
        found = await bench.measure(cases, paired=True)
        await redis.flushdb()
        return found


def _set(redis: Any, numbers: Iterator[int], keys: int) -> Call:
    """A call that sets so many new keys, without a wait between them."""

    def set_key(client: Any) -> Any:
        return client.set(f"bench/peers:producer:{next(numbers)}", "", nx=True, ex=REMEMBERED_S)

    async def set_one() -> None:
        check(await set_key(redis), expected=True)

    async def set_all() -> None:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(keys):
            set_key(pipeline)
        check(await pipeline.execute(), [True] * keys)

    return set_one if keys == 1 else set_all


# ---- logs


@dataclass(kw_only=True)
class Receive(Publish):
    """A backlog, by a consumer of a new subscription, until each message is acknowledged."""

    verb = "receive"
    services = ("dispatcher", "ledger", "cursor")
    dispatcher: str
    messages: int

    async def prepare(self) -> None:
        async with connect(self.address) as client, self.producer(client) as producer:
            until = float("inf")
            self.messages = await self.pump(producer, until=until, count_max=self.messages)

    async def round(self, meter: Meter) -> Round:
        async with (
            connect(self.address, self.dispatcher) as client,
            client.consumer(self.topic, f"s{next(_subscriptions)}") as consumer,
        ):
            received = 0
            with meter:
                async with asyncio.TaskGroup() as acknowledging:
                    while received < self.messages:
                        messages = await consumer.receive_many()
                        acknowledging.create_task(consumer.ack_many(messages))
                        received += len(messages)
        check(received, self.messages)
        return meter.round(received)


_subscriptions = count()


async def _logs(bench: Bench) -> list[Measurement]:
    """The same messages through each log, by its own client. Cases of one kind follow each other,
    Seqgate's last."""
    messages = bench.scaled(MESSAGES)
    namespace = "bench/peers"
    own: dict[str, Publish] = {
        PUBLISH: workload(bench, Publish, "unbatched", namespace=namespace),
        ONE: workload(bench, OneAtATime, "one at a time", namespace=namespace, shares=[MEDIAN]),
        RECEIVE: workload(
            bench,
            Receive,
            "a backlog",
            namespace=namespace,
            dispatcher=bench.address("dispatcher"),
            messages=messages,
        ),
    }
    async with AsyncExitStack() as used:
        folder = used.enter_context(tempfile.TemporaryDirectory(dir=bench.stack.folder))
        cases = await _jetstream(bench, Path(folder), used, messages)
        cases += await _rabbitmq(bench, Path(folder), used, messages)
        for kind, case in own.items():
            # The peer that promises the same.
            limits = [each.name for each in cases if each.name == f"{SYNCED['always']}: {kind}"]
            cases.append(replace(case, name=f"Seqgate: {kind}", limits=limits))
        cases.sort(key=lambda each: each.name.partition(": ")[2])
        return await bench.measure(cases, paired=True)


def jetstream_program() -> str | None:
    """The path of nats-server, if it is installed, and its client."""
    return program("nats-server") if importlib.util.find_spec("nats") else None


async def _jetstream(bench: Bench, folder: Path, used: AsyncExitStack, messages: int) -> list[Case]:
    found = jetstream_program()
    if found is None:
        bench.left_out.append("NATS JetStream, which needs nats-server and the package nats-py")
        return []
    from tools.bench.jetstream import (
        JetStreamOneAtATime,
        JetStreamPublish,
        JetStreamReceive,
        nats_server,
    )

    cases: list[Case] = []
    for sync, text in SYNCED.items():
        address, pid = await used.enter_async_context(nats_server(found, folder, sync))
        how: dict[str, Any] = {"address": address, "pids": {"nats": pid}}
        cases += [
            JetStreamPublish(f"{text}: {PUBLISH}", topic="unbatched", **how),
            JetStreamOneAtATime(f"{text}: {ONE}", topic="one", shares=[MEDIAN], **how),
            JetStreamReceive(f"{text}: {RECEIVE}", topic="receive", messages=messages, **how),
        ]
    return cases


def rabbitmq_programs() -> tuple[str, str] | None:
    """The paths of rabbitmq-server and Erlang's epmd, if they are installed, and a client."""
    broker, epmd = program("rabbitmq-server"), program("epmd")
    return (broker, epmd) if broker and epmd and importlib.util.find_spec("rstream") else None


async def _rabbitmq(bench: Bench, folder: Path, used: AsyncExitStack, messages: int) -> list[Case]:
    found = rabbitmq_programs()
    if found is None:
        bench.left_out.append(
            "RabbitMQ streams, which need rabbitmq-server and the package rstream"
        )
        return []
    from tools.bench.rabbitmq import (
        RabbitOneAtATime,
        RabbitPublish,
        RabbitReceive,
        rabbitmq_server,
    )

    address, pid = await used.enter_async_context(rabbitmq_server(*found, folder))
    how: dict[str, Any] = {"address": address, "pids": {"rabbitmq": pid}}
    return [
        RabbitPublish(f"{RABBITMQ}: {PUBLISH}", topic="unbatched", **how),
        RabbitOneAtATime(f"{RABBITMQ}: {ONE}", topic="one", shares=[MEDIAN], **how),
        RabbitReceive(f"{RABBITMQ}: {RECEIVE}", topic="receive", messages=messages, **how),
    ]
