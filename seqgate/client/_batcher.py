"""Which messages travel together?

Messages are collected until they are many enough, large enough, or old enough. A batch carries
increasing sequence ids, so a message whose id is not above every id before it (an application that
sends again) travels alone: only the service can say whether it is a duplicate. What comes after it
starts a new batch. (Pulsar's Java client, apache/pulsar#5491.) So does a message with a delivery
time, which is that of its whole entry.
"""

from dataclasses import dataclass

from seqgate.client._codec import OutgoingMessage

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
    """

    messages_max: int = 1_000
    bytes_max: int = 128 * 1024
    delay_s: float = 0.001
    by_key: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.messages_max <= 10_000:
            raise ValueError("a batch holds 1 to 10,000 messages")
        if self.bytes_max < 1 or self.delay_s < 0:
            raise ValueError("bytes_max is at least 1, and delay_s is not negative")


class Batcher:
    """Collects messages into parcels."""

    def __init__(self, batching: Batching | None) -> None:
        self._batching = batching
        self.bytes_max = batching.bytes_max if batching else 0
        self._open: Parcel = []
        self._size_bytes = 0
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
        if self._open and self._size_bytes + size_bytes > self.bytes_max:
            ready = self.flush()
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
        self._size_bytes = 0
        return [parcel]
