"""A typical application: several producers, some with batching, all of which resend.

All requests and answers go into a History, for the checkers.
"""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from grpc import StatusCode, aio

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.client import Batching, Client, Producer, connect
from seqgate.errors import StaleSequenceIdError
from tests.support.checkers import (
    Acknowledgement,
    Content,
    History,
    Identity,
    Marks,
    Stored,
    log_anomalies,
    report,
    state_anomalies,
)
from tests.support.stubs import dedup_stub
from tests.support.waiting import eventually

FIRST_ID = 2**60
"""Ids beyond the precision of Lua's numbers."""

PRODUCERS: Mapping[str, Batching | None] = {
    "single": None,
    "small": Batching(messages_max=7, delay_s=0.001),
    "large": Batching(messages_max=100, delay_s=0.002),
    "keyed": Batching(messages_max=20, delay_s=0.001, by_key=True),
}

COPY_SHARE = 0.1
"""The share of messages that are duplicated at once."""

OVERLAP = 30
"""The number of messages of the previous round that are resent."""

OPEN_TIMEOUT_S = 300.0
"""How long a producer waits for its topic, which may need a rebuild on a busy machine."""


class Application:
    """Publishes to one topic, in rounds."""

    def __init__(self, ledger: str, dedup: str, topic: str, random: Random) -> None:
        self._ledger = ledger
        self._dedup = dedup
        self.topic = topic
        self._random = random
        self._next = 0
        self.history = History()

    async def publish(self, count: int) -> None:
        """Have each producer resend its last messages and publish new ones. Returns once all are
        answered."""
        first = max(0, self._next - OVERLAP)
        self._next += count
        ids = [FIRST_ID + 3 * number for number in range(first, self._next)]
        async with connect(self._ledger) as client, asyncio.TaskGroup() as tasks:
            for name, batching in PRODUCERS.items():
                tasks.create_task(self._publish(client, name, batching, ids))

    async def check_log(self) -> None:
        """Check the log against the messages sent and their receipts.

        Raises:
            AssertionError: an anomaly was found.
        """
        log = await self._log()
        anomalies = log_anomalies(self.history, log)
        assert not anomalies, report(anomalies)
        assert not self.history.stale
        assert {stored.identity for stored in log} == set(self.history.sent)

    async def check_state(self) -> None:
        """Check the dedup state against the log. A dead writer leaves unconfirmed entries to its
        successor, so publish first.

        Raises:
            AssertionError: they still differ after a while.
        """
        log = await self._log()

        async def agrees() -> bool:
            return not state_anomalies(log, await self._state())

        await eventually(agrees, "deduplication knows the log")

    async def _log(self) -> list[Stored]:
        async with connect(self._ledger) as client:
            return [
                Stored(
                    message.id,
                    Identity(message.producer_name, message.sequence_id),
                    Content(message.payload, message.key),
                )
                async for message in client.reader(self.topic, follow=False)
            ]

    async def _publish(
        self, client: Client, name: str, batching: Batching | None, ids: Sequence[int]
    ) -> None:
        async with client.producer(
            self.topic,
            name=name,
            takeover=True,
            batching=batching,
            send_timeout_s=None,
            open_timeout_s=OPEN_TIMEOUT_S,
        ) as producer:
            sends = []
            for sequence_id in ids:
                sends.append(self._send(producer, sequence_id))
                if self._random.random() < COPY_SHARE:
                    sends.append(self._send(producer, sequence_id))
                if self._random.random() < 0.2:
                    await asyncio.sleep(0)
            await asyncio.gather(*sends)

    def _send(self, producer: Producer, sequence_id: int) -> "asyncio.Task[None]":
        identity = Identity(producer.name, sequence_id)
        content = Content(f"{identity}".encode(), f"key-{sequence_id % 5}")
        self.history.send(identity, content)
        done = producer.send_nowait(content.payload, key=content.key, sequence_id=sequence_id)
        return asyncio.create_task(self._note(identity, done))

    async def _note(self, identity: Identity, done: "asyncio.Future[Any]") -> None:
        try:
            receipt = await done
        except StaleSequenceIdError:
            self.history.stale.append(identity)
        else:
            self.history.acknowledged.append(
                Acknowledgement(identity, receipt.message_id, receipt.duplicate)
            )

    async def _state(self) -> dict[str, Marks]:
        state = {}
        async with aio.insecure_channel(self._dedup) as channel:
            stub: Any = dedup_stub(channel)
            for name in PRODUCERS:
                request = dedup_pb2.GetProducerRequest(topic=self.topic, producer_name=name)
                try:
                    producer = (await stub.GetProducer(request)).producer
                except aio.AioRpcError as error:
                    if error.code() is StatusCode.NOT_FOUND:
                        continue
                    raise
                state[name] = Marks(producer.persisted_sequence_id, producer.pushed_sequence_id)
        return state
