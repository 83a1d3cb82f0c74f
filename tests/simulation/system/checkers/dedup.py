"""Invariants of the dedup state."""

import itertools
from dataclasses import dataclass, field

from seqgate.services.dedup.core.topic import TopicState
from tests.simulation.system.seen import Appended, Log, Seen


class Dedup:
    """Tracks from outside whether each topic deduplicates."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._off: dict[str, str] = {}
        self.forgotten: set[tuple[str, str]] = set()
        """Topics and producers that deduplication forgot: it treats their ids as new."""

    def is_on(self, topic: str) -> bool:
        """True if deduplication is certainly on."""
        return topic not in self._off

    def changing(self, topic: str) -> None:
        """A change was requested."""
        self._off[topic] = "unsure"

    def changed(self, topic: str, *, on: bool) -> None:
        """A change took effect everywhere."""
        if on:
            self._off.pop(topic, None)
        else:
            self._off[topic] = "off"

    def forgot(self, topic: str, producer: str, *, is_inactive: bool, connected_s: float) -> None:
        """Deduplication forgets a producer; connected_s is negative if it may be disconnected."""
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
    """The fold over a log, up to the confirmed position of the state.

    Attributes:
        size: the number of entries folded.
        marks: by producer.
        is_compared: all producers were compared since the state started to cover this log.
    """

    size: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    is_compared: bool = False


class Folds:
    """P7: compares each topic's dedup state with the fold over its log, after each step.

    Trims let the state run ahead of the fold in two cases. A large message whose start is trimmed
    counts by what the rest of the log shows: a state built from there has it complete before its
    last chunk is confirmed. And the marks of trimmed entries are reported first and all at once,
    also those of entries that another writer trimmed beyond the confirmed position.
    """

    def __init__(self, seen: Seen, dedup: Dedup) -> None:
        self._seen = seen
        self._dedup = dedup
        self._folds: dict[str, Fold] = {}

    def check(self, topic: str, state: TopicState, *, is_all: bool) -> None:
        """Compare the producers confirmed since the last check, or all."""
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
            # The marks of trimmed entries come with the first entries left, if there are any.
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
                f"{topic} {producer}: state has {has}, log up to {state.confirmed} gives {mark}",
            )


def _mark_at(entry: Appended) -> int:
    """The mark of its producer, if the log ended there."""
    is_whole = entry.chunk is None or entry.chunk.is_last
    return entry.highest if is_whole else entry.highest - 1


def _trimmed_beyond(log: Log, size: int, producer: str) -> set[int]:
    """The marks of a producer at trimmed entries after the first `size` of a log."""
    entries = itertools.takewhile(
        lambda each: log.is_trimmed(each.position), itertools.islice(log.entries, size, None)
    )
    return {_mark_at(each) for each in entries if each.producer == producer}


def _is_settled_beyond(log: Log, size: int, producer: str) -> bool:
    """True if the first `size` entries end within a large message of this producer whose start is
    trimmed, and later entries complete or end it."""
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
