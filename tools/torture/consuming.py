"""A consumer of the torture.

given    a message was handed out, with the token of its delivery
ask      before it is acknowledged; `through`: with everything before it
done     the answer: durably
not      the answer: not, and why
refuse   before it is refused
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final

from seqgate.client import (
    AssemblyLimits,
    Client,
    Consumer,
    Received,
    RetryPolicy,
    SubscriptionType,
)
from seqgate.errors import ConsumerClosedError, CorruptMessageError, SeqgateError, StaleTokenError
from seqgate.message_id import ChunkMessageId
from tools.torture.journal import Journal
from tools.torture.messages import read
from tools.torture.roles import ConsumerRole

RETRY: Final = RetryPolicy(min_s=0.05, max_s=1.0)

LONG_SHARE: Final = 0.002
LONG_S: Final = 1.5
"""How many messages take long, and how long that is at most."""


class Consuming:
    """One role's work."""

    def __init__(self, role: ConsumerRole, client: Client, journal: Journal, random: Random):
        self._role = role
        self._client = client
        self._journal = journal
        self._random = random

    @property
    def is_finished(self) -> bool:
        """It may end whenever it is over."""
        return True

    async def run(self, over: asyncio.Event) -> None:
        """Consume until it is over.

        Raises:
            SeqgateError: the consumer ended; call again to go on.
        """
        role = self._role
        consumer = self._client.consumer(
            role.topic,
            role.subscription,
            type=role.subscription_type,
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
            working = [asyncio.create_task(self._work(consumer)) for _ in range(role.concurrency)]
            ending = asyncio.create_task(over.wait())
            await asyncio.wait([*working, ending], return_when=asyncio.FIRST_COMPLETED)
            for task in (*working, ending):
                task.cancel()
            for result in await asyncio.gather(*working, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

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
        token = list(message.token)
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
        long = self._random.random() < LONG_SHARE
        await asyncio.sleep(
            self._random.uniform(0, LONG_S)
            if long
            else self._random.expovariate(1 / self._role.work_s)
        )
        if (said.is_poison and self._role.is_strict) or (
            self._random.random() < self._role.refused_share
        ):
            self._journal.write("refuse", k=token)
            with suppress(StaleTokenError):
                await consumer.nack(message)
            return
        if self._random.random() < self._role.through_share:
            assert self._role.subscription_type is SubscriptionType.EXCLUSIVE
            self._journal.write("ask", k=token, through=True)
            try:
                await consumer.ack_through(message)
            except SeqgateError as error:
                self._journal.write("not", k=token, why=error.reason)
                raise_closed(error)
            else:
                self._journal.write("done", k=token)
            return
        self._journal.write("ask", k=token)
        consumer.ack_nowait(message).add_done_callback(self._answered(token))

    def _answered(self, token: list[int]) -> Callable[["asyncio.Future[None]"], None]:
        def note(done: "asyncio.Future[None]") -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                self._journal.write("done", k=token)
            else:
                reason = error.reason if isinstance(error, SeqgateError) else repr(error)
                self._journal.write("not", k=token, why=reason)

        return note


def raise_closed(error: SeqgateError) -> None:
    """Whoever works on must not go on with a consumer that has ended.

    Raises:
        SeqgateError: the error, unless it is about one token.
    """
    if not isinstance(error, StaleTokenError):
        raise error
