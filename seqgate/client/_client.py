"""The client: one connection to a ledger service, and what is made from it."""

from collections.abc import Callable
from typing import Final

from seqgate.client._assembler import AssemblyLimits, Dropped
from seqgate.client._batcher import Batching
from seqgate.client._channel import open_channel
from seqgate.client._chunking import Chunking
from seqgate.client._codec import Compression
from seqgate.client._producer import Producer
from seqgate.client._reader import EARLIEST, Reader, Start
from seqgate.types import TopicName

MAX_PENDING_MESSAGES: Final = 10_000
"""How many messages a producer keeps pending unless told otherwise."""


def connect(ledger: str) -> "Client":
    """A client of the ledger service at `ledger` (host:port, or dns:///name:port). It connects when
    it is first used.

        async with connect("localhost:7702") as client:
            async with client.producer("orders", name="checkout") as producer:
                receipt = await producer.send(b"...", key="customer-17")

    Raises:
        RuntimeError: there is no running event loop.
    """
    return Client(ledger)


class Client:
    """See connect."""

    def __init__(self, ledger: str) -> None:
        self._channel = open_channel(ledger)

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        initial_sequence_id: int | None = None,
        takeover: bool = False,
        batching: Batching | None = None,
        chunking: Chunking | None = None,
        compression: Compression = Compression.NONE,
        max_pending_messages: int = MAX_PENDING_MESSAGES,
        send_timeout_s: float | None = 30.0,
        open_timeout_s: float = 30.0,
    ) -> Producer:
        """A producer; `async with` opens and closes it.

        Args:
            topic: tenant/namespace/name, or a name in public/default. Created if policy allows.
            name: unique in its topic, 1 to 255 bytes. It is what deduplication goes by: an
                application that wants its resends recognised after a restart gives one, and always
                the same. None: the service assigns a name that nobody has had.
            initial_sequence_id: the last id that the application counts as published; used when the
                service knows nothing of the name. The first automatic id is one more.
            takeover: take the name from a producer that is using it, instead of being refused.
            batching: collect messages into batches; None: each message is an entry.
            chunking: cut messages that are too large for one entry; None: they are refused. Not
                together with batching.
            compression: compress each entry.
            max_pending_messages: how many messages may wait for their receipt; `send` waits beyond.
                A large message counts once for each chunk.
            send_timeout_s: how long a message may wait for its receipt; when one is overdue, all
                that are pending fail. None: for ever.
            open_timeout_s: how long opening may take.

        Raises:
            InvalidNameError: the topic or the name cannot be one.
            InvalidRequestError: the initial sequence id is not 0 to 2^63 - 2.
            ValueError: batching and chunking are both asked for.
        """
        return Producer(
            self._channel,
            TopicName.expand(topic),
            name=name,
            initial_sequence_id=initial_sequence_id,
            takeover=takeover,
            batching=batching,
            chunking=chunking,
            compression=compression,
            max_pending_messages=max_pending_messages,
            send_timeout_s=send_timeout_s,
            open_timeout_s=open_timeout_s,
        )

    def reader(
        self,
        topic: str,
        *,
        start: Start = EARLIEST,
        inclusive: bool = True,
        follow: bool = True,
        assembly: AssemblyLimits | None = None,
        on_dropped: Callable[[Dropped], None] | None = None,
    ) -> Reader:
        """A reader; iterate over it.

        Args:
            topic: tenant/namespace/name, or a name in public/default. It must exist.
            start: "earliest", "latest", or a message's id.
            inclusive: with an id, whether that message comes first, or the one after it.
            assembly: how much of incomplete large messages is held in memory; None: as much as
                AssemblyLimits() says.
            on_dropped: is told of chunks that make no message, with the reason.
            follow: wait for messages that are yet to come; otherwise the iteration ends where the
                topic ends.
        """
        return Reader(
            self._channel,
            TopicName.expand(topic),
            start=start,
            inclusive=inclusive,
            follow=follow,
            assembly=assembly or AssemblyLimits(),
            on_dropped=on_dropped,
        )

    async def close(self) -> None:
        """Close the connection. Producers are closed before it, by whoever opened them."""
        await self._channel.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()
