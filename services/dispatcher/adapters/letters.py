"""The dead letter topic, over the ledger's deduplicated publish path."""

import asyncio
from hashlib import blake2b
from typing import Any, Final

from grpc import StatusCode, aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.services.dispatcher.ports import GENERATION, LedgerUnavailable, Letter, LetterRefused
from seqgate.services.runtime.status import call_failed
from seqgate.types import PRODUCER_NAME_BYTES_MAX

RETRY_AFTER_S: Final = 0.5
"""How long a letter waits that could not be put."""

IDS_A_LETTER: Final = 10_000
"""How many sequence ids a letter has for its messages: as many as a batch may have."""

ROOM_BYTES: Final = 127 * 1024
"""How large an entry's metadata may be with them, in bytes: 1 KiB below what the ledger takes."""

PROPERTIES_MAX: Final = 128
"""How many properties an entry may have (entry.proto)."""

REFUSED_RETRY_AFTER_S: Final = 30.0
"""How long a letter waits at most that was refused: somebody has to do something about it."""

FAILED_RETRY_AFTER_S: Final = 2.0
"""How long a letter waits at most that could not be stored, in seconds: the next one may be."""

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
"""How a stream ends that is not to be opened again with the same."""

_CHUNK_REFUSED: Final = frozenset(
    {
        pb.RECEIPT_STATUS_CHUNK_GAP,
        pb.RECEIPT_STATUS_LAYOUT_CONFLICT,
        pb.RECEIPT_STATUS_STALE,
    }
)
"""What a chunk is told that continues nothing."""

_OF_CHUNKS: Final = (
    "uuid",
    "chunk_id",
    "num_chunks_from_msg",
    "total_chunk_msg_size",
    "message_crc32c",
    "compression",
    "uncompressed_size",
)
"""What metadata say of a chunk that is not so of a message which is as it is."""

_THERE: Final = frozenset({pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE})


class GrpcDeadLetters:
    """See seqgate.services.dispatcher.ports.DeadLetters.

    A letter is published by a producer that stands for its subscription, under a sequence id that
    follows from its number. A chunk keeps its message's id and attempt, and has a producer that
    stands for these, the message's own producer and the letter's round as well: so the message
    comes together again, also when it dies once more after the subscription was moved, and in
    whatever order messages die, none has an id that is too low.
    """

    def __init__(self, channel: FollowingChannel, *, timeout_s: float) -> None:
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._timeout_s = timeout_s

    async def put(self, letter: Letter) -> bool:
        """See the port."""
        is_there = await self._put(letter, published(letter))
        if is_there is None:  # rather a message that tells what it is of than none
            is_there = await self._put(letter, published(letter, is_alone=True))
        return is_there is True

    async def _put(self, letter: Letter, entry: pb.Entry) -> bool | None:
        call = self._stub.Publish()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._publish(call, letter, entry)
        except aio.AioRpcError as error:
            said = call_failed(error)
            because = said.reason or said.code.name
            if said.code in _REFUSING and said.reason != NOT_OWNER:
                raise _refused(letter, because) from error
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

    async def _publish(self, call: Any, letter: Letter, entry: pb.Entry) -> bool | None:
        """See put; None: it is a chunk, and the topic has not those before it."""
        producer = entry.metadata.producer_name
        opening = pb.Open(topic=str(letter.topic), producer_name=producer, takeover=True)
        await call.write(pb.PublishRequest(open=opening))
        # What is written to a stream that is being refused would hide why it is.
        if (answer := await call.read()) is aio.EOF or not answer.HasField("opened"):
            raise _closed()
        publication = pb.Publication(request_id=1, entries=[entry])
        publications = pb.Publications(publications=[publication])
        await call.write(pb.PublishRequest(publications=publications))
        while (response := await call.read()) is not aio.EOF:
            for receipt in response.receipts.receipts:
                if receipt.status in _THERE:
                    return True
                if receipt.status == pb.RECEIPT_STATUS_STALE:
                    return False
                if receipt.status in _CHUNK_REFUSED and is_chunk(entry):
                    return None
                because = receipt.error.message or _status_name(receipt.status)
                if receipt.status == pb.RECEIPT_STATUS_REFUSED:
                    raise _refused(letter, because)
                raise _refused(letter, because, retry_after_s=FAILED_RETRY_AFTER_S)
        raise _closed()


def _closed() -> LedgerUnavailable:
    return LedgerUnavailable(
        "the stream to the dead letter topic ended", retry_after_s=RETRY_AFTER_S
    )


def _status_name(status: int) -> str:
    known = pb.ReceiptStatus.DESCRIPTOR.values_by_number.get(status)
    return str(status) if known is None else known.name


def _refused(
    letter: Letter, because: str, retry_after_s: float = REFUSED_RETRY_AFTER_S
) -> LetterRefused:
    return LetterRefused(
        f"dead letter topic {letter.topic} refused a message",
        retry_after_s=retry_after_s,
        dead_letter_topic=letter.topic,
        because=because,
    )


def is_chunk(entry: pb.Entry) -> bool:
    """Whether an entry is a chunk of a large message."""
    return entry.metadata.num_chunks_from_msg > 1


def published(letter: Letter, *, is_alone: bool = False) -> pb.Entry:
    """What is published: the entry, with where it comes from among its properties. A chunk that
    `is_alone` is published as a message of its own, which says what it is a chunk of."""
    source = letter.entry
    metadata = entry_pb2.EntryMetadata()
    metadata.CopyFrom(source.metadata)
    metadata.ClearField("deliver_at_time")
    origin = {
        GENERATION: str(letter.generation),
        "seqgate.origin.topic": str(letter.source),
        "seqgate.origin.subscription": letter.subscription,
        "seqgate.origin.id": f"{source.position.ledger_id}:{source.position.entry_id}",
        "seqgate.origin.producer": source.metadata.producer_name,
        "seqgate.origin.sequence_id": str(source.metadata.sequence_id),
        "seqgate.attempts": str(letter.attempts),
    }
    if is_alone:
        origin["seqgate.origin.chunk"] = (
            f"{metadata.chunk_id + 1} of {metadata.num_chunks_from_msg}"
        )
        origin["seqgate.origin.uuid"] = metadata.uuid
        if metadata.compression:  # a part of it cannot be opened
            origin["seqgate.origin.compression"] = entry_pb2.CompressionType.Name(
                metadata.compression
            )
        for field in _OF_CHUNKS:
            metadata.ClearField(field)
    for name, value in origin.items():
        metadata.properties[name] = value
        if len(metadata.properties) > PROPERTIES_MAX or metadata.ByteSize() > ROOM_BYTES:
            del metadata.properties[name]  # rather the letter without it than none
    if metadata.num_chunks_from_msg > 1:
        metadata.producer_name = _producer(
            letter, source.metadata.producer_name, source.metadata.uuid, str(letter.round)
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
    name = "/".join(("seqgate.dead", str(letter.source), letter.subscription, *line, *more))
    if len(name.encode()) <= PRODUCER_NAME_BYTES_MAX:
        return name
    return f"seqgate.dead/{blake2b(name.encode(), digest_size=16).hexdigest()}"
