"""`seqgate bench`: loads a live installation within bounds, and checks what it delivers.

The topic is the command's own, and is deleted at the end. Every message says when it was sent, and
which one of its key it is, so that a lost, doubled or overtaken message is found.
"""

import asyncio
import secrets
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.cli._command import Run
from seqgate.cli._declared import flag, option
from seqgate.cli._failure import DONE, REFUSED
from seqgate.cli._service import client as client_of
from seqgate.client import Batching, Client, Consumer, Receipt
from seqgate.errors import NotFoundError, SeqgateError

MESSAGES_MAX: Final = 1_000_000
SECONDS_MAX: Final = 600
RATE_MAX: Final = 100_000
SIZE_BYTES_MAX: Final = 1024 * 1024
KEYS_MAX: Final = 100_000
CLIENTS_MAX: Final = 16
"""The largest values of the options."""

SUBSCRIPTION: Final = "bench"

PENDING_MAX: Final = 1_000
PENDING_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most messages of a producer that await a receipt, and the most bytes of their payloads."""

TOGETHER_MAX: Final = 500
"""The most messages that are acknowledged together."""

HEADER: Final = struct.Struct("!QQQ")
"""The start of a payload: when it was sent, in nanoseconds of this machine's monotonic clock; the
number of its key; and the number of the message in its key, from 0."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be published: messages of `size` bytes in `keys` keys by `producers` producers, at
    `rate` a second, until there are `messages` or `seconds` have passed."""

    messages: int
    seconds: int
    rate: int
    size: int
    keys: int
    producers: int
    consumers: int
    batching: Batching | None


@dataclass(slots=True)
class Seen:
    """What happened. Latencies are in nanoseconds; `skipped` has the messages, by key and number,
    that were overtaken and did not come yet."""

    receipts_ns: list[int] = field(default_factory=list)
    deliveries_ns: list[int] = field(default_factory=list)
    publishing_s: float = 0.0
    delivering_s: float = 0.0
    stored: int = 0
    failed: int = 0
    doubled: int = 0
    overtaken: int = 0
    lost: int = 0
    next_of_key: dict[int, int] = field(default_factory=dict)
    skipped: set[tuple[int, int]] = field(default_factory=set)

    @property
    def is_broken(self) -> bool:
        return bool(self.failed or self.doubled or self.overtaken or self.lost)

    def take(self, payload: bytes, now_ns: int) -> None:
        """Take a delivered message."""
        sent_ns, key, number = HEADER.unpack_from(payload)
        expected = self.next_of_key.get(key, 0)
        if number < expected and (key, number) not in self.skipped:
            self.doubled += 1
            return
        self.skipped.discard((key, number))
        missing = [(key, each) for each in range(expected, number)]
        self.skipped.update(missing)
        self.overtaken += len(missing)
        self.next_of_key[key] = max(expected, number + 1)
        self.deliveries_ns.append(now_ns - sent_ns)


async def bench(
    run: Run,
    *,
    messages: int = option(
        "N", "Messages to publish.", default=10_000, min=1, max=MESSAGES_MAX, show_default=True
    ),
    seconds: int = option(
        "S", "Publish no longer than this.", default=30, min=1, max=SECONDS_MAX, show_default=True
    ),
    rate: int = option(
        "N", "Messages a second, in all.", default=1_000, min=1, max=RATE_MAX, show_default=True
    ),
    size: int = option(
        "BYTES",
        "Size of a payload.",
        default=100,
        min=HEADER.size,
        max=SIZE_BYTES_MAX,
        show_default=True,
    ),
    keys: int = option("N", "Keys.", default=1_000, min=1, max=KEYS_MAX, show_default=True),
    producers: int = option(
        "N", "Producers.", default=1, min=1, max=CLIENTS_MAX, show_default=True
    ),
    consumers: int = option(
        "N", "Consumers.", default=2, min=0, max=CLIENTS_MAX, show_default=True
    ),
    batch: bool = flag("Batch messages."),
) -> int:
    """Load an installation within bounds, and report rates, latencies and broken promises.

    Publishes to a new topic of public/default, consumes it by key, and deletes it at the end. Exits
    with 1 if a message failed, was lost, was delivered twice, or overtook another one of its key.
    """
    topic = f"public/default/bench-{secrets.token_hex(4)}"
    batching = Batching(by_key=True) if batch else None
    load = Load(messages, seconds, rate, size, keys, producers, consumers, batching)
    settings = run.settings
    await run.services.call(pb.CreateTopicRequest(topic=topic))
    try:
        async with client_of(settings, settings.dispatcher.value) as client:
            with run.waits.on("the messages to be published and delivered"):
                seen = await _run(client, topic, load, settings.timeout_s)
    finally:
        with suppress(NotFoundError):
            await run.services.call(pb.DeleteTopicRequest(topic=topic, force=True))
    shown = _record(topic, seen)
    run.output.result(shown, _fields(shown))
    return REFUSED if seen.is_broken else DONE


async def _run(client: Client, topic: str, load: Load, patience_s: float) -> Seen:
    """Publish and consume. What is not delivered `patience_s` after the last message is lost."""
    seen = Seen()
    consumers = [client.consumer(topic, SUBSCRIPTION) for _ in range(load.consumers)]
    consuming: list[asyncio.Task[None]] = []
    publishing: list[asyncio.Task[None]] = []
    try:
        for consumer in consumers:
            await consumer.open()
            consuming.append(asyncio.create_task(_consume(consumer, seen)))
        started_s = time.monotonic()
        publishing = [
            asyncio.create_task(_publish(client, topic, load, place, seen))
            for place in range(load.producers)
        ]
        await asyncio.gather(*publishing)
        seen.publishing_s = time.monotonic() - started_s
        if consuming:
            await _until_delivered(consuming, seen, patience_s)
            seen.delivering_s = time.monotonic() - started_s
            seen.lost = seen.stored - len(seen.deliveries_ns)
    finally:
        for task in (*consuming, *publishing):
            task.cancel()
        await asyncio.gather(*consuming, *publishing, return_exceptions=True)
        for consumer in consumers:
            await consumer.close()
    return seen


async def _publish(client: Client, topic: str, load: Load, place: int, seen: Seen) -> None:
    """Publish one producer's share: the keys whose numbers leave `place` as the remainder."""
    keys = range(place, load.keys, load.producers) or range(place, place + 1)
    count = len(range(place, load.messages, load.producers))
    interval_s = load.producers / load.rate
    padding = bytes(load.size - HEADER.size)
    room = asyncio.Semaphore(min(PENDING_MAX, PENDING_BYTES_MAX // load.size))

    def settled(sent_ns: int, receipt: "asyncio.Future[Receipt]") -> None:
        room.release()
        if receipt.cancelled() or receipt.exception() is not None:
            seen.failed += 1
            return
        seen.stored += 1
        seen.receipts_ns.append(time.monotonic_ns() - sent_ns)

    async with client.producer(topic, batching=load.batching) as producer:
        started_s = time.monotonic()
        for number in range(count):
            ahead_s = started_s + number * interval_s - time.monotonic()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            if time.monotonic() - started_s > load.seconds:
                break
            await room.acquire()
            of_key, at = divmod(number, len(keys))
            key, sent_ns = keys[at], time.monotonic_ns()
            payload = HEADER.pack(sent_ns, key, of_key) + padding
            try:
                receipt = producer.send_nowait(payload, key=f"key-{key}")
            except SeqgateError:  # the producer has ended
                seen.failed += 1
                break
            receipt.add_done_callback(partial(settled, sent_ns))
        with suppress(SeqgateError):
            await producer.flush()


async def _consume(consumer: Consumer, seen: Seen) -> None:
    while True:
        messages = await consumer.receive_many(TOGETHER_MAX)
        now_ns = time.monotonic_ns()
        for message in messages:
            seen.take(message.payload, now_ns)
        await consumer.ack_many(messages)


async def _until_delivered(
    consuming: Sequence["asyncio.Task[None]"], seen: Seen, patience_s: float
) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while len(seen.deliveries_ns) < seen.stored:
                for task in consuming:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)


def _record(topic: str, seen: Seen) -> dict[str, Any]:
    return {
        "topic": topic,
        "published": {
            "messages": seen.stored,
            **_rate(seen.stored, seen.publishing_s),
            **_latency(seen.receipts_ns),
        },
        "delivered": {
            "messages": len(seen.deliveries_ns),
            **_rate(len(seen.deliveries_ns), seen.delivering_s),
            **_latency(seen.deliveries_ns),
        },
        "failed": seen.failed,
        "lost": seen.lost,
        "doubled": seen.doubled,
        "overtaken": seen.overtaken,
    }


def _rate(count: int, seconds: float) -> dict[str, float | None]:
    return {"per_s": round(count / seconds, 1) if seconds else None}


def _latency(found_ns: list[int]) -> dict[str, float | None]:
    """The median, the 99th percentile and the longest, in milliseconds."""
    ordered = sorted(found_ns)

    def share(part: float) -> float | None:
        return round(ordered[int(part * (len(ordered) - 1))] / 1e6, 3) if ordered else None

    return {"p50_ms": share(0.5), "p99_ms": share(0.99), "max_ms": share(1.0)}


def _fields(shown: dict[str, Any]) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = [("Topic", f"{shown['topic']} (deleted)")]
    for title, key in (("Published", "published"), ("Delivered", "delivered")):
        part = shown[key]
        lines.append((title, f"{part['messages']:,} messages"))
        if part["messages"]:
            lines += [
                ("  rate", f"{part['per_s']:,} messages/s"),
                ("  latency", "p50 {p50_ms} ms, p99 {p99_ms} ms, max {max_ms} ms".format(**part)),
            ]
    return [*lines, *((each.title(), shown[each]) for each in _BROKEN)]


_BROKEN: Final = ("failed", "lost", "doubled", "overtaken")
