"""Which messages travel together?

Messages are collected until they are many enough, large enough, or old enough. A batch carries
increasing sequence ids, so a message whose id is not above every id before it (an application that
sends again) travels alone: only the service can say whether it is a duplicate. What comes after it
starts a new batch. (Pulsar's Java client, apache/pulsar#5491.) So does a message with a delivery
time, which is that of its whole entry.

A batch is one entry, or, batched by key, an entry for each key. What an entry shows to filters is
said of all its messages, so a message that shows something else begins another: the next batch, or
by key the next entry of its key. (In apache/pulsar#16680 that was asked for only where schemas
differ, and batches would have been mixed.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from seqgate.client._codec import OutgoingMessage
from seqgate.client._projection import Projection, listed

ENTRIES_MAX: Final = 1_000
"""How many entries travel together at most (ledger.proto)."""

_NOTHING: Final = object()
"""What a group shows that has no entry yet."""

Parcel = list[OutgoingMessage]
"""What travels together, in the order in which it was sent."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How a producer batches.

    Attributes:
        messages_max: how many messages a batch holds, 1 to 10,000.
        bytes_max: how many bytes they may have, about.
        delay_s: how long a batch waits for more, in seconds.
        by_key: make an entry for each key, and store the entries of one flush together. Consumers
            that share a subscription by key need this (Pulsar's KEY_BASED batcher).
        filter_properties: which properties of a batch's messages filters see: names, or the values
            that count by name, others being taken for absent (Pulsar's batchedFilterProperties and
            restrictSameValuesInBatchProperties). None are listed: none are seen, but those of a
            message that happens to be alone. Otherwise a batch ends before a message with other
            values for them, by key only that of its key, and a message that is alone shows what it
            would in company. A property that differs from message to message makes batches of one.
            At most 64 names of 1 to 255 bytes, of each 1 to 1,000 values; what a message has of
            them, at most 32 KiB.

    Raises:
        ValueError: one is out of its bounds.
    """

    messages_max: int = 1_000
    bytes_max: int = 128 * 1024
    delay_s: float = 0.001
    by_key: bool = False
    filter_properties: Sequence[str] | Mapping[str, Iterable[str]] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if not 1 <= self.messages_max <= 10_000:
            raise ValueError("a batch holds 1 to 10,000 messages")
        if self.bytes_max < 1 or self.delay_s < 0:
            raise ValueError("bytes_max is at least 1, and delay_s is not negative")
        object.__setattr__(self, "filter_properties", listed(self.filter_properties))

    @property
    def projection(self) -> Projection | None:
        """Says what a producer's messages show; None: it does not matter."""
        return Projection(listed(self.filter_properties)) if self.filter_properties else None


class Batcher:
    """Collects messages into parcels."""

    def __init__(self, batching: Batching | None) -> None:
        self._batching = batching
        self.bytes_max = batching.bytes_max if batching else 0
        self._by_key = batching is not None and batching.by_key
        self._entries_max = ENTRIES_MAX if self._by_key else 1
        self._counts = batching is not None and (  # entries; otherwise there cannot be too many
            bool(batching.filter_properties)
            or (self._by_key and batching.messages_max > ENTRIES_MAX)
        )
        self._open: Parcel = []
        self._size_bytes = 0
        self._entries = 0
        self._shown: dict[object, object] = {}  # by the newest entry of each group, if they count
        self._highest = -1

    @property
    def collecting(self) -> bool:
        """Whether a batch waits for more."""
        return bool(self._open)

    def add(self, message: OutgoingMessage) -> list[Parcel]:
        """Take a message. Returns what is to be sent now, in order."""
        if self._batching is None:
            return [[message]]
        alone = message.sequence_id <= self._highest or message.deliver_at_ms is not None
        self._highest = max(self._highest, message.sequence_id)
        if alone:
            return [*self.flush(), [message]]
        ready: list[Parcel] = []
        size_bytes = message.size_bytes
        begins = self._counts and self._begins_entry(message)
        added_bytes = size_bytes + message.shown_bytes if begins else size_bytes
        if self._open and (
            self._size_bytes + added_bytes > self.bytes_max
            or (begins and self._entries == self._entries_max)
        ):
            ready = self.flush()
            begins = self._counts
        if begins:
            self._begin_entry(message)
        self._open.append(message)
        self._size_bytes += size_bytes
        if len(self._open) >= self._batching.messages_max or self._size_bytes >= self.bytes_max:
            ready += self.flush()
        return ready

    def flush(self) -> list[Parcel]:
        """Give out what was collected."""
        if not self._open:
            return []
        parcel, self._open = self._open, []
        self._size_bytes = self._entries = 0
        self._shown.clear()
        return [parcel]

    def _begins_entry(self, message: OutgoingMessage) -> bool:
        """Whether a message does not join an entry of the open batch."""
        shown = self._shown.get(message.group if self._by_key else None, _NOTHING)
        return shown is not message.shown and shown != message.shown

    def _begin_entry(self, message: OutgoingMessage) -> None:
        self._shown[message.group if self._by_key else None] = message.shown
        self._entries += 1
        self._size_bytes += message.shown_bytes


def cut_by_key(parcel: Sequence[OutgoingMessage]) -> list[Parcel]:
    """What each entry of a parcel holds that is batched by key: messages of one key that show the
    same, those of a key in their order; the entries in the order of their highest ids."""
    newest: dict[object, Parcel] = {}
    entries: list[Parcel] = []
    for message in parcel:
        group = message.group
        entry = newest.get(group)
        if entry is None or entry[-1].shown != message.shown:
            entry = newest[group] = []
            entries.append(entry)
        entry.append(message)
    return sorted(entries, key=lambda entry: entry[-1].sequence_id)
