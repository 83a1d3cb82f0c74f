"""What lies between the chunks of large messages, from one seed: raw producers, a ledger, and all
who read its log.

Raw producers have no client library. They send chunks of several large messages by turns, with
messages and batches between them, begin attempts again, skip and repeat chunks, and reconnect; they
do obey a hold. Deduplication is switched on and off meanwhile, and the faults of publish.py happen.

At the end, a message is *told* if every chunk of an attempt was answered STORED, in order. Then

    every told message is delivered, and everybody delivers the same ones, once:
        a reader, consumers of each type, FindMessage, the fold, and Spark
    consumers have acknowledged everything
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import pyarrow as pa

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._assembler import Assembled, Assembler, AssemblyLimits
from seqgate.client._chunk_deliveries import (
    Acknowledge,
    ChunkDeliveries,
    Complete,
    Damaged,
    GiveBack,
    Refuse,
)
from seqgate.client._chunk_deliveries import Effect as OfChunks
from seqgate.client._codec import (
    Compression,
    OutgoingMessage,
    encode_batch,
    piece_of,
    position_of,
)
from seqgate.client._subscribing import Incomplete
from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.services.dispatcher.core.effects import (
    Deliver,
    Delivery,
    Revoke,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Ack, Nack, Subscription
from seqgate.services.dispatcher.entries import entry_of
from seqgate.services.ledger.core.entry import Entry, StoredEntry, Unit, unit_of
from seqgate.services.ledger.core.find import Finder
from seqgate.services.ledger.core.receipt import Found, Status
from seqgate.services.ledger.core.writer import Phase
from seqgate.services.ledger.live import Answered
from seqgate.spark._columns import Range
from seqgate.spark._messages import MESSAGE_COLUMNS, Edges, Scan, message_batches
from seqgate.types import Position
from tests.simulation.publish import _PARSER, Log, Process, World, _stored
from tests.support.publisher import single
from tests.unit.test_subscription import Stage

STEPS: Final = 150
END: Final = 10**6
"""The id of each producer's last message."""

OPEN_MAX: Final = 3
"""The most attempts of a producer that go on by turns."""


class Told(NamedTuple):
    """A message stored whole: its producer, id and attempt (empty: it is none), and its entries."""

    producer: str
    sequence_id: int
    uuid: str
    positions: tuple[Position, ...]

    @property
    def last(self) -> Position:
        return self.positions[-1]


@dataclass
class Attempt:
    sequence_id: int
    uuid: str
    chunks: int
    next: int = 0
    stored: list[Position] = field(default_factory=list)


class RawProducer:
    """Publishes by hand; see the module. It has the interface of publish.Application."""

    def __init__(self, world: "Between", name: str) -> None:
        self.world, self.name = world, name
        self.random = world.random
        self.attempts: list[Attempt] = []
        self.next_id = 0
        self.told: list[Told] = []
        self.process: Process | None = None
        self.session = self.requests = self.begun = 0
        self.out: dict[int, tuple[Attempt | None, int]] = {}
        self.has_ended = False
        self.resumes = False

    def end(self) -> None:
        """Publish a last message, which ends what is unfinished."""
        if self.process is None:
            self._connect()
        elif not self.out and not self.has_ended:
            unit = self._made(None, END, [single(1, END, b"end").entries[0]])
            self.process.perform(self.process.writer.submit([unit]))

    def restart(self) -> None:
        self.break_stream()
        if self.random.random() < 0.5:
            self.attempts.clear()

    def break_stream(self) -> None:
        if self.process is not None:
            self.process.sessions.pop(self.session, None)
            self.process.writer.close_session(self.session)
        self.disconnect()

    def disconnect(self) -> None:
        self.process = None
        self.out.clear()
        self.resumes = False
        for each in self.attempts:
            each.stored = []  # what became of them is not known
            each.next = self.random.choice((0, each.next))

    def step(self) -> None:
        if self.process is None:
            self._connect()
        elif not (self.resumes and self.out):
            units = [self._unit() for _ in range(self.random.choice((1, 1, 2, 4)))]
            self.process.perform(self.process.writer.submit(units))

    def take(self, answered: Answered) -> None:
        for request_id in answered.request_ids:
            attempt, number = self.out.pop(request_id)
            status, position = answered.receipt.status, answered.receipt.position
            self.has_ended |= number == END and status in (Status.STORED, Status.DUPLICATE)
            if status is Status.STORED and position is not None:
                self._note(attempt, number, position)
            elif status not in (Status.DUPLICATE, Status.STALE):
                self.resumes = True
                if attempt is not None and self.random.random() < 0.5:
                    attempt.next = 0

    def _note(self, attempt: Attempt | None, number: int, position: Position) -> None:
        if attempt is None:
            self.told.append(Told(self.name, number, "", (position,)))
            return
        if number == 0:
            attempt.stored = []
        if number == len(attempt.stored):
            attempt.stored.append(position)
            if number + 1 == attempt.chunks:
                positions = tuple(attempt.stored)
                self.told.append(Told(self.name, attempt.sequence_id, attempt.uuid, positions))

    def _connect(self) -> None:
        process = self.world.process
        if process.stopped or process.writer.phase is not Phase.LIVE:
            return
        if process.epoch != self.world.log.ledger_id:
            process.stop()
            return
        if process.writer.busy(self.name):
            return
        self.world.sessions += 1
        self.process, self.session = process, self.world.sessions
        process.sessions[self.session] = self  # type: ignore[assignment]
        process.writer.open_session(self.session)
        if attempt := self.world.log.unfinished(self.name):
            process.writer.left_unfinished(self.session, attempt)

    def _unit(self) -> Unit:
        random = self.random
        choice = random.random()
        if choice < 0.25 and len(self.attempts) < OPEN_MAX:
            self.attempts.append(self._new_attempt())
        if choice < 0.85 and self.attempts:
            return self._chunk(random.choice(self.attempts))
        sequence_id = self._new_id()
        if random.random() < 0.6:
            return self._made(None, sequence_id, [single(1, sequence_id, b"plain").entries[0]])
        self.next_id = sequence_id + 1
        messages = [OutgoingMessage(each, b"x", "k") for each in (sequence_id, sequence_id + 1)]
        entry = encode_batch(self.name, messages, compression=Compression.NONE, publish_time_ms=0)
        return self._made(None, messages[0].sequence_id, [entry])

    def _new_id(self) -> int:
        if not self.world.state.enabled and self.random.random() < 0.05:
            self.next_id = self.random.randrange(self.next_id + 1)  # it numbers from there again
        self.next_id += 1
        return self.next_id

    def _new_attempt(self) -> Attempt:
        random = self.random
        self.begun += 1
        uuid = f"{self.name}{self.begun}"
        if self.attempts and random.random() < 0.3:
            return Attempt(random.choice(self.attempts).sequence_id, uuid, random.choice((2, 3)))
        return Attempt(self._new_id(), uuid, random.choice((2, 2, 3, 4)))

    def _chunk(self, attempt: Attempt) -> Unit:
        number = attempt.next
        if self.random.random() < 0.08:
            number = self.random.randrange(attempt.chunks)
        attempt.next = number + 1
        if attempt.next == attempt.chunks:
            attempt.next = 0
            if self.random.random() < 0.9:
                self.attempts.remove(attempt)
        is_stray = number and self.random.random() < 0.02  # under another id
        publication = single(
            1,
            attempt.sequence_id + bool(is_stray),
            b"%03d" % number,
            partition_key=f"k{attempt.sequence_id % 2}",
            uuid=attempt.uuid,
            chunk_id=number,
            num_chunks_from_msg=attempt.chunks,
            total_chunk_msg_size=3 * attempt.chunks,
        )
        return self._made(attempt, number, list(publication.entries))

    def _made(self, attempt: Attempt | None, number: int, entries: list[pb.Entry]) -> Unit:
        for each in entries:
            each.metadata.producer_name = self.name
        self.requests += 1
        self.out[self.requests] = attempt, number
        parsed = _PARSER._entries(self.name, entries)
        resume, self.resumes = self.resumes, False
        return unit_of(self.session, self.requests, parsed, resume=resume)


class Between(World):
    """The world of publish.py with raw producers, and deduplication that is switched."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        super().__init__(seed, enabled=Random(seed).random() < 0.4)
        self.faults = faults
        self.raw = [RawProducer(self, name) for name in ("p", "q")]
        self.applications = self.raw  # type: ignore[assignment]

    def run(self) -> None:
        for _ in range(STEPS):
            if self.random.random() < 0.05:
                self.state.enabled = not self.state.enabled
            self.step(failing=self.faults and self.random.random() < 0.5)
        self.state.enabled = True
        while not all(each.has_ended for each in self.raw):
            for each in self.raw:
                each.end()
            if self.process.stopped:
                self.process = Process(self)
            self._finish_something()

    def _finish_something(self) -> None:
        under_way = [
            (each, effect)
            for each in (self.process, *self.zombies)
            if not each.stopped
            for effect in each.under_way
        ]
        if under_way:
            process, effect = self.random.choice(under_way)
            process.under_way.remove(effect)
            process.finish(effect, failing=False)

    def check(self) -> None:
        """The state is checked after each misfortune, and the log at the end."""

    @property
    def told(self) -> list[Told]:
        every = [told for each in self.raw for told in each.told]
        return sorted(every, key=lambda told: told.last)


# ---- those who read the log


def by_rule(log: Log) -> list[Told]:
    """The messages of a log by the rule: chunks that directly follow each other."""
    found: list[Told] = []
    following: dict[str, list[tuple[Position, Entry]]] = {}
    for position, entry in log.entries:
        chunk, before = entry.chunk, following.pop(entry.producer, [])
        if chunk is None:
            found.append(Told(entry.producer, entry.lowest, "", (position,)))
            continue
        if chunk.chunk_id == 0:
            before = []
        assert chunk.chunk_id == len(before), "a chunk follows nothing"
        before = [*before, (position, entry)]
        assert {(each.lowest, each.chunk.layout) for _, each in before if each.chunk} == {
            (entry.lowest, chunk.layout)
        }
        if chunk.is_last:
            positions = tuple(at for at, _ in before)
            found.append(Told(entry.producer, entry.lowest, chunk.uuid, positions))
        else:
            following[entry.producer] = before
    return found


def stored(log: Log) -> Iterator[pb.StoredEntry]:
    for position, entry in log.entries:
        wire = _stored(position, entry)
        wire.aborts = entry.aborts
        yield wire


def read(log: Log) -> list[Position]:
    """Where the messages end that a reader returns, in order."""
    found: list[Position] = []
    assembler = Assembler(AssemblyLimits())
    for each in stored(log):
        if each.aborts:
            assembler.abort(each.metadata.producer_name, each.aborts)
        if each.metadata.num_chunks_from_msg < 2:
            found.append(position_of(each.position))
        elif isinstance(outcome := assembler.add(piece_of(each), 0).outcome, Assembled):
            assert len(outcome.body) == each.metadata.total_chunk_msg_size
            found.append(outcome.positions[-1])
        else:
            assert outcome is None, "the last chunk of no message is stored"
    return found


def find(log: Log, told: Told) -> Any:
    """What FindMessage says of a message."""
    finder = Finder(told.producer, [told.sequence_id], told.uuid)
    for position, entry in log.entries:
        finder.show(StoredEntry(position, 0, entry, len(entry.payload)))
    return finder.place(told.sequence_id)


def folded(log: Log) -> list[Position]:
    """Where messages are complete in the fold."""
    marks: dict[str, Marks] = {}
    found: list[Position] = []
    for position, entry in log.entries:
        mark = advance(marks.get(entry.producer, Marks()), entry.highest, entry.chunk)
        marks[entry.producer] = mark
        if mark.persisted_chunk is None:
            assert mark.persisted == entry.highest
            found.append(position)
    return found


class LogStub:
    """The ledger as Spark sees it: a log that is read whole, from its start."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def Read(self, request: pb.ReadRequest, timeout: float) -> Any:
        class Stream(list[pb.ReadResponse]):
            def cancel(self) -> None:
                pass

        entries = pb.StoredEntries(entries=list(stored(self._log)))
        return Stream([pb.ReadResponse(entries=entries)] if self._log.entries else [])


def of_spark(log: Log) -> list[Position]:
    """Where the messages end that a task of Spark returns, in order; a batch counts once."""
    assert log.tail is not None
    names = ("ledger_id", "entry_id", "payload")
    schema = pa.schema([(name, MESSAGE_COLUMNS[name]) for name in names])
    scan = Scan(schema, Edges(), 60.0, fails_on_trimmed=True, reports_gaps=False)
    wanted = Range("t/n/t", None, log.tail, len(log.entries))
    rows = [
        row
        for batch in message_batches(LogStub(log), wanted, scan)  # type: ignore[arg-type]
        for row in batch.to_pylist()
    ]
    return list(dict.fromkeys(Position(row["ledger_id"], row["entry_id"]) for row in rows))


class Consumers:
    """Consumers of one subscription, which read a log as it grows: the real subscription, and of
    the client what becomes of chunks. Some consumers crash, and the dispatcher restarts."""

    def __init__(self, log: Log, kind: SubscriptionType, random: Random) -> None:
        self.random = random
        self.entries = list(stored(log))
        self.places = [position_of(each.position) for each in self.entries]
        self.stage = Stage(kind=kind)
        self.count = 1 if kind is SubscriptionType.EXCLUSIVE else 2
        self.done: list[Position] = []
        """Where messages end that were processed."""
        self._seen_effects = self._consumers = 0
        self._numbers: dict[int, int] = {}  # of entries, by delivery
        self._connect()

    def run(self) -> None:
        """Read the log in pages, with crashes in between."""
        read = 0
        while read < len(self.entries):
            size = self.random.choice((1, 1, 2, 5))
            self._publish(read, min(len(self.entries), read + size))
            read += size
            if self.random.random() < 0.7:
                self._consume()
            if self.random.random() < 0.05:
                self._crash()
            if self.random.random() < 0.05:
                self._restart()
        self._consume()

    @property
    def acknowledged(self) -> set[Position]:
        return {
            place
            for number, place in enumerate(self.places)
            if Position(1, number) in self.stage.sub.acknowledged
        }

    def _publish(self, start: int, end: int) -> None:
        new = []
        for number in range(start, end):
            entry = entry_of(self.entries[number])
            new.append(entry._replace(position=Position(1, number)))
        self.stage.log += new
        self.stage.do(self.stage.sub.read(new, self.stage.now_ms))

    def _connect(self) -> None:
        self.chunks: dict[int, ChunkDeliveries] = {}
        for _ in range(self.count):
            self._connect_one()

    def _connect_one(self) -> None:
        self._consumers += 1
        self.chunks[self._consumers] = ChunkDeliveries(AssemblyLimits(), Incomplete.REFUSE)
        self.stage.connect(self._consumers, 1_000)

    def _crash(self) -> None:
        consumer = self.random.choice(list(self.chunks))
        del self.chunks[consumer]
        self.stage.leave(consumer)
        self._connect_one()

    def _restart(self) -> None:
        """Another dispatcher owns the subscription, and reads from the mark-delete position on."""
        stage, acknowledged = self.stage, Acknowledged(None)
        for number in range(len(stage.log)):
            if Position(1, number) in stage.sub.acknowledged:
                acknowledged.add(Position(1, number))
        stage.sub = Subscription(stage.options, Ring(), Durable(acknowledged), is_filtered=False)
        self._connect()
        stage.do(stage.sub.read(stage.log, stage.now_ms))

    def _consume(self) -> None:
        """Process what was sent, in order, until nothing more is."""
        idle = False
        while not idle or self._seen_effects < len(self.stage.effects):
            idle = self._seen_effects == len(self.stage.effects)
            while self._seen_effects < len(self.stage.effects):
                effect = self.stage.effects[self._seen_effects]
                self._seen_effects += 1
                match effect:
                    case Deliver(consumer, deliveries) if consumer in self.chunks:
                        for each in deliveries:
                            self._deliver(consumer, each)
                    case Revoke(consumer, numbers) if consumer in self.chunks:
                        for number in numbers:
                            gone = self.chunks[consumer].take_back(number, gone=(number,))
                            self._apply(consumer, gone)
            self.stage.wait(100_000)

    def _deliver(self, consumer: int, delivery: Delivery) -> None:
        number = delivery.position.entry_id
        self._numbers[delivery.delivery] = number
        entry, chunks = self.entries[number], self.chunks[consumer]
        metadata = entry.metadata
        if entry.aborts:
            place = self.places[number]
            self._apply(consumer, chunks.abort(metadata.producer_name, entry.aborts, place))
        if metadata.num_chunks_from_msg < 2:
            self._process(consumer, [delivery.delivery], delivery.unacked)
            return
        place = self.places[number]
        self._apply(consumer, chunks.add(delivery.delivery, entry, place, b"k", 0))

    def _apply(self, consumer: int, effects: list[OfChunks]) -> None:
        for effect in effects:
            match effect:
                case Complete(deliveries, _, _):
                    self._process(consumer, deliveries)
                case Acknowledge(deliveries):
                    self._acknowledge(consumer, deliveries)
                case GiveBack(deliveries, _, _, attempt, _):
                    given, _ = self.stage.sub.give_back(
                        consumer, list(deliveries), self.stage.now_ms
                    )
                    self.stage.do(given)
                    self.chunks[consumer].given_back(attempt)
                case Refuse(deliveries):
                    self._fail(consumer, deliveries)  # the others were settled late, or moved
                case Damaged(error):
                    raise error

    def _process(self, consumer: int, deliveries: Sequence[int], messages: int = 0) -> None:
        """Process a message, which fails now and then."""
        if self.random.random() < 0.05:
            self._fail(consumer, deliveries)
            return
        self.done.append(self.places[self._numbers[deliveries[-1]]])
        self._acknowledge(consumer, deliveries, messages)

    def _fail(self, consumer: int, deliveries: Sequence[int]) -> None:
        items = [Nack(each, 0) for each in deliveries]
        effects, _ = self.stage.sub.negative_acknowledge(consumer, items, self.stage.now_ms)
        self.stage.do(effects)

    def _acknowledge(self, consumer: int, deliveries: Sequence[int], messages: int = 0) -> None:
        items = [Ack(each, messages) for each in deliveries]
        effects, _, _ = self.stage.sub.acknowledge(consumer, items, self.stage.now_ms)
        self.stage.do(effects)


def check(world: Between) -> list[Told]:
    """Check everything that the module promises. Returns the messages."""
    messages, log = by_rule(world.log), world.log
    lasts = [each.last for each in messages]
    assert {each.positions for each in world.told} <= {each.positions for each in messages}
    assert read(log) == lasts
    assert folded(log) == lasts
    if log.entries:
        assert of_spark(log) == lasts
    newest = {(each.producer, each.sequence_id, each.uuid): each for each in messages}
    for each in newest.values():
        if each.uuid:
            assert find(log, each) == Found(each.last, None, each.positions, each.uuid)
    for kind in SubscriptionType:
        consumers = Consumers(log, kind, world.random)
        consumers.run()
        assert set(consumers.done) == set(lasts), kind
        assert consumers.acknowledged == {at for at, _ in log.entries}, kind
    return messages
