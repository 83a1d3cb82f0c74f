"""Invariants of logs and receipts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from seqgate.api.entry.v1 import entry_pb2
from seqgate.payloads import unpack
from seqgate.services.deduplication import continues
from seqgate.services.dispatcher.core.effects import Why
from seqgate.services.dispatcher.letters import graveyard
from seqgate.services.dispatcher.ports import ATTEMPTS, MEND, REASON
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Chunk, Position, TopicName
from tests.simulation.system.checkers.cursors import Cursors
from tests.simulation.system.checkers.dedup import Dedup
from tests.simulation.system.checkers.terms import Terms, key_of
from tests.simulation.system.seen import (
    NUMBER,
    Appended,
    Log,
    Origin,
    Seen,
    Sent,
    Subscription,
    numbers_in,
)

OVERHEAD_BYTES: Final = 200
"""The most that holding an entry costs beyond its payload and metadata."""

ORIGIN: Final = "seqgate.origin."
"""The prefix of the properties that name a dead letter's source."""


class Logs:
    """Checks logs at each change of their store, and receipts."""

    def __init__(self, seen: Seen, terms: Terms, dedup: Dedup, cursors: Cursors) -> None:
        self._seen = seen
        self._terms = terms
        self._dedup = dedup
        self._cursors = cursors

    def at_ledger(
        self, method: str, args: tuple[Any, ...], named: dict[str, Any], answer: Any
    ) -> None:
        """The ledger store performed a call."""
        match method:
            case "append":
                self._appended(*args)
            case "trim":
                topic, before = args
                self._trimmed(str(topic), before)
            case "deleting":
                self._seen.log(str(args[0])).deletions += 1
            case "delete":
                self._deleted(str(args[0]))
            case "leaving":  # the deleter died before it could report
                for topic in answer:
                    self._deleted(str(topic))
            case "create" | "take":
                state = answer if method == "take" else answer[0]
                self._made(str(args[0]), state.incarnation)
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
        log = self._seen.log(topic)
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
        origin, mends, attempts = None, None, 0
        metadata = entry_pb2.EntryMetadata.FromString(entry.metadata)
        if entry.producer.startswith("seqgate.dead"):
            properties = metadata.properties
            place = Position(*map(int, properties[f"{ORIGIN}id"].split(":")))
            origin = Origin(
                properties[f"{ORIGIN}topic"], properties[f"{ORIGIN}subscription"], place
            )
            if properties.get(REASON) == Why.REDELIVERIES.value:
                attempts = int(properties[ATTEMPTS])
            if MEND in properties:
                mends = Position(*map(int, json.loads(properties[MEND])[0].split(":")))
        log.messages_max = max(log.messages_max, len(entry.sequence_ids))
        size_bytes = len(entry.payload) + len(entry.metadata) + OVERHEAD_BYTES
        log.entry_bytes_max = max(log.entry_bytes_max, size_bytes)
        before = None if origin is None else self._seen.log(origin.topic).at.get(origin.position)
        return Appended(
            position,
            entry.producer,
            tuple(entry.sequence_ids),
            _numbers(entry, metadata),
            entry.chunk,
            append_ms,
            self._seen.now_s(),
            origin,
            0 if before is None else before.generation + 1,
            len(entry.payload),
            mends,
            attempts,
        )

    def _check_appended(self, topic: str, log: Log, new: Appended) -> None:
        seen, producer = self._seen, new.producer
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
                seen.violate("INVENTED", f"{topic} {new.position} has message {number}, never sent")
        if new.generation > graveyard.GENERATIONS_MAX:
            seen.violate("COPIED", f"{topic} {new.position} is copy number {new.generation}")
        where = f"{topic} {new.position} {producer}"
        last = log.last.get(producer)
        if not _follows(last, new):
            seen.violate("SPLICED", f"{where} chunk {new.chunk} after {last}")
        if not self._dedup.is_on(topic):
            return
        mark = log.marks.get(producer, -1)
        if new.chunk is None or new.chunk.chunk_id == 0:
            stored = log.stored.get(producer, set())
            twice = stored.intersection(new.ids)
            if twice:
                seen.violate("TWICE", f"{where} #{sorted(twice)} is already stored")
            elif new.highest <= mark:
                seen.violate("REORDERED", f"{where} #{new.highest} after #{mark}")
        if new.chunk is not None:
            attempt = (producer, new.chunk.uuid, new.chunk.chunk_id)
            if attempt in log.chunks:
                seen.violate("TWICE", f"{where} chunk {attempt}")
            first = log.attempts.get((producer, new.chunk.uuid), [new.position])[0]
            if log.is_trimmed(first):
                seen.violate("CUT", f"{where} chunk {new.chunk}: the first, at {first}, is trimmed")

    def _take(self, topic: str, log: Log, new: Appended) -> None:
        producer = new.producer
        log.entries.append(new)
        log.at[new.position] = new
        stored = log.stored.setdefault(producer, set())
        if new.chunk is None or new.chunk.is_last:
            if new.highest < log.marks.get(producer, -1):  # the producer started over
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
        for (of, _), subscription in self._seen.subscriptions.items():
            if of == topic:
                subscription.waiting[new.position] = None
        if new.origin is not None:
            self._lettered(topic, new, new.origin)

    def _lettered(self, topic: str, new: Appended, origin: Origin) -> None:
        subscription = self._seen.subscription(origin.topic, origin.subscription)
        if new.mends is not None:
            self._mended(subscription, (topic, new.mends), new)
            return
        letter = (origin.position, new.chunk.chunk_id if new.chunk else 0)
        self._seen.counts["dead letters"] += 1
        if letter in subscription.lettered:
            self._seen.violate("LETTER_TWICE", f"{origin} again, at {new.position}")
        self._check_failures(subscription, origin)
        back = subscription.returns.get(origin.position)
        if back is not None and new.attempts > back.attempts:
            what = f"{new.attempts} failures, {back.attempts} of them since it came back"
            self._seen.violate("LETTER_EARLY", f"{origin} has {what}")
        subscription.lettered.add(letter)
        is_there = origin.position in self._seen.log(origin.topic).at  # its topic may be deleted
        if subscription.holds and new.numbers and is_there:
            key = key_of(self._seen, subscription, new.numbers[0], (origin.position, 0))
            subscription.held.setdefault(
                key, (origin.position, self._cursors.from_now_on(subscription))
            )

    def _mended(
        self, subscription: Subscription, original: tuple[str, Position], new: Appended
    ) -> None:
        """A letter has one mended copy."""
        self._seen.counts["mended letters"] += 1
        if original in subscription.mended:
            self._seen.violate("LETTER_TWICE", f"{original} is mended again, at {new.position}")
        subscription.mended.add(original)

    def _check_failures(self, subscription: Subscription, origin: Origin) -> None:
        """In an exact history, a message or one of its chunks must have been refused more than the
        allowed number of redeliveries."""
        most = subscription.redeliveries_max
        if not self._terms.is_exact or most is None or subscription.letters_tail:
            return
        log = self._seen.log(origin.topic)
        entry = log.at.get(origin.position)
        chunk = None if entry is None else entry.chunk
        places = [origin.position]
        if entry is not None and chunk is not None:
            places = log.attempts[entry.producer, chunk.uuid]
        times = max(subscription.refused[each] for each in places)
        times = max(times, *(subscription.refused_before[each] for each in places))
        if times <= most:
            self._seen.violate("LETTER_EARLY", f"{origin} was refused {times} times")

    def _trimmed(self, topic: str, before: Position) -> None:
        self._seen.note(f"trim {topic} before {before}")
        self._seen.counts["trims"] += 1
        log = self._seen.log(topic)
        if log.kept_from is None or before > log.kept_from:
            log.kept_from = before

    def trimmed_are(self, topic: str, first: Position | None, listed: Mapping[str, int]) -> None:
        """(P7) A trim left `first` as the first entry, and the store remembers `listed` of trimmed
        producers. Producers of large messages are left out: their marks depend on where their
        messages were cut."""
        log = self._seen.log(topic)
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
                self._seen.violate(
                    "FOLD", f"{topic} {producer}: store has {has}, trimmed entries give "
                    f"{marks[producer]}"
                )  # fmt: skip

    def _made(self, topic: str, incarnation: int) -> None:
        """A topic exists in this incarnation. A higher one proves a deletion whose process died
        before it could report."""
        log = self._seen.log(topic)
        if log.incarnation and incarnation > log.incarnation and log.deletions:
            self._deleted(topic)
        self._seen.log(topic).incarnation = incarnation

    def _deleted(self, topic: str) -> None:
        if not self._seen.log(topic).deletions:
            return  # it was recreated since, which implied the deletion
        self._seen.note(f"delete {topic}")
        self._seen.counts["topics deleted"] += 1
        before = self._seen.log(topic)
        last = before.entries[-1].position.ledger_id if before.entries else before.deleted_ledger
        self._seen.logs[topic] = Log(deleted_ledger=last, deletions=before.deletions - 1)
        for (of, _), subscription in self._seen.subscriptions.items():
            if of == topic:
                subscription.waiting.clear()

    def answered(
        self, sent: Sent, sequence_id: int, position: Position, *, duplicate: bool
    ) -> None:
        """A producer got a receipt for its message."""
        self._seen.counts["duplicate receipts" if duplicate else "receipts"] += 1
        sent.outcome = "duplicate" if duplicate else "stored"
        self._seen.note(f"receipt {sent.number} {sent.producer}#{sequence_id} at {position}")
        log = self._seen.log(sent.topic)
        what = f"message {sent.number}, {sent.topic} {sent.producer}#{sequence_id} at {position}"
        at = log.at.get(position)
        if at is None:
            if not log.is_trimmed(position):
                self._seen.violate("LOST", what)
            return
        if sent.number not in at.numbers or sequence_id not in at.ids:
            kind = (
                "MISPLACED" if any(sent.number in each.numbers for each in log.entries) else "LOST"
            )
            self._seen.violate(kind, f"{what}: found {at}")
        elif at.chunk is not None:
            chunks = log.attempts[at.producer, at.chunk.uuid]
            found = [log.at[each].chunk for each in chunks[: chunks.index(position) + 1]]
            if not _is_whole([chunk.chunk_id for chunk in found if chunk is not None], at.chunk):
                self._seen.violate("LOST", f"{what}: only chunks at {chunks}")
            elif log.is_trimmed(chunks[0]) and not log.is_trimmed(position):
                self._seen.note(f"a part of message {sent.number} is trimmed")

    def refused(self, sent: Sent, reason: str) -> None:
        """A producer got a refusal, or an error."""
        self._seen.counts[f"refused {reason}"] += 1
        sent.outcome = reason
        self._seen.note(f"refused {sent.number} {sent.producer}#{sent.sequence_id}: {reason}")
        log = self._seen.log(sent.topic)
        if reason == "TRIMMED" and log.kept_from is None and not log.deleted_ledger:
            self._seen.violate("NOT_TRIMMED", f"message {sent.number}: nothing was trimmed")
        if reason == "STALE" and sent.sequence_id is not None:
            for each in log.entries:
                is_there = sent.number in each.numbers and sent.sequence_id in each.ids
                is_whole = each.chunk is None or each.chunk.is_last
                if is_there and is_whole and not log.is_trimmed(each.position):
                    self._seen.violate("NOT_STALE", f"message {sent.number} is at {each.position}")


def _follows(last: Appended | None, new: Appended) -> bool:
    """False if an entry is a chunk that does not continue its producer's last one, whether
    deduplication is on or off."""
    if new.chunk is None or new.chunk.chunk_id == 0:
        return True
    before = None if last is None or last.ids != new.ids else last.chunk
    return before is not None and continues(before, new.chunk)


def _is_whole(chunk_ids: Sequence[int], last: Chunk) -> bool:
    """True if these chunks form a message that ends with `last`. Without deduplication some or all
    of them may repeat."""
    following = 0
    for chunk_id in chunk_ids:
        if chunk_id in (0, following):
            following = chunk_id + 1
        elif chunk_id > following:
            return False
    return last.chunk_id + 1 == following == last.num_chunks


def _numbers(entry: Entry, metadata: entry_pb2.EntryMetadata) -> tuple[int, ...]:
    """The numbers of the messages that start in an entry."""
    if NUMBER in metadata.properties:
        return (int(metadata.properties[NUMBER]),)
    return numbers_in(unpack(metadata, entry.payload))
