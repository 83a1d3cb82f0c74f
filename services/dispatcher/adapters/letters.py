"""The dead letter topic, over the ledger's deduplicated publish path."""

import asyncio
import json
from hashlib import blake2b
from typing import Any, Final

from grpc import StatusCode, aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.services.dispatcher.ports import (
    ACKNOWLEDGED,
    ATTEMPTS,
    FAILURES,
    GENERATION,
    LETTER_BYTES_MAX,
    LIVES,
    ORIGIN,
    PRODUCER,
    PROPERTIES_MAX,
    REASON,
    REDRIVES,
    STEPS,
    Added,
    LedgerUnavailable,
    Letter,
    LetterRefused,
)
from seqgate.services.runtime.status import call_failed
from seqgate.types import PRODUCER_NAME_BYTES_MAX, Position, TopicName

RETRY_AFTER_S: Final = 0.5
"""The delay before a letter is retried while the ledger is unavailable, in seconds."""

IDS_A_LETTER: Final = 10_000
"""The sequence ids reserved for a letter's messages: the most that a batch holds."""

REFUSED_RETRY_AFTER_S: Final = 30.0
"""The longest delay before a refused letter is retried, in seconds: an operator must act first."""

FAILED_RETRY_AFTER_S: Final = 2.0
"""The longest delay before a letter that was not stored is retried, in seconds."""

_REFUSING: Final = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.PERMISSION_DENIED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.OUT_OF_RANGE,
        StatusCode.UNIMPLEMENTED,
        StatusCode.DATA_LOSS,
    }
)
"""The statuses of a stream whose repetition would be refused again."""

_CHUNK_REFUSED: Final = frozenset(
    {
        pb.RECEIPT_STATUS_CHUNK_GAP,
        pb.RECEIPT_STATUS_LAYOUT_CONFLICT,
        pb.RECEIPT_STATUS_STALE,
    }
)
"""The receipts of a chunk that continues no message."""

_OF_CHUNKS: Final = (
    "uuid",
    "chunk_id",
    "num_chunks_from_msg",
    "total_chunk_msg_size",
    "message_crc32c",
    "compression",
    "uncompressed_size",
)
"""The fields of a chunk that are wrong once it is published as a message of its own."""

_THERE: Final = frozenset({pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE})


class GrpcDeadLetters:
    """See seqgate.services.dispatcher.ports.DeadLetters.

    A letter's producer is named after its subscription, and its sequence id follows from its
    number. A chunk keeps its message's id and attempt; its producer's name also has the message's
    producer, its attempt and the letter's round. So the chunks of a message reassemble, even if it
    is dead-lettered again after a reset, and no id is too low, in whatever order messages fail.
    """

    def __init__(self, channel: FollowingChannel, *, timeout_s: float) -> None:
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._timeout_s = timeout_s

    async def put(self, letter: Letter) -> bool:
        is_there = await self._put(letter, published(letter))
        if is_there is None:  # better a message that names its origin than none
            is_there = await self._put(letter, published(letter, is_alone=True))
        return is_there is True

    async def add(self, topic: TopicName, entry: pb.Entry) -> Added:
        receipt = await self._receipt(topic, entry)
        if receipt.status in _THERE and receipt.HasField("position"):
            return Added(Position(receipt.position.ledger_id, receipt.position.entry_id))
        if receipt.status in _THERE or receipt.status == pb.RECEIPT_STATUS_STALE:
            return Added(None)
        if receipt.status == pb.RECEIPT_STATUS_REFUSED:
            return Added(None, _because(receipt))
        raise _refused(topic, _because(receipt), retry_after_s=FAILED_RETRY_AFTER_S)

    async def _put(self, letter: Letter, entry: pb.Entry) -> bool | None:
        """As `put`; None: a chunk, and the topic lacks those before it."""
        receipt = await self._receipt(letter.topic, entry)
        if receipt.status in _THERE:
            return True
        if receipt.status == pb.RECEIPT_STATUS_STALE:
            return False
        if receipt.status in _CHUNK_REFUSED and is_chunk(entry):
            return None
        if receipt.status == pb.RECEIPT_STATUS_REFUSED:
            raise _refused(letter.topic, _because(receipt))
        raise _refused(letter.topic, _because(receipt), retry_after_s=FAILED_RETRY_AFTER_S)

    async def _receipt(self, topic: TopicName, entry: pb.Entry) -> pb.Receipt:
        call = self._stub.Publish()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._published(call, topic, entry)
        except aio.AioRpcError as error:
            said = call_failed(error)
            because = said.reason or said.code.name
            if said.code in _REFUSING and said.reason != NOT_OWNER:
                raise _refused(topic, because) from error
            raise LedgerUnavailable(
                "the ledger of the dead letter topic does not answer",
                retry_after_s=RETRY_AFTER_S,
                because=because,
            ) from error
        except asyncio.InvalidStateError as error:  # it ended before it was written to
            raise _closed() from error
        except TimeoutError as error:
            raise LedgerUnavailable(
                "the ledger of the dead letter topic does not answer in time",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        finally:
            call.cancel()

    async def _published(self, call: Any, topic: TopicName, entry: pb.Entry) -> pb.Receipt:
        producer = entry.metadata.producer_name
        opening = pb.Open(topic=str(topic), producer_name=producer, takeover=True)
        await call.write(pb.PublishRequest(open=opening))
        # Wait for the answer: a write to a stream that is being refused hides the reason.
        if (answer := await call.read()) is aio.EOF or not answer.HasField("opened"):
            raise _closed()
        publication = pb.Publication(request_id=1, entries=[entry])
        publications = pb.Publications(publications=[publication])
        await call.write(pb.PublishRequest(publications=publications))
        while (response := await call.read()) is not aio.EOF:
            for receipt in response.receipts.receipts:
                return receipt  # type: ignore[no-any-return]
        raise _closed()


def _because(receipt: pb.Receipt) -> str:
    return receipt.error.message or _status_name(receipt.status)


def _closed() -> LedgerUnavailable:
    return LedgerUnavailable(
        "the stream to the dead letter topic ended", retry_after_s=RETRY_AFTER_S
    )


def _status_name(status: int) -> str:
    known = pb.ReceiptStatus.DESCRIPTOR.values_by_number.get(status)
    return str(status) if known is None else known.name


def _refused(
    topic: TopicName, because: str, retry_after_s: float = REFUSED_RETRY_AFTER_S
) -> LetterRefused:
    return LetterRefused(
        f"dead letter topic {topic} refused a message",
        retry_after_s=retry_after_s,
        dead_letter_topic=topic,
        because=because,
    )


def is_chunk(entry: pb.Entry) -> bool:
    return entry.metadata.num_chunks_from_msg > 1


def published(letter: Letter, *, is_alone: bool = False) -> pb.Entry:
    """The entry as published, with its origin in its properties. A chunk that `is_alone` becomes a
    message of its own, whose properties name its place and its large message."""
    source = letter.entry
    metadata = entry_pb2.EntryMetadata()
    metadata.CopyFrom(source.metadata)
    metadata.ClearField("deliver_at_time")
    origin = {
        GENERATION: str(letter.generation),
        f"{ORIGIN}topic": str(letter.source),
        f"{ORIGIN}subscription": letter.subscription,
        f"{ORIGIN}id": f"{source.position.ledger_id}:{source.position.entry_id}",
        f"{ORIGIN}producer": source.metadata.producer_name,
        f"{ORIGIN}sequence_id": str(source.metadata.sequence_id),
        ATTEMPTS: str(letter.attempts),
    }
    if is_alone:
        origin[f"{ORIGIN}chunk"] = f"{metadata.chunk_id + 1} of {metadata.num_chunks_from_msg}"
        origin[f"{ORIGIN}uuid"] = metadata.uuid
        if metadata.compression:  # a part cannot be decompressed
            origin[f"{ORIGIN}compression"] = entry_pb2.CompressionType.Name(metadata.compression)
        for field in _OF_CHUNKS:
            metadata.ClearField(field)
    # Those of the letter before, if this is a letter's letter.
    for name in (REASON, FAILURES, ACKNOWLEDGED, STEPS):
        metadata.properties.pop(name, None)
    lives = metadata.properties.pop(LIVES, "")
    if letter.why is not None:
        origin[REASON] = letter.why.value
    if letter.acknowledged:
        origin[ACKNOWLEDGED] = f"{letter.acknowledged:x}"
    if source.metadata.sequence_id_steps:
        origin[STEPS] = ",".join(map(str, source.metadata.sequence_id_steps))
    if letter.failures:
        failures = [each.to_json() for each in letter.failures]
        origin[FAILURES] = json.dumps(failures, ensure_ascii=False)
    if lives:
        origin[LIVES] = lives
    for name, value in origin.items():
        metadata.properties[name] = value
        if len(metadata.properties) > PROPERTIES_MAX or metadata.ByteSize() > LETTER_BYTES_MAX:
            del metadata.properties[name]  # better a letter without it than none
    if metadata.num_chunks_from_msg > 1:
        lives = metadata.properties.get(REDRIVES, "")  # a redriven message has other letters
        metadata.producer_name = _producer(
            letter,
            source.metadata.producer_name,
            source.metadata.uuid,
            str(letter.round),
            *([lives] if lives else []),
        )
    else:
        metadata.producer_name = _producer(letter)
        first = letter.number * IDS_A_LETTER
        metadata.sequence_id = first
        metadata.ClearField("sequence_id_steps")
        if source.metadata.HasField("highest_sequence_id"):
            metadata.highest_sequence_id = first + source.metadata.num_messages_in_batch - 1
    return pb.Entry(metadata=metadata, payload=source.payload)


def _producer(letter: Letter, *more: str) -> str:
    line = (letter.line,) if letter.line else ()
    name = PRODUCER + "/".join((str(letter.source), letter.subscription, *line, *more))
    if len(name.encode()) <= PRODUCER_NAME_BYTES_MAX:
        return name
    return f"{PRODUCER}{blake2b(name.encode(), digest_size=16).hexdigest()}"
