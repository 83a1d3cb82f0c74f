"""The client for threads, against all services.

What crosses into its thread is counted while its loop is held up, so that counts do not depend on
the machine's speed.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from seqgate.client import (
    LATEST,
    Batching,
    Breaker,
    BreakerState,
    Chunking,
    MessageId,
    Outgoing,
    Received,
    SendManyError,
    SubscriptionType,
)
from seqgate.client import blocking as seqgate
from seqgate.dev.stack import Stack
from seqgate.errors import (
    ConsumerClosedError,
    InvalidRequestError,
    MixedSequenceIdsError,
    NotFoundError,
    ProducerClosedError,
    ProducerQueueFullError,
    StaleSequenceIdError,
    StaleTokenError,
)
from tests.support.waiting import WITHIN_S, until

COLLECTING = Batching(delay_s=60)
"""Batches that are sent by `flush` alone."""


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[seqgate.Client]:
    with seqgate.connect(
        stack.address("ledger"),
        stack.address("dispatcher"),
        dedup=stack.address("dedup"),
        cursor=stack.address("cursor"),
    ) as client:
        yield client


def publish(client: seqgate.Client, topic: str, *payloads: bytes, key: str | None = None) -> None:
    with client.producer(topic) as producer:
        producer.send_many([Outgoing(each, key=key) for each in payloads])


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def received(consumer: seqgate.Consumer, count: int) -> list[Received]:
    return [consumer.receive(WITHIN_S) for _ in range(count)]


def buffered(consumer: seqgate.Consumer, count: int) -> None:
    until(lambda: consumer.buffered == count, f"{count} messages are buffered")


@contextmanager
def held_up(client: seqgate.Client) -> Iterator[None]:
    """The client's loop does nothing while the block runs."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(WITHIN_S)

    client._portal.post(hold)
    assert begun.wait(WITHIN_S)
    try:
        yield
    finally:
        go.set()


# ---- publishing and reading


def test_messages_are_published_read_and_consumed(client: seqgate.Client, topic: str) -> None:
    with client.producer(topic, name="p") as producer:
        first = producer.send(b"0", key="a", properties={"n": "0"}, sequence_id=7)
        again = producer.send(b"0", key="a", properties={"n": "0"}, sequence_id=7)
        assert again.duplicate
        assert again.message_id == first.message_id
        producer.send_many([Outgoing(b"1", sequence_id=8), Outgoing(b"2", sequence_id=9)])
        assert producer.send_nowait(b"3", sequence_id=10).result(WITHIN_S).sequence_id == 10
        assert (producer.name, producer.topic) == ("p", topic)
        assert producer.last_sequence_id == 10
        assert (producer.pending_messages, producer.pending_bytes) == (0, 0)
    with client.reader(topic, follow=False) as reader:
        read = list(reader)
    assert [each.payload for each in read] == numbered(4)
    assert (read[0].key, read[0].properties, read[0].id) == ("a", {"n": "0"}, first.message_id)
    with client.consumer(topic, "s", name="c") as consumer:
        messages = received(consumer, 4)
        consumer.ack(messages[0])
        consumer.ack_many(messages[1:3])
        consumer.ack_nowait(messages[3]).result(WITHIN_S)
        assert (consumer.name, consumer.subscription, consumer.topic) == ("c", "s", topic)
        assert consumer.is_connected
        assert [last for _, last in consumer.ranges] == [65_535]
    assert sorted(each.payload for each in messages) == numbered(4)
    with client.consumer(topic, "s") as consumer, pytest.raises(TimeoutError):
        consumer.receive(timeout_s=0.05)


def test_a_reader_moves_and_reads_many(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(10))
    with client.reader(topic, follow=False) as reader:
        some = reader.read_many(3)
        assert [each.payload for each in some] == numbered(3)
        assert reader.has_message_available()
        reader.seek(some[1].id)
        assert [each.payload for each in reader] == numbered(10)[1:]
        assert reader.read() is None
        assert reader.read_many() == []
        assert not reader.has_message_available()
        assert reader.skip() is None
        assert dict(reader.dropped) == {}
        with pytest.raises(ValueError, match="at least 1"):
            reader.read_many(0)
    assert reader.read() is None


def test_what_a_client_made_tells_about_itself_when_it_is_closed(stack: Stack, topic: str) -> None:
    with seqgate.connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        publish(client, topic, b"0")
        with client.reader(topic, follow=False) as reader:
            assert [each.payload for each in reader] == [b"0"]
        with client.consumer(topic, "s", properties={"team": "a"}) as consumer:
            assert consumer.properties == {"team": "a"}
        with client.producer(topic) as producer:
            pass
    assert (dict(reader.dropped), dict(consumer.dropped)) == ({}, {})
    assert consumer.properties == {"team": "a"}
    assert producer.name
    assert list(reader) == list(consumer) == []
    with pytest.raises(ProducerClosedError):
        producer.send(b"0")
    for each in (producer, consumer, reader, client):
        each.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.producer(topic)


def test_threads_share_a_reader(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(500))
    with client.reader(topic, follow=False) as reader, ThreadPoolExecutor(4) as pool:
        parts = [pool.submit(lambda: [each.payload for each in reader]) for _ in range(4)]
        read = [payload for part in parts for payload in part.result(WITHIN_S)]
    assert sorted(read) == sorted(numbered(500))


def test_the_errors_are_the_asyncio_clients(client: seqgate.Client, topic: str) -> None:
    with pytest.raises(NotFoundError):
        next(client.reader("public/none/none"))
    with pytest.raises(NotFoundError), client.consumer("public/none/none", "s"):
        pass
    with pytest.raises(ValueError, match="batching or chunking"):
        client.producer(topic, batching=COLLECTING, chunking=Chunking())
    with client.producer(topic, name="p") as producer:
        producer.send(b"0", sequence_id=5)
        with pytest.raises(StaleSequenceIdError) as stale:
            producer.send(b"0", sequence_id=3)
        assert stale.value.sequence_id == 3
        with pytest.raises(MixedSequenceIdsError):
            producer.send(b"0")
        assert isinstance(producer.send_nowait(b"0").exception(WITHIN_S), MixedSequenceIdsError)
        with pytest.raises(InvalidRequestError, match="payload must be bytes"):
            producer.send_nowait("text")  # type: ignore[arg-type]
        with pytest.raises(SendManyError) as some:
            producer.send_many([Outgoing(b"1", sequence_id=6), Outgoing(b"2", sequence_id=2)])
        assert isinstance(some.value.outcomes[1], StaleSequenceIdError)
    with pytest.raises(ProducerClosedError):
        producer.send(b"0")


# ---- threads that share a producer


def test_messages_of_many_threads_are_stored_once_each_in_their_order(
    client: seqgate.Client, topic: str
) -> None:
    with client.producer(topic, batching=Batching()) as producer, ThreadPoolExecutor(8) as pool:

        def send(thread: int) -> None:
            for number in range(25):
                producer.send(b"%d:%d" % (thread, number))

        list(pool.map(send, range(8)))
    found = [each.payload.split(b":") for each in client.reader(topic, follow=False)]
    assert len(found) == 8 * 25
    for thread in range(8):
        ours = [int(number) for by, number in found if int(by) == thread]
        assert ours == list(range(25))


def test_messages_sent_together_share_a_hand_over_and_a_batch(
    client: seqgate.Client, topic: str
) -> None:
    batching = Batching(delay_s=60, messages_max=1_000)
    with client.producer(topic, batching=batching) as producer, ThreadPoolExecutor(20) as pool:
        with held_up(client):
            before = client._portal.hand_overs
            futures = [producer.send_nowait(b"x") for _ in range(980)]
            waiting = [pool.submit(producer.send, b"x") for _ in range(20)]
            until(lambda: producer.pending_messages == 1_000, "all are handed over")
            assert client._portal.hand_overs - before <= 1
        receipts = [each.result(WITHIN_S) for each in [*futures, *waiting]]
    assert len({each.message_id.position for each in receipts}) == 1


def test_a_full_producer_refuses_or_waits(client: seqgate.Client, topic: str) -> None:
    with client.producer(topic, batching=COLLECTING, max_pending_messages=3) as producer:
        futures = [producer.send_nowait(b"x") for _ in range(3)]
        assert producer.pending_messages == 3
        assert producer.pending_bytes >= 3
        with pytest.raises(ProducerQueueFullError):
            producer.send_nowait(b"x")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.send, b"y")
            until(lambda: producer.pending_messages == 4, "another thread waits for room")
            producer.flush()
            assert all(each.done() for each in futures)
            until(lambda: producer._held.pending_messages == 1, "its message has room")
            producer.flush()
            assert waiting.result(WITHIN_S).sequence_id == 3
    assert len(list(client.reader(topic, follow=False))) == 4


def test_a_message_that_waits_for_room_fails_when_the_producer_ends(
    stack: Stack, topic: str
) -> None:
    with ThreadPoolExecutor(2) as pool, seqgate.connect(stack.address("ledger")) as client:
        producer = client.producer(topic, batching=COLLECTING, max_pending_messages=1)
        producer.open()
        waiting = [pool.submit(producer.send, b"x") for _ in range(2)]
        until(lambda: producer.pending_messages == 2, "one is pending, one waits")
        client.close()
        for each in waiting:
            with pytest.raises(ProducerClosedError, match="the client is closed"):
                each.result(WITHIN_S)


# ---- threads that share a consumer


def test_each_message_goes_to_one_of_many_threads(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(400))
    taken: Counter[bytes] = Counter()
    with client.consumer(topic, "s", type=SubscriptionType.SHARED) as consumer:

        def work() -> list[bytes]:
            mine = []
            for message in consumer:
                mine.append(message.payload)
                consumer.ack_nowait(message)
                if len(mine) % 10 == 0:
                    consumer.flush()
                done.release()
            return mine

        done = threading.Semaphore(0)
        with ThreadPoolExecutor(6) as pool:
            workers = [pool.submit(work) for _ in range(6)]
            for _ in range(400):
                assert done.acquire(timeout=WITHIN_S)
            consumer.close()
            for worker in workers:
                taken.update(worker.result(WITHIN_S))
    assert taken == Counter(numbered(400))
    again = client.consumer(topic, "s", type=SubscriptionType.SHARED)
    with again, pytest.raises(TimeoutError):
        again.receive(timeout_s=0.05)


def test_a_locked_key_waits_for_its_thread(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(2), key="a")
    with client.consumer(topic, "s") as consumer:
        first, key = consumer.receive_and_lock()
        buffered(consumer, 1)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(consumer.receive_and_lock)
            until(lambda: consumer._held.waiting == 1, "a thread waits for the key")
            with pytest.raises(TimeoutError):
                consumer.receive(timeout_s=0)
            consumer.ack(first)
            assert not second.done()
            consumer.unlock(key)
            assert second.result(WITHIN_S)[0].payload == b"1"


def test_taking_and_acknowledging_buffered_messages_wakes_the_loop_seldom(
    client: seqgate.Client, topic: str
) -> None:
    publish(client, topic, *numbered(900))
    with client.consumer(topic, "s", receiver_queue=1_000) as consumer:
        buffered(consumer, 900)
        futures, before = list[Future[None]](), client._portal.hand_overs
        for _ in range(9):
            messages = [consumer.receive(timeout_s=0)]
            with held_up(client):
                messages += [consumer.receive(timeout_s=0) for _ in range(99)]
                futures += [consumer.ack_nowait(message) for message in messages]
            for each in futures:
                each.result(WITHIN_S)
        # For each shelf: to fill it, to hold the loop up, and for the first acknowledgement.
        assert client._portal.hand_overs - before <= 27


def test_threads_that_wait_are_told_when_the_consumer_or_client_is_closed(
    stack: Stack, topic: str
) -> None:
    with (
        ThreadPoolExecutor(3) as pool,
        seqgate.connect(stack.address("ledger"), stack.address("dispatcher")) as client,
    ):
        publish(client, topic, b"0")
        with client.consumer(topic, "s") as consumer:
            consumer.ack(consumer.receive(WITHIN_S))
            waiting = pool.submit(consumer.receive)
            until(lambda: consumer._held.waiting == 1, "a thread waits")
            consumer.close()
            with pytest.raises(ConsumerClosedError):
                waiting.result(WITHIN_S)
        consumer = client.consumer(topic, "s")
        consumer.open()
        reader = client.reader(topic, start=LATEST)
        received = pool.submit(consumer.receive)
        iterated = pool.submit(list, consumer)
        read = pool.submit(reader.read)
        until(lambda: consumer._held.waiting == 2, "two threads wait")
        client.close()
        with pytest.raises(ConsumerClosedError):
            received.result(WITHIN_S)
        assert iterated.result(WITHIN_S) == []
        assert read.result(WITHIN_S) is None


# ---- messages that are buffered, and not taken yet


def test_time_outs_of_messages_that_no_thread_has_taken_are_renewed(
    client: seqgate.Client, topic: str
) -> None:
    publish(client, topic, *numbered(20))
    with client.consumer(topic, "s", type=SubscriptionType.SHARED, ack_timeout_s=0.5) as consumer:
        buffered(consumer, 20)
        held = consumer.receive(timeout_s=0)
        buffered(consumer, 20)  # the one that was taken has timed out, and is delivered again
        messages = received(consumer, 20)
        consumer.ack_many(messages)
        attempts = {each.payload: each.attempts for each in messages}
        assert attempts == dict.fromkeys(numbered(20), 0) | {held.payload: 1}
        with pytest.raises(StaleTokenError):
            consumer.ack(held)


def test_a_revoked_message_is_not_handed_out_before_its_redelivery(
    client: seqgate.Client, topic: str
) -> None:
    publish(client, topic, *numbered(5), key="a")
    with client.consumer(topic, "s") as consumer:
        first = consumer.receive(WITHIN_S)
        buffered(consumer, 4)
        consumer.nack_nowait(first, delay_s=0)
        for number in range(5):
            message = consumer.receive(WITHIN_S)
            assert (message.payload, message.attempts) == (b"%d" % number, int(number == 0))
            consumer.ack(message)


def test_the_breaker_stops_handing_out_what_is_buffered(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(10))
    breaker = Breaker(outcomes=3, pause_min_s=60)
    with client.consumer(topic, "s", type=SubscriptionType.SHARED, breaker=breaker) as consumer:
        buffered(consumer, 10)
        for message in received(consumer, 3):
            consumer.nack_nowait(message, delay_s=60)
        assert consumer.breaker_state is BreakerState.OPEN
        with pytest.raises(TimeoutError):
            consumer.receive(timeout_s=0)
        assert consumer.buffered == 7


def test_a_probe_of_the_breaker_wakes_a_thread_that_waits(
    client: seqgate.Client, topic: str
) -> None:
    publish(client, topic, *numbered(3))
    breaker = Breaker(outcomes=1, pause_min_s=0.01, pause_max_s=60)
    with client.consumer(topic, "s", type=SubscriptionType.SHARED, breaker=breaker) as consumer:
        buffered(consumer, 3)
        refused = consumer.receive(timeout_s=0)
        consumer.nack(refused, delay_s=60, reason=ValueError("away"))
        probe = consumer.receive(WITHIN_S)
        with pytest.raises(TimeoutError):
            consumer.receive(timeout_s=0)
        consumer.ack_nowait(probe)
        consumer.ack(consumer.receive(WITHIN_S))


def test_a_seek_drops_what_is_buffered(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(5))
    with client.consumer(topic, "s") as consumer:
        first = consumer.receive(WITHIN_S)
        buffered(consumer, 4)
        consumer.seek(LATEST)
        with pytest.raises(TimeoutError):
            consumer.receive(timeout_s=0)
        with pytest.raises(StaleTokenError):
            consumer.ack(first)
        consumer.seek(first.id)
        assert [each.payload for each in received(consumer, 5)] == numbered(5)


def test_a_paused_consumer_grants_no_permits(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(2))
    consumer = client.consumer(topic, "s")
    consumer.pause()
    with consumer:
        with pytest.raises(TimeoutError):
            consumer.receive(timeout_s=0.05)
        consumer.resume()
        assert len(received(consumer, 2)) == 2


def test_closing_hands_back_what_no_thread_has_taken(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(10))
    with client.consumer(topic, "s") as consumer:
        buffered(consumer, 10)
        consumer.ack(consumer.receive(timeout_s=0))
    with client.consumer(topic, "s") as consumer:
        rest = received(consumer, 9)
    assert {each.attempts for each in rest} == {0}
    assert len({each.payload for each in rest}) == 9


def test_messages_are_settled_by_every_method(client: seqgate.Client, topic: str) -> None:
    publish(client, topic, *numbered(6))
    with client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE) as consumer:
        messages = consumer.receive_many(timeout_s=WITHIN_S)
        while len(messages) < 6:
            messages += consumer.receive_many(timeout_s=WITHIN_S)
        with consumer.processing(messages[0]):
            consumer.ack_id(messages[0].id)
        consumer.extend(messages[1])
        consumer.ack_through(messages[2])
        consumer.reconsume_later(messages[3], delay_s=0)
        again = consumer.receive(WITHIN_S)
        assert (again.payload, again.attempts) == (b"3", 1)
        with pytest.raises(InvalidRequestError):
            consumer.nack(again, delay_s=-1)
        with pytest.raises(InvalidRequestError):
            consumer.nack(again, reason="r" * 257)
        consumer.ack_nowait(again)
        consumer.flush()
        rest = received(consumer, 2)
        assert [each.payload for each in rest] == numbered(6)[4:]
        assert dict(consumer.dropped) == {}
        assert dict(consumer.properties) == {}
        with pytest.raises(ValueError, match="at least 1"):
            consumer.receive_many(0)
        consumer.ack_many(rest)


# ---- processes


async def test_a_call_inside_an_event_loop_names_the_asyncio_client(stack: Stack) -> None:
    with pytest.raises(RuntimeError, match=r"use the asyncio client, seqgate\.client"):
        seqgate.connect(stack.address("ledger"))


def script(stack: Stack, program: str, *arguments: str) -> "subprocess.Popen[str]":
    """A program in a process of its own, where warnings are errors."""
    addresses = (stack.address("ledger"), stack.address("dispatcher"))
    # Python 3.12 warns of every fork of a process with threads.
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"]
    return subprocess.Popen(
        [*command, "-c", program, *addresses, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )


def ended(process: "subprocess.Popen[str]") -> str:
    """What a program printed. It must end by itself, and complain of nothing."""
    try:
        out, err = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, ""), out
    return out


def test_an_interrupt_ends_a_wait_and_loses_nothing(
    stack: Stack, client: seqgate.Client, topic: str
) -> None:
    publish(client, topic, b"0")
    process = script(
        stack,
        """
import sys
from seqgate.client import blocking
_, ledger, dispatcher, topic = sys.argv
with blocking.connect(ledger, dispatcher) as client, client.consumer(topic, "s") as consumer:
    reader = client.reader(topic)
    consumer.ack(consumer.receive()); reader.read()
    waits = [consumer.receive, reader.read, lambda: next(consumer), lambda: consumer.receive(60)]
    for wait in waits:
        try:
            print("waits", flush=True)
            wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    client.producer(topic).open()
    with client.producer(topic) as producer:
        producer.send(b"1")
    print(consumer.receive().payload, reader.read().payload, flush=True)
""",
        topic,
    )
    assert process.stdout is not None
    for _ in range(4):
        assert process.stdout.readline() == "waits\n"
        until(lambda: sleeps(process.pid), "the main thread waits")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
    assert ended(process) == "b'1' b'1'\n"


def sleeps(pid: int) -> bool:
    """Whether a process's main thread waits for something."""
    with open(f"/proc/{pid}/task/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_forgotten_client_ends_silently_with_the_interpreter(
    stack: Stack, client: seqgate.Client, topic: str, is_dropped: bool
) -> None:
    publish(client, topic, b"0")
    process = script(
        stack,
        """
import gc, sys, threading
from seqgate.client import blocking
_, ledger, dispatcher, topic, is_dropped = sys.argv
client = blocking.connect(ledger, dispatcher)
producer = client.producer(topic); producer.open(); producer.send(b"1")
consumer = client.consumer(topic, "s"); consumer.open(); consumer.receive()
reader = client.reader(topic); reader.read()
waits = threading.Thread(target=lambda: list(reader), daemon=True)
waits.start()
if is_dropped == "True":
    waits = client._portal._thread
    reader.close()
    del client, producer, consumer, reader
    gc.collect()
    waits.join()
print("end")
""",
        topic,
        str(is_dropped),
    )
    assert ended(process) == "end\n"


FORKING = """
import multiprocessing, os, sys
from seqgate.client import blocking
from seqgate.errors import ClientForkedError, StaleTokenError

_, ledger, dispatcher, topic, how = sys.argv

client = blocking.connect(ledger, dispatcher)
producer = client.producer(topic, name="parent"); producer.open()
producer.send(b"0")
consumer = client.consumer(topic, "parent"); consumer.open()
taken = consumer.receive()
reader = client.reader(topic)
reader.read()
pending = producer.send_nowait(b"1")

def child():
    uses = [
        lambda: producer.send(b"x"), lambda: producer.send_nowait(b"x"), lambda: producer.open(),
        lambda: producer.send_many([b"x"]), lambda: producer.flush(), lambda: reader.read(),
        lambda: next(reader), lambda: reader.seek("earliest"), lambda: consumer.receive(),
        lambda: consumer.receive_many(), lambda: next(consumer), lambda: consumer.ack(taken),
        lambda: consumer.ack_nowait(taken), lambda: consumer.nack_nowait(taken),
        lambda: consumer.pause(), lambda: consumer.resume(), lambda: client.producer(topic),
        lambda: client.__enter__(), lambda: consumer.unlock(b""),
        lambda: consumer.ack_many([taken]), lambda: consumer.nack(taken),
    ]
    for use in uses:
        try:
            use()
        except ClientForkedError as error:
            assert "after the fork" in str(error) and error.reason == "CLIENT_FORKED"
        else:
            raise AssertionError("not refused")
    for each in (producer, consumer, reader, client):
        each.close()
    with blocking.connect(ledger, dispatcher) as ours:
        with ours.producer(topic, name="child") as mine:
            assert not mine.send(b"2").duplicate
        with ours.consumer(topic, "child") as mine:
            for _ in range(3):
                mine.ack(mine.receive(60))
    print("child", flush=True)

if how == "fork":
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
elif how == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
assert pending.result(60).message_id.entry_id == 1
try:
    consumer.ack(taken)
except StaleTokenError:
    print("stale", flush=True)
assert [consumer.receive(60).payload for _ in range(3)] == [b"0", b"1", b"2"]
assert producer.send(b"3").sequence_id == 2
assert [reader.read().payload for _ in range(3)] == [b"1", b"2", b"3"]
producer.close(); consumer.close(); client.close()
print("parent", flush=True)
"""


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_fork_refuses_the_parents_client_and_has_its_own(
    stack: Stack, topic: str, how: str
) -> None:
    """The parent's client goes on: it reconnects, and sends again what has no receipt yet."""
    assert ended(script(stack, FORKING, topic, how)) == "child\nstale\nparent\n"


def test_a_fork_of_a_process_that_uses_grpc_elsewhere_is_refused_at_once(
    stack: Stack, topic: str
) -> None:
    """Instead of hanging: gRPC's threads are gone in the child."""
    process = script(
        stack,
        """
import asyncio, os, sys
from seqgate.client import blocking, connect
from seqgate.errors import ClientForkedError
_, ledger, dispatcher, topic = sys.argv

async def main():
    async with connect(ledger) as client, client.producer(topic) as producer:
        await producer.send(b"0")
        pid = os.fork()
        if pid == 0:
            try:
                blocking.connect(ledger)
            except ClientForkedError as error:
                print(error, flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        await producer.send(b"1")

asyncio.run(main())
""",
        topic,
    )
    assert ended(process).startswith("gRPC was in use when this process was forked")


def test_a_process_that_forks_before_it_has_clients_needs_no_care(stack: Stack, topic: str) -> None:
    """As under gunicorn with preload: the application is imported, and then forked."""
    process = script(
        stack,
        """
import os, sys
from seqgate.client import blocking
_, ledger, dispatcher, topic = sys.argv
workers = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        with blocking.connect(ledger, dispatcher) as client:
            with client.producer(topic, name=f"worker-{number}") as producer:
                producer.send(b"%d" % number)
        sys.exit()
    workers.append(pid)
for pid in workers:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
with blocking.connect(ledger) as client:
    print(sorted(each.payload for each in client.reader(topic, follow=False)))
""",
        topic,
    )
    assert ended(process) == "[b'0', b'1', b'2']\n"


# ---- admin


def test_an_admin_manages_topics_subscriptions_and_cursors(
    client: seqgate.Client, topic: str
) -> None:
    admin = client.admin()
    assert admin.create_topic(topic).name == topic
    publish(client, topic, *numbered(3))
    assert admin.topic(topic).messages == 3
    assert [each.name for each in admin.topics(topic)] == [topic]
    assert admin.create_subscription(topic, "s", start=LATEST).name == "s"
    assert [each.name for each in admin.subscriptions(topic)] == ["s"]
    assert admin.dead_letters(topic, "s") == []
    life = admin.message_life(topic, message_id=MessageId(1, 0))
    assert [each.subscription for each in life.subscriptions] == ["s"]
    assert admin.create_cursor(topic, "c").mark_delete is None
    assert "c" in {each.name for each in admin.cursors(topic)}
    assert admin.explain_publication(topic, "nobody", 1).verdict == "NEW"
    admin.delete_subscription(topic, "s")
    admin.delete_topic(topic)
    with pytest.raises(NotFoundError):
        admin.topic(topic)


def test_threads_share_an_admin(client: seqgate.Client, topic: str) -> None:
    admin = client.admin()
    admin.create_topic(topic)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: admin.topic(topic).name, range(64)))
    assert found == [topic] * 64
