"""The client: the connections to the services, and what is made from them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from grpc import aio

from seqgate.client._assembler import AssemblyLimits, Dropped
from seqgate.client._batcher import Batching
from seqgate.client._breaker import Breaker
from seqgate.client._channel import PLAIN, Security, open_channel
from seqgate.client._chunking import Chunking
from seqgate.client._codec import Compression
from seqgate.client._consumer import Consumer
from seqgate.client._inbox import Inbox, ReceiverLimits
from seqgate.client._producer import Producer
from seqgate.client._reader import EARLIEST, Missed, Reader, Start
from seqgate.client._subscribing import (
    Incomplete,
    KeyRange,
    Place,
    RetryPolicy,
    Subscribing,
    SubscriptionOptions,
    SubscriptionType,
)
from seqgate.owners import FollowingChannel
from seqgate.tls import TLS, BearerToken
from seqgate.types import TopicName

MAX_PENDING_MESSAGES: Final = 10_000
MAX_PENDING_BYTES: Final = 64 * 1024 * 1024
"""How many messages, and how many bytes of them, a producer keeps pending unless told otherwise."""

RECEIVER_QUEUE_MESSAGES: Final = 1_000
RECEIVER_QUEUE_BYTES: Final = 64 * 1024 * 1024
"""How many messages, and bytes of them, a consumer takes before it hands them out, unless told
otherwise."""

BREAKER: Final = Breaker()
"""When a consumer stops for a while unless told otherwise."""


def connect(
    ledger: str,
    dispatcher: str | None = None,
    *,
    tls: TLS | None = None,
    token: BearerToken | None = None,
) -> "Client":
    """A client of the ledger service at `ledger` (host:port, or dns:///name:port), and, for
    consumers, of the dispatcher service at `dispatcher`. It connects when it is first used.

        async with connect("localhost:7702") as client:
            async with client.producer("orders", name="checkout") as producer:
                receipt = await producer.send(b"...", key="customer-17")

    Args:
        tls: connect over TLS, with a certificate of its own if one is given. Files are read again
            when they change: what is called from then on uses the new ones.
        token: shows who calls: a token, a file (Path) that is read again when it changes, or a
            function that is called for each call and must not block. Beyond this machine it needs
            TLS.

    Raises:
        RuntimeError: there is no running event loop.
        OSError, ValueError: a file cannot be used, or a token would be sent in the clear.
    """
    return Client(ledger, dispatcher, Security(tls, token))


class Client:
    """See connect."""

    def __init__(
        self, ledger: str, dispatcher: str | None = None, security: Security = PLAIN
    ) -> None:
        self._open_channel = partial(open_channel, security=security)
        self._channel = FollowingChannel(ledger, self._open_channel)
        self._channel.at(ledger)  # what is wrong with files is said at once
        self._dispatcher = dispatcher
        self._dispatchers: dict[str, aio.Channel] = {}  # by address: consumers are sent on

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
        max_pending_bytes: int = MAX_PENDING_BYTES,
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
            max_pending_bytes: how many bytes of payloads, keys and properties they may have; `send`
                waits beyond, but never for a message that is alone. What is pending takes about
                twice that in memory: as it was given, and as it is sent.
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
            max_pending_bytes=max_pending_bytes,
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
        on_missed: Callable[[Missed], None] | None = None,
    ) -> Reader:
        """A reader; iterate over it.

        Args:
            topic: tenant/namespace/name, or a name in public/default. It must exist.
            start: "earliest", "latest", or a message's id.
            inclusive: with an id, whether that message comes first, or the one after it.
            assembly: how much of incomplete large messages is held in memory; None: as much as
                AssemblyLimits() says.
            on_dropped: is told of chunks that make no message, with the reason.
            on_missed: is told of messages that were trimmed before they were read, in their place,
                and the reader goes on; None: it raises MessagesTrimmedError until `skip` is called.
                With "earliest" nothing counts as missing until something was read.
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
            on_missed=on_missed,
        )

    def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        type: SubscriptionType = SubscriptionType.KEY_SHARED,  # noqa: A002
        options: SubscriptionOptions | None = None,
        name: str | None = None,
        start: Place | None = EARLIEST,
        properties: Mapping[str, str] | None = None,
        ranges: Sequence[KeyRange] = (),
        weight: int = 1,
        ack_timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        breaker: Breaker | None = BREAKER,
        receiver_queue: int = RECEIVER_QUEUE_MESSAGES,
        receiver_queue_bytes: int = RECEIVER_QUEUE_BYTES,
        assembly: AssemblyLimits | None = None,
        incomplete: Incomplete = Incomplete.REFUSE,
        on_dropped: Callable[[Dropped], None] | None = None,
        open_timeout_s: float = 30.0,
    ) -> Consumer:
        """A consumer; `async with` opens and closes it, and it is iterated over.

        Args:
            topic: tenant/namespace/name, or a name in public/default. It must exist.
            subscription: its name: 1 to 255 bytes of UTF-8, no control characters.
            type: who gets the subscription's messages.
            options: how it behaves; None: as SubscriptionOptions() says. All consumers that are
                connected at a time give the same type and options.
            name: the consumer's, 1 to 255 bytes; who comes back under its name gets its slots back.
                None: the service makes one, and the consumer keeps it when it connects again.
            start: where the subscription starts if it does not exist: "earliest", "latest", a
                message's id, or a time. None: it must exist.
            properties: those that it has then: at most 64, of 4 KiB each at most.
            ranges: of STICKY placement, which hash slots the consumer takes: (first, last), both
                included, 0 to 65,535.
            weight: how many shares of the ring the consumer has, 1 to 100.
            ack_timeout_s: after how many seconds a message counts as failed unless it is settled or
                extended: 0.1 to 86,400; None: never. What was not handed out yet is renewed by
                itself, so that at least two thirds are left to the application.
            retry: how long a refused message waits; None: as the service says.
            breaker: when nothing is handed out for a while because everything fails: unless told
                otherwise, when the last 100 messages were refused; None: never.
            receiver_queue: how many messages are taken before they are handed out, 1 to 1,000,000.
                A batch that begins within comes whole.
            receiver_queue_bytes: for how many bytes of them there are permits, going by the size of
                the messages that came last; nothing more is permitted while as much is waiting.
            assembly: how much of incomplete large messages is held in memory besides; None: as much
                as AssemblyLimits() says.
            incomplete: what becomes of large messages that cannot be put together here.
            on_dropped: is told of chunks that make no message, with the reason. Those that never
                will (ABORTED, RESTARTED, DUPLICATE, CORRUPT) are acknowledged; `incomplete` says
                what becomes of the others. Must not raise.
            open_timeout_s: how long opening may take.

        Raises:
            InvalidNameError: the topic cannot be one.
            InvalidRequestError: an option, a range or the start cannot be one.
            ValueError: the client was connected to no dispatcher, or a limit is out of its bounds.
        """
        if self._dispatcher is None:
            raise ValueError("connect() was given no dispatcher: there are no consumers without")
        ack_timeout_ms = round((ack_timeout_s or 0) * 1000)
        subscribing = Subscribing(
            topic=TopicName.expand(topic),
            subscription=subscription,
            type=type,
            options=options or SubscriptionOptions(),
            name=name,
            start=start,
            properties=properties or {},
            ranges=ranges,
            weight=weight,
            ack_timeout_ms=ack_timeout_ms,
        )
        inbox = Inbox(
            str(subscribing.topic),
            is_ordered=subscribing.is_ordered,
            is_one_key=subscribing.is_one_key,
            limits=ReceiverLimits(receiver_queue, receiver_queue_bytes, ack_timeout_ms),
            assembly=assembly or AssemblyLimits(),
            incomplete=incomplete,
            retry=retry,
            breaker=breaker,
        )
        return Consumer(
            self._dispatcher_channel,
            self._dispatcher,
            subscribing,
            inbox,
            on_dropped=on_dropped,
            open_timeout_s=open_timeout_s,
        )

    def _dispatcher_channel(self, address: str) -> aio.Channel:
        channel = self._dispatchers.get(address)
        if channel is None:
            channel = self._dispatchers[address] = self._open_channel(address)
        return channel

    async def close(self) -> None:
        """Close the connections. Producers and consumers are closed before, by whoever opened
        them."""
        await self._channel.close()
        for channel in list(self._dispatchers.values()):
            await channel.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()
