"""The applications: they publish, consume and read.

An application keeps the state it needs after its process dies, as a real one would in a database: a
producer with ids of its own keeps its unsent messages, and those without a receipt.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

from seqgate.client import (
    AfterDeadLetter,
    AssemblyLimits,
    Batching,
    Breaker,
    Chunking,
    Client,
    Compression,
    Consumer,
    Incomplete,
    Message,
    MessageId,
    Producer,
    Receipt,
    Received,
    RetryPolicy,
    SubscriptionOptions,
    SubscriptionType,
    process_by_key,
)
from seqgate.errors import (
    ConsumerClosedError,
    FencedError,
    InUseError,
    InvalidRequestError,
    LimitExceededError,
    MessageTooLargeError,
    NotFoundError,
    ProducerClosedError,
    ProducerQueueFullError,
    SeqgateError,
    SequenceIdTrimmedError,
    StaleSequenceIdError,
    StaleTokenError,
    UnavailableError,
)
from seqgate.message_id import ChunkMessageId
from seqgate.types import Position
from tests.simulation.ground import EPOCH_S
from tests.simulation.system.seen import NUMBER, Place, Sent

if TYPE_CHECKING:
    from tests.simulation.system.world import World

KEYS: Final = ("a", "b", "c", "d")
LONG_KEY: Final = "long " * 1_000
TAGS: Final = ("red", "green")
KINDS: Final = ("KEY_SHARED", "SHARED", "EXCLUSIVE")
AFTER: Final = tuple(each.name for each in AfterDeadLetter)
REST_S: Final = 0.5
"""The pause of an application before it retries after a failure."""

AGAIN_MAX: Final = 3
"""The most stored messages that an application sends again after a restart."""

LETTER_OF: Final = "seqgate.origin.chunk"
COMPRESSED_LETTER: Final = "seqgate.origin.compression"
"""Properties of a dead letter that is a chunk without its predecessors."""

IDLE_S: Final = (57.0, 58.5, 59.5)
"""How long an idle producer rests: close to the shortest inactivity timeout, of one minute."""

EXPIRY_MS: Final = 60_000
"""How long consumers keep the chunks of a stalled message: short enough that messages behind them
arrive before a history ends."""

Failure = (SeqgateError, TimeoutError)


# ---- producers


@dataclass
class Publishing:
    """A producer's application.

    Attributes:
        has_ids: it numbers its messages itself, and resends those without a receipt.
        todo: messages to send, in order; with ids of its own, until their receipts.
        stored: the last messages with ids of its own that have receipts.
    """

    name: str
    topic: str
    has_ids: bool
    batching: Batching | None
    chunking: Chunking | None
    rest_s: float
    sizes: tuple[int, ...]
    compression: Compression = Compression.NONE
    todo: list[Sent] = field(default_factory=list)
    stored: list[Sent] = field(default_factory=list)
    next_id: int = 0
    left: int = 0
    over: bool = False
    starts_over: asyncio.Event | None = None
    """Set on a request to number from a lower id on; the requester waits until one is stored."""
    lower: int | None = None
    """The first of the lower ids; None if it has none yet."""
    over_when_stored: asyncio.Event | None = None
    open_since_s: float | None = None
    rests: bool = False

    @property
    def is_done(self) -> bool:
        """True once every message is sent and answered."""
        return self.over or (self.left == 0 and not self.todo)


def publishing(world: "World", number: int) -> Publishing:
    """Draw a producer's application."""
    rng, swarm = world.rng, world.swarm
    batching = chunking = None
    if swarm.has("batching") and rng.random() < swarm.more.get("batch_share", 0.6):
        batching = Batching(
            messages_max=swarm.one_of("batch", rng, (1, 2, 3, 10)),
            bytes_max=rng.choice([64, 1024, 128 * 1024]),
            delay_s=rng.choice([0.0, 0.001, 0.05]),
            by_key=swarm.has("batching by key") and rng.random() < 0.5,
            filter_properties=("tag",) if swarm.has("filters") else (),
        )
    elif swarm.has("chunking") and rng.random() < swarm.more.get("chunk_share", 0.7):
        chunking = Chunking(swarm.one_of("chunk_bytes", rng, (0, 32, 100)))
    sizes = (12, 40, 150) if chunking is None else (12, 40, 150, 400)
    sizes = swarm.more.get("sizes", sizes)
    compression = Compression.NONE
    if swarm.has("compression"):
        compression = rng.choice([Compression.LZ4, Compression.ZSTD, Compression.NONE])
    shares = swarm.has("shared names") and number > 0
    return Publishing(
        "p0" if shares else f"p{number}",
        world.publishings[0].topic if shares else rng.choice(world.topics),
        has_ids=(rng.random() < 0.6 or "own_ids" in swarm.more) and not swarm.has("shared names"),
        batching=batching,
        chunking=chunking,
        rest_s=swarm.one_of(
            "rest_s", rng, (0.0, 0.001, 0.01, 0.1, swarm.seconds / swarm.messages / 2)
        ),
        sizes=sizes,
        compression=compression,
        left=rng.randint(swarm.messages // 2, swarm.messages),
    )


async def publish(world: "World", application: Publishing, rng: Random) -> None:
    """Run one process of a producer's application."""
    while not application.is_done:
        client = world.connect()
        try:
            await _publish_on(world, application, client, rng)
            if application.rests:
                application.rests = False
                await client.close()
                await _idle(world, rng)
        except InUseError:
            await asyncio.sleep(REST_S)
        except FencedError as error:
            world.seen.note(f"{application.name} is over: {error.reason}")
            world.seen.counts["producers superseded"] += 1
            if not application.has_ids:
                world.superseded(application, error)
            await asyncio.sleep(rng.random() * REST_S)
        except (ProducerClosedError, UnavailableError, LimitExceededError, TimeoutError) as error:
            world.seen.note(f"{application.name} starts again: {error!r}")
            await asyncio.sleep(REST_S)
        except NotFoundError as error:
            world.seen.note(f"{application.name}: {error!r}")
            if not world.may_be_missing(application.topic):
                raise
            await asyncio.sleep(REST_S)
        finally:
            await client.close()


async def _publish_on(world: "World", application: Publishing, client: Client, rng: Random) -> None:
    limits = world.swarm.limits["producer"]
    producer = client.producer(
        application.topic,
        name=application.name,
        takeover=True,
        batching=application.batching,
        chunking=application.chunking,
        compression=application.compression,
        max_pending_messages=limits.get("max_pending_messages", 1_000),
        send_timeout_s=limits.get("send_timeout_s", 30.0),
    )
    async with producer:
        world.seen.note(f"{application.name} is open, last id {producer.last_sequence_id}")
        application.open_since_s = world.seen.now_s()
        try:
            await _publish_all(world, application, producer, rng)
        finally:
            application.open_since_s = None


async def _publish_all(
    world: "World", application: Publishing, producer: Producer, rng: Random
) -> None:
    if not application.has_ids:
        application.todo.clear()  # their fate is unknown: they are not resent
    again = list(application.todo)
    if world.swarm.has("resends") and rng.random() < 0.7 and application.lower is None:
        again = application.stored[-rng.randint(1, AGAIN_MAX) :] + again
    world.seen.counts["resends"] += len(again)
    sending = Sending(world, application, producer)
    if world.swarm.has("idle producers") and rng.random() < 0.8:
        await _idle(world, rng)
    while (again or application.left) and not sending.has_failed:
        if application.starts_over is not None and not again:
            await sending.answered(asyncio.ALL_COMPLETED)
            if application.todo:
                break
            _start_over(world, application, rng)
        sent = again.pop(0) if again else _next(world, application, rng)
        await sending.send(sent)
        if world.swarm.has("idle producers") and not world.is_quiet and rng.random() < 0.5:
            application.rests = True
            break
        if application.rest_s and not world.is_quiet:
            await asyncio.sleep(rng.random() * 2 * application.rest_s)
        elif rng.random() < 0.3:
            await sending.answered(asyncio.FIRST_COMPLETED)
        restarts = world.swarm.has("producers restart") and not world.is_quiet
        if restarts and rng.random() < 0.05:
            world.seen.counts["producers restarted"] += 1
            break
    await sending.answered(asyncio.ALL_COMPLETED)


def _start_over(world: "World", application: Publishing, rng: Random) -> None:
    """Continue from a lower id, like an application that lost its database."""
    application.starts_over, over = None, application.starts_over
    application.stored.clear()
    application.next_id = rng.randrange(application.next_id + 1)
    application.lower = application.next_id
    application.over_when_stored = over
    world.seen.counts["producers started over"] += 1
    world.seen.note(f"{application.name} starts over at {application.lower}")


async def _idle(world: "World", rng: Random) -> None:
    """Rest for almost as long as a producer may without being forgotten."""
    world.seen.counts["idle producers"] += 1
    with suppress(TimeoutError):
        async with asyncio.timeout(rng.choice(IDLE_S)):
            await world.until_quiet()


class Sending:
    """The messages of one producer, in order. After a failure it sends no more: later messages
    would overtake those to be resent."""

    def __init__(self, world: "World", application: Publishing, producer: Producer) -> None:
        self.has_failed = False
        self._world = world
        self._application = application
        self._producer = producer
        self._pending: dict[asyncio.Future[Receipt], Sent] = {}

    async def send(self, sent: Sent) -> None:
        """Send a message, once there is room."""
        self._world.seen.note(f"send {sent.number} {sent.producer}#{sent.sequence_id}")
        if sent.asked_s is None:
            sent.asked_s = self._world.loop.now
        while not self.has_failed:
            try:
                future = self._producer.send_nowait(
                    sent.payload,
                    key=sent.key,
                    properties={"tag": sent.tag, NUMBER: str(sent.number)},
                    sequence_id=sent.sequence_id,
                    deliver_after_s=sent.delay_s or None,
                )
            except ProducerQueueFullError:
                if not self._pending:
                    self._give_up(sent, "TOO_MANY_CHUNKS")
                    return
                await self.answered(asyncio.FIRST_COMPLETED)
                continue
            except (MessageTooLargeError, InvalidRequestError) as error:
                self._check_refusal(sent, error)
                self._give_up(sent, error.reason)
                return
            except SeqgateError as error:
                self._world.seen.note(f"not sent: {sent.number}: {error!r}")
                self.has_failed = True
                return
            self._pending[future] = sent
            future.add_done_callback(self._resolved)
            return

    async def answered(self, when: str) -> None:
        """Wait for receipts."""
        if self._pending:
            await asyncio.wait(list(self._pending), return_when=when)
            await asyncio.sleep(0)

    def _check_refusal(self, sent: Sent, error: SeqgateError) -> None:
        if self._application.chunking is not None and isinstance(error, MessageTooLargeError):
            self._world.seen.violate(
                "REFUSED", f"message {sent.number}, {sent.size_bytes} bytes: {error}"
            )

    def _note_stored(self, sent: Sent) -> None:
        application = self._application
        if sent in application.todo:
            application.todo.remove(sent)
            if sent.sequence_id is not None:
                application.stored = [*application.stored[-AGAIN_MAX:], sent]
        if application.over_when_stored is not None:
            application.over_when_stored.set()
            application.over_when_stored = None

    def _give_up(self, sent: Sent, reason: str) -> None:
        self._world.checker.logs.refused(sent, reason)
        if sent in self._application.todo:
            self._application.todo.remove(sent)

    def _resolved(self, future: "asyncio.Future[Receipt]") -> None:
        sent = self._pending.pop(future)
        if future.cancelled():
            self.has_failed = True
            return
        error = future.exception()
        if error is None:
            receipt = future.result()
            position = receipt.message_id.position
            self._world.checker.logs.answered(
                sent, receipt.sequence_id, position, duplicate=receipt.duplicate
            )
            if receipt.differs is not False:
                self._world.seen.violate("CONFLICT", f"message {sent.number}: {receipt}")
            self._note_stored(sent)
        elif isinstance(error, StaleSequenceIdError | MessageTooLargeError | InvalidRequestError):
            self._check_refusal(sent, error)
            self._give_up(sent, error.reason)
        elif isinstance(error, SequenceIdTrimmedError):  # resending does not help
            self._give_up(sent, error.reason)
        else:
            reason = getattr(error, "reason", "") or type(error).__name__
            self.has_failed = True
            if self._application.has_ids:
                self._world.seen.counts[f"unanswered {reason}"] += 1
            else:
                self._give_up(sent, reason)


def _next(world: "World", application: Publishing, rng: Random) -> Sent:
    application.left -= 1
    swarm = world.swarm
    sequence_id = None
    if application.has_ids:
        sequence_id = application.next_id
        application.next_id += rng.choice([1, 1, 1, 2, 7])
    delays = swarm.has("delays") and rng.random() < swarm.more.get("delay_share", 0.3)
    sent = Sent(
        len(world.seen.sent) + 1,
        application.topic,
        application.name,
        sequence_id,
        _key(world, rng),
        rng.choice(TAGS),
        rng.random() * 3 if delays else 0.0,
        rng.choice(application.sizes),
        is_keyed=application.batching is None or application.batching.by_key,
    )
    world.seen.sent[sent.number] = sent
    application.todo.append(sent)
    return sent


def _key(world: "World", rng: Random) -> str | None:
    if world.swarm.has("long keys") and rng.random() < world.swarm.more.get("long_key_share", 0.2):
        return LONG_KEY
    return rng.choice((*KEYS[: rng.choice([1, 4])], None))


# ---- consumers


@dataclass
class Subscribed:
    """The settings that a subscription's applications share."""

    topic: str
    name: str
    type: SubscriptionType
    options: SubscriptionOptions
    incomplete: Incomplete
    ack_timeout_s: float | None
    nack_share: float
    stuck_share: float
    consumers: int
    starts_late: bool = False
    by_key: bool = False


def subscribed(world: "World", number: int) -> Subscribed:
    """Draw a subscription."""
    rng, swarm = world.rng, world.swarm
    kind = SubscriptionType[swarm.one_of("kinds", rng, KINDS)]
    topic = rng.choice(world.topics)
    circle = ""
    if swarm.has("letters in circles") and len(world.topics) > 1:
        topic, circle = world.topics[number % 2], world.topics[(number + 1) % 2]
    letters = swarm.has("dead letters")
    options = SubscriptionOptions(
        max_in_flight_per_key=rng.choice([0, 0, 1, 2]),
        max_unacked_per_consumer=rng.choice([None, None, 1, 3]),
        max_unacked=rng.choice([None, None, 2, 5]),
        max_redeliveries=swarm.one_of("max_redeliveries", rng, (0, 1, 3)) if letters else None,
        dead_letter_topic=circle,
        after_dead_letter=AfterDeadLetter[swarm.one_of("after", rng, AFTER)],
        drain_deadline_s=swarm.one_of("drain_deadline_s", rng, (0.0, 0.5)),
        delay_holds_key=swarm.has("delays") and rng.random() < 0.5,
    )
    consumers = swarm.one_of("consumers", rng, (1, 2, 3))
    return Subscribed(
        topic,
        f"s{number}",
        kind,
        options,
        Incomplete.ACKNOWLEDGE if swarm.has("incomplete acknowledged") else Incomplete.REFUSE,
        ack_timeout_s=rng.choice([0.3, 2.0]) if swarm.has("ack timeouts") else None,
        nack_share=swarm.one_of("nack_share", rng, (0.05, 0.3))
        if swarm.has("nacks") or letters
        else 0,
        stuck_share=0.05 if swarm.has("stuck consumers") else 0.0,
        consumers=1 if kind is SubscriptionType.EXCLUSIVE else consumers,
        starts_late=swarm.has("late starts"),
        by_key=swarm.has("process by key") and rng.random() < 0.5,
    )


async def consume(world: "World", of: Subscribed, name: str, rng: Random) -> None:
    """Run one process of a consumer's application."""
    while True:
        client = world.connect()
        try:
            await _consume_on(world, of, name, client, rng)
            await asyncio.sleep(rng.random() * REST_S)
        except (NotFoundError, InUseError, UnavailableError, LimitExceededError, FencedError,
                ConsumerClosedError, TimeoutError) as error:  # fmt: skip
            world.seen.note(f"{name} starts again: {error!r}")
            await asyncio.sleep(REST_S)
        finally:
            await client.close()


async def _consume_on(
    world: "World", of: Subscribed, name: str, client: Client, rng: Random
) -> None:
    swarm, checker = world.swarm, world.checker
    limits = swarm.limits["consumer"]
    bytes_max = limits.get("assembly_bytes_max", 1024 * 1024)
    if of.starts_late and not world.seen.log(of.topic).entries:
        await asyncio.sleep(rng.random() * swarm.more.get("late_s", swarm.seconds / 2))
    start: Any = "earliest"
    if of.starts_late:
        start = rng.choice(["latest", datetime.fromtimestamp(EPOCH_S + world.loop.now, UTC)])
    first_s, longest_s = swarm.more.get("retry_s", (0.05, 0.5))
    consumer = client.consumer(
        of.topic,
        of.name,
        type=of.type,
        options=of.options,
        name=name,
        start=start,
        ack_timeout_s=of.ack_timeout_s,
        retry=RetryPolicy(first_s, longest_s),
        breaker=Breaker(2, 1.0, 0.1, 0.5) if swarm.has("circuit breaker") else None,
        receiver_queue=limits.get("receiver_queue", 1_000),
        receiver_queue_bytes=limits.get("receiver_queue_bytes", 64 * 1024 * 1024),
        assembly=AssemblyLimits(
            messages_max=limits.get("assembly_messages_max", 100),
            bytes_max=bytes_max,
            message_bytes_max=bytes_max,
            expiry_ms=EXPIRY_MS,
        ),
        incomplete=of.incomplete,
        on_dropped=lambda dropped: checker.deliveries.dropped(
            of.topic, of.name, dropped, of.incomplete
        ),
    )
    stays_s = rng.random() * 5 if swarm.has("consumers come and go") else None
    async with consumer:
        world.seen.note(f"{name} is connected")
        if of.by_key:
            await _process(world, of, name, consumer, rng, stays_s)
        else:
            await _receive(world, of, name, consumer, rng, stays_s)
        world.seen.counts["consumers left"] += 1
    world.seen.note(f"{name} left")


async def _receive(
    world: "World",
    of: Subscribed,
    name: str,
    consumer: Consumer,
    rng: Random,
    stays_s: float | None,
) -> None:
    """Receive messages one by one, and settle them concurrently."""
    settling: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    ends_s = None if stays_s is None else loop.time() + stays_s
    while ends_s is None or loop.time() < ends_s or world.is_quiet:
        timeout_s = None if ends_s is None or world.is_quiet else ends_s - loop.time()
        try:
            message = await consumer.receive(timeout_s)
        except TimeoutError:
            continue
        task = asyncio.create_task(_handle(world, of, name, consumer, message, rng))
        settling.add(task)
        task.add_done_callback(settling.discard)
        task.add_done_callback(partial(_note_ended, world, name))
        if rng.random() < 0.5:
            await asyncio.wait([task], timeout=1.0)
        if world.swarm.has("seeks") and not world.is_quiet and rng.random() < 0.05:
            await _seek(world, of, consumer, rng)
    for task in settling:
        task.cancel()


async def _process(
    world: "World",
    of: Subscribed,
    name: str,
    consumer: Consumer,
    rng: Random,
    stays_s: float | None,
) -> None:
    """Have the client process messages by key, and settle them."""

    async def handle(message: Received) -> None:
        _note_delivered(world, of, name, message)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.3)
        if not world.is_quiet and rng.random() < of.nack_share:
            world.checker.deliveries.refuses(of.topic, of.name, places_of(world, message))
            raise RuntimeError("not today")
        token = (message.token.epoch, message.token.delivery)
        world.checker.deliveries.asks(of.topic, of.name, places_of(world, message), token)

    processing = asyncio.create_task(
        process_by_key(consumer, handle, concurrency=3, on_failure=lambda *_: None)
    )
    quiet = asyncio.create_task(world.until_quiet())
    try:
        await asyncio.wait([processing, quiet], timeout=stays_s, return_when="FIRST_COMPLETED")
        if quiet.done():
            await asyncio.wait([processing])
        if processing.done():
            processing.result()
    finally:
        quiet.cancel()
        processing.cancel()
        await asyncio.wait([processing])


async def _seek(world: "World", of: Subscribed, consumer: Consumer, rng: Random) -> None:
    entries = world.seen.log(of.topic).entries
    place: Place | None = None
    if entries and rng.random() < 0.7:
        place = (rng.choice(entries).position, 0)
    world.seen.counts["seeks"] += 1
    world.seen.note(f"seek {of.name} to {place}")
    move = world.checker.administration.moves(
        of.topic, of.name, None if place is None else place[0]
    )
    try:
        await consumer.seek("earliest" if place is None else MessageId(*place[0]))
        move.answered_s = world.seen.now_s()
    except Failure as error:
        world.seen.note(f"{of.name} is not moved: {error!r}")


def place_of(message: Received) -> Place:
    """A message's entry and index."""
    return message.id.position, max(message.id.batch_index, 0)


def places_of(world: "World", message: Received) -> list[Place]:
    """Everything that an acknowledgement of a message covers: for a large one, its chunks.

    Without deduplication the same chunks may be stored again after them."""
    if not isinstance(message.id, ChunkMessageId):
        return [place_of(message)]
    log = world.seen.log(message.topic)
    first, last = message.id.first_chunk.position, message.id.position
    at = log.at.get(last)
    if at is None or at.chunk is None:
        return [place_of(message)]
    chunks = log.attempts[at.producer, at.chunk.uuid]
    return [(each, 0) for each in chunks if first <= each <= last]


def sent_as(
    sent: Mapping[int, Sent], payload: bytes, properties: Mapping[str, str]
) -> tuple[int, bool]:
    """The number of a received message, and whether its payload was sent. A dead letter that is a
    single chunk has a part of the payload, which cannot be checked if compressed."""
    if LETTER_OF not in properties:
        number = int(payload[1:].split(b">", 1)[0])
        return number, payload == sent[number].payload
    number = int(properties[NUMBER])
    return number, COMPRESSED_LETTER in properties or payload in sent[number].payload


def _note_delivered(world: "World", of: Subscribed, name: str, message: Received) -> None:
    number, is_sent = sent_as(world.seen.sent, message.payload, message.properties)
    if not is_sent:
        world.seen.violate("INVENTED", f"message {number} has another payload: {message.payload!r}")
    token = (message.token.epoch, message.token.delivery)
    world.checker.deliveries.delivered(
        of.topic, of.name, name, token, place_of(message), number, message.attempts
    )


async def _handle(
    world: "World",
    of: Subscribed,
    name: str,
    consumer: Consumer,
    message: Received,
    rng: Random,
) -> None:
    _note_delivered(world, of, name, message)
    settle = partial(_settle, world, of, name, consumer, message, rng)
    try:
        if world.swarm.has("partial acks") and message.id.batch_index >= 0:
            await settle()
            return
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * world.swarm.more.get("work_s", 0.3))
        if not world.is_quiet and rng.random() < of.stuck_share:
            world.seen.counts["stuck"] += 1
            await world.until_quiet()
        await settle()
    except StaleTokenError:
        world.seen.counts["stale tokens"] += 1
    except Failure as error:
        world.seen.note(f"{name}: {place_of(message)} is not settled: {error!r}")


def _note_ended(world: "World", name: str, handling: asyncio.Task[None]) -> None:
    if not handling.cancelled() and (error := handling.exception()) is not None:
        world.seen.violate("SURPRISE", f"{name} fails with {error!r}")


async def _settle(
    world: "World",
    of: Subscribed,
    name: str,
    consumer: Consumer,
    message: Received,
    rng: Random,
) -> None:
    """Acknowledge or refuse a message."""
    checker, place = world.checker, place_of(message)
    token = (message.token.epoch, message.token.delivery)
    if not world.is_quiet and rng.random() < of.nack_share:
        world.seen.counts["nacks"] += 1
        world.seen.note(f"nack {of.name} {place} {token}")
        checker.deliveries.refuses(of.topic, of.name, places_of(world, message))
        await consumer.nack(message)
        return
    is_through = (
        of.type is SubscriptionType.EXCLUSIVE
        and world.swarm.has("cumulative acks")
        and rng.random() < 0.5
    )
    places = [place] if is_through else places_of(world, message)
    world.seen.note(f"ack {of.name} {place} {token}{' through' if is_through else ''}")
    asked_s = world.seen.now_s()
    try:
        if is_through:
            checker.deliveries.asks_through(of.topic, of.name, place, token)
            await consumer.ack_through(message)
        else:
            checker.deliveries.asks(of.topic, of.name, places, token)
            await consumer.ack(message)
    except StaleTokenError:
        checker.deliveries.not_asked(of.topic, of.name, places, token)
        raise
    for each in places:
        checker.deliveries.done(of.topic, of.name, each, token, asked_s)


# ---- readers


async def read(world: "World", topic: str, rng: Random) -> None:
    """Run a process that reads a topic again and again, and compares it with the log."""
    while not world.is_over:
        client = world.connect()
        last: Position | None = None
        try:
            follow = rng.random() < 0.5
            async with asyncio.timeout(5 + rng.random() * 5):
                async for message in client.reader(topic, follow=follow):
                    world.seen.counts["read"] += 1
                    _check_read(world, topic, message, last)
                    last = message.id.position
        except Failure as error:
            world.seen.note(f"a reader of {topic}: {error!r}")
        finally:
            await client.close()
        await asyncio.sleep(REST_S + rng.random())


def _check_read(world: "World", topic: str, message: Message, last: Position | None) -> None:
    id_, position = message.id, message.id.position
    log = world.seen.log(topic)
    at = log.at.get(position)
    number, is_sent = sent_as(world.seen.sent, message.payload, message.properties)
    # Entries in transit when the topic was deleted still arrive.
    is_deleted = at is None and position.ledger_id <= log.deleted_ledger
    is_there = is_deleted or (at is not None and number in at.numbers)
    if not is_there or not is_sent:
        world.seen.violate("INVENTED", f"read at {id_}: {message.payload!r}, the log has {at}")
    if last is not None and position < last:
        world.seen.violate("REORDERED", f"read {id_} after {last}")
