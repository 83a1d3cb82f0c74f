"""How entries end: acknowledged, failed, dead-lettered, or skipped.

    acknowledged ──▶ batch ──Persist──▶ persisting ──▶ durable: never delivered again
    failed ───────▶ to record ─Record─▶ recording ───▶ durable: may be delivered again
    failed too often ──▶ DeadLetter ──▶ a gap in its key
        CONTINUE   the next delivery names the missing message
        HOLD       nothing follows, until the key is released
        TAIL       later messages are dead-lettered too, until the key is released

One batch is pending at a time, and one record; later ones form the next. An acknowledged delivery
stays in flight until the acknowledgement is durable, so no entry counts as settled that a crash
would deliver again.

A gap is remembered until a later message of its key is acknowledged, or the key is released. SHARED
subscriptions have no gaps.

A subscription never stops. An entry that can be neither delivered nor dead-lettered is skipped:
acknowledged, counted and logged, so that it can be found in the log.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    Because,
    FailedDelivery,
    FailedEntry,
    ForgetKey,
    Gap,
    How,
    KeyState,
    Options,
    Outgoing,
    Passed,
    Persist,
    Record,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import Flight, Lane
from seqgate.services.dispatcher.core.positions import Acknowledged, Run, runs_of
from seqgate.types import Position

FAILURES_MAX: Final = 10
"""The most failed deliveries remembered for an entry: the latest."""

FAILED_ENTRIES_MAX: Final = 10_000
"""The most entries whose failed deliveries are remembered: those that failed last."""

REASONS_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of the reasons of all these failed deliveries, in memory."""

UNSETTLED_MAX: Final = 20_000
"""Limit of acknowledged entries that are not durable yet, some 300 bytes each, at which reading
stops. Rejected entries need no permit, so nothing else bounds them while nothing can be made
durable."""


class Durable(NamedTuple):
    """The state from which a machine starts.

    Attributes:
        partial: of partly acknowledged batches, the unacknowledged messages (bits).
        keys: keys of which a message was dead-lettered, in the form of `remembered`.
        doomed: entries on their way to the dead letter topic.
        waits: the start times of the oldest waits that must end.
        returned: acknowledged entries that are delivered once more: dead letters that come back.
        failures: the latest failed deliveries of entries, the oldest first.
        large_letters: large messages of which not all chunks are dead-lettered yet: the first chunk
            of each attempt.
    """

    acknowledged: Acknowledged
    partial: Mapping[Position, int] = {}
    attempts: Mapping[Position, int] = {}
    keys: Mapping[bytes, KeyState] = {}
    doomed: frozenset[Position] = frozenset()
    waits: Mapping[Position, int] = {}
    returned: frozenset[Position] = frozenset()
    failures: Mapping[Position, tuple[FailedDelivery, ...]] = {}
    large_letters: Mapping[str, Position] = {}


@dataclass(slots=True)
class Batch:
    """Acknowledgements that are made durable together.

    Attributes:
        whole: entries, and the lanes that they were in; None: in none.
        parts: of batches, the lane, the number of messages, and the bits of the acknowledged ones.
        runs: the entries in `whole`, once they are being persisted.
    """

    number: int
    whole: dict[Position, Lane | None] = field(default_factory=dict)
    parts: dict[Position, tuple[Lane, int, int]] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    successions: list[tuple[Position, Position]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.whole or self.parts)


class Settling:
    """See the module. `doomed` entries are dead-lettered regardless of their attempts."""

    def __init__(
        self, options: Options, durable: Durable, out: Outgoing, totals: dict[str, int]
    ) -> None:
        self.acknowledged = durable.acknowledged
        self.partial = dict(durable.partial)
        self.attempts = dict(durable.attempts)
        self.doomed = set(durable.doomed)
        self.returned = set(durable.returned)
        self._failures = Failures()
        for position, failures in durable.failures.items():
            for each in failures:
                self._failures.add(position, each)
        self.gaps = Gaps(options, durable.keys, self.returned)
        self._out = out
        self._totals = totals
        self._batch = Batch(1)
        self._persisting: Batch | None = None
        self._to_record: dict[Position, Lane] = {}
        self._recording: dict[Position, Lane] | None = None

    @property
    def is_idle(self) -> bool:
        return self._persisting is None and self._recording is None

    @property
    def durable_with(self) -> int:
        if self._batch:
            return self._batch.number
        return 0 if self._persisting is None else self._persisting.number

    @property
    def unsettled(self) -> Iterator[Position]:
        """Entries acknowledged as a whole, and not durably yet."""
        return chain(self._batch.whole, self._persisting.whole if self._persisting else ())

    @property
    def is_full(self) -> bool:
        """Whether reading stops, since too many acknowledgements are not durable yet."""
        persisting = 0 if self._persisting is None else len(self._persisting.whole)
        return len(self._batch.whole) + persisting >= UNSETTLED_MAX

    # ---- acknowledgements

    def record_succession(self, before: Position | None, position: Position) -> None:
        """Record that no entry lies between two positions of different ledgers; None: the log
        begins at `position`."""
        if before is None and position.entry_id == 0 and position.ledger_id == 1:
            return
        self._batch.successions.append((before or Position(0, 0), position))

    def acknowledge(self, flight: Flight, messages: int) -> None:
        """Acknowledge messages of a delivery (bits), which counts once it is durable."""
        newly = messages & flight.unacked & ~flight.pending
        if not newly:
            return
        flight.pending |= newly
        if flight.is_settling:
            self._batch.parts.pop(flight.position, None)
            self._batch.whole[flight.position] = flight.lane
        else:
            pending = flight.pending | _pending(self._batch, flight.position)
            self._batch.parts[flight.position] = (flight.lane, flight.messages, pending)

    def acknowledge_whole(self, flight: Flight) -> None:
        """`acknowledge` of all messages, which most deliveries are."""
        if flight.pending == flight.unacked:
            return
        flight.pending = flight.unacked
        batch = self._batch
        if batch.parts:
            batch.parts.pop(flight.position, None)
        batch.whole[flight.position] = flight.lane

    def left(self, position: Position, messages: int) -> int:
        """The bits of messages without an acknowledgement, durable or pending, of an entry that is
        not in flight: messages acknowledged by an earlier delivery are not delivered again."""
        batch, persisting = self._batch, self._persisting
        left = (1 << messages) - 1
        if self.partial:
            left = self.partial.get(position, left)
        if batch.parts:
            left &= ~_pending(batch, position)
        if persisting is not None and persisting.parts:
            left &= ~_pending(persisting, position)
        return left

    def acknowledge_entry(self, position: Position, lane: Lane | None) -> None:
        """Acknowledge an entry that is not in flight; `lane` is the one that it was in, if any."""
        self._batch.parts.pop(position, None)
        self._batch.whole[position] = lane

    def pass_over(
        self, positions: Sequence[Position], because: Because, lane: Lane | None = None
    ) -> None:
        """Skip entries that neither wait nor are in flight, because no consumer can have them."""
        for position in positions:
            self.acknowledge_entry(position, lane)
        self.record_passed(positions, because)

    def record_passed(self, positions: Sequence[Position], because: Because) -> None:
        """Count and log entries that were acknowledged without a delivery."""
        self._totals["passed_entries"] += len(positions)
        if positions:
            self._out.add(Passed(tuple(positions), because))

    def persist(self) -> Persist | None:
        """The next batch to persist; None: there is none, or one is pending."""
        if self._persisting is not None or not self._batch:
            return None
        batch = self._persisting = self._batch
        self._batch = Batch(batch.number + 1)
        parts = tuple((each, size, bits) for each, (_, size, bits) in batch.parts.items())
        batch.runs = runs_of(batch.whole)
        return Persist(batch.number, batch.runs, parts, tuple(batch.successions))

    def persisted(self) -> Batch:
        """End the pending batch: its entries in `whole` are durably acknowledged."""
        batch, self._persisting = self._persisting, None
        assert batch is not None
        for run in batch.runs:
            self.acknowledged.add_range(*run)
        if self.partial or self.attempts or self.doomed or self.returned:
            for position in batch.whole:
                self._forget(position)
        return batch

    def reduce(self, position: Position, messages: int, bits: int) -> int:
        """Record durable acknowledgements of a batch's messages (bits). Returns the bits left."""
        left = self.partial.get(position, (1 << messages) - 1) & ~bits
        if left:
            self.partial[position] = left
        return left

    def done(self, position: Position) -> None:
        """Record that the rest of a batch is durably acknowledged."""
        self.acknowledged.add(position)
        self._forget(position)

    def _forget(self, position: Position) -> None:
        """Forget the state of an entry that is durably acknowledged."""
        self.partial.pop(position, None)
        self.attempts.pop(position, None)
        self._failures.forget(position)
        self.doomed.discard(position)
        self.returned.discard(position)

    def is_over(self, position: Position) -> bool:
        """Whether an entry is durably acknowledged, and does not come back as a dead letter."""
        return position in self.acknowledged and position not in self.returned

    def is_gone(self, position: Position) -> bool:
        """Whether an entry is acknowledged as a whole, durably or not yet, also as a dead letter
        that came back."""
        if position not in self.returned:
            return self.is_settled(position)
        persisting = () if self._persisting is None else self._persisting.whole
        return position in self._batch.whole or position in persisting

    def is_settled(self, position: Position) -> bool:
        """Whether an entry is acknowledged as a whole, durably or not yet."""
        return position in self.acknowledged or self.is_settling(position)

    def is_settling(self, position: Position) -> bool:
        """Whether an entry's acknowledgement as a whole is on its way to disk."""
        if position in self._batch.whole:
            return True
        return self._persisting is not None and position in self._persisting.whole

    # ---- failures

    def failed_beyond(self, limit: int | None, position: Position) -> bool:
        """Whether an entry failed more than `limit` times (None: no limit), or is doomed."""
        if position in self.doomed:
            return True
        return limit is not None and self.attempts.get(position, 0) > limit

    def failures(self, position: Position) -> tuple[FailedDelivery, ...]:
        """The latest failed deliveries of an entry, as far as they are known."""
        return self._failures.of(position)

    def record_failure(
        self, flight: Flight, how: How, consumer: str, now_ms: int, reason: str = ""
    ) -> None:
        """Count a failed delivery. Nothing of its key is delivered before that is recorded."""
        position, lane = flight.position, flight.lane
        self.attempts[position] = self.attempts.get(position, 0) + 1
        self._failures.add(position, FailedDelivery(how, now_ms, consumer, reason))
        assert position not in self._to_record, "nothing of the key is delivered before"
        lane.recording += 1
        self._to_record[position] = lane

    def record(self) -> Record | None:
        """The next failures to record; None: there are none, or a record is pending."""
        if self._recording is not None or not self._to_record:
            return None
        self._recording, self._to_record = self._to_record, {}
        failed = (
            FailedEntry(each, self.attempts.get(each, 0), self.failures(each))
            for each in self._recording
        )
        return Record(tuple(failed))

    def recorded(self) -> list[Lane]:
        """End the pending record. Returns the lane of each failure."""
        recording, self._recording = self._recording, None
        assert recording is not None
        for lane in recording.values():
            lane.recording -= 1
        return list(recording.values())


def _pending(batch: Batch, position: Position) -> int:
    """The messages of an entry (bits) that a batch acknowledges in part."""
    part = batch.parts.get(position)
    return 0 if part is None else part[2]


class Failures:
    """The latest failed deliveries of the entries that failed last, in that order."""

    def __init__(self) -> None:
        self._of: dict[Position, tuple[FailedDelivery, ...]] = {}
        self._reasons_bytes = 0

    def of(self, position: Position) -> tuple[FailedDelivery, ...]:
        return self._of.get(position, ())

    def add(self, position: Position, failed: FailedDelivery) -> None:
        before = self._of.pop(position, ())
        if len(before) == FAILURES_MAX:
            self._reasons_bytes -= _size_bytes(before[0].reason)
            before = before[1:]
        self._of[position] = (*before, failed)
        self._reasons_bytes += _size_bytes(failed.reason)
        while len(self._of) > FAILED_ENTRIES_MAX or self._reasons_bytes > REASONS_BYTES_MAX:
            self.forget(next(iter(self._of)))

    def forget(self, position: Position) -> None:
        for each in self._of.pop(position, ()):
            self._reasons_bytes -= _size_bytes(each.reason)


def _size_bytes(text: str) -> int:
    """The most bytes that a text's characters take in memory."""
    return len(text) if text.isascii() else 4 * len(text)


GAPS_MAX: Final = 1_000
"""Limit of remembered gaps; beyond it the oldest one with CONTINUE is forgotten."""

KEY_BYTES_MAX: Final = 2_000
"""Limit of a key's bytes beyond which its digest is stored instead."""


def remembered(key: bytes) -> bytes:
    """The stored form of a key: itself, or its digest."""
    if len(key) <= KEY_BYTES_MAX:
        return key
    return b"blake2b:" + blake2b(key, digest_size=32).digest()


class Gaps:
    """The state of keys of which a message was dead-lettered, by stored form, the oldest first."""

    def __init__(
        self, options: Options, keys: Mapping[bytes, KeyState], returned: Container[Position] = ()
    ) -> None:
        self.keys = dict(keys)
        self._options = options
        self._returned = returned
        self._firsts: dict[Position, Position] = {}

    def state(self, key: bytes) -> KeyState | None:
        return self.keys.get(remembered(key))

    def gap(self, key: bytes) -> Gap | None:
        state = self.state(key)
        return None if state is None else state.gap

    def is_beyond(self, key: bytes, position: Position, after: AfterDeadLetter) -> bool:
        """Whether an earlier message of a key was dead-lettered, with this rule for later ones."""
        state = self.state(key)
        return state is not None and state.after is after and state.gap.position < position

    def holds_behind(self, key: bytes, position: Position) -> bool:
        """Whether a key is held behind this dead-lettered message, until it is released."""
        state = self.state(key)
        if state is None or state.after is not AfterDeadLetter.HOLD or state.has_more:
            return False
        return state.gap.position == position

    def after(self, key: bytes) -> AfterDeadLetter:
        """The rule for a key when one of its messages is dead-lettered now."""
        if self._options.kind is SubscriptionType.SHARED:
            return AfterDeadLetter.CONTINUE
        before = self.state(key)
        return self._options.after_dead_letter if before is None else before.after

    def with_gap(self, key: bytes, gap: Gap) -> KeyState:
        """The state of a key once this message is dead-lettered, too. A key that is held stays held
        behind the first one, and behind the first chunk of a large message; but not behind one that
        is on its way back, which waits in its key like any other."""
        before, after = self.state(key), self.after(key)
        if after is not AfterDeadLetter.HOLD:
            return KeyState(after, gap)
        gap = Gap(self._firsts.get(gap.position, gap.position), gap.attempts)
        if before is None:
            return KeyState(after, gap)
        if before.gap.position == gap.position:
            return KeyState(after, max(before.gap, gap), before.has_more)
        if before.gap.position in self._returned and not before.has_more:
            return KeyState(after, gap)
        return KeyState(after, min(before.gap, gap), has_more=True)

    def record_chunk(self, position: Position, first: Position) -> None:
        """Record where the message of a chunk begins that is dead-lettered: its chunks are one
        gap."""
        self._firsts[position] = first

    def add(self, key: bytes, gap: Gap) -> ForgetKey | None:
        """Record that a message was dead-lettered, which may forget the oldest gap."""
        state = self.with_gap(key, gap)
        self._firsts.pop(gap.position, None)
        self.keys.pop(remembered(key), None)
        self.keys[remembered(key)] = state
        if len(self.keys) > GAPS_MAX:
            for each, state in self.keys.items():
                if state.after is AfterDeadLetter.CONTINUE:
                    return self.forget(each)
        return None

    def forget(self, key: bytes) -> ForgetKey | None:
        """Forget a key. Returns the effect; None: the key is not known."""
        return None if self.keys.pop(remembered(key), None) is None else ForgetKey(key)
