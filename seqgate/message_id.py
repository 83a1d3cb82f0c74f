"""Message ids in the forms that applications store: a value, a text, bytes.

There are three kinds of ids, in one order:

    plain   ledger:entry:partition          the message is an entry
    batch   ledger:entry:partition:index    the entry is a batch, and this its message `index`
    chunk   first;last                      the message is cut into entries, `first` to `last`

A chunk id is its last chunk's id with the position of the first chunk. Only reading the message
again needs the first chunk, so order, equality and hash ignore it.

The id of a message that was read or received knows its topic, to be told from the same place in
another topic. Texts and bytes have no topic.

The bytes are Pulsar's MessageIdData. Its Java client writes batch_size = 0 where its C++ client
omits it, so one id has two encodings: compare ids, never their bytes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Final

from google.protobuf.message import DecodeError

from seqgate.api.entry.v1.entry_pb2 import MessageIdData
from seqgate.types import SEQUENCE_ID_MAX, Position

_UNSET: Final = -1
_INT32_MAX: Final = 2**31 - 1

_NUMBER: Final = "(?:-1|0|[1-9][0-9]{0,18})"
_ONE: Final = re.compile(
    r"N:N(?::N){0,2}|\(N,N,N,N\)".replace("N", _NUMBER)  # Java's form, C++'s form
)
_FIRST_AND_LAST: Final = re.compile(
    r"N:N:N;N:N:N|\(N,N,N,-1\);\(N,N,N,-1\)".replace("N", _NUMBER)  # no chunk is in a batch
)

_key: Final = attrgetter("ledger_id", "entry_id", "partition", "batch_index")


class _InTopic:
    """Beside the fields of an id, which make it what it is. Unset: the topic is not known."""

    __slots__ = ("_topic",)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class MessageId(_InTopic):
    """A message's place: its entry and, in a batch, its index.

    Ordered, compared and hashed like Pulsar's: by ledger, entry, partition and batch index
    (`compareTo` of Pulsar's MessageIdImpl), ChunkMessageIds included. So the id of a batch's entry
    sorts before the messages in it.

    Attributes:
        ledger_id, entry_id: the entry, -1 to 2^63 - 1; -1 is before all that exist.
        partition: 0 to 2^31 - 1; -1: not partitioned.
        batch_index: 0 to 2^31 - 1; -1: not in a batch.
        batch_size: the number of messages in the batch, -1 to 2^31 - 1. Unknown if it is -1, or 0
            as in the ids that a producer gets.
    """

    ledger_id: int
    entry_id: int
    partition: int
    batch_index: int
    batch_size: int

    def __init__(
        self,
        ledger_id: int,
        entry_id: int,
        partition: int = _UNSET,
        batch_index: int = _UNSET,
        batch_size: int = 0,
        *,
        _topic: str = "",
    ) -> None:
        # Runs for every message: a dataclass's own __init__ takes a quarter longer. parse,
        # from_bytes and to_bytes check the bounds.
        put = object.__setattr__
        put(self, "ledger_id", ledger_id)
        put(self, "entry_id", entry_id)
        put(self, "partition", partition)
        put(self, "batch_index", batch_index)
        put(self, "batch_size", batch_size)
        if _topic:
            put(self, "_topic", _topic)

    def __getstate__(self) -> list[Any]:
        return [*(getattr(self, each.name) for each in fields(self)), topic_of(self)]

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore what `__getstate__` returns, or what 0.2.0 did: the fields alone."""
        names = [each.name for each in fields(self)]
        for name, value in zip([*names, "_topic"], state, strict=False):
            object.__setattr__(self, name, value)

    @staticmethod
    def parse(text: str) -> "MessageId":
        """Parse the form that str() writes, ledger:entry alone, or the form that Pulsar's C++ and
        Python clients print: (ledger,entry,partition,batch-index), two of them with a semicolon for
        a chunk id. Two places make a ChunkMessageId.

        Raises:
            ValueError: it has none of these forms, a number is below -1 or above 2^63 - 1, or the
                first chunk is after the last.
        """
        one, chunks = _ONE.fullmatch(text), _FIRST_AND_LAST.fullmatch(text)
        numbers = [int(number) for number in re.findall(r"-?[0-9]+", text)] if one or chunks else []
        if not numbers or max(numbers) > SEQUENCE_ID_MAX:
            raise ValueError(f"not a message id: {text!r}")
        if one:
            return MessageId(*numbers)
        half = len(numbers) // 2
        return ChunkMessageId(MessageId(*numbers[:half]), MessageId(*numbers[half:]))

    @staticmethod
    def from_bytes(data: bytes) -> "MessageId":
        """Decode the bytes of to_bytes() or of one of Pulsar's clients.

        A batch index makes a batch id; without one, a first chunk makes a ChunkMessageId
        (`fromByteArray` of Pulsar's MessageIdImpl). A "topic-aware" id has the bytes of the id
        inside, without the topic, so it is accepted as well, and keeps its first chunk (Pulsar's
        `fromByteArrayWithTopic` loses it).

        Raises:
            ValueError: the bytes are empty or malformed, lack the ledger or the entry, a number is
                below -1, or the first chunk is after the last.
            TypeError: `data` is not bytes.
        """
        try:
            wire = MessageIdData.FromString(data)
        except DecodeError as error:
            raise ValueError("not a message id: the bytes are malformed") from error
        if wire.HasField("batch_index"):
            batch = replace(_plain(wire), batch_index=wire.batch_index, batch_size=wire.batch_size)
            return _checked(batch)
        if wire.HasField("first_chunk_message_id"):
            return ChunkMessageId(_plain(wire.first_chunk_message_id), _plain(wire))
        return _plain(wire)

    def to_bytes(self) -> bytes:
        """The bytes that Pulsar's Java client writes for this id (`toByteArray` of its
        MessageIdImpl, BatchMessageIdImpl and ChunkMessageIdImpl). Raises ValueError if a number is
        out of its bounds."""
        return _wire(self).SerializeToString()

    @property
    def position(self) -> Position:
        """The entry of the message; of a chunk id, the last entry."""
        return Position(self.ledger_id, self.entry_id)

    def __str__(self) -> str:
        text = f"{self.ledger_id}:{self.entry_id}:{self.partition}"
        return text if self.batch_index < 0 else f"{text}:{self.batch_index}"

    def __hash__(self) -> int:
        return hash(_key(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageId):
            return NotImplemented
        return _key(self) == _key(other)

    def __lt__(self, other: "MessageId") -> bool:
        if not isinstance(other, MessageId):
            return NotImplemented
        return _key(self) < _key(other)

    def __le__(self, other: "MessageId") -> bool:
        if not isinstance(other, MessageId):
            return NotImplemented
        return _key(self) <= _key(other)

    def __gt__(self, other: "MessageId") -> bool:
        if not isinstance(other, MessageId):
            return NotImplemented
        return _key(self) > _key(other)

    def __ge__(self, other: "MessageId") -> bool:
        if not isinstance(other, MessageId):
            return NotImplemented
        return _key(self) >= _key(other)


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class ChunkMessageId(MessageId):
    """A large message's place: its last chunk's id, with the place of its first chunk (PIP-107).

    Attributes:
        first_chunk, last_chunk: plain ids; the id's own numbers are the last chunk's.

    Raises:
        ValueError: the first chunk is after the last, or one of them is in a batch.
    """

    first_chunk: MessageId
    last_chunk: MessageId

    __getstate__, __setstate__ = MessageId.__getstate__, MessageId.__setstate__

    def __init__(self, first: MessageId, last: MessageId) -> None:
        if first > last:
            raise ValueError(f"not a message id: its first chunk {first} is after its last {last}")
        if first.batch_index != _UNSET or last.batch_index != _UNSET:
            raise ValueError(f"not a message id: a chunk is in a batch: {first};{last}")
        topic = topic_of(last)
        MessageId.__init__(self, last.ledger_id, last.entry_id, last.partition, _topic=topic)
        put = object.__setattr__
        put(self, "first_chunk", MessageId(first.ledger_id, first.entry_id, first.partition))
        last = MessageId(last.ledger_id, last.entry_id, last.partition, _topic=topic)
        put(self, "last_chunk", last)

    def to_bytes(self) -> bytes:
        """See MessageId.to_bytes."""
        wire = _wire(self.last_chunk)
        wire.first_chunk_message_id.CopyFrom(_wire(self.first_chunk))
        return wire.SerializeToString()

    def __str__(self) -> str:
        return f"{self.first_chunk};{self.last_chunk}"

    def __repr__(self) -> str:
        return f"ChunkMessageId(first={self.first_chunk!r}, last={self.last_chunk!r})"


EARLIEST_ID: Final = MessageId(-1, -1, -1)
"""Before every message of a topic; Pulsar's MessageId.earliest."""

LATEST_ID: Final = MessageId(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX, -1)
"""After every message of a topic; Pulsar's MessageId.latest."""


def topic_of(message_id: MessageId) -> str:
    """The full name of the topic of an id that came with a message; "": it is not known."""
    return getattr(message_id, "_topic", "")


def _wire(message_id: MessageId) -> MessageIdData:
    """Encode an id without a first chunk."""
    each = _checked(message_id)
    wire = MessageIdData(ledger_id=each.ledger_id % 2**64, entry_id=each.entry_id % 2**64)
    if each.partition != _UNSET:
        wire.partition = each.partition
    if each.batch_index == _UNSET:
        wire.batch_size = 0
        return wire
    wire.batch_index = each.batch_index
    if each.batch_size != _UNSET:
        wire.batch_size = each.batch_size
    return wire


def _plain(wire: MessageIdData) -> MessageId:
    """Decode an id, ignoring its first chunk."""
    if not (wire.HasField("ledger_id") and wire.HasField("entry_id")):
        raise ValueError("not a message id: the bytes name no ledger or no entry")
    partition = wire.partition if wire.HasField("partition") else _UNSET
    return _checked(MessageId(_signed(wire.ledger_id), _signed(wire.entry_id), partition))


def _signed(number: int) -> int:
    return number if number < 2**63 else number - 2**64


def _checked(message_id: MessageId) -> MessageId:
    """Return an id within the bounds of the wire unchanged."""
    entry = (message_id.ledger_id, message_id.entry_id)
    rest = (message_id.partition, message_id.batch_index, message_id.batch_size)
    if min(entry + rest) < _UNSET or max(entry) > SEQUENCE_ID_MAX or max(rest) > _INT32_MAX:
        raise ValueError(f"not a message id: a number is out of bounds: {message_id!r}")
    return message_id
