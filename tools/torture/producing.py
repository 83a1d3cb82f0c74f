"""A producer of the torture. It writes these lines:

sent      about to send a message, or to resend it
receipt   its receipt
refused   it is not in the log and never will be
failed    its outcome is unknown; a role with ids of its own resends it
finished  every message has a receipt or, without ids of its own, an outcome
"""

import asyncio
from collections import deque
from functools import partial
from random import Random
from typing import Final

from seqgate.client import Batching, Chunking, Client, Producer, Receipt
from seqgate.errors import (
    FencedError,
    ProducerQueueFullError,
    SeqgateError,
    SequenceIdTrimmedError,
    StaleSequenceIdError,
)
from tools.stack.journal import Journal, lines
from tools.torture.messages import make
from tools.torture.roles import ProducerRole, Work

FIRST_ID: Final = 2**60
"""Beyond 2^53, so that floating-point numbers cannot distinguish adjacent ids."""

ID_STEP: Final = 3

OVERLAP: Final = 10
"""How many messages with receipts are resent after a crash."""

CHUNK_BYTES: Final = 4_000
MESSAGES_MAX: Final = 50_000  # of a role
SEND_TIMEOUT_S: Final = 20.0

Sent = tuple[int, "asyncio.Future[Receipt]"]


class Producing(Work[ProducerRole]):
    """One role's work, across reconnections and restarts of its process."""

    def __init__(
        self, role: ProducerRole, client: Client, journal: Journal, random: Random
    ) -> None:
        super().__init__(role, client, journal, random)
        self._next = 0
        self._highest = -1
        self._missing: set[int] = set()
        self._recall()

    def _recall(self) -> None:
        """Restore the state from the journal."""
        for line in lines(self._journal.path):
            match line["e"]:
                case "sent":
                    self._highest = max(self._highest, line["n"])
                    self._missing.add(line["n"])
                case "receipt" | "refused":
                    self._missing.discard(line["n"])
        if self._role.ids:
            self._rewind(overlap=OVERLAP)
        else:
            self._next, self._missing = self._highest + 1, set()

    def _rewind(self, *, overlap: int = 0) -> None:
        self._next = max(0, min(self._missing, default=self._highest + 1) - overlap)

    async def run(self, over: asyncio.Event) -> None:
        """Publish until `over`, and then until every message has its receipt."""
        role = self._role
        batching = {
            "batch": Batching(12, 8_000, delay_s=0.005, filter_properties=("place",)),
            "by_key": Batching(messages_max=20, bytes_max=8_000, delay_s=0.01, by_key=True),
        }.get(role.way)
        producer = self._client.producer(
            role.topic,
            name=role.producer or role.name,
            takeover=True,
            batching=batching,
            chunking=Chunking(CHUNK_BYTES) if role.way == "chunks" else None,
            max_pending_messages=role.pending_max + 100,
            send_timeout_s=SEND_TIMEOUT_S,
            open_timeout_s=30.0,
        )
        async with producer:
            self._journal.write("opened", last=producer.last_sequence_id)
            await self._publish(producer, over)
        if not role.ids:
            self._missing = set()
        if over.is_set() and not self._missing:
            self._journal.write("finished", messages=self._highest + 1)

    @property
    def is_finished(self) -> bool:
        return not self._missing

    async def _publish(self, producer: Producer, over: asyncio.Event) -> None:
        waiting: deque[Sent] = deque()
        try:
            while not (over.is_set() and self._next > self._highest and not waiting):
                may_send = self._next <= self._highest or not (
                    over.is_set() or self._next >= MESSAGES_MAX
                )
                if may_send and len(waiting) < self._role.pending_max:
                    await self._send(producer, waiting)
                else:
                    await asyncio.sleep(0.02)
                while waiting and waiting[0][1].done():
                    if not self._note(*waiting.popleft()):
                        return
        finally:
            for number, done in waiting:
                if done.done():
                    self._note(number, done)
                else:
                    done.add_done_callback(partial(self._note, number))

    async def _send(self, producer: Producer, waiting: deque[Sent]) -> None:
        number = self._next
        made = make(self._role, number)
        sequence_id = FIRST_ID + ID_STEP * number if self._role.ids else None
        again = number <= self._highest
        self._journal.write("sent", n=number, s=sequence_id, again=again)
        self._missing.add(number)
        self._highest = max(self._highest, number)
        try:
            done = producer.send_nowait(
                made.payload,
                key=made.key,
                properties={"place": made.place},
                sequence_id=sequence_id,
                deliver_after_s=made.delay_s,
            )
        except ProducerQueueFullError:
            await asyncio.sleep(0.02)
            if not self._role.ids:  # not sent, and never will be
                self._missing.discard(number)
                self._next += 1
            return
        waiting.append((number, done))
        self._next += 1
        if not again:
            await asyncio.sleep(self._random.expovariate(self._role.rate))
        elif number % 10 == 0:
            await asyncio.sleep(0)

    def _note(self, number: int, done: "asyncio.Future[Receipt]") -> bool:
        """Record an outcome. Returns False if the producer must be reopened."""
        if done.cancelled():
            return False
        error = done.exception()
        if error is None:
            receipt = done.result()
            self._missing.discard(number)
            self._journal.write(
                "receipt",
                n=number,
                s=receipt.sequence_id,
                id=str(receipt.message_id),
                dup=receipt.duplicate,
                differs=receipt.differs,
            )
            return True
        reason = error.reason if isinstance(error, SeqgateError) else repr(error)
        if isinstance(error, StaleSequenceIdError | SequenceIdTrimmedError):
            self._missing.discard(number)
            self._journal.write("refused", n=number, why=reason)
            return True
        self._journal.write("failed", n=number, why=reason, what=type(error).__name__)
        if self._role.ids:
            self._rewind()
        else:
            self._missing.discard(number)
        return not self._role.ids and not isinstance(error, FencedError)
