"""What must hold of a history, checked as it happens and when it is over.

TWICE         (P2) an id of a producer, or a chunk of an attempt, is stored again while
              deduplication is on
REORDERED     a log has a producer's ids out of order
OVERTAKEN     (P4) a key's first deliveries are out of order
SPLICED       a chunk follows something else than the chunk before it
INVENTED      something is in the log, or was delivered, that nobody sent
BACKWARDS     append times go back
LOST          (P1) acknowledged to its producer, and not in the log
MISPLACED     a receipt names a place where the message is not
NOT_STALE     called overtaken, and in the log
SKIPPED       acknowledged by the cursor, and no delivery was acknowledged that counts, no filter
              that applied rejects it, it was not dead-lettered, not trimmed, no chunk of an attempt
              that ended unfinished, nobody moved the subscription over it; or it was passed for a
              reason that is not true
UNDONE        what the cursor counted as acknowledged it counts no more, and nobody moved it back
RESURRECTED   (P6) delivered again after its acknowledgement was answered
NOT_DURABLE   its acknowledgement was answered, and the cursor does not have it
SHARED_KEY    (P4) a key is in flight at two consumers
HELD          delivered though its key is held after a dead letter
LETTER_TWICE  in the dead letter topic more than once
LETTER_EARLY  in the dead letter topic, and did not fail as often as it may
COPIED        went through more dead letter topics than a message may
HEADLESS      chunks are delivered of a message that began before the subscription did
CUT           a chunk is stored behind a beginning that was trimmed
FORGOTTEN     a producer that is connected was forgotten as inactive
EPOCH         the epoch of a lease went back, or two instances, or one twice, took a subscription
              under the same
FOLD          (P7) the state of deduplication is not what folding the log gives
EXPLAINED     what Explain says is not so
OVERDRAWN     a consumer's permits are below zero by more than the rest of a batch
BUDGET        a buffer holds more than it may, or more is done at once (budgets.py)
REFUSED       a large message was refused, which should have been cut
SURPRISE      a service failed in a way that it did not foresee, or its process ended
STUCK         faults have stopped, and something that can go on does not
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from seqgate.api.entry.v1 import entry_pb2
from seqgate.client import Dropped, DropReason, Incomplete
from seqgate.payloads import unpack
from seqgate.types import Position, TopicName
from services.cursor.core.cursor import CursorState
from services.dedup.core.topic import TopicState
from services.dispatcher import dead
from services.dispatcher.core.effects import Because
from services.ledger.core.entry import Entry
from tests.simulation.system.seen import (
    NUMBER,
    Appended,
    FilterSet,
    Log,
    Move,
    Origin,
    Place,
    Seen,
    Sent,
    Subscription,
    Token,
    numbers_in,
)

OVERHEAD_BYTES: Final = 200
"""What is around an entry wherever it is held, at most."""

CLOCK_STEP_S: Final = 0.002
"""Times are rounded to milliseconds, by who sends and by who delivers."""

ORIGIN: Final = "seqgate.origin."
"""How the names of properties begin by which a dead letter tells where it comes from."""

RANGES_MAX: Final = 1_000_000

FINAL: Final = (DropReason.ABORTED, DropReason.RESTARTED, DropReason.DUPLICATE)
"""Why the client acknowledges chunks whatever it is told about incomplete messages."""

COME_AGAIN: Final = (DropReason.EVICTED, DropReason.EXPIRED)
"""Why the client gives chunks back that have not failed."""


class Dedup:
    """Whether a topic deduplicates, as far as it can be told from outside."""

    def __init__(self) -> None:
        self._off: dict[str, str] = {}
        self.forgotten: set[tuple[str, str]] = set()
        """Producers of topics that deduplication forgot: what it is told of them is new."""

    def is_on(self, topic: str) -> bool:
        """For certain."""
        return topic not in self._off

    def changing(self, topic: str) -> None:
        """Somebody asks to switch it."""
        self._off[topic] = "unsure"

    def changed(self, topic: str, *, on: bool) -> None:
        """It is switched, everywhere."""
        if on:
            self._off.pop(topic, None)
        else:
            self._off[topic] = "off"


class Checker:
    """See the module. Is told what stores do, and what clients see."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.dedup = Dedup()
        self.folds = Folds(seen, self.dedup)
        self.next_delivery: Callable[[str, str, int], Token | None] = lambda *_: None
        """Of a subscription that an instance has by this epoch, what names its next delivery; None:
        no instance has it."""
        self.import_s = 30.0
        """For how long after an instance took a cursor that was imported what is stored may count
        as acknowledged: it asks where the log ends."""
        self.clocks_agree = False
        """Whether all processes have the same time."""
        self.payload_bytes_max = sys.maxsize
        """How large a payload may be that the ledger never refused."""
        self.is_exact = False
        """Whether nothing fails in this history but what consumers refuse."""

    # ---- the log

    def at_ledger(
        self, method: str, args: tuple[Any, ...], named: dict[str, Any], answer: Any
    ) -> None:
        """The store of logs did something."""
        match method:
            case "append":
                self._appended(*args)
            case "trim":
                topic, before = args
                self._trimmed(str(topic), before)
            case "delete":
                self._deleted(str(args[0]))
            case _:
                pass

    def _appended(
        self,
        topic: TopicName,
        ledger_id: int,
        tail: Position | None,
        entries: Sequence[Entry],
        append_ms: int,
    ) -> None:
        log = self.seen.log(topic)
        entry_id = tail.entry_id + 1 if tail is not None and tail.ledger_id == ledger_id else 0
        for entry in entries:
            position = Position(ledger_id, entry_id)
            appended = self._parsed(str(topic), log, position, entry, append_ms)
            self._check_appended(str(topic), log, appended)
            self._take(str(topic), log, appended)
            entry_id += 1

    def _parsed(
        self, topic: str, log: Log, position: Position, entry: Entry, append_ms: int
    ) -> Appended:
        origin = None
        metadata = entry_pb2.EntryMetadata.FromString(entry.metadata)
        if entry.producer.startswith("seqgate.dead"):
            properties = metadata.properties
            place = Position(*map(int, properties[f"{ORIGIN}id"].split(":")))
            origin = Origin(
                properties[f"{ORIGIN}topic"], properties[f"{ORIGIN}subscription"], place
            )
        log.messages_max = max(log.messages_max, len(entry.sequence_ids))
        size_bytes = len(entry.payload) + len(entry.metadata) + OVERHEAD_BYTES
        log.entry_bytes_max = max(log.entry_bytes_max, size_bytes)
        before = None if origin is None else self.seen.log(origin.topic).at.get(origin.position)
        return Appended(
            position,
            entry.producer,
            tuple(entry.sequence_ids),
            _numbers(entry, metadata),
            entry.chunk,
            append_ms,
            self.seen.now_s(),
            origin,
            0 if before is None else before.generation + 1,
            len(entry.payload),
        )

    def _check_appended(self, topic: str, log: Log, new: Appended) -> None:
        seen, producer = self.seen, new.producer
        what = f"append {topic} {new.position} {producer} {new.ids[0]}-{new.highest} {new.numbers}"
        if new.chunk is not None:
            what += f" chunk {new.chunk.chunk_id}/{new.chunk.num_chunks} {new.chunk.uuid[:4]}"
        seen.note(what)
        if log.entries and new.append_ms < log.entries[-1].append_ms:
            seen.violate("BACKWARDS", f"{topic} {new.position}: {new.append_ms} after "
                         f"{log.entries[-1].append_ms}")  # fmt: skip
        for number in new.numbers:
            sent = seen.sent.get(number)
            if sent is None or (new.origin is None and sent.topic != topic):
                seen.violate("INVENTED", f"{topic} {new.position} has message {number}")
        if new.generation > dead.GENERATIONS_MAX:
            seen.violate("COPIED", f"{topic} {new.position} is copy number {new.generation}")
        if not self.dedup.is_on(topic):
            return
        where = f"{topic} {new.position} {producer}"
        mark = log.marks.get(producer, -1)
        if new.chunk is None or new.chunk.chunk_id == 0:
            stored = log.stored.get(producer, set())
            twice = stored.intersection(new.ids)
            if twice:
                seen.violate("TWICE", f"{where} #{sorted(twice)} is stored already")
            elif new.highest <= mark:
                seen.violate("REORDERED", f"{where} #{new.highest} behind #{mark}")
        if new.chunk is not None:
            attempt = (producer, new.chunk.uuid, new.chunk.chunk_id)
            if attempt in log.chunks:
                seen.violate("TWICE", f"{where} chunk {attempt}")
            last = log.last.get(producer)
            if new.chunk.chunk_id and not (
                last is not None
                and last.chunk is not None
                and last.chunk.layout == new.chunk.layout
                and last.chunk.chunk_id == new.chunk.chunk_id - 1
            ):
                seen.violate("SPLICED", f"{where} chunk {new.chunk} after {last}")
            first = log.attempts.get((producer, new.chunk.uuid), [new.position])[0]
            if log.is_trimmed(first):
                seen.violate("CUT", f"{where} chunk {new.chunk}: the first was at {first}")

    def _take(self, topic: str, log: Log, new: Appended) -> None:
        producer = new.producer
        log.entries.append(new)
        log.at[new.position] = new
        stored = log.stored.setdefault(producer, set())
        if new.chunk is None or new.chunk.is_last:
            if new.highest < log.marks.get(producer, -1):  # it has started over
                stored.difference_update([each for each in stored if each > new.highest])
            stored.update(new.ids)
            log.marks[producer] = new.highest
        elif new.highest <= log.marks.get(producer, -1):
            stored.difference_update([each for each in stored if each >= new.highest])
            log.marks[producer] = new.highest - 1
        if new.chunk is not None:
            log.chunks.add((producer, new.chunk.uuid, new.chunk.chunk_id))
            log.attempts.setdefault((producer, new.chunk.uuid), []).append(new.position)
        log.last[producer] = new
        for (of, _), subscription in self.seen.subscriptions.items():
            if of == topic:
                subscription.waiting[new.position] = None
        if new.origin is not None:
            self._lettered(topic, new, new.origin)

    def _lettered(self, topic: str, new: Appended, origin: Origin) -> None:
        subscription = self.seen.subscription(origin.topic, origin.subscription)
        letter = (origin.position, new.chunk.chunk_id if new.chunk else 0)
        self.seen.counts["dead letters"] += 1
        if letter in subscription.lettered:
            self.seen.violate("LETTER_TWICE", f"{origin} at {new.position} and before")
        self._check_failures(subscription, origin)
        subscription.lettered.add(letter)
        if subscription.holds and new.numbers:
            key = self._key(subscription, new.numbers[0], (origin.position, 0))
            subscription.held.setdefault(key, (origin.position, self._from_now_on(subscription)))

    def _check_failures(self, subscription: Subscription, origin: Origin) -> None:
        """Where nothing else fails, a message failed as often as consumers refused it, or a chunk
        of it."""
        most = subscription.redeliveries_max
        if not self.is_exact or most is None or subscription.letters_tail:
            return
        log = self.seen.log(origin.topic)
        entry = log.at.get(origin.position)
        chunk = None if entry is None else entry.chunk
        places = [origin.position]
        if entry is not None and chunk is not None:
            places = log.attempts[entry.producer, chunk.uuid]
        times = max(subscription.refused[each] for each in places)
        if times <= most:
            self.seen.violate("LETTER_EARLY", f"{origin} was refused {times} times")

    def _trimmed(self, topic: str, before: Position) -> None:
        self.seen.note(f"trim {topic} before {before}")
        self.seen.counts["trims"] += 1
        log = self.seen.log(topic)
        if log.kept_from is None or before > log.kept_from:
            log.kept_from = before

    def trimmed_are(self, topic: str, first: Position | None, listed: Mapping[str, int]) -> None:
        """(P7) A trim leaves this as the first entry; what the store remembers of producers whose
        entries it has no more. Those of large messages are left out: what they come to depends on
        where they were cut."""
        log = self.seen.log(topic)
        marks, entries = log.trimmed_marks, log.entries
        while log.trimmed < len(entries) and (
            first is None or entries[log.trimmed].position < first
        ):
            each = entries[log.trimmed]
            marks[each.producer] = each.highest
            if each.chunk is not None:
                log.trimmed_chunks.add(each.producer)
            log.trimmed += 1
        for producer in marks.keys() - log.trimmed_chunks:
            has = listed.get(producer)
            if has != marks[producer]:
                self.seen.violate(
                    "FOLD", f"{topic} {producer}: {has}, and what was trimmed says "
                    f"{marks[producer]}"
                )  # fmt: skip

    def _deleted(self, topic: str) -> None:
        self.seen.note(f"delete {topic}")
        self.seen.counts["topics deleted"] += 1
        before = self.seen.log(topic)
        last = before.entries[-1].position.ledger_id if before.entries else before.deleted_ledger
        self.seen.logs[topic] = Log(deleted_ledger=last)
        for (of, _), subscription in self.seen.subscriptions.items():
            if of == topic:
                subscription.waiting.clear()

    # ---- what producers are told

    def answered(
        self, sent: Sent, sequence_id: int, position: Position, *, duplicate: bool
    ) -> None:
        """A producer was told that its message is in the log."""
        self.seen.counts["duplicate receipts" if duplicate else "receipts"] += 1
        sent.outcome = "duplicate" if duplicate else "stored"
        self.seen.note(f"receipt {sent.number} {sent.producer}#{sequence_id} at {position}")
        log = self.seen.log(sent.topic)
        what = f"message {sent.number}, {sent.topic} {sent.producer}#{sequence_id} at {position}"
        at = log.at.get(position)
        if at is None:
            if not log.is_trimmed(position):
                self.seen.violate("LOST", what)
            return
        if sent.number not in at.numbers or sequence_id not in at.ids:
            kind = (
                "MISPLACED" if any(sent.number in each.numbers for each in log.entries) else "LOST"
            )
            self.seen.violate(kind, f"{what}: there is {at}")
        elif at.chunk is not None:
            chunks = log.attempts[at.producer, at.chunk.uuid]  # twice, where nobody deduplicates
            end = chunks.index(position) + 1
            found = [log.at[each].chunk for each in chunks[max(0, end - at.chunk.num_chunks) : end]]
            ids = [chunk.chunk_id for chunk in found if chunk is not None]
            if ids != list(range(at.chunk.num_chunks)):
                self.seen.violate("LOST", f"{what}: only chunks at {chunks}")
            elif log.is_trimmed(chunks[0]) and not log.is_trimmed(position):
                self.seen.note(f"a part of message {sent.number} is trimmed")

    def refused(self, sent: Sent, reason: str) -> None:
        """A producer was told something else."""
        self.seen.counts[f"refused {reason}"] += 1
        sent.outcome = reason
        self.seen.note(f"refused {sent.number} {sent.producer}#{sent.sequence_id}: {reason}")
        log = self.seen.log(sent.topic)
        if reason == "TRIMMED" and log.kept_from is None and not log.deleted_ledger:
            self.seen.violate("NOT_TRIMMED", f"message {sent.number}: nothing was trimmed")
        if reason == "STALE" and sent.sequence_id is not None:
            for each in log.entries:
                is_there = sent.number in each.numbers and sent.sequence_id in each.ids
                is_whole = each.chunk is None or each.chunk.is_last
                if is_there and is_whole and not log.is_trimmed(each.position):
                    self.seen.violate("NOT_STALE", f"message {sent.number} is at {each.position}")

    # ---- cursors

    def cursor_created(self, topic: TopicName, name: str, mark_delete: Position | None) -> None:
        """The store of cursors made a cursor."""
        if name.startswith("seqgate.") or topic.is_system:
            return
        self.seen.note(f"cursor {topic} {name} made at {mark_delete}")
        subscription = self.seen.subscription(topic, name)
        log = self.seen.log(topic)
        subscription.start = mark_delete
        subscription.acknowledged.clear()
        subscription.waiting = dict.fromkeys(each.position for each in log.entries)
        for position in list(subscription.waiting):
            if mark_delete is not None and position <= mark_delete:
                del subscription.waiting[position]
                subscription.acknowledged.add(position)

    def cursor_deleted(self, topic: TopicName, name: str) -> None:
        """The store of cursors removed one."""
        self.seen.note(f"cursor {topic} {name} is gone")
        before = self.seen.subscriptions.pop((str(topic), name), None)
        if before is not None:
            after = self.seen.subscriptions[str(topic), name] = before.made_again()
            after.waiting = dict.fromkeys(each.position for each in self.seen.log(topic).entries)

    def cursor_changed(self, topic: TopicName, name: str, state: CursorState) -> None:
        """The store of cursors changed a subscription's cursor to this."""
        if name.startswith("seqgate.") or topic.is_system:
            return
        subscription = self.seen.subscription(topic, name)
        self._check_epoch(subscription, state)
        subscription.remembers_keys = any(
            each.startswith(dead._KEY) for each in state.head.properties
        )
        log = self.seen.log(topic)
        acknowledged = state.acknowledged(None, RANGES_MAX)
        mark = state.head.mark_delete
        now: set[Position] = set()
        for first, last_entry in acknowledged.ranges:
            now.update(
                Position(first.ledger_id, entry) for entry in range(first.entry_id, last_entry + 1)
            )
        parts = {
            each.position: sum(1 << index for index in each.indexes)
            for each in acknowledged.batches
        }

        def is_there(position: Position) -> bool:
            return (mark is not None and position <= mark) or position in now

        lost = [each for each in subscription.acknowledged if not is_there(each)]
        lost_parts = [
            (position, bits & ~parts.get(position, 0))
            for position, bits in subscription.parts.items()
            if bits & ~parts.get(position, 0) and not is_there(position)
        ]
        taken = [each for each in subscription.waiting if is_there(each)]
        skipped = []
        for position in taken:
            del subscription.waiting[position]
            subscription.acknowledged.add(position)
            why = self._reason(subscription, log, position)
            self.seen.note(f"acknowledged {subscription.name} {position}: {why}")
            if not why:
                skipped.append(position)
        subscription.parts = parts
        if lost or lost_parts:
            self._undone(subscription, log, lost, lost_parts)
        if skipped:
            self._skipped(subscription, log, skipped)

    def _check_epoch(self, subscription: Subscription, state: CursorState) -> None:
        lease = state.head.lease
        if lease is None:
            return
        if lease.epoch < subscription.epoch or lease.epoch <= subscription.spent_epoch:
            before = max(subscription.epoch, subscription.spent_epoch)
            self.seen.violate(
                "EPOCH", f"{subscription.topic} {subscription.name}: {lease.epoch} after {before}"
            )
        subscription.is_taken_now = lease.epoch > subscription.epoch
        for move in subscription.moves:
            if move.is_import and move.taken_s is None:
                move.taken_s = self.seen.now_s()
        subscription.epoch = lease.epoch

    def taken(self, topic: TopicName, name: str, epoch: int) -> None:
        """An instance takes a subscription: its deliveries are named by the epoch from now on, and
        nobody else's may be, nor those that it made before it was started again."""
        subscription = self.seen.subscription(topic, name)
        if epoch in subscription.taken_epochs:
            self.seen.violate("EPOCH", f"{topic} {name} is taken twice under {epoch}")
        subscription.taken_epochs.add(epoch)

    def _undone(
        self,
        subscription: Subscription,
        log: Log,
        lost: Sequence[Position],
        parts: Sequence[tuple[Position, int]],
    ) -> None:
        """The cursor counts entries, or some messages of batches, as acknowledged no more."""
        undone = {*lost, *(position for position, _ in parts)}
        first = min((each for each in undone if not log.is_trimmed(each)), default=None)
        subscription.acknowledged.difference_update(lost)
        self._forget(subscription, undone)
        subscription.start = None
        subscription.waiting = dict.fromkeys(
            each.position for each in log.entries if each.position not in subscription.acknowledged
        )
        if first is not None and not any(
            each.is_open
            and (each.start is None or each.is_import or self._first_of(log, each.start) <= first)
            for each in subscription.moves
        ):
            self.seen.violate(
                "UNDONE", f"{subscription.topic} {subscription.name} {sorted(lost)} {parts}"
            )
        self._moved(subscription)

    def _first_of(self, log: Log, position: Position) -> Position:
        """Where the message begins that an entry is of."""
        entry = log.at.get(position)
        if entry is None or entry.chunk is None:
            return position
        return log.attempts[entry.producer, entry.chunk.uuid][0]

    def _forget(self, subscription: Subscription, positions: set[Position]) -> None:
        now_s = self.seen.now_s()
        for position in positions:
            subscription.undone_s[position] = now_s
            subscription.passed.pop(position, None)
            subscription.dropped.discard(position)
        for places in (subscription.asked, subscription.done):
            for place in [each for each in places if each[0] in positions]:
                del places[place]
        first = min(positions)
        for place in [each for each in subscription.through if each[0] >= first]:
            del subscription.through[place]
        subscription.lettered = {each for each in subscription.lettered if each[0] not in positions}
        for key in [key for key, (at, _) in subscription.held.items() if at in positions]:
            del subscription.held[key]

    def _skipped(self, subscription: Subscription, log: Log, skipped: list[Position]) -> None:
        """The cursor counts entries as acknowledged for no reason but that it was moved."""
        last = max(skipped)
        if any(
            each.is_open and each.start is not None and self._may_skip(each, log, last)
            for each in subscription.moves
        ):
            self._moved(subscription)
            return
        for position in skipped:
            self.seen.violate(
                "SKIPPED",
                f"{subscription.topic} {subscription.name} {position}: messages "
                f"{log.at[position].numbers}",
            )

    def _may_skip(self, move: Move, log: Log, last: Position) -> bool:
        """Whether a move explains that everything up to an entry counts as acknowledged."""
        assert move.start is not None
        if not move.is_import:
            return last < move.start
        until_s = self.seen.now_s() if move.taken_s is None else move.taken_s + self.import_s
        return last <= move.start and log.at[last].at_s <= until_s

    def _moved(self, subscription: Subscription) -> None:
        """The subscription goes on somewhere else: what was delivered before counts no more."""
        subscription.floor = self._from_now_on(subscription)
        subscription.first_of_key.clear()
        subscription.delivered.clear()
        self.seen.note(f"moved {subscription.name}, from delivery {subscription.floor} on")

    def _from_now_on(self, subscription: Subscription) -> Token:
        """The least token of what is delivered from now on."""
        epoch = subscription.epoch
        token = self.next_delivery(subscription.topic, subscription.name, epoch)
        if token is not None:
            return token
        # An instance that takes it has delivered nothing yet, one that is no more will not.
        return (epoch if subscription.is_taken_now else epoch + 1, 0)

    def _reason(self, subscription: Subscription, log: Log, position: Position) -> str:
        """Why an entry may be acknowledged; empty: it may not."""
        entry = log.at[position]
        through = max(subscription.through, default=None)
        if all(
            (position, index) in subscription.asked
            or (through is not None and (position, index) <= through)
            for index in range(len(entry.ids))
        ):
            return "asked"
        if log.is_trimmed(position):
            return "trimmed"
        if any(position == lettered for lettered, _ in subscription.lettered):
            return "dead-lettered"
        if position in subscription.dropped:
            return "dropped"
        if log.is_beheaded(position):
            return "beheaded"
        if log.is_aborted(position):
            return "aborted"
        if position in subscription.passed:
            return f"passed: {subscription.passed[position]}"
        tags = {self.seen.sent[number].tag for number in entry.numbers}
        if tags and tags <= self._rejected(subscription, entry):
            return "rejected"
        return ""

    def _rejected(self, subscription: Subscription, entry: Appended) -> set[str]:
        """The tags of what may have been rejected since an entry was stored: by each filter but
        those in the place of which others were before. Chunks share the verdict of the first."""
        log = self.seen.log(subscription.topic)
        since_s = log.at[self._first_of(log, entry.position)].at_s
        rejected: set[str] = set()
        for each in reversed(subscription.filters):
            rejected |= each.rejected
            if each.answered_s is not None and each.answered_s <= since_s:
                break
        return rejected

    def filters(self, topic: str, name: str, rejected: Iterable[str]) -> FilterSet:
        """Somebody asks to filter a subscription."""
        asked = FilterSet(self.seen.now_s(), frozenset(rejected))
        self.seen.subscription(topic, name).filters.append(asked)
        return asked

    def passed(
        self, topic: TopicName, name: str, positions: Sequence[Position], because: Because
    ) -> None:
        """The dispatcher says that it acknowledges entries though nobody received them."""
        subscription, log = self.seen.subscription(topic, name), self.seen.log(topic)
        for position in positions:
            self.seen.counts[f"passed {because.name}"] += 1
            self.seen.note(f"passed {topic} {name} {position}: {because.name}")
            subscription.passed[position] = because.name
            if not log.is_trimmed(position) and not self._may_be_passed(
                subscription, log, log.at[position], because
            ):
                self.seen.violate("SKIPPED", f"{topic} {name} {position}: {because.value}")

    def _may_be_passed(
        self, subscription: Subscription, log: Log, entry: Appended, because: Because
    ) -> bool:
        match because:
            case Because.HEADLESS if entry.chunk is not None and entry.chunk.chunk_id:
                first = log.attempts[entry.producer, entry.chunk.uuid][0]
                is_there = log.at[first].chunk.chunk_id == 0  # type: ignore[union-attr]
                return (
                    not is_there
                    or log.is_trimmed(first)
                    or first in subscription.acknowledged
                    or bool(self._reason(subscription, log, first))
                )
            case Because.CYCLE:
                return entry.generation >= dead.GENERATIONS_MAX
            case Because.LETTER_REFUSED:
                return entry.payload_bytes > self.payload_bytes_max
            case _:
                return False

    def dropped(self, topic: str, name: str, dropped: Dropped, incomplete: Incomplete) -> None:
        """A consumer's client let go of chunks; some of them it acknowledges."""
        subscription = self.seen.subscription(topic, name)
        self.seen.counts[f"dropped {dropped.reason.name}"] += 1
        self.seen.note(f"dropped {name} {dropped.positions}: {dropped.reason.name}")
        if dropped.reason is DropReason.HEADLESS:
            self._check_headless(subscription, dropped)
        if dropped.reason is DropReason.CORRUPT:
            self.seen.violate("INVENTED", f"{topic} {name} {dropped}")
        if dropped.reason in FINAL or incomplete is Incomplete.ACKNOWLEDGE:
            subscription.dropped.update(dropped.positions)
        elif dropped.reason not in COME_AGAIN:
            for position in dropped.positions:
                subscription.refused[position] += 1

    def _check_headless(self, subscription: Subscription, dropped: Dropped) -> None:
        """What begins before the subscription does is nobody's: it is passed, and not delivered."""
        log, start = self.seen.log(subscription.topic), subscription.start
        chunks = log.attempts.get((dropped.producer, dropped.uuid))
        if chunks and start is not None and chunks[0] <= start:
            self.seen.violate(
                "HEADLESS",
                f"{subscription.topic} {subscription.name} begins behind {start}, and is delivered "
                f"{dropped.positions} of a message at {chunks[0]}",
            )

    # ---- what consumers see

    def acknowledged_when(self, subscription: Subscription, place: Place) -> bool:
        """Whether the cursor has a message."""
        position, index = place
        return (
            position in subscription.acknowledged
            or bool(subscription.parts.get(position, 0) >> index & 1)
            or self.seen.log(subscription.topic).is_trimmed(position)
        )

    def asks(self, topic: str, name: str, places: Iterable[Place], token: Token) -> None:
        """A consumer asks to acknowledge messages by a delivery."""
        asked = self.seen.subscription(topic, name).asked
        for place in places:
            asked.setdefault(place, set()).add(token)

    def asks_through(self, topic: str, name: str, place: Place, token: Token) -> None:
        """The one consumer asks to acknowledge everything up to a message."""
        self.seen.subscription(topic, name).through.setdefault(place, set()).add(token)

    def not_asked(self, topic: str, name: str, places: Iterable[Place], token: Token) -> None:
        """It was told that the delivery counts no more: it asked for nothing, unless it lost its
        connection, and does not know."""
        if not self.is_exact:
            return
        subscription = self.seen.subscription(topic, name)
        for place in places:
            for known in (subscription.asked, subscription.through):
                tokens = known.get(place, set())
                tokens.discard(token)
                if not tokens:
                    known.pop(place, None)

    def refuses(self, topic: str, name: str, places: Iterable[Place]) -> None:
        """A consumer refuses messages."""
        refused = self.seen.subscription(topic, name).refused
        for position in {position for position, _ in places}:
            refused[position] += 1

    def done(self, topic: str, name: str, place: Place, token: Token, asked_s: float) -> None:
        """A consumer was told that an acknowledgement for which it asked then is durable."""
        self.seen.counts["acknowledgements"] += 1
        self.seen.note(f"done {name} {place} {token}")
        subscription = self.seen.subscription(topic, name)
        if place[0] not in self.seen.log(topic).at or token < subscription.floor:
            return
        if subscription.undone_s.get(place[0], -1.0) >= asked_s:
            return
        if not self.acknowledged_when(subscription, place):
            self.seen.violate("NOT_DURABLE", f"{topic} {name} {place}")
        subscription.done[place] = token

    def delivered(
        self, topic: str, name: str, consumer: str, token: Token, place: Place, number: int,
        attempts: int,
    ) -> None:  # fmt: skip
        """A consumer was given a message."""
        seen = self.seen
        subscription = seen.subscription(topic, name)
        seen.counts["deliveries"] += 1
        seen.note(f"delivered {name} {consumer} {place} {token} {number} {attempts}")
        what = f"{topic} {name} {place} by {token} to {consumer}"
        if number not in seen.sent:
            seen.violate("INVENTED", what)
            return
        self._check_time(seen.sent[number], what)
        if token < subscription.floor:
            return
        before = subscription.done.get(place)
        if before is not None and token > before:
            seen.violate("RESURRECTED", f"{what}: done by {before}")
        self._check_order(subscription, place, token, seen.sent[number], what)

    def _check_time(self, sent: Sent, what: str) -> None:
        """Nothing comes before it is to be delivered."""
        if sent.delay_s and self.clocks_agree:
            assert sent.asked_s is not None
            early_s = sent.asked_s + sent.delay_s - self.seen.now_s()
            if early_s > CLOCK_STEP_S:
                self.seen.violate("EARLY", f"{what}: by {early_s:.3f} s")

    def _check_order(
        self, subscription: Subscription, place: Place, token: Token, sent: Sent, what: str
    ) -> None:
        """First deliveries of a key are in the order of the log, and none comes while it is held.
        (Delayed messages let others go first, unless they hold their keys.)"""
        if not subscription.is_ordered or (sent.delay_s and not subscription.delays_hold):
            return
        key = self._key(subscription, sent.number, place)
        held = subscription.held.get(key)
        if held is not None and held[0] < place[0] and token >= held[1]:
            self.seen.violate("HELD", f"{what}: its key is held since {held}")
        last = subscription.first_of_key.get(key)
        if place in subscription.delivered:
            return
        subscription.delivered.add(place)
        if last is not None and place < last[0] and last[1] < token:
            self.seen.violate("OVERTAKEN", f"{what}: {last} of its key was before")
        if last is None or place > last[0]:
            subscription.first_of_key[key] = (place, token)

    def _key(self, subscription: Subscription, number: int, place: Place) -> object:
        if subscription.kind == "EXCLUSIVE":
            return ""
        sent = self.seen.sent[number]
        return place if sent.key is None or not sent.is_keyed else sent.key

    def moves(self, topic: str, name: str, start: Position | None) -> Move:
        """Somebody asks to move a subscription: what is delivered first; None: the first entry
        there is."""
        move = Move(self.seen.now_s(), start)
        self.seen.subscription(topic, name).moves.append(move)
        return move

    def imported(self, topic: str, name: str, beyond: Position) -> None:
        """Somebody else makes the cursor of a subscription, which says more than there is. What is
        stored until an instance takes it counts as acknowledged; then it is taken back."""
        move = Move(self.seen.now_s(), beyond, is_import=True)
        self.seen.subscription(topic, name).moves.append(move)

    def explained(self, topic: str, name: str, position: Position, said: Sequence[str]) -> None:
        """The dispatcher said why an entry is not delivered."""
        subscription, log = self.seen.subscription(topic, name), self.seen.log(topic)
        self.seen.note(f"explained {topic} {name} {position}: {', '.join(said)}")
        what = f"{topic} {name} {position}: {', '.join(said)}"
        is_gone = position not in log.at or log.is_trimmed(position)
        is_moved = any(each.is_open for each in subscription.moves)
        if "REASON_NO_ENTRY" in said and not is_gone:
            self.seen.violate("EXPLAINED", f"{what}, and it is there")
        has_letter = any(lettered == position for lettered, _ in subscription.lettered)
        if "REASON_DEAD_LETTERED" in said and not (is_moved or has_letter):
            self.seen.violate("EXPLAINED", f"{what}, and there is no letter")
        if "REASON_ACKNOWLEDGED" in said and not (is_gone or is_moved):
            if position not in subscription.acknowledged:
                self.seen.violate("EXPLAINED", f"{what}, and the cursor does not have it")
                return
            token = self.next_delivery(topic, name, subscription.epoch)
            if token is not None:
                for index in range(len(log.at[position].ids)):
                    subscription.done.setdefault((position, index), token)

    def reported(self, topic: str, name: str, report: Any) -> None:
        """The dispatcher said what a subscription does."""
        for each in report.consumers:
            self.permits(topic, name, each.name, each.permits)

    def permits(self, topic: str, name: str, consumer: str, permits: int) -> None:
        """How many permits a consumer has: its last delivery may have been a batch of which not
        all had one."""
        least = 1 - self.seen.log(topic).messages_max
        if permits < least:
            self.seen.violate("OVERDRAWN", f"{topic} {name} {consumer}: {permits} permits")

    def look(self, live: Any) -> None:
        """What a subscription has in flight at a dispatcher."""
        topic, name = str(live.topic), live.name
        owners: dict[object, int] = {}
        log = self.seen.log(topic)
        for consumer in live.machine.consumers.values():
            self.permits(topic, name, consumer.name, consumer.permits)
            if not live.machine.options.orders_keys:
                continue
            for flight in consumer.flights.values():
                entry = log.at.get(flight.position)
                if entry is None or not entry.numbers:
                    continue
                key = self._key_in(live, entry)
                if owners.setdefault(key, consumer.id) != consumer.id:
                    self.seen.violate(
                        "SHARED_KEY", f"{topic} {name}: {key!r} is in flight at two consumers"
                    )

    def _key_in(self, live: Any, entry: Appended) -> object:
        sent = self.seen.sent[entry.numbers[0]]
        if live.machine.options.kind.name == "EXCLUSIVE":
            return ""
        return entry.position if sent.key is None or not sent.is_keyed else sent.key

    # ---- deduplication's state

    def forgot(self, topic: str, producer: str, *, is_inactive: bool, connected_s: float) -> None:
        """Deduplication forgets a producer, which has been connected for so long."""
        self.seen.counts["purged producers" if is_inactive else "evicted producers"] += 1
        self.seen.note(f"forget {topic} {producer} {is_inactive}, connected for {connected_s:.1f}")
        if is_inactive and connected_s >= 0 and self.dedup.is_on(topic):
            self.seen.violate("FORGOTTEN", f"{topic} {producer}, connected for {connected_s:.1f} s")
        self.dedup.forgotten.add((topic, producer))
        log = self.seen.log(topic)
        log.marks.pop(producer, None)
        log.stored.pop(producer, None)


@dataclass(slots=True)
class Fold:
    """What folding a log gives, up to what deduplication has.

    Attributes:
        size: how many entries are folded.
        marks: of each producer.
        is_compared: whether all producers were compared since deduplication began with this log.
    """

    size: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    is_compared: bool = False


class Folds:
    """P7: what deduplication says of each topic, held against the log after each step."""

    def __init__(self, seen: Seen, dedup: Dedup) -> None:
        self._seen = seen
        self._dedup = dedup
        self._folds: dict[str, Fold] = {}

    def check(self, topic: str, state: TopicState, *, is_all: bool) -> None:
        """Compare the producers of what was confirmed since the last time, or all."""
        log = self._seen.log(topic)
        if log.deleted_ledger or topic not in self._seen.logs:
            return
        known = self._folds.setdefault(topic, Fold())
        entries, confirmed = log.entries, state.confirmed
        if confirmed is None or (known.size and entries[known.size - 1].position > confirmed):
            self._folds[topic] = known = Fold()
        changed = set()
        while known.size < len(entries) and confirmed and entries[known.size].position <= confirmed:
            each = entries[known.size]
            is_whole = each.chunk is None or each.chunk.is_last
            known.marks[each.producer] = each.highest if is_whole else each.highest - 1
            changed.add(each.producer)
            known.size += 1
        if not known.is_compared and confirmed is not None:
            # What was trimmed has been told with the first entries that are left, if there are any.
            is_all = is_all or log.kept_from is None or confirmed >= log.kept_from
            known.is_compared = is_all
        for producer in known.marks if is_all else changed:
            self._compare(topic, producer, known.marks[producer], state)

    def _compare(self, topic: str, producer: str, mark: int, state: TopicState) -> None:
        if (topic, producer) in self._dedup.forgotten or mark < 0:
            return
        tracked = state.producers.get(producer)
        has = None if tracked is None else tracked.marks.decided
        if has != mark:
            self._seen.violate(
                "FOLD",
                f"{topic} {producer}: {has}, and the log up to {state.confirmed} says {mark}",
            )


def _numbers(entry: Entry, metadata: entry_pb2.EntryMetadata) -> tuple[int, ...]:
    """The numbers of the messages in an entry."""
    if NUMBER in metadata.properties:
        return (int(metadata.properties[NUMBER]),)
    return numbers_in(unpack(metadata, entry.payload))
