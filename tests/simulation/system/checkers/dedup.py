"""What must hold of deduplication's state."""

import itertools
from dataclasses import dataclass, field

from seqgate.services.dedup.core.topic import TopicState
from tests.simulation.system.seen import Appended, Log, Seen


class Dedup:
    """Whether a topic deduplicates, as far as it can be told from outside."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
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

    def forgot(self, topic: str, producer: str, *, is_inactive: bool, connected_s: float) -> None:
        """Deduplication forgets a producer, which has been connected for so long."""
        self._seen.counts["purged producers" if is_inactive else "evicted producers"] += 1
        self._seen.note(f"forget {topic} {producer} {is_inactive}, connected for {connected_s:.1f}")
        if is_inactive and connected_s >= 0 and self.is_on(topic):
            self._seen.violate(
                "FORGOTTEN", f"{topic} {producer}, connected for {connected_s:.1f} s"
            )
        self.forgotten.add((topic, producer))
        log = self._seen.log(topic)
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
    """P7: what deduplication says of each topic, held against the log after each step.

    A large message of which a trim took the beginning counts as what is left of the log says of it:
    a state that is built from there has it as complete before its last chunk is confirmed. And what
    was trimmed is told first and as a whole, of a log that a writer knows less of by then since
    another one has it: of those producers the state is ahead.
    """

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
            known.marks[each.producer] = _mark_at(each)
            changed.add(each.producer)
            known.size += 1
        if not known.is_compared and confirmed is not None:
            # What was trimmed has been told with the first entries that are left, if there are any.
            is_all = is_all or log.kept_from is None or confirmed >= log.kept_from
            known.is_compared = is_all
        for producer in known.marks if is_all else changed:
            self._compare(topic, producer, known, state)

    def _compare(self, topic: str, producer: str, known: Fold, state: TopicState) -> None:
        mark = known.marks[producer]
        if (topic, producer) in self._dedup.forgotten or mark < 0:
            return
        tracked = state.producers.get(producer)
        has = None if tracked is None else tracked.marks.decided
        log = self._seen.log(topic)
        if has == mark + 1 and _is_settled_beyond(log, known.size, producer):
            return
        if has != mark and has not in _trimmed_beyond(log, known.size, producer):
            self._seen.violate(
                "FOLD",
                f"{topic} {producer}: {has}, and the log up to {state.confirmed} says {mark}",
            )


def _mark_at(entry: Appended) -> int:
    """Its producer's mark, if the log ended there."""
    is_whole = entry.chunk is None or entry.chunk.is_last
    return entry.highest if is_whole else entry.highest - 1


def _trimmed_beyond(log: Log, size: int, producer: str) -> set[int]:
    """The marks of a producer at what is trimmed behind the first entries of a log, so many."""
    entries = itertools.takewhile(
        lambda each: log.is_trimmed(each.position), itertools.islice(log.entries, size, None)
    )
    return {_mark_at(each) for each in entries if each.producer == producer}


def _is_settled_beyond(log: Log, size: int, producer: str) -> bool:
    """Whether the first entries of a log, so many, end amid a large message of this producer of
    which the beginning is trimmed, and which is complete or overtaken in the entries after them."""
    folded = [each for each in log.entries[:size] if each.producer == producer]
    head = next(
        (each for each in reversed(folded) if not (each.chunk and each.chunk.chunk_id)), None
    )
    if head is None or head.chunk is None or folded[-1].chunk is None or folded[-1].chunk.is_last:
        return False
    return log.is_trimmed(head.position) and any(
        each.chunk is None or each.chunk.is_last or each.highest != head.highest
        for each in log.entries[size:]
        if each.producer == producer
    )
