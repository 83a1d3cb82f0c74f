"""The client for threads, when an exception is raised between any two lines of a calling thread.

Only that call raises. Nothing that it had taken is lost, and all other calls go on.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from seqgate.client import Batching, Outgoing, Received, SubscriptionType
from seqgate.client import blocking as seqgate
from seqgate.dev.stack import Stack
from seqgate.errors import InUseError, StaleTokenError, UnavailableError
from tests.integration.test_blocking_client import script
from tests.support.depth import times
from tests.support.interrupting import Interrupt, at_each_line, interrupted
from tests.support.waiting import WITHIN_S, until

MESSAGES = 400
"""More than a call has lines."""


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[seqgate.Client]:
    with seqgate.connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


@pytest.fixture(scope="module")
def other() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function in another thread, within a limit."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result(WITHIN_S)


def publish(client: seqgate.Client, topic: str, count: int = MESSAGES) -> None:
    with client.producer(topic) as producer:
        producer.send_many([Outgoing(b"%d" % number, key="a") for number in range(count)])


# ---- publishing


@pytest.mark.parametrize("method", ["send", "send_nowait", "send_many", "flush"])
@pytest.mark.parametrize("batching", [None, Batching(delay_s=0.001)])
def test_an_interrupted_call_of_a_producer_leaks_no_slot(
    client: seqgate.Client,
    topic: str,
    other: Callable[[Callable[[], Any]], Any],
    method: str,
    batching: Batching | None,
) -> None:
    with client.producer(topic, max_pending_messages=1, batching=batching) as producer:
        calls: dict[str, Callable[[], object]] = {
            "send": lambda: producer.send(b"0", key="a"),
            "send_nowait": lambda: producer.send_nowait(b"0", key="a"),
            "send_many": lambda: producer.send_many([b"0", b"1"]),
            "flush": producer.flush,
        }

        def scenario(at: int) -> bool:
            was_interrupted = interrupted(calls[method], at)
            other(lambda: producer.send(b"other"))
            until(lambda: producer.pending_messages == 0, "no slot leaks")
            assert producer.pending_bytes == 0
            return was_interrupted

        assert at_each_line(scenario) > 10
    with client.reader(topic, follow=False) as reader:
        stored = [each.payload for each in reader]
    assert stored.count(b"other") >= 2


# ---- consuming


def taken_one_by_one(
    consumer: seqgate.Consumer, taking: Callable[[list[Received]], object]
) -> None:
    """Whichever line interrupts, the next message comes next, and has not failed before."""
    seen = 0

    def scenario(at: int) -> bool:
        nonlocal seen
        taken: list[Received] = []
        was_interrupted = interrupted(lambda: taking(taken), at)
        taken = taken or [consumer.receive(WITHIN_S)]
        for message in taken:
            assert (message.payload, message.attempts) == (b"%d" % seen, 0)
            seen += 1
        consumer.ack_many(taken)
        return was_interrupted

    assert at_each_line(scenario) > 10


@pytest.mark.parametrize("receiver_queue", [1, 1_000], ids=["fetched", "on the shelf"])
@pytest.mark.parametrize("method", ["receive", "receive with a time-out", "iterate", "many"])
def test_a_message_that_an_interrupted_call_had_taken_is_the_next(
    client: seqgate.Client, topic: str, method: str, receiver_queue: int
) -> None:
    publish(client, topic)
    with client.consumer(topic, "s", receiver_queue=receiver_queue) as consumer:

        def take(taken: list[Received]) -> None:
            match method:
                case "receive":
                    taken.append(consumer.receive())
                case "receive with a time-out":
                    taken.append(consumer.receive(WITHIN_S))
                case "iterate":
                    for message in consumer:
                        taken.append(message)
                        break
                case _:
                    taken += consumer.receive_many(3)

        taken_one_by_one(consumer, take)


def test_a_key_that_an_interrupted_call_had_locked_is_unlocked(
    client: seqgate.Client, topic: str
) -> None:
    publish(client, topic)
    with client.consumer(topic, "s") as consumer:
        seen = 0

        def scenario(at: int) -> bool:
            nonlocal seen
            taken: list[tuple[Received, bytes]] = []
            was_interrupted = interrupted(lambda: taken.append(consumer.receive_and_lock()), at)
            message, key = taken[0] if taken else consumer.receive_and_lock()
            assert (message.payload, message.attempts) == (b"%d" % seen, 0)
            seen += 1
            consumer.ack_nowait(message)
            with suppress(Interrupt):
                interrupted(lambda: consumer.unlock(key), at)
            consumer.unlock(key)
            return was_interrupted

        assert at_each_line(scenario) > 10


@pytest.mark.parametrize("method", ["ack", "ack_nowait", "ack_many", "extend", "nack_nowait"])
def test_an_interrupted_settlement_happens_or_can_be_repeated(
    client: seqgate.Client, topic: str, method: str
) -> None:
    publish(client, topic)
    with client.consumer(topic, "s", type=SubscriptionType.SHARED) as consumer:

        def scenario(at: int) -> bool:
            message = consumer.receive(WITHIN_S)
            call = getattr(consumer, method)
            argument: Any = [message] if method == "ack_many" else message
            was_interrupted = interrupted(lambda: call(argument), at)
            with suppress(StaleTokenError):
                consumer.ack(message)
            return was_interrupted

        assert at_each_line(scenario) > 10


def test_a_seek_that_is_interrupted_can_be_repeated(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, 3)
    with client.consumer(topic, "s") as consumer:

        def scenario(at: int) -> bool:
            was_interrupted = interrupted(lambda: consumer.seek("earliest"), at)
            seek_again(consumer)
            assert consumer.receive(WITHIN_S).payload == b"0"
            return was_interrupted

        assert at_each_line(scenario) > 10


def seek_again(consumer: seqgate.Consumer) -> None:
    """The interrupted seek may still be in progress."""

    def sought() -> bool:
        with suppress(UnavailableError):
            consumer.seek("earliest")
            return True
        return False

    until(sought)


# ---- reading


@pytest.mark.parametrize("method", ["read", "iterate", "read_many"])
def test_an_interrupted_reader_returns_each_message_once(
    client: seqgate.Client, topic: str, method: str, other: Callable[[Callable[[], Any]], Any]
) -> None:
    publish(client, topic)
    with client.reader(topic) as reader:
        seen = 0

        def take(taken: list[Any]) -> None:
            match method:
                case "read":
                    taken.append(reader.read())
                case "iterate":
                    for message in reader:
                        taken.append(message)
                        break
                case _:
                    taken += reader.read_many(2)

        def scenario(at: int) -> bool:
            nonlocal seen
            taken: list[Any] = []
            was_interrupted = interrupted(lambda: take(taken), at)
            for message in taken or [other(reader.read)]:
                assert message.payload == b"%d" % seen
                seen += 1
            return was_interrupted

        assert at_each_line(scenario) > 3

        def fetching(at: int) -> bool:
            nonlocal seen
            reader.seek("earliest")
            seen = 0
            return scenario(at)

        assert at_each_line(fetching) > 10


# ---- opening and closing


@pytest.mark.parametrize("what", ["consumer", "producer"])
@pytest.mark.parametrize("how", ["enter", "close", "exit"])
def test_what_is_interrupted_while_it_is_opened_or_closed_is_closed(
    client: seqgate.Client, topic: str, what: str, how: str
) -> None:
    publish(client, topic, 1)

    def made() -> Any:
        if what == "producer":
            return client.producer(topic, name="p")
        return client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE)

    def opens() -> bool:
        again = made()
        try:
            again.open()
        except InUseError:
            return False
        again.close()
        return True

    def scenario(at: int) -> bool:
        each = made()
        if how == "enter":
            was_interrupted = interrupted(each.__enter__, at)
            if not was_interrupted:
                each.close()
        else:
            each.open()
            leave = each.close if how == "close" else partial(each.__exit__, None, None, None)
            was_interrupted = interrupted(leave, at)
            del leave
        del each
        gc.collect()
        until(opens, "its name or place is free")
        return was_interrupted

    assert at_each_line(scenario) > 5


def threads_of_clients() -> int:
    gc.collect()
    return sum(each.name == "seqgate-client nowhere:1" for each in threading.enumerate())


def test_an_interrupted_connect_leaves_no_thread() -> None:
    def scenario(at: int) -> bool:
        made: list[seqgate.Client] = []
        was_interrupted = interrupted(lambda: made.append(seqgate.connect("nowhere:1")), at)
        for each in made:
            each.close()
        made.clear()
        until(lambda: not threads_of_clients(), "the client's thread ends")
        return was_interrupted

    assert at_each_line(scenario) > 50


@pytest.mark.parametrize("how", ["close", "exit"])
def test_an_interrupted_close_can_be_repeated(how: str) -> None:
    def scenario(at: int) -> bool:
        client = seqgate.connect("nowhere:1")
        close = client.close if how == "close" else lambda: client.__exit__(None, None, None)
        was_interrupted = interrupted(close, at)
        client.close()
        assert not threads_of_clients()
        return was_interrupted

    assert at_each_line(scenario) > 10


# ---- signals


SIGNALS = """
import random, signal, sys, threading
from seqgate.client import SubscriptionType, blocking
from seqgate.errors import ProducerQueueFullError
_, ledger, dispatcher, topic, seed, signals = sys.argv
rng, hits = random.Random(int(seed)), 0

class Told(KeyboardInterrupt): ...

def handle(number, frame):
    # At most twice a turn: the second time where the first one is dealt with.
    global hits, may_raise
    signal.setitimer(signal.ITIMER_REAL, rng.choice([0.00005, rng.uniform(0.0002, 0.004)]))
    if may_raise:
        hits += 1
        may_raise -= 1
        raise Told

signal.signal(signal.SIGALRM, handle)
may_raise = 0

def turn():
    global may_raise
    try:
        try:
            may_raise = 2
            producer.send(b"main")
            consumer.ack_nowait(consumer.receive())
            producer.send_nowait(b"main")
            consumer.receive_many(2)
            reader.read()
            consumer.flush()
            may_raise = 0
        except (Told, ProducerQueueFullError):
            may_raise = 0
    except Told:
        may_raise = 0

def other():
    while not over.is_set():
        producer.send(b"other")

over = threading.Event()
with blocking.connect(ledger, dispatcher) as client:
    with client.producer(topic, max_pending_messages=8) as producer:
        with client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE) as consumer:
            reader = client.reader(topic)
            thread = threading.Thread(target=other)
            thread.start()
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            while hits < int(signals):
                turn()
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            over.set()
            thread.join(60)
            assert not thread.is_alive(), "another thread's call does not end"
            producer.flush()
            producer.send(b"last")
            assert producer.pending_messages == 0
            # Whatever was received and not acknowledged is delivered again to the next consumer.
        with client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE) as consumer:
            while (message := consumer.receive(60)).payload != b"last":
                consumer.ack_nowait(message)
            consumer.ack(message)
print("over", [each.name for each in threading.enumerate() if "seqgate" in each.name])
"""


def test_thousands_of_signals_interrupt_only_their_calls(
    stack: Stack, client: seqgate.Client, topic: str
) -> None:
    publish(client, topic, 1)
    signals = times(quick=1_000, full=20_000)
    process = script(stack, SIGNALS, topic, "0", str(signals))
    try:
        # Python itself may report an exception that a signal's handler raised in a finalizer.
        out, err = process.communicate(timeout=5 * WITHIN_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "over []\n"), err
