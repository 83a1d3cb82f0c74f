"""Decides which messages are sent together.

A batch is sent when it has enough messages or bytes, or its oldest message has waited long enough.
Ids increase within a batch, so a message whose id is not above all earlier ones (a resend by the
application) is sent alone, since only the service knows whether it is a duplicate, and the next
message starts a new batch. (Pulsar's Java client, apache/pulsar#5491.) A message with a delivery
time is sent alone too: the time is a field of its entry.

A batch is one entry, or with `by_key` one entry per key. All messages of an entry share the
properties that filters see, so a message with other ones starts a new batch, or with `by_key` a new
entry of its key. (apache/pulsar#16680 demanded that only where schemas differ, and would have mixed
batches.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from seqgate.client._arguments import COUNT_MAX, flag, real, settle, whole
from seqgate.client._codec import OutgoingMessage
from seqgate.client._projection import Projection, listed

ENTRIES_MAX: Final = 1_000
"""The most entries per publication (ledger.proto)."""

MESSAGES_MAX: Final = 10_000
"""The most messages in a batch."""

DELAY_MAX_S: Final = 86_400.0
"""The longest that a batch may wait for more messages: a day."""

_NOTHING: Final = object()
"""Stands for the filter properties of a group without an entry."""

Parcel = list[OutgoingMessage]


@dataclass(frozen=True, slots=True)
class Batching:
    """How a producer batches.

    Attributes:
        messages_max: the most messages in a batch, 1 to 10,000.
        bytes_max: the approximate limit on a batch's size, in bytes, 1 or more; three quarters of
            the service's largest entry always apply.
        delay_s: how long a batch waits for more messages, in seconds, 0 to 86,400.
        by_key: make one entry per key, and store the entries of one flush together. Required if
            consumers share a subscription by key (Pulsar's KEY_BASED batcher).
        filter_properties: the properties of a batch that filters see: names, or values by name,
            where other values count as absent (Pulsar's batchedFilterProperties and
            restrictSameValuesInBatchProperties). Empty: filters see none, except those of a message
            that happens to be alone. Otherwise a message with other values ends the batch, or with
            `by_key` its key's entry, and a message that is alone shows only the listed ones. A
            property that differs in each message makes batches of one. At most 64 names of 1 to 255
            bytes, each with 1 to 1,000 values; at most 32 KiB per message.

    Raises:
        InvalidRequestError: one is of another type, or out of its bounds.
    """

    messages_max: int = 1_000
    bytes_max: int = 128 * 1024
    delay_s: float = 0.001
    by_key: bool = False
    filter_properties: Sequence[str] | Mapping[str, Iterable[str]] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        settle(
            self,
            messages_max=whole("messages_max", self.messages_max, 1, MESSAGES_MAX),
            bytes_max=whole("bytes_max", self.bytes_max, 1, COUNT_MAX, "bytes"),
            delay_s=real("delay_s", self.delay_s, 0, DELAY_MAX_S),
            by_key=flag("by_key", self.by_key),
            filter_properties=listed(self.filter_properties),
        )

    @property
    def projection(self) -> Projection | None:
        return Projection(listed(self.filter_properties)) if self.filter_properties else None


class Batcher:
    def __init__(self, batching: Batching | None) -> None:
        self._batching = batching
        self.bytes_max = batching.bytes_max if batching else 0
        self._by_key = batching is not None and batching.by_key
        self._entries_max = ENTRIES_MAX if self._by_key else 1
        self._counts_entries = batching is not None and (  # otherwise the limit is out of reach
            bool(batching.filter_properties)
            or (self._by_key and batching.messages_max > ENTRIES_MAX)
        )
        self._open: Parcel = []
        self._size_bytes = 0
        self._entries = 0
        self._shown: dict[object, object] = {}  # of each group's newest entry, if counted
        self._highest = -1

    @property
    def collecting(self) -> bool:
        return bool(self._open)

    def add(self, message: OutgoingMessage) -> list[Parcel]:
        """Add a message. Returns the parcels to send now, in order."""
        if self._batching is None:
            return [[message]]
        alone = message.sequence_id <= self._highest or message.deliver_at_ms is not None
        self._highest = max(self._highest, message.sequence_id)
        if alone:
            return [*self.flush(), [message]]
        ready: list[Parcel] = []
        size_bytes = message.size_bytes
        begins = self._counts_entries and self._begins_entry(message)
        added_bytes = size_bytes + message.shown_bytes if begins else size_bytes
        if self._open and (
            self._size_bytes + added_bytes > self.bytes_max
            or (begins and self._entries == self._entries_max)
        ):
            ready = self.flush()
            begins = self._counts_entries
        if begins:
            self._begin_entry(message)
        self._open.append(message)
        self._size_bytes += size_bytes
        if len(self._open) >= self._batching.messages_max or self._size_bytes >= self.bytes_max:
            ready += self.flush()
        return ready

    def flush(self) -> list[Parcel]:
        """Take the open batch."""
        if not self._open:
            return []
        parcel, self._open = self._open, []
        self._size_bytes = self._entries = 0
        self._shown.clear()
        return [parcel]

    def _begins_entry(self, message: OutgoingMessage) -> bool:
        shown = self._shown.get(message.group if self._by_key else None, _NOTHING)
        return shown is not message.shown and shown != message.shown

    def _begin_entry(self, message: OutgoingMessage) -> None:
        self._shown[message.group if self._by_key else None] = message.shown
        self._entries += 1
        self._size_bytes += message.shown_bytes


def cut_by_key(parcel: Sequence[OutgoingMessage]) -> list[Parcel]:
    """Split a batch into entries: for each key, messages with the same projection, in order.
    Entries are ordered by their highest ids."""
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
