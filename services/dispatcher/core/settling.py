"""What is acknowledged, and what is on its way to be: in whole, in part, and how often it failed.

    acknowledged ──▶ batch ──Persist──▶ persisting ──▶ durable: never delivered again
    failed ───────▶ to record ─Record─▶ recording ───▶ durable: may be delivered again

One batch is under way at a time, and one record. What comes meanwhile makes the next. A delivery
that is acknowledged stays in flight until that is durable, so nothing is thought to be settled that
a crash would bring back.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from seqgate.types import Position
from services.dispatcher.core.effects import Persist, Record
from services.dispatcher.core.lane import Flight, Lane
from services.dispatcher.core.positions import Acknowledged

UNSETTLED_MAX: Final = 20_000
"""How many entries may be acknowledged and not durably before reading stops, about 300 bytes each.
What filters reject needs no permit, so nothing else bounds it while nothing can be made durable."""


@dataclass(slots=True)
class Batch:
    """Acknowledgements that are made durable together.

    Attributes:
        whole: entries, and the lanes that they were in; None: they were no messages.
        parts: of batches, the lane, how many messages they have, and the bits of what is
            acknowledged.
    """

    number: int
    whole: dict[Position, Lane | None] = field(default_factory=dict)
    parts: dict[Position, tuple[Lane, int, int]] = field(default_factory=dict)
    successions: list[tuple[Position, Position]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.whole or self.parts)


class Settling:
    """See the module.

    Attributes:
        acknowledged: which entries are, durably.
        partial: of batches, which messages are not acknowledged (bits).
        attempts: how often deliveries of entries failed.
        doomed: which entries go to the dead letter topic, however often that was.
    """

    def __init__(
        self,
        acknowledged: Acknowledged,
        partial: Mapping[Position, int],
        attempts: Mapping[Position, int],
        doomed: Iterable[Position] = (),
    ) -> None:
        self.acknowledged = acknowledged
        self.partial = dict(partial)
        self.attempts = dict(attempts)
        self.doomed = set(doomed)
        self._batch = Batch(1)
        self._persisting: Batch | None = None
        self._to_record: dict[Position, Lane] = {}
        self._recording: dict[Position, Lane] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to make durable."""
        return self._persisting is None and self._recording is None

    @property
    def durable_with(self) -> int:
        """The number of the Persist with which everything is durable that was acknowledged so far;
        0: it is."""
        if self._batch:
            return self._batch.number
        return 0 if self._persisting is None else self._persisting.number

    @property
    def unsettled(self) -> Iterator[Position]:
        """The entries, whole, that are acknowledged and not durably."""
        return chain(self._batch.whole, self._persisting.whole if self._persisting else ())

    @property
    def is_full(self) -> bool:
        """Whether so many entries wait to be made durable that no more are to be read."""
        persisting = 0 if self._persisting is None else len(self._persisting.whole)
        return len(self._batch.whole) + persisting >= UNSETTLED_MAX

    # ---- acknowledgements

    def note_succession(self, before: Position | None, position: Position) -> None:
        """The log goes on in another ledger; None: it begins there."""
        if before is None and position.entry_id == 0 and position.ledger_id == 1:
            return
        self._batch.successions.append((before or Position(0, 0), position))

    def settle(self, flight: Flight, messages: int) -> None:
        """Messages of a delivery (bits) are acknowledged; it counts when it is durable."""
        newly = messages & flight.unacked & ~flight.asked
        if not newly:
            return
        flight.asked |= newly
        if flight.is_settling:
            self._batch.parts.pop(flight.position, None)
            self._batch.whole[flight.position] = flight.lane
        else:
            asked = flight.asked | _asked(self._batch, flight.position)
            self._batch.parts[flight.position] = (flight.lane, flight.messages, asked)

    def left(self, position: Position, messages: int) -> int:
        """Which messages of an entry that is not in flight are not acknowledged (bits), neither
        durably nor soon: what an earlier delivery acknowledged of it never comes again."""
        left = self.partial.get(position, (1 << messages) - 1)
        left &= ~_asked(self._batch, position)
        return left if self._persisting is None else left & ~_asked(self._persisting, position)

    def settle_whole(self, position: Position, lane: Lane | None) -> None:
        """An entry that is not in flight is acknowledged; None: it is no message."""
        self._batch.parts.pop(position, None)
        self._batch.whole[position] = lane

    def persist(self) -> Persist | None:
        """What to make durable next; None: nothing, or something is being made durable."""
        if self._persisting is not None or not self._batch:
            return None
        batch = self._persisting = self._batch
        self._batch = Batch(batch.number + 1)
        parts = tuple((each, size, bits) for each, (_, size, bits) in batch.parts.items())
        return Persist(batch.number, tuple(batch.whole), parts, tuple(batch.successions))

    def persisted(self) -> Batch:
        """What is durable now."""
        batch, self._persisting = self._persisting, None
        assert batch is not None
        return batch

    def reduce(self, position: Position, messages: int, bits: int) -> int:
        """Some of a batch's messages are acknowledged, durably. Returns which are not."""
        left = self.partial.get(position, (1 << messages) - 1) & ~bits
        if left:
            self.partial[position] = left
        return left

    def done(self, position: Position) -> None:
        """An entry is acknowledged, durably."""
        self.acknowledged.add(position)
        self.partial.pop(position, None)
        self.attempts.pop(position, None)
        self.doomed.discard(position)

    def is_settled(self, position: Position) -> bool:
        """Whether an entry is acknowledged, whole, durably or soon."""
        if position in self.acknowledged or position in self._batch.whole:
            return True
        return self._persisting is not None and position in self._persisting.whole

    # ---- failures

    def failed_beyond(self, limit: int | None, position: Position) -> bool:
        """Whether deliveries of an entry failed more often than that (None: they may), or it is
        doomed anyway."""
        if position in self.doomed:
            return True
        return limit is not None and self.attempts.get(position, 0) > limit

    def note_failure(self, flight: Flight) -> None:
        """A delivery failed. Nothing of its key is delivered before that is recorded."""
        position, lane = flight.position, flight.lane
        self.attempts[position] = self.attempts.get(position, 0) + 1
        assert position not in self._to_record, "nothing of the key is delivered before"
        lane.recording += 1
        self._to_record[position] = lane

    def record(self) -> Record | None:
        """What to record next; None: nothing, or something is being recorded."""
        if self._recording is not None or not self._to_record:
            return None
        self._recording, self._to_record = self._to_record, {}
        return Record(tuple((each, self.attempts.get(each, 0)) for each in self._recording))

    def recorded(self) -> list[Lane]:
        """What was being recorded is: a lane for each failure."""
        recording, self._recording = self._recording, None
        assert recording is not None
        for lane in recording.values():
            lane.recording -= 1
        return list(recording.values())


def _asked(batch: Batch, position: Position) -> int:
    """Which messages of an entry are acknowledged in part with a batch (bits)."""
    part = batch.parts.get(position)
    return 0 if part is None else part[2]
