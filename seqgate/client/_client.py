"""The client: connections to the services, and the producers, readers and consumers on them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from grpc import aio

from seqgate.client._address import checked_address
from seqgate.client._admin import Admin
from seqgate.client._arguments import (
    callback,
    flag,
    instance_or_none,
    member,
    number,
    open_timeout,
    properties_of,
    real,
    text,
    whole,
)
from seqgate.client._assembler import AssemblyLimits, Dropped
from seqgate.client._batcher import Batching
from seqgate.client._breaker import Breaker
from seqgate.client._calls import Calls
from seqgate.client._channel import PLAIN, Security, open_channel
from seqgate.client._chunking import Chunking
from seqgate.client._codec import Compression
from seqgate.client._consumer import Consumer
from seqgate.client._inbox import Inbox, ReceiverLimits
from seqgate.client._loops import of_one_loop
from seqgate.client._producer import OnConflict, Producer
from seqgate.client._reader import EARLIEST, Missed, Reader, Start
from seqgate.client._subscribing import (
    DELAY_MAX_S,
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
"""A producer's default limits on messages that await a receipt: their number and their bytes."""

RECEIVER_QUEUE_MESSAGES: Final = 1_000
RECEIVER_QUEUE_BYTES: Final = 64 * 1024 * 1024
"""A consumer's default limits on buffered messages: their number and their bytes."""

BREAKER: Final = Breaker()

ACK_TIMEOUT_MIN_S: Final = 0.1
"""The shortest time-out of a message that is not settled, in seconds."""

RECEIVER_QUEUE_MESSAGES_MAX: Final = 1_000_000
"""The most messages that a consumer may buffer."""

ADMIN_TIMEOUT_S: Final = 30.0
"""How long a call of the admin client may take, in seconds."""


def connect(
    ledger: str,
    dispatcher: str | None = None,
    *,
    dedup: str | None = None,
    cursor: str | None = None,
    tls: TLS | None = None,
    token: BearerToken | None = None,
) -> "Client":
    """Return a client of the ledger service at `ledger` (host:port, or dns:///name:port) and, for
    consumers, of the dispatcher service at `dispatcher`. It connects on first use.

        async with connect("localhost:7702") as client:
            async with client.producer("orders", name="checkout") as producer:
                receipt = await producer.send(b"...", key="customer-17")

    Args:
        dedup, cursor: the addresses of these services, for `admin`.
        tls: connect over TLS, optionally with a client certificate. Files are reloaded when they
            change.
        token: authenticates calls: a token, a file (Path) that is reloaded when it changes, or a
            function that is called for each call and must not block. Requires TLS unless the
            service is on this machine.

    Raises:
        RuntimeError: no event loop is running.
        InvalidRequestError: an argument is of another type, or an address is neither host:port
            nor a target of gRPC.
        OSError, ValueError: a file is unusable, or a token would be sent in plain text.
    """
    return Client(ledger, dispatcher, Security(tls, token), dedup=dedup, cursor=cursor)


@of_one_loop
class Client:
    """See connect."""

    # What it makes. The client for threads makes subclasses of them.
    _producer_class: type[Producer] = Producer
    _reader_class: type[Reader] = Reader
    _inbox_class: type[Inbox] = Inbox
    _consumer_class: type[Consumer] = Consumer

    def __init__(
        self,
        ledger: str,
        dispatcher: str | None = None,
        security: Security = PLAIN,
        *,
        dedup: str | None = None,
        cursor: str | None = None,
    ) -> None:
        instance_or_none("tls", security.tls, TLS)
        if not isinstance(security.token, str | Path):
            callback("token", security.token)
        given = {"ledger": ledger, "dispatcher": dispatcher, "dedup": dedup, "cursor": cursor}
        addresses = {
            name: checked_address(text(name, address, least=1))
            for name, address in given.items()
            if address is not None or name == "ledger"
        }
        self._security = security
        self._channel = FollowingChannel(addresses["ledger"], self._open_channel)
        self._channel.at(addresses["ledger"])  # raises now if files are unusable
        self._dispatcher = addresses.get("dispatcher")
        self._dispatchers: dict[str, aio.Channel] = {}  # by address: subscriptions differ in owner
        self._calls = Calls(addresses, self._open_channel, timeout_s=ADMIN_TIMEOUT_S, waits=True)

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
        on_conflict: OnConflict | str = OnConflict.REPORT,
    ) -> Producer:
        """Make a producer; `async with` opens and closes it.

        Args:
            topic: tenant/namespace/name, or a name in public/default. Created if policy allows.
            name: unique in its topic, 1 to 255 bytes; it identifies the producer to deduplication.
                Use the same name after a restart to have resends recognised. None: the service
                assigns a new one.
            initial_sequence_id: the last id that the application considers published; used if the
                service does not know the name. The first automatic id is one more.
            takeover: take the name from a producer that is using it, instead of failing.
            batching: collect messages into batches; None: each message is an entry.
            chunking: cut messages that are too large for one entry; None: refuse them. Excludes
                batching.
            compression: compress each entry.
            max_pending_messages: the most messages that may await a receipt, 1 or more; `send`
                waits at the limit. A large message counts once per chunk.
            max_pending_bytes: the most bytes of payloads, keys and properties that may await a
                receipt, 1 or more; `send` waits at the limit, unless nothing else is pending.
                Pending messages take about twice that in memory: as given, and as sent.
            send_timeout_s: how long a message may await its receipt, in seconds, up to a century;
                when one is overdue, all pending messages fail. None or 0: no limit.
            open_timeout_s: how long opening may take, in seconds, above 0, up to a century.
            on_conflict: what becomes of a message whose sequence id is stored with other content;
                also "report" or "refuse". The topic's policy may refuse where this does not.

        Raises:
            InvalidNameError: the topic or the name is invalid.
            InvalidRequestError: another argument is of another type, or out of its bounds: the
                initial sequence id is 0 to 2^63 - 2. Or both batching and chunking are given.
        """
        return self._producer_class(
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
            on_conflict=on_conflict,
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
        """Make a reader, an async iterator of messages.

        Args:
            topic: tenant/namespace/name, or a name in public/default. It must exist.
            start: "earliest", "latest", a message's id, or a time.
            inclusive: whether to start with the message of the id, or after it.
            follow: wait for new messages; False: the iteration ends at the topic's end.
            assembly: limits on incomplete large messages in memory; None: AssemblyLimits().
            on_dropped: called with chunks that make no message, and the reason.
            on_missed: called with the range when messages were trimmed before they were read; the
                reader continues after it. None: MessagesTrimmedError, until `skip` is called. With
                "earliest", only messages after the first one read count as missed.

        Raises:
            InvalidNameError: the topic is invalid.
            InvalidRequestError: the start is none, or a time before 1970; or another argument is of
                another type, such as a coroutine function for `on_dropped`.
        """
        return self._reader_class(
            self._channel,
            TopicName.expand(topic),
            start=start,
            inclusive=inclusive,
            follow=flag("follow", follow),
            assembly=instance_or_none("assembly", assembly, AssemblyLimits) or AssemblyLimits(),
            on_dropped=callback("on_dropped", on_dropped),
            on_missed=callback("on_missed", on_missed),
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
        """Make a consumer, an async iterator of messages; `async with` opens and closes it.

        Args:
            topic: tenant/namespace/name, or a name in public/default. It must exist.
            subscription: its name: 1 to 255 bytes of UTF-8, no control characters.
            type: how messages are distributed over consumers.
            options: the subscription's behaviour; None: SubscriptionOptions(). All connected
                consumers must give the same type and options.
            name: the consumer's name, 1 to 255 bytes; a consumer that reconnects under its name
                gets the same slots. None: the service assigns one, which is kept for reconnecting.
            start: where the subscription starts if it does not exist: "earliest", "latest", a
                message's id, or a time. None: it must exist.
            properties: set on the subscription if it is created: at most 64, of at most 4 KiB each.
            ranges: the consumer's hash slots, for STICKY placement: (first, last), both included,
                0 to 65,535.
            weight: the consumer's shares of the hash ring, 1 to 100.
            ack_timeout_s: seconds after which a message fails unless it is settled or extended: 0.1
                to 86,400; None or 0: never. Buffered messages are renewed automatically: the
                application has at least two thirds of the time.
            retry: the delay before a refused message is redelivered; None: the service's default.
            breaker: stops handing out messages while all of them fail; the default opens when the
                last 100 were refused. None: never stop.
            receiver_queue: the most messages to buffer, 1 to 1,000,000. A batch that begins within
                the limit arrives whole.
            receiver_queue_bytes: the most bytes of messages to buffer, 1 or more. Permits are
                computed from the size of recent messages; none are granted while this much is
                buffered.
            assembly: limits on incomplete large messages in memory, on top of the receiver queue;
                None: AssemblyLimits().
            incomplete: what to do with large messages that cannot be assembled here.
            on_dropped: called with chunks that make no message, and the reason. ABORTED, RESTARTED,
                DUPLICATE and CORRUPT chunks are acknowledged; `incomplete` decides on the others.
                Must not raise.
            open_timeout_s: how long opening may take, in seconds, above 0, up to a century.

        Raises:
            InvalidNameError: the topic is invalid.
            InvalidRequestError: another argument is of another type, or out of its bounds.
            ValueError: the client has no dispatcher.
        """
        if self._dispatcher is None:
            raise ValueError("consumers need a dispatcher: give its address to connect()")
        ack_timeout_ms = _ack_timeout_ms(ack_timeout_s)
        subscribing = Subscribing(
            topic=TopicName.expand(topic),
            subscription=text("subscription", subscription),
            type=member("type", type, SubscriptionType),
            options=instance_or_none("options", options, SubscriptionOptions)
            or SubscriptionOptions(),
            name=None if name is None else text("name", name, least=1),
            start=start,
            properties=properties_of("properties", properties),
            ranges=ranges,
            weight=weight,
            ack_timeout_ms=ack_timeout_ms,
        )
        inbox = self._inbox_class(
            str(subscribing.topic),
            is_ordered=subscribing.is_ordered,
            is_one_key=subscribing.is_one_key,
            limits=ReceiverLimits(
                whole("receiver_queue", receiver_queue, 1, RECEIVER_QUEUE_MESSAGES_MAX),
                whole("receiver_queue_bytes", receiver_queue_bytes, 1),
                ack_timeout_ms,
            ),
            assembly=instance_or_none("assembly", assembly, AssemblyLimits) or AssemblyLimits(),
            incomplete=member("incomplete", incomplete, Incomplete),
            retry=instance_or_none("retry", retry, RetryPolicy),
            breaker=instance_or_none("breaker", breaker, Breaker),
        )
        return self._consumer_class(
            self._dispatcher_channel,
            self._dispatcher,
            subscribing,
            inbox,
            on_dropped=callback("on_dropped", on_dropped),
            open_timeout_s=open_timeout(open_timeout_s),
        )

    def admin(self) -> Admin:
        """The admin client of the services whose addresses the client has: it manages topics,
        policies, subscriptions and cursors. A call may take 30 seconds, and so long waits for a
        service that restarts: then it raises UnavailableError."""
        return Admin(self._calls)

    def _open_channel(self, address: str) -> aio.Channel:
        return open_channel(address, self._security)

    def _dispatcher_channel(self, address: str) -> aio.Channel:
        channel = self._dispatchers.get(address)
        if channel is None:
            channel = self._dispatchers[address] = self._open_channel(address)
        return channel

    async def _hang_up(self) -> None:
        """Close the connections, of which no call is under way. Later calls open others."""
        await self._calls.close()
        await self._channel.hang_up()
        dispatchers, self._dispatchers = self._dispatchers, {}
        for channel in dispatchers.values():
            await channel.close()

    async def close(self) -> None:
        """Close the connections. Close producers and consumers first."""
        await self._calls.close()
        await self._channel.close()
        for channel in list(self._dispatchers.values()):
            await channel.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()


def _ack_timeout_ms(ack_timeout_s: object) -> int:
    """0: no time-out."""
    if ack_timeout_s is None or number("ack_timeout_s", ack_timeout_s) == 0:
        return 0
    return round(real("ack_timeout_s", ack_timeout_s, ACK_TIMEOUT_MIN_S, DELAY_MAX_S) * 1000)
