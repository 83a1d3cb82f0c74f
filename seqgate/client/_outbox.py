"""A producer's unresolved publications: a machine without a socket.

    add ──▶ unsent ──to_send──▶ outstanding ──receive──▶ Resolved
              ▲                      │
              └── opened, resume ────┘

A parcel is the content of one publication: a message, a batch, or one chunk of a large message.
Parcels keep the order in which they were added. They are sent within the service's window, answered
in any order, and resent in order after a disconnection. A receipt with one of these statuses pauses
the outbox, because its parcel and all later ones must be resent:

    PARTIAL           some messages of a batch are stored: a batch of the others takes its place
    FAILED            the service cannot store it now
    SKIPPED           an earlier parcel paused the stream
    CHUNK_GAP,
    LAYOUT_CONFLICT   the large message starts again as a new attempt

A paused outbox sends nothing. It resumes when every sent parcel is answered; the first publication
after that has `resume` set.

A large message has one parcel per chunk, without others between them, and is resolved when all of
them are answered.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._chunking import LargeMessage
from seqgate.client._codec import OutgoingMessage
from seqgate.client._status import error_of_status
from seqgate.errors import (
    InternalError,
    SeqgateError,
    SequenceIdTrimmedError,
    StaleSequenceIdError,
)
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.types import Position

METADATA_BYTES_MAX: Final = 128 * 1024
"""The largest metadata of an entry, in bytes (entry.proto). Ten thousand messages with ids far
apart exceed it."""


class Receipt(NamedTuple):
    """A message is in the log.

    Attributes:
        message_id: its id.
        sequence_id: its sequence id.
        duplicate: an earlier publish had stored it; message_id is the original's.
        differs: whether the original has another content: key, ordering key, properties, event or
            delivery time, or payload. This message is then not in the log. None: they could not be
            compared.
    """

    message_id: MessageId
    sequence_id: int
    duplicate: bool
    differs: bool | None = False


class Resolved(NamedTuple):
    message: OutgoingMessage
    outcome: Receipt | SeqgateError


# NamedTuple._make without a Python call per message.
_receipt: Final[Callable[[Iterable[Any]], Receipt]] = partial(tuple.__new__, Receipt)
_resolved: Final[Callable[[Iterable[Any]], Resolved]] = partial(tuple.__new__, Resolved)


@dataclass(slots=True)
class _Parcel:
    messages: list[OutgoingMessage]
    entries: list[pb.Entry]
    size_bytes: int
    added_at: float
    sent: bool = False

    @property
    def resolved(self) -> bool:
        return False

    @property
    def is_batch(self) -> bool:
        """Whether its first entry is a batch, perhaps of one message."""
        return self.entries[0].metadata.HasField("num_messages_in_batch")

    def exceeds(self, payload_bytes_max: int) -> bool:
        return any(len(entry.payload) > payload_bytes_max for entry in self.entries)

    def put_into(self, publication: pb.Publication) -> None:
        publication.entries.extend(self.entries)


@dataclass(slots=True, kw_only=True)
class _ChunkParcel(_Parcel):
    large: LargeMessage
    chunk_id: int

    @property
    def resolved(self) -> bool:
        return self.large.resolved

    def put_into(self, publication: pb.Publication) -> None:
        self.large.fill(publication.entries.add(), self.chunk_id)


Encode = Callable[[Sequence[OutgoingMessage]], list[pb.Entry]]


def pieces(
    encode: Encode, messages: list[OutgoingMessage], payload_bytes_max: int
) -> Iterator[tuple[list[OutgoingMessage], list[pb.Entry]]]:
    """Encode a parcel's messages, in as many parts as keep every payload and its metadata within
    the limits. A message that exceeds a limit alone is a part of its own."""
    entries = encode(messages)
    if len(messages) == 1 or all(
        len(entry.payload) <= payload_bytes_max and entry.metadata.ByteSize() <= METADATA_BYTES_MAX
        for entry in entries
    ):
        yield messages, entries
        return
    middle = len(messages) // 2
    yield from pieces(encode, messages[:middle], payload_bytes_max)
    yield from pieces(encode, messages[middle:], payload_bytes_max)


@dataclass(slots=True)
class Outbox:
    """See the module.

    Attributes:
        encode: makes the entries of a parcel.
        highest_sent: the highest sequence id ever sent; -1: none.
        last_failure: the error of the latest FAILED receipt.
    """

    encode: Encode
    window_messages: int = 0
    window_bytes: int = 0
    _parcels: dict[int, _Parcel] = field(default_factory=dict)
    _unsent: list[int] = field(default_factory=list)
    highest_sent: int = -1
    last_failure: SeqgateError | None = None
    _next_id: int = 1
    _messages_out: int = 0
    _bytes_out: int = 0
    _parcels_out: int = 0
    _paused: bool = False
    _resume: bool = False
    _retry_after_s: float = 0.0

    @property
    def pending(self) -> int:
        return len(self._parcels)

    @property
    def outstanding(self) -> int:
        return self._parcels_out

    @property
    def waiting(self) -> bool:
        """Whether something waits for the window, or for `resume`."""
        return self._paused or bool(self._unsent)

    @property
    def unresolved(self) -> list[OutgoingMessage]:
        messages = (message for parcel in self._open_parcels() for message in parcel.messages)
        return list({id(message): message for message in messages}.values())

    @property
    def oldest_added_at(self) -> float | None:
        return next((parcel.added_at for parcel in self._open_parcels()), None)

    def add(self, messages: list[OutgoingMessage], entries: list[pb.Entry], now: float) -> None:
        size_bytes = sum([entry.ByteSize() for entry in entries])
        self._append(_Parcel(messages, entries, size_bytes, now))

    def add_large(self, large: LargeMessage, now: float) -> None:
        """Add all chunks of a large message, with nothing between them."""
        for parcel in _chunk_parcels(large, now):
            self._append(parcel)

    def opened(
        self,
        window_messages: int,
        window_bytes: int,
        chunk_bytes: int = 0,
        payload_bytes_max: int = 0,
    ) -> None:
        """Start over on a new stream: everything is unsent, in order. Messages above `chunk_bytes`
        are cut into chunks, and batches above `payload_bytes_max` into smaller batches; 0: no
        limit."""
        self.window_messages, self.window_bytes = window_messages, window_bytes
        self._messages_out = self._bytes_out = self._parcels_out = 0
        self._paused = self._resume = False
        self._retry_after_s = 0.0
        for parcel in self._parcels.values():
            parcel.sent = False
        self._drop_resolved()
        self._cut_smaller(chunk_bytes, payload_bytes_max)
        self._start_again(chunk_bytes)
        self._unsent = list(self._parcels)

    def to_send(self, bytes_max: int) -> pb.Publications | None:
        """The next parcels within the window, up to about `bytes_max`; None: send nothing now."""
        if self._paused:
            return None
        chosen = pb.Publications()
        size_bytes = 0
        taken = 0
        for request_id in self._unsent:
            parcel = self._parcels[request_id]
            if (taken and size_bytes + parcel.size_bytes > bytes_max) or self._exceeds(parcel):
                break
            publication = chosen.publications.add()
            publication.request_id = request_id
            if self._resume:
                publication.resume, self._resume = True, False
            parcel.put_into(publication)
            highest = parcel.messages[-1].sequence_id
            if highest > self.highest_sent:
                self.highest_sent = highest
            parcel.sent = True
            self._parcels_out += 1
            self._messages_out += len(parcel.messages)
            self._bytes_out += parcel.size_bytes
            size_bytes += parcel.size_bytes
            taken += 1
        del self._unsent[:taken]
        return chosen if taken else None

    @property
    def resume_after_s(self) -> float | None:
        """Seconds to wait before `resume`; None unless paused with every sent parcel answered."""
        return self._retry_after_s if self._paused and not self._parcels_out else None

    def resume(self) -> None:
        """Resend, from the first parcel that is not stored."""
        self._paused, self._resume, self._retry_after_s = False, True, 0.0
        self._start_again()
        self._unsent = [request_id for request_id, each in self._parcels.items() if not each.sent]

    def receive(self, receipt: pb.Receipt) -> list[Resolved]:
        """Take a receipt. Returns the messages that it resolves."""
        parcel = self._parcels.get(receipt.request_id)
        if parcel is None or not parcel.sent:
            return []
        parcel.sent = False
        self._parcels_out -= 1
        self._messages_out -= len(parcel.messages)
        self._bytes_out -= parcel.size_bytes
        if self._pauses(receipt, parcel):
            if parcel.resolved:
                del self._parcels[receipt.request_id]
            if receipt.status == pb.RECEIPT_STATUS_PARTIAL:
                return self._cut(receipt, parcel)
            return []
        self.last_failure = None
        del self._parcels[receipt.request_id]
        if isinstance(parcel, _ChunkParcel):
            return self._resolve_chunk(receipt, parcel)
        return _resolve(receipt, parcel)

    def receive_run(self, run: pb.ReceiptRun) -> list[Resolved]:
        """Take the receipts of publications that were stored one after the other. Returns the
        messages that they resolve."""
        ledger_id, first = run.position.ledger_id, run.position.entry_id
        resolved: list[Resolved] = []
        for place, request_id in enumerate(range(run.request_id, run.request_id + run.count)):
            parcel = self._parcels.get(request_id)
            if parcel is None or not parcel.sent:
                continue
            if len(parcel.messages) > 1 or isinstance(parcel, _ChunkParcel):
                position = common_pb2.Position(ledger_id=ledger_id, entry_id=first + place)
                stored = pb.RECEIPT_STATUS_STORED
                receipt = pb.Receipt(request_id=request_id, status=stored, position=position)
                resolved += self.receive(receipt)
                continue
            del self._parcels[request_id]
            self._parcels_out -= 1
            self._messages_out -= 1
            self._bytes_out -= parcel.size_bytes
            message = parcel.messages[0]
            batch_index = 0 if parcel.is_batch else -1
            message_id = MessageId(ledger_id, first + place, -1, batch_index)
            resolved.append(
                Resolved(message, Receipt(message_id, message.sequence_id, duplicate=False))
            )
        if resolved:
            self.last_failure = None
        return resolved

    def fail_all(self, error: SeqgateError) -> list[Resolved]:
        resolved = [Resolved(message, error) for message in self.unresolved]
        self._parcels.clear()
        self._unsent.clear()
        return resolved

    def _append(self, parcel: _Parcel) -> None:
        self._parcels[self._next_id] = parcel
        self._unsent.append(self._next_id)
        self._next_id += 1

    def _exceeds(self, parcel: _Parcel) -> bool:
        """Whether a parcel exceeds the window. A parcel that is sent alone never does."""
        return self._parcels_out > 0 and (
            self._messages_out + len(parcel.messages) > self.window_messages
            or self._bytes_out + parcel.size_bytes > self.window_bytes
        )

    def _open_parcels(self) -> Iterator[_Parcel]:
        return (parcel for parcel in self._parcels.values() if not parcel.resolved)

    def _pauses(self, receipt: pb.Receipt, parcel: _Parcel) -> bool:
        """Pause if the receipt demands a resend; returns whether it does."""
        match receipt.status:
            case pb.RECEIPT_STATUS_FAILED:
                self.last_failure = error = error_of_status(receipt.error)
                self._pause(error.retry_after_s or 0.1)
            case pb.RECEIPT_STATUS_SKIPPED | pb.RECEIPT_STATUS_PARTIAL:
                self._pause(0.0)
            case pb.RECEIPT_STATUS_CHUNK_GAP | pb.RECEIPT_STATUS_LAYOUT_CONFLICT if isinstance(
                parcel, _ChunkParcel
            ):
                parcel.large.broken = True
                self._pause(0.0)
            case _:
                return False
        return True

    def _cut_smaller(self, chunk_bytes: int, payload_bytes_max: int) -> None:
        """Cut parcels that exceed the limits of a new stream, in place. Messages already stored are
        duplicates by their ids, however they are cut."""
        parcels: dict[int, _Parcel] = {}
        for request_id, parcel in self._parcels.items():
            smaller: Iterable[_Parcel] = ()
            if isinstance(parcel, _ChunkParcel):
                pass
            elif chunk_bytes and parcel.exceeds(chunk_bytes):
                smaller = _cut_message(parcel, chunk_bytes)
            elif payload_bytes_max and parcel.exceeds(payload_bytes_max):
                smaller = _cut_batch(parcel, self.encode, payload_bytes_max)
            cut = list(smaller)
            if not cut:
                parcels[request_id] = parcel
            for each in cut:
                parcels[self._next_id] = each
                self._next_id += 1
        self._parcels = parcels

    def _start_again(self, chunk_bytes: int = 0) -> None:
        """Replace broken or oversized attempts at large messages with new ones, in place."""
        begun: set[int] = set()
        parcels: dict[int, _Parcel] = {}
        for request_id, parcel in self._parcels.items():
            if not isinstance(parcel, _ChunkParcel):
                parcels[request_id] = parcel
                continue
            large = parcel.large
            if large.broken or (chunk_bytes and large.chunk_bytes > chunk_bytes):
                large.start_again(min(chunk_bytes or large.chunk_bytes, large.chunk_bytes))
                begun.add(id(large))
                for each in _chunk_parcels(large, parcel.added_at):
                    parcels[self._next_id] = each
                    self._next_id += 1
            elif id(large) not in begun:
                parcels[request_id] = parcel
        self._parcels = parcels

    def _resolve_chunk(self, receipt: pb.Receipt, parcel: _ChunkParcel) -> list[Resolved]:
        large = parcel.large
        if large.resolved:
            return []
        (message,) = parcel.messages
        if receipt.status in _WITH_POSITION and receipt.HasField("position"):
            position = Position(receipt.position.ledger_id, receipt.position.entry_id)
            duplicate = receipt.status == pb.RECEIPT_STATUS_DUPLICATE
            large.stored(parcel.chunk_id, position, duplicate=duplicate)
            message_id = large.message_id
            if message_id is None:
                return []
            large.resolved = True
            stored = Receipt(message_id, message.sequence_id, large.duplicate)
            return _compared(receipt, [Resolved(message, stored)])
        large.resolved = True
        self._drop_resolved()
        return _compared(receipt, [Resolved(message, _outcome_of_chunk(message, receipt))])

    def _drop_resolved(self) -> None:
        """Forget chunks of resolved messages that are not outstanding."""
        self._parcels = {
            request_id: each
            for request_id, each in self._parcels.items()
            if each.sent or not each.resolved
        }
        self._unsent = [each for each in self._unsent if each in self._parcels]

    def _pause(self, retry_after_s: float) -> None:
        self._paused = True
        self._retry_after_s = max(self._retry_after_s, retry_after_s)

    def _cut(self, receipt: pb.Receipt, parcel: _Parcel) -> list[Resolved]:
        """Keep only the messages of a batch that are not stored."""
        first_new = receipt.first_new_sequence_id
        ordered = sorted(parcel.messages, key=lambda message: message.sequence_id)
        old = [message for message in ordered if message.sequence_id < first_new]
        parcel.messages = [each for each in parcel.messages if each.sequence_id >= first_new]
        parcel.entries = self.encode(parcel.messages)
        parcel.size_bytes = sum(entry.ByteSize() for entry in parcel.entries)
        return _by_fates(receipt, old)


_WITH_FATES = (pb.RECEIPT_STATUS_DUPLICATE, pb.RECEIPT_STATUS_STALE)
_WITH_POSITION = (pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE)


def _resolve(receipt: pb.Receipt, parcel: _Parcel) -> list[Resolved]:
    """The outcomes of a parcel's messages, in the order of its entries."""
    messages = _in_entry_order(parcel)
    if receipt.status == pb.RECEIPT_STATUS_REFUSED:
        error = error_of_status(receipt.error)
        return [Resolved(message, error) for message in messages]
    if receipt.fates and receipt.status in _WITH_FATES:
        return _by_fates(receipt, messages)
    if receipt.status not in _WITH_POSITION or not receipt.HasField("position"):
        unknown = _not_understood(receipt)
        return [Resolved(message, unknown) for message in messages]
    duplicate = receipt.status == pb.RECEIPT_STATUS_DUPLICATE
    ledger_id, entry_id = receipt.position.ledger_id, receipt.position.entry_id
    resolved = []
    left = iter(messages)
    for offset, entry in enumerate(parcel.entries):
        batch = entry.metadata.HasField("num_messages_in_batch")
        count = entry.metadata.num_messages_in_batch if batch else 1
        for index in range(count):
            message = next(left)
            message_id = MessageId(ledger_id, entry_id + offset, -1, index if batch else -1)
            stored = _receipt((message_id, message.sequence_id, duplicate, False))
            resolved.append(_resolved((message, stored)))
    return _compared(receipt, resolved) if duplicate else resolved


def _by_fates(receipt: pb.Receipt, messages: Sequence[OutgoingMessage]) -> list[Resolved]:
    outcomes = [
        Resolved(message, _outcome(message, fate))
        for message, fate in zip(messages, receipt.fates, strict=True)
    ]
    return _compared(receipt, outcomes)


def _compared(receipt: pb.Receipt, resolved: list[Resolved]) -> list[Resolved]:
    """Outcomes with what their receipt says of the contents."""
    refused = error_of_status(receipt.error) if receipt.HasField("error") else None
    for index in receipt.not_compared:
        message, outcome = resolved[index]
        if isinstance(outcome, Receipt):
            resolved[index] = Resolved(message, outcome._replace(differs=None))
    for index in receipt.differs:
        message, outcome = resolved[index]
        if isinstance(outcome, Receipt):
            resolved[index] = Resolved(message, refused or outcome._replace(differs=True))
    return resolved


def _chunk_parcels(large: LargeMessage, now: float) -> Iterator[_ChunkParcel]:
    for chunk_id in range(large.num_chunks):
        size_bytes = large.size_bytes(chunk_id)
        yield _ChunkParcel([large.message], [], size_bytes, now, large=large, chunk_id=chunk_id)


def _cut_message(parcel: _Parcel, chunk_bytes: int) -> Iterator[_Parcel]:
    for message in parcel.messages:
        if message.sealed is not None:
            large = LargeMessage(message, *message.sealed, chunk_bytes)
            yield from _chunk_parcels(large, parcel.added_at)


def _cut_batch(parcel: _Parcel, encode: Encode, payload_bytes_max: int) -> Iterator[_Parcel]:
    """A batch cut into smaller ones; empty for a single message."""
    if len(parcel.messages) == 1:
        return
    for messages, entries in pieces(encode, parcel.messages, payload_bytes_max):
        size_bytes = sum(entry.ByteSize() for entry in entries)
        yield _Parcel(messages, entries, size_bytes, parcel.added_at)


def _not_understood(receipt: pb.Receipt) -> InternalError:
    """The error for a status newer than this client: it must not pass for a success."""
    return InternalError(f"unknown receipt status: {receipt.status}")


def _in_entry_order(parcel: _Parcel) -> list[OutgoingMessage]:
    """A parcel's messages in the order of its entries, which differs if it was batched by key."""
    if len(parcel.entries) == 1:
        return parcel.messages
    by_id = {message.sequence_id: message for message in parcel.messages}
    ordered = []
    for entry in parcel.entries:
        sequence_id = entry.metadata.sequence_id
        ordered.append(by_id[sequence_id])
        steps = entry.metadata.sequence_id_steps or (
            [1] * (max(1, entry.metadata.num_messages_in_batch) - 1)
        )
        for step in steps:
            sequence_id += step
            ordered.append(by_id[sequence_id])
    return ordered


def _outcome_of_chunk(message: OutgoingMessage, receipt: pb.Receipt) -> Receipt | SeqgateError:
    """The outcome of a large message by a receipt without the chunk's position."""
    if receipt.status == pb.RECEIPT_STATUS_REFUSED:
        return error_of_status(receipt.error)
    if receipt.fates and receipt.status in _WITH_FATES:
        return _outcome(message, receipt.fates[0])
    return _not_understood(receipt)


def _outcome(message: OutgoingMessage, fate: pb.MessageFate) -> Receipt | SeqgateError:
    match fate.fate:
        case pb.FATE_STORED:
            batch_index = fate.batch_index if fate.HasField("batch_index") else -1
            message_id = MessageId(fate.position.ledger_id, fate.position.entry_id, -1, batch_index)
            if fate.HasField("first_chunk_position"):
                first = fate.first_chunk_position
                message_id = ChunkMessageId(MessageId(first.ledger_id, first.entry_id), message_id)
            return Receipt(message_id, message.sequence_id, duplicate=True)
        case pb.FATE_TRIMMED:
            return SequenceIdTrimmedError(
                "cannot tell whether the message is in the log: that part is trimmed"
            ).of_message(message.sequence_id)
        case _:
            return StaleSequenceIdError(
                "the message is not in the log: its producer has stored a higher sequence id"
            ).of_message(message.sequence_id)
