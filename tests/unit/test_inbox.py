"""The consumer's inbox against the service's subscription: any order of events, over two wires with
any delay."""

from collections import Counter, deque
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._assembler import AssemblyLimits
from seqgate.client._breaker import Breaker
from seqgate.client._inbox import Inbox, ReceiverLimits
from seqgate.client._message import Received
from seqgate.client._subscribing import Incomplete, RetryPolicy
from seqgate.errors import SeqgateError, StaleTokenError, UnavailableError
from seqgate.times import duration
from seqgate.types import Position
from tests.support.depth import times
from tests.support.fake_dispatcher import EPOCH, Broker, Stream

KEYS = ("a", "b", "c")
QUEUE = 4
BATCH = 3
ROUNDS = 100
PRODUCERS = 130
STEPS_MAX = 10_000
"""Far above the steps of any history that ends."""
BREAKER = Breaker(outcomes=2, ratio=0.5, pause_min_s=0.02, pause_max_s=0.05)
TYPES = (
    pb.SUBSCRIPTION_TYPE_KEY_SHARED,
    pb.SUBSCRIPTION_TYPE_SHARED,
    pb.SUBSCRIPTION_TYPE_EXCLUSIVE,
)


class Clocked(Broker):
    """A broker with a settable clock."""

    clock_ms = 1_000

    def now_ms(self) -> int:
        return self.clock_ms


@dataclass
class Handed:
    """A message that the application holds."""

    message: Received
    key: bytes


class World:
    """A broker, a consumer, the wires between them, and an application. After each step it checks
    the promises about messages handed out."""

    def __init__(
        self,
        kind: int,
        ack_timeout_ms: int = 0,
        breaker: Breaker | None = None,
        assembly: AssemblyLimits | None = None,
    ) -> None:
        self.broker = Clocked()
        self.kind = kind
        self.is_ordered = kind != pb.SUBSCRIPTION_TYPE_SHARED
        self.ack_timeout_ms = ack_timeout_ms
        self.inbox = Inbox(
            "t/n/topic",
            is_ordered=self.is_ordered,
            is_one_key=kind == pb.SUBSCRIPTION_TYPE_EXCLUSIVE,
            limits=ReceiverLimits(QUEUE, 1_000_000, ack_timeout_ms),
            assembly=assembly or AssemblyLimits(),
            incomplete=Incomplete.REFUSE,
            retry=RetryPolicy(min_s=0.01, max_s=0.05),
            breaker=breaker,
        )
        self.up: deque[pb.ConsumeRequest] = deque()
        self.down: deque[pb.ConsumeResponse] = deque()
        self.handed: list[Handed] = []
        self.tokens: set[tuple[int, int]] = set()
        self.revoked: set[int] = set()
        self.seen: dict[bytes, set[tuple[Position, int]]] = {}
        self.answers: Counter[str] = Counter()
        self.waiting: dict[int, str] = {}
        self.waiters = 0
        self.busy: list[bytes] = []
        self.open: list[list[ledger_pb2.Entry]] = []
        self.connect()

    # ---- the wires

    def connect(self) -> None:
        subscribe = pb.Subscribe(
            consumer_name="c",
            options=pb.SubscriptionOptions(type=self.kind),  # type: ignore[arg-type]
            create_at=common_pb2.Start(earliest=common_pb2.Earliest()),
            ack_timeout=duration(self.ack_timeout_ms) if self.ack_timeout_ms else None,
            delivery_runs=self.broker.subscribed % 2 == 0,
        )
        self.number = self.broker.subscribe(subscribe)
        self.stream: Stream = self.broker.streams[self.number]
        self.stream.outbox.get_nowait()
        self.inbox.subscribed(EPOCH)
        self.settle_up()

    def cut(self) -> None:
        """Break the connection, and drop everything in transit."""
        self.broker.lose(self.number)
        self.up.clear()
        self.down.clear()
        self.handed.clear()
        self.seen.clear()
        self.inbox.disconnected()
        self.settle_up()
        assert not self.waiting, "somebody waits for an answer that never comes"
        self.connect()

    def settle_up(self) -> None:
        for waiter, error in self.inbox.take_resolved():
            self.answer(waiter, error)
        self.inbox.take_dropped()
        self.up.extend(self.inbox.requests())
        while not self.stream.outbox.empty():
            response = self.stream.outbox.get_nowait()
            assert isinstance(response, pb.ConsumeResponse)
            self.down.append(response)
        assert self.inbox.buffered + max(self.inbox.outstanding, 0) <= QUEUE + BATCH

    def answer(self, waiter: int, error: SeqgateError | None) -> None:
        what = self.waiting.pop(waiter)
        expected = UnavailableError if what == "seek" else StaleTokenError
        assert error is None or isinstance(error, expected), error
        self.answers[what if error is None else f"{what}: stale"] += 1

    def waiter(self, what: str) -> int:
        self.waiters += 1
        self.waiting[self.waiters] = what
        return self.waiters

    def send(self) -> None:
        """Deliver the oldest request to the service."""
        if self.up:
            self.broker.handle(self.number, self.up.popleft())
            self.settle_up()

    def deliver(self) -> None:
        """Deliver the oldest response to the consumer."""
        if not self.down:
            return
        response = self.down.popleft()
        if response.HasField("revoked"):
            self.revoked.update(response.revoked.deliveries)
        if response.HasField("sought"):
            self.handed.clear()
            self.seen.clear()
        self.inbox.receive(response, self.broker.clock_ms)
        self.settle_up()

    def begin_large(self, key: str) -> None:
        """Store the first chunk of a large message."""
        self.open.append(self.broker.chunks(b"x" * 25, key, 10))
        self.go_on(-1)

    def go_on(self, at: int) -> None:
        """Store the next chunk of an unfinished message, if there is one."""
        if self.open:
            chunks = self.open[at % len(self.open)]
            self.broker.store(chunks.pop(0))
            self.open = [each for each in self.open if each]

    # ---- the application

    def take(self, *, lock: bool = False) -> None:
        message = self.inbox.take(self.broker.clock_ms, lock=lock)
        if message is None:
            return
        token = message.token
        held = self.inbox.key_of(message)
        assert held is not None
        assert held not in self.busy
        if lock:
            self.busy.append(held)
        assert (token.delivery, token.batch_index) not in self.tokens, "handed out twice"
        self.tokens.add((token.delivery, token.batch_index))
        assert token.delivery not in self.revoked, "handed out after its revoke"
        self.check_order(message, held)
        self.handed.append(Handed(message, held))
        self.settle_up()

    def take_and_put_back(self, count: int, *, lock: bool) -> None:
        """As if nothing had happened."""
        inbox = self.inbox
        before = (inbox.buffered, inbox.unacked)
        taken: list[tuple[Received, bytes]] = []
        while len(taken) < count:
            message = inbox.take(self.broker.clock_ms, lock=lock)
            if message is None:
                break
            key = inbox.key_of(message)
            assert key is not None
            taken.append((message, key))
        for message, key in reversed(taken):
            inbox.put_back(message)
            if lock:
                inbox.unlock(key)
        assert (inbox.buffered, inbox.unacked) == before
        self.settle_up()

    def check_order(self, message: Received, key: bytes) -> None:
        """Check that every earlier message of the key was handed out and not refused since, or is
        acknowledged."""
        place = (message.id.position, message.id.batch_index)
        seen = self.seen.setdefault(key, set())
        if self.is_ordered:
            earlier = {
                (position, index)
                for position, indexes in self.places(key)
                if position <= place[0] and position not in self.broker.done
                for index in indexes
                if (position, index) < place
            }
            assert earlier <= seen, f"{place} before {earlier - seen}"
        seen.add(place)

    def places(self, key: bytes) -> list[tuple[Position, list[int]]]:
        found = []
        machine = self.broker.machine
        assert machine is not None
        for stored in self.broker.log:
            metadata = stored.metadata
            if metadata.num_chunks_from_msg > 1 and not _is_last(metadata):
                continue
            if key not in (b"", metadata.partition_key.encode()):
                continue
            position = Position(stored.position.ledger_id, stored.position.entry_id)
            count = metadata.num_messages_in_batch
            left = machine.partial.get(position, -1)
            indexes = [at for at in range(count) if left >> at & 1] if count else [-1]
            found.append((position, indexes))
        return found

    def acknowledge(self, at: int) -> None:
        if self.handed:
            handed = self.handed.pop(at % len(self.handed))
            self.inbox.acknowledge(handed.message.token, self.waiter("ack"))
            self.settle_up()

    def negative_acknowledge(self, at: int) -> None:
        if not self.handed:
            return
        handed = self.handed[at % len(self.handed)]
        now_ms = self.broker.clock_ms
        self.inbox.negative_acknowledge(handed.message.token, 10, now_ms, self.waiter("nack"))
        self.forget(handed)
        self.settle_up()

    def forget(self, first: Handed) -> None:
        """Expect a refused message, and the later ones of its key, to be handed out again."""
        position = first.message.id.position
        seen = self.seen.get(first.key, set())
        self.seen[first.key] = {place for place in seen if place[0] < position}
        self.handed.remove(first)

    def release(self, at: int) -> None:
        if self.busy:
            self.inbox.unlock(self.busy.pop(at % len(self.busy)))

    def seek(self) -> None:
        self.inbox.seek(common_pb2.Start(earliest=common_pb2.Earliest()), self.waiter("seek"))
        self.settle_up()

    def give_away(self, at: int) -> None:
        """Move the keys of deliveries to another consumer."""
        numbers = [*self.broker.machine.consumers[self.number].flights]  # type: ignore[union-attr]
        if numbers:
            self.broker.move(self.number, numbers[at % len(numbers) :])
            self.settle_up()

    # ---- the end

    def finish(self) -> None:
        """Deliver everything in transit; the application acknowledges all messages."""
        while self.open:
            self.go_on(0)
        for key in self.busy:
            self.inbox.unlock(key)
        self.busy.clear()
        for _ in range(ROUNDS):
            self.broker.clock_ms += 1_000
            self.broker.tick()
            self.rest()
            before = -1
            while before != len(self.tokens):
                before = len(self.tokens)
                self.take()
            while self.handed:
                self.acknowledge(0)
            self.rest()
            if len(self.broker.done) == len(self.broker.log) and not self.waiting:
                break
        assert len(self.broker.done) == len(self.broker.log), "a message never came"
        assert not self.waiting
        assert not self.inbox.buffered

    def rest(self) -> None:
        """Deliver everything in transit."""
        self.inbox.flush()
        self.settle_up()
        steps = 0
        while self.up or self.down or self.broker.pending:
            steps += 1
            assert steps < STEPS_MAX, "nothing comes to rest"
            self.send()
            self.deliver()
            if self.broker.pending:
                self.broker.complete()
            self.settle_up()


def _is_last(metadata: entry_pb2.EntryMetadata) -> bool:
    return metadata.chunk_id == metadata.num_chunks_from_msg - 1


def run(world: World, steps: list[tuple[str, int]]) -> None:
    for step, number in steps:
        key = KEYS[number % len(KEYS)]
        match step:
            case "publish":
                world.broker.publish(b"x", key=key)
            case "publish batch":
                world.broker.publish_batch([b"x"] * BATCH, key=key)
            case "publish large":
                world.broker.publish_large(b"x" * 25, key, chunk_bytes=10)
            case "begin large":
                world.begin_large(key)
            case "go on":
                world.go_on(number)
            case "send":
                for _ in range(number + 1):
                    world.send()
            case "deliver":
                for _ in range(number + 1):
                    world.deliver()
            case "take":
                for _ in range(number + 1):
                    world.take()
            case "hold":
                world.take(lock=True)
            case "put back":
                world.take_and_put_back(number, lock=number % 2 == 0)
            case "release":
                world.release(number)
            case "ack":
                world.acknowledge(number)
            case "nack":
                world.negative_acknowledge(number)
            case "flush":
                world.inbox.flush()
            case "persist":
                if world.broker.pending:
                    world.broker.complete()
            case "time":
                world.broker.clock_ms += number * 10
                world.broker.tick()
            case "renew":
                world.inbox.renew_waiting(world.broker.clock_ms)
            case "move":
                world.give_away(number)
            case "seek":
                world.seek()
            case "cut":
                world.cut()
        world.settle_up()


COMMON = (
    *("publish",) * 3,
    *("send",) * 4,
    *("deliver",) * 4,
    *("take",) * 4,
    *("ack",) * 2,
    "hold",
    *("put back",) * 2,
    "release",
    "flush",
    "persist",
    "time",
    "renew",
    "move",
    "cut",
)


def steps(*more: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    step = st.tuples(st.sampled_from((*COMMON, *more)), st.integers(0, 7))
    return st.lists(step, max_size=120)


@settings(max_examples=times(quick=80, full=300))
@given(
    st.sampled_from(TYPES),
    st.sampled_from((0, 100)),
    st.sampled_from((None, BREAKER)),
    steps("nack", "nack", "publish batch", "seek"),
)
def test_each_message_is_handed_out_in_order_until_it_is_acknowledged(
    kind: int, ack_timeout_ms: int, breaker: Breaker | None, history: list[tuple[str, int]]
) -> None:
    world = World(kind, ack_timeout_ms, breaker)
    run(world, history)
    world.finish()


@settings(max_examples=times(quick=60, full=200))
@given(st.sampled_from(TYPES), steps("publish large", "publish large", "seek"))
def test_large_messages_are_handed_out_whole(kind: int, history: list[tuple[str, int]]) -> None:
    world = World(kind)
    run(world, history)
    world.finish()


@settings(max_examples=times(quick=80, full=300))
@given(
    st.sampled_from(TYPES),
    st.integers(1, 3),
    st.sampled_from((25, 40, 1_000)),
    steps("begin large", "begin large", "go on", "go on", "publish large"),
)
def test_large_messages_beyond_the_assembly_limits_arrive_whole_and_none_has_failed(
    kind: int, messages_max: int, bytes_max: int, history: list[tuple[str, int]]
) -> None:
    limits = AssemblyLimits(messages_max, bytes_max, message_bytes_max=25)
    world = World(kind, assembly=limits)
    run(world, [each for each in history if each[0] != "cut"])
    world.finish()
    assert not world.broker.dead
    assert not world.broker.failures


@pytest.mark.parametrize("kind", TYPES)
def test_any_number_of_interleaved_large_messages_arrives_with_default_limits(kind: int) -> None:
    world = World(kind)
    assert AssemblyLimits().messages_max == 100
    messages = [world.broker.chunks(b"x" * 25, "a", 10) for _ in range(PRODUCERS)]
    for some in zip(*messages, strict=True):
        for chunk in some if some[0] is not messages[0][-1] else reversed(some):
            world.broker.store(chunk)
    world.finish()
    assert not world.broker.dead
    assert not world.broker.failures


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("is_behind", [False, True], ids=["one by one", "all at once"])
def test_chunks_without_room_are_delivered_twice_at_most(kind: int, is_behind: bool) -> None:
    """For any number of keys, and any order of their chunks."""
    random = Random(7)
    world = World(kind, assembly=AssemblyLimits(messages_max=2))
    left = dict.fromkeys(map(str, range(15)), 8)
    open_: dict[str, list[ledger_pb2.Entry]] = {}
    while left or open_:
        key = random.choice(sorted({*left, *open_}))
        if key not in open_:
            open_[key] = world.broker.chunks(b"x" * 75, key, 10)
            left[key] -= 1
            if not left[key]:
                del left[key]
        world.broker.store(open_[key].pop(0))
        if not open_[key]:
            del open_[key]
        if not is_behind:
            for step in random.choices((world.send, world.deliver, world.take), k=4):
                step()
            world.acknowledge(0)
    world.settle_up()
    world.finish()
    assert not world.broker.failures
    assert world.broker.machine is not None
    totals = world.broker.machine.totals
    assert totals["delivered_entries"] == len(world.broker.log) + totals["returned"]
    assert totals["returned"] < len(world.broker.log) / 2
