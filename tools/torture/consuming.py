"""A consumer of the torture. It writes these lines:

given    a message was received, with the token of its delivery
ask      about to acknowledge it; `through`: cumulatively
done     the acknowledgement is durable
not      the acknowledgement failed, and why
refuse   about to refuse it
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Final

from seqgate.client import AssemblyLimits, Consumer, Received, RetryPolicy, SubscriptionType
from seqgate.errors import ConsumerClosedError, CorruptMessageError, SeqgateError, StaleTokenError
from seqgate.message_id import ChunkMessageId
from tools.torture.messages import read
from tools.torture.roles import ConsumerRole, Work

RETRY: Final = RetryPolicy(min_s=0.05, max_s=1.0)

CONCURRENCY: Final = 8  # how many messages a consumer processes at a time

LONG_SHARE: Final = 0.002
LONG_S: Final = 1.5
"""The share of messages that take long, and the longest time of one."""


class Consuming(Work[ConsumerRole]):
    async def run(self, over: asyncio.Event) -> None:
        role = self._role
        consumer = self._client.consumer(
            role.topic,
            role.subscription,
            type=role.type,
            options=role.options,
            name=role.name,
            retry=RETRY,
            breaker=None,
            receiver_queue=role.queue,
            assembly=AssemblyLimits(messages_max=role.assembled_max),
            open_timeout_s=30.0,
        )
        async with consumer:
            self._journal.write("joined")
            await self._until(over, *(self._work(consumer) for _ in range(CONCURRENCY)))

    async def _work(self, consumer: Consumer) -> None:
        while True:
            try:
                message, key = await consumer.receive_and_lock()
            except CorruptMessageError as damage:
                self._journal.write("corrupt", what=str(damage.details))
                continue
            except ConsumerClosedError:
                return
            try:
                await self._process(consumer, message)
            except ConsumerClosedError:
                return
            finally:
                consumer.unlock(key)

    async def _process(self, consumer: Consumer, message: Received) -> None:
        token = list(message.token[:3])
        said = read(message.payload)
        place = message.id.first_chunk if isinstance(message.id, ChunkMessageId) else None
        self._journal.write(
            "given",
            k=token,
            id=str(message.id),
            first=None if place is None else str(place),
            u=said.uid,
            key=message.key,
            key_is=said.key,
            delayed=said.is_delayed,
            at=message.append_time_ms,
            n=message.attempts,
        )
        role, random = self._role, self._random
        long = random.random() < LONG_SHARE
        await asyncio.sleep(
            random.uniform(0, LONG_S) if long else random.expovariate(1 / role.work_s)
        )
        if (said.is_poison and role.is_strict) or random.random() < role.refused_share:
            self._journal.write("refuse", k=token)
            with suppress(StaleTokenError):
                await consumer.nack(message)
            return
        if random.random() < role.through_share:
            assert role.type is SubscriptionType.EXCLUSIVE
            self._journal.write("ask", k=token, through=True)
            try:
                await consumer.ack_through(message)
            except SeqgateError as error:
                self._journal.write("not", k=token, why=error.reason)
                if not isinstance(error, StaleTokenError):  # the consumer has ended
                    raise
            else:
                self._journal.write("done", k=token)
            return
        self._journal.write("ask", k=token)
        consumer.ack_nowait(message).add_done_callback(partial(self._answered, token))

    def _answered(self, token: list[int], done: "asyncio.Future[None]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._journal.write("done", k=token)
        else:
            reason = error.reason if isinstance(error, SeqgateError) else repr(error)
            self._journal.write("not", k=token, why=reason)
