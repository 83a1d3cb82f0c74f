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
SKIPPED       acknowledged by the cursor, and nobody asked for that, no filter rejected it, it
              was not dead-lettered, not trimmed, no chunk of an attempt that ended unfinished, and
              nobody moved the subscription over it
UNDONE        what the cursor counted as acknowledged it counts no more, and nobody moved it
RESURRECTED   (P6) delivered again after its acknowledgement was answered
NOT_DURABLE   its acknowledgement was answered, and the cursor does not have it
HELD          delivered though its key is held after a dead letter
LETTER_TWICE  in the dead letter topic more than once
FOLD          (P7) the state of deduplication is not what folding the log gives
OVERDRAWN     a consumer's permits are below zero by more than its last batch
BUDGET        a buffer holds more than it may
SURPRISE      a service failed in a way that it did not foresee, or its process ended
STUCK         faults have stopped, and something that can go on does not
"""

from collections.abc import Sequence
from typing import Any, Final

from seqgate.api.entry.v1 import entry_pb2
from seqgate.types import Position, TopicName
from services.cursor.core.cursor import CursorState
from services.dedup.core.topic import TopicState
from services.ledger.core.entry import Entry
from tests.simulation.system.seen import (
    Appended,
    Log,
    Move,
    Origin,
    Place,
    Seen,
    Sent,
    Subscription,
    numbers_in,
)

ORIGIN: Final = "seqgate.origin."
"""How the names of properties begin by which a dead letter tells where it comes from."""

RANGES_MAX: Final = 1_000_000

HELD_S: Final = 8.0
"""For so long a consumer may have messages of a key that is held, of virtual time: they were
delivered before."""

BATCH_MESSAGES_MAX: Final = 10
"""The largest batch of the workload: by as many permits a consumer's may be overdrawn."""


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

    # ---- the log

    def at_ledger(
        self, method: str, args: tuple[Any, ...], named: dict[str, Any], answer: Any
    ) -> None:
        """The store of logs did something."""
        match method:
            case "append":
                self._appended(*args)
            case "trims":  # it may be cut off in the middle
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
        if entry.producer.startswith("seqgate.dead"):
            properties = entry_pb2.EntryMetadata.FromString(entry.metadata).properties
            place = Position(*map(int, properties[f"{ORIGIN}id"].split(":")))
            origin = Origin(
                properties[f"{ORIGIN}topic"], properties[f"{ORIGIN}subscription"], place
            )
        numbers = numbers_in(entry.payload)
        if entry.chunk is not None and not numbers:
            before = log.attempts.get((entry.producer, entry.chunk.uuid))
            numbers = log.at[before[-1]].numbers if before else ()
        return Appended(
            position,
            entry.producer,
            tuple(entry.sequence_ids),
            numbers,
            entry.chunk,
            append_ms,
            self.seen.now_s(),
            origin,
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
        if letter in subscription.lettered and not subscription.moves:
            self.seen.violate("LETTER_TWICE", f"{origin} at {new.position} and before")
        subscription.lettered.add(letter)
        if subscription.holds and new.numbers:
            key = self._key(subscription, new.numbers[0], (origin.position, 0))
            subscription.held.setdefault(key, (origin.position, self.seen.now_s()))

    def _trimmed(self, topic: str, before: Position) -> None:
        self.seen.note(f"trim {topic} before {before}")
        self.seen.counts["trims"] += 1
        log = self.seen.log(topic)
        if log.kept_from is None or before > log.kept_from:
            log.kept_from = before

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
            chunks = log.attempts[at.producer, at.chunk.uuid]
            if len(chunks) != at.chunk.num_chunks:
                self.seen.violate("LOST", f"{what}: only chunks at {chunks}")
            elif log.is_trimmed(chunks[0]) and not log.is_trimmed(position):
                self.seen.note(f"a part of message {sent.number} is trimmed")

    def refused(self, sent: Sent, reason: str) -> None:
        """A producer was told something else."""
        self.seen.counts[f"refused {reason}"] += 1
        sent.outcome = reason
        self.seen.note(f"refused {sent.number} {sent.producer}#{sent.sequence_id}: {reason}")
        if reason == "STALE" and sent.sequence_id is not None:
            log = self.seen.log(sent.topic)
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
        subscription.acknowledged.clear()
        subscription.waiting = dict.fromkeys(each.position for each in self.seen.log(topic).entries)
        for position in list(subscription.waiting):
            if mark_delete is not None and position <= mark_delete:
                del subscription.waiting[position]
                subscription.acknowledged.add(position)

    def cursor_deleted(self, topic: TopicName, name: str) -> None:
        """The store of cursors removed one."""
        self.seen.note(f"cursor {topic} {name} is gone")
        before = self.seen.subscriptions.pop((str(topic), name), None)
        if before is not None:
            after = self.seen.subscription(topic, name)
            after.kind, after.is_ordered = before.kind, before.is_ordered
            after.holds, after.moves = before.holds, before.moves

    def cursor_changed(self, topic: TopicName, name: str, state: CursorState) -> None:
        """The store of cursors changed a subscription's cursor to this."""
        if name.startswith("seqgate.") or topic.is_system:
            return
        subscription = self.seen.subscription(topic, name)
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
        lost = [
            each
            for each in subscription.acknowledged
            if not ((mark is not None and each <= mark) or each in now)
        ]
        if lost:
            self._undone(subscription, log, lost)
        taken = [
            each
            for each in subscription.waiting
            if (mark is not None and each <= mark) or each in now
        ]
        for position in taken:
            del subscription.waiting[position]
            subscription.acknowledged.add(position)
            why = self._reason(subscription, log, position)
            self.seen.note(f"acknowledged {subscription.name} {position}: {why}")
            if not why:
                self.seen.violate(
                    "SKIPPED", f"{topic} {name} {position}: messages {log.at[position].numbers}"
                )
        subscription.parts = parts

    def _undone(self, subscription: Subscription, log: Log, lost: list[Position]) -> None:
        for position in sorted(lost):
            subscription.acknowledged.discard(position)
            for place in [each for each in subscription.done if each[0] == position]:
                del subscription.done[place]
        if not subscription.moves:
            self.seen.violate("UNDONE", f"{subscription.topic} {subscription.name} {sorted(lost)}")
        subscription.waiting = dict.fromkeys(
            each.position for each in log.entries if each.position not in subscription.acknowledged
        )

    def _reason(self, subscription: Subscription, log: Log, position: Position) -> str:
        """Why an entry may be acknowledged; empty: it may not."""
        entry = log.at[position]
        places = [(position, index) for index in range(len(entry.ids))]
        through = subscription.through
        if all(
            each in subscription.asked or (through is not None and each <= through)
            for each in places
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
        if subscription.moves:
            return "moved"
        tags = {self.seen.sent[number].tag for number in entry.numbers}
        if tags and tags <= subscription.rejected_tags:
            return "rejected"
        return ""

    # ---- what consumers see

    def acknowledged_when(self, subscription: Subscription, place: Place) -> bool:
        """Whether the cursor has a message."""
        position, index = place
        return (
            position in subscription.acknowledged
            or bool(subscription.parts.get(position, 0) >> index & 1)
            or self.seen.log(subscription.topic).is_trimmed(position)
        )

    def done(self, subscription: Subscription, place: Place, token: tuple[int, int]) -> None:
        """A consumer was told that its acknowledgement is durable."""
        self.seen.counts["acknowledgements"] += 1
        self.seen.note(f"done {subscription.name} {place} {token}")
        if subscription.moves or place[0] not in self.seen.log(subscription.topic).at:
            return
        if not self.acknowledged_when(subscription, place):
            self.seen.violate("NOT_DURABLE", f"{subscription.topic} {subscription.name} {place}")
        subscription.done[place] = token

    def delivered(
        self, subscription: Subscription, consumer: str, token: tuple[int, int], place: Place,
        number: int, attempts: int,
    ) -> None:  # fmt: skip
        """A consumer was given a message."""
        seen = self.seen
        seen.counts["deliveries"] += 1
        seen.note(f"delivered {subscription.name} {consumer} {place} {token} {number} {attempts}")
        what = f"{subscription.topic} {subscription.name} {place} by {token} to {consumer}"
        if number not in seen.sent:
            seen.violate("INVENTED", what)
            return
        before = subscription.done.get(place)
        if before is not None and token > before and not subscription.moves:
            seen.violate("RESURRECTED", f"{what}: done by {before}")
        self._check_order(subscription, place, token, seen.sent[number], what)

    def _check_order(
        self,
        subscription: Subscription,
        place: Place,
        token: tuple[int, int],
        sent: Sent,
        what: str,
    ) -> None:
        """First deliveries of a key are in the order of the log, and none comes while it is held.
        (Delayed messages let others go first.)"""
        if subscription.moves or sent.delay_s or not subscription.is_ordered:
            return
        key = self._key(subscription, sent.number, place)
        held = subscription.held.get(key)
        if held is not None and held[0] < place[0] and self.seen.now_s() > held[1] + HELD_S:
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

    def moved(self, subscription: Subscription) -> Move:
        """Somebody asks to move a subscription."""
        move = Move(self.seen.now_s())
        subscription.moves.append(move)
        return move

    def reported(self, topic: str, name: str, report: Any) -> None:
        """The dispatcher said what a subscription does."""
        for each in report.consumers:
            if each.permits < -BATCH_MESSAGES_MAX:
                self.seen.violate(
                    "OVERDRAWN", f"{topic} {name} {each.name}: {each.permits} permits"
                )

    def look(self, live: Any) -> None:
        """What a subscription holds in memory at a dispatcher."""
        where = f"{live.topic} {live.name}"
        if live.cache_bytes > live.cache_bytes_max:
            self.seen.violate("BUDGET", f"{where} caches {live.cache_bytes} bytes")
        kept = len(live.machine.parking.delays)
        if kept > live.options.delayed_max:
            self.seen.violate("BUDGET", f"{where} keeps {kept} messages for later")
        for consumer in live.machine.consumers.values():
            if consumer.permits < -BATCH_MESSAGES_MAX:
                self.seen.violate("OVERDRAWN", f"{where} has {consumer.permits} permits")

    # ---- deduplication's state

    def fold_of(self, topic: str, confirmed: Position | None) -> dict[str, int]:
        """By producer, up to which id nothing more is stored, as the log up to a position says."""
        marks: dict[str, int] = {}
        for each in self.seen.log(topic).entries:
            if confirmed is None or each.position > confirmed:
                break
            is_whole = each.chunk is None or each.chunk.is_last
            marks[each.producer] = each.highest if is_whole else each.highest - 1
        return marks

    def check_state(self, topic: str, state: TopicState) -> None:
        """P7, of a topic that deduplicates."""
        if not self.dedup.is_on(topic) or self.seen.log(topic).deleted_ledger:
            return
        for producer, mark in self.fold_of(topic, state.confirmed).items():
            if (topic, producer) in self.dedup.forgotten or mark < 0:
                continue
            tracked = state.producers.get(producer)
            has = None if tracked is None else tracked.marks.decided
            if has != mark:
                self.seen.violate(
                    "FOLD",
                    f"{topic} {producer}: {has}, and the log up to {state.confirmed} says {mark}",
                )
