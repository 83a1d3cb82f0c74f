"""What lies between the chunks of a large message: whoever was told STORED for every chunk has a
message, for readers, for consumers of every type and for FindMessage; whatever was refused has
none. With deduplication on, off, and switched amid the message.

A story is a list of publications of one producer, in order:

    a0 b0 ...   chunks: messages 5 and 6 are a and b, and c is another attempt at message 5
    7, 8-9      a message, a batch
    a2!         a chunk that is refused
    off, on     deduplication is switched
    |           the producer's stream ends, and another one is opened
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Client, Consumer, Received, SubscriptionType, connect
from seqgate.client._codec import Compression, OutgoingMessage, encode_batch, position_of
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Position
from tests.integration.services import Services
from tests.spark.logs import Log, fill
from tests.support import entries
from tests.support.publisher import Publisher, publishing, single
from tests.support.waiting import eventually

LARGE: Final = {"a": (5, 3), "b": (6, 2), "c": (5, 2)}
"""Attempts: the message's id, and the number of chunks."""

END: Final = 20
"""The message at the end of each story. It ends what is unfinished."""

STORIES: Final = {
    "another large message": ("off a0 b0 a1! b1 a2!", {"b", "20"}),
    "two large messages by turns": ("off a0 b0 a1! b0 b1 a2! a0 a1 a2", {"b", "a", "20"}),
    "a message": ("off a0 7 a1! a2!", {"7", "20"}),
    "a batch": ("off a0 a1 8-9 a2!", {"8", "9", "20"}),
    "another attempt": ("off a0 c0 a1! c1 a2!", {"c", "20"}),
    "its first chunk again": ("off a0 a0 a1 a0 a1 a2", {"a", "20"}),
    "its second chunk again": ("off a0 a1 a1! a2", {"a", "20"}),
    "the whole message again": ("off a0 a1 a2 a0 a1 a2", {"a", "20"}),
    "nothing, and no first chunk": ("off a1! a2! 7", {"7", "20"}),
    "streams": ("off a0 | b0 | a1! | b1 | a2! | a0 | a1 | a2", {"b", "a", "20"}),
    "a switch": ("a0 off a1 on a2 7", {"a", "7", "20"}),
    "a switch off, and a message": ("a0 off 7 a1! a2!", {"7", "20"}),
    "a switch on, and a message": ("off a0 7 on a1! a2! 8-9", {"7", "8", "9", "20"}),
    "a switch off and on": ("a0 off b0 a1! on b1 a2!", {"b", "20"}),
}


OLD: Final = {
    # As version 0.2.0 stored them without deduplication, ^ before the attempt that an entry names.
    "another large message": ("a0 b0^a a1^b b1^a a2", {"a", "b"}),
    "a message": ("a0 7^a a1 a2", {"a", "7"}),
    "a message, and no rest": ("a0 a1 7^a", {"7"}),
    "at once: no abort was recorded": ("a0 7 b0 a1 b1 a2", {"a", "b", "7"}),
    "its first chunk again": ("a0 a1 a0 a1 a2", {"a"}),
}


class Teller:
    """A producer that follows a story, and knows which messages were stored whole."""

    def __init__(self, services: Services, topic: str) -> None:
        self.services, self.topic = services, topic
        self.whole: dict[str, Position] = {}
        """Where each message ends of which everything was answered STORED."""
        self._requests = 0
        self._resumes = False
        self._stored: dict[str, int] = {}

    async def tell(self, story: str) -> str:
        """Returns the story as it went."""
        went: list[str] = []
        for part in story.split("|"):
            async with publishing(self.services.ledger, self.topic, "p") as publisher:
                went.append(" ".join([await self._do(publisher, word) for word in part.split()]))
        return " | ".join(went)

    async def _do(self, publisher: Publisher, word: str) -> str:
        if word in ("on", "off"):
            values = dedup_pb2.PolicyValues(enabled=word == "on")
            request = dedup_pb2.SetPolicyRequest(topic=self.topic, values=values)
            await self.services.dedup.SetPolicy(request)
            return word
        word = word.rstrip("!")
        self._requests += 1
        receipt = await publisher.store(self._publication(word))
        self._resumes = receipt.status != pb.RECEIPT_STATUS_STORED
        if self._resumes:
            return f"{word}!"
        self._note(word, position_of(receipt.position))
        return word

    def _publication(self, word: str) -> pb.Publication:
        if word[0] in LARGE:
            sequence_id, count = LARGE[word[0]]
            return single(
                self._requests,
                sequence_id,
                word.encode(),
                resume=self._resumes,
                partition_key="k",
                uuid=word[0],
                chunk_id=int(word[1]),
                num_chunks_from_msg=count,
                total_chunk_msg_size=2 * count,
            )
        first, _, last = word.partition("-")
        if not last:
            return single(self._requests, int(first), word.encode(), resume=self._resumes)
        messages = [OutgoingMessage(each, b"x", "k") for each in range(int(first), int(last) + 1)]
        entry = encode_batch("p", messages, compression=Compression.NONE, publish_time_ms=0)
        return pb.Publication(request_id=self._requests, entries=[entry], resume=self._resumes)

    def _note(self, word: str, position: Position) -> None:
        name = word[0]
        if name not in LARGE:
            first, _, last = word.partition("-")
            for each in range(int(first), int(last or first) + 1):
                self.whole[str(each)] = position
            return
        number, (_, count) = int(word[1]), LARGE[name]
        self._stored[name] = number + 1 if number in (0, self._stored.get(name)) else -1
        if self._stored[name] == count:
            self.whole[name] = position


def name_of(sequence_id: int, payload: bytes) -> str:
    """The message's name in the story."""
    return payload[:1].decode() if payload[:1].isalpha() and len(payload) > 2 else str(sequence_id)


async def read(client: Client, topic: str) -> set[str]:
    async with client.reader(topic, follow=False) as reader:
        return {name_of(each.sequence_id, each.payload) async for each in reader}


async def consumed(
    services: Services, client: Client, topic: str, kind: SubscriptionType, last: Position
) -> set[str]:
    """What the consumers of a new subscription get until everything is acknowledged, through the
    last entry."""
    seen: set[str] = set()

    async def consume(consumer: Consumer) -> None:
        async for each in consumer:
            received: Received = each
            seen.add(name_of(received.sequence_id, received.payload))
            await consumer.ack(received)

    name = kind.name.lower().replace("_", "-")
    count = 1 if kind is SubscriptionType.EXCLUSIVE else 2
    async with AsyncExitStack() as connected, asyncio.TaskGroup() as tasks:
        consuming = []
        for number in range(count):
            consumer = client.consumer(topic, name, name=f"c{number}", type=kind)
            await connected.enter_async_context(consumer)
            consuming.append(tasks.create_task(consume(consumer)))

        async def done() -> bool:
            found = await mark_delete(services, topic, name)
            return found == last

        await eventually(done, f"{kind.name} acknowledged everything of {topic}")
        for task in consuming:
            task.cancel()
    return seen


async def mark_delete(services: Services, topic: str, name: str) -> Position | None:
    request = dispatcher_pb2.GetSubscriptionRequest(topic=topic, subscription=name)
    found = (await services.dispatcher.GetSubscription(request)).subscription
    return position_of(found.mark_delete) if found.HasField("mark_delete") else None


async def found(services: Services, topic: str, names: Sequence[str]) -> dict[str, Position]:
    """Where FindMessage says that messages end."""
    places: dict[str, Position] = {}
    for name in names:
        sequence_id, uuid = (LARGE[name][0], name) if name in LARGE else (int(name), "")
        request = pb.FindMessageRequest(
            topic=topic, producer_name="p", sequence_id=sequence_id, uuid=uuid
        )
        fate = (await services.ledger.FindMessage(request)).fate
        if fate.HasField("position"):
            places[name] = position_of(fate.position)
    return places


def old_entry(word: str) -> Entry:
    word, _, aborts = word.partition("^")
    wire = entry_pb2.EntryMetadata(producer_name="p", publish_time=1, partition_key="k")
    if word[0] not in LARGE:
        wire.sequence_id = int(word)
        metadata = wire.SerializeToString()
        return entries.single(int(word), payload=b"x")._replace(metadata=metadata, aborts=aborts)
    wire.sequence_id, wire.num_chunks_from_msg = LARGE[word[0]]
    wire.uuid, wire.chunk_id = word[0], int(word[1])
    wire.total_chunk_msg_size = 3 * wire.num_chunks_from_msg
    chunk = entries.chunk(
        wire.sequence_id, wire.uuid, wire.chunk_id, wire.num_chunks_from_msg, aborts=aborts
    )
    payload = f"{word}-".encode()
    return chunk._replace(metadata=wire.SerializeToString(), payload=payload)


async def test_what_an_earlier_version_stored_is_delivered(
    private: Callable[..., AbstractAsyncContextManager[Services]], tmp_path: Path
) -> None:
    """Consumers of 0.2.0 passed large messages that readers returned."""
    logs = {
        f"public/default/old-{number}": Log([[[old_entry(each)] for each in story.split()]])
        for number, (story, _) in enumerate(OLD.values())
    }
    await fill(tmp_path / "stack", logs)
    async with private() as services:
        stack = services.stack
        async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
            for topic, (story, messages) in zip(logs, OLD.values(), strict=True):
                last = Position(1, len(story.split()) - 1)
                assert await read(client, topic) == messages, story
                assert (await found(services, topic, sorted(messages))).keys() == messages
                for kind in SubscriptionType:
                    got = await consumed(services, client, topic, kind, last)
                    assert got == messages, (story, kind)


@pytest.mark.parametrize("between", STORIES)
async def test_what_is_stored_is_delivered_whatever_lies_between_its_chunks(
    services: Services, topic: str, between: str
) -> None:
    story, messages = STORIES[between]
    teller = Teller(services, topic)
    assert await teller.tell(f"{story} {END}") == f"{story} {END}"
    assert teller.whole.keys() == messages
    assert await found(services, topic, ["a", "b", "c", *messages - LARGE.keys()]) == teller.whole
    stack = services.stack
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        assert await read(client, topic) == messages
        for kind in SubscriptionType:
            got = await consumed(services, client, topic, kind, teller.whole[str(END)])
            assert got == messages, kind
