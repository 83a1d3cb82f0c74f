"""The gate before the verdicts: does a topic's state match the writer's view of it?

A topic's state covers its log up to the *confirmed* position. Redis may lose the newest part of it,
or all of it, so each call has the writer (incarnation, epoch) and the end of the log, and both are
compared before any claim is judged:

    the state is of an older incarnation    the topic was deleted and recreated: start empty
    the state's epoch is newer              FENCED: this writer was replaced
    the state's epoch is older              a takeover: open claims are withdrawn
    the state ends before the log           BEHIND: confirm the missing entries, then ask again
    the state ends after the log            FENCED: another writer appended
    the state's revision is not the one     CHANGED: an answer, or its claims, were lost:
      that the writer last saw                roll back, then ask again
    otherwise                               verdicts

Positions protect confirmed entries. The revision protects claims that are only admitted: it changes
with each call that admits or withdraws claims.

The confirmed position and the persisted marks change together, so at any moment they equal the fold
over the log. A snapshot is such a pair; a lost state is loaded from one, and the writer confirms
the rest.

adapters/lua/topic.lua is the same gate inside Redis.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seqgate.services.dedup.core.sequence import Marks, admit, advance, withdraw
from seqgate.services.deduplication import (
    NEVER,
    Applied,
    Behind,
    Changed,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerVerdicts,
    Verdict,
    Withdrawal,
    Writer,
)
from seqgate.services.errors import Fenced
from seqgate.types import Chunk, Position


class Full(NamedTuple):
    """The claims name `wanted` untracked producers, more than fit; nothing was judged."""

    tracked: int
    wanted: int


class Tracked(NamedTuple):
    marks: Marks
    active_ms: int


class Persisted(NamedTuple):
    """The durable state of a producer: its mark, and the time of its last activity."""

    producer: str
    highest: int
    unfinished: Chunk | None
    active_ms: int


class Frozen(NamedTuple):
    """A topic's state at one moment, without claims in flight: the fold over the log up to
    `confirmed`. `entries` is the number of entries confirmed so far."""

    incarnation: int
    confirmed: Position | None
    entries: int
    producers: list[Persisted]


class Saved(NamedTuple):
    """The newest snapshot recorded in the state; `taken_ms` 0: there is none, or it was dropped."""

    position: Position | None = None
    entries: int = 0
    taken_ms: int = 0


class Loaded(NamedTuple):
    """Whether a state was loaded, and the confirmed position of the current state."""

    loaded: bool
    confirmed: Position


@dataclass(slots=True)
class Counts:
    """Counts since the state was created; see dedup.proto."""

    confirmed_entries: int = 0
    new: int = 0
    duplicate: int = 0
    partial: int = 0
    waiting: int = 0
    purged: int = 0
    evicted: int = 0
    misplaced: int = 0
    aborted: int = 0


@dataclass(slots=True)
class TopicState:
    """The deduplication state of a topic. One owner; the methods change it in place."""

    incarnation: int
    epoch: int
    confirmed: Position | None = None
    revision: int = 0
    remaining: int = 0
    producers: dict[str, Tracked] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    saved: Saved = Saved()

    @property
    def unsaved(self) -> int:
        return self.counts.confirmed_entries - self.saved.entries

    @classmethod
    def loaded_by(
        cls,
        state: "TopicState | None",
        incarnation: int,
        through: Position,
        producers: Iterable[Persisted],
        *,
        replacing: bool,
        taken_ms: int | None,
    ) -> "tuple[TopicState, bool]":
        """The state after loading another one, and whether it was replaced: it is with `replacing`,
        or if the current state covers less. The writer stays; its open claims are withdrawn.
        `taken_ms` is set when the newest snapshot is loaded.

        Raises:
            Fenced: the current state has a newer incarnation.
        """
        if state is not None and state.incarnation > incarnation:
            raise Fenced("the topic has a newer incarnation", epoch=state.epoch)
        if state is None or state.incarnation < incarnation:
            state = cls(incarnation, 0)
        elif not (replacing or _ends_before(state.confirmed, through)):
            return state, False
        state.confirmed, state.remaining = through, 0
        state.producers = {
            producer: Tracked(Marks(highest, highest, unfinished, unfinished), active_ms)
            for producer, highest, unfinished, active_ms in producers
        }
        if taken_ms is not None:
            state.saved = Saved(through, state.counts.confirmed_entries, taken_ms)
        state.withdraw_all()
        return state, True

    def frozen(self) -> Frozen:
        """The content of a snapshot. Producers that have stored nothing are left out."""
        return Frozen(
            self.incarnation,
            self.confirmed,
            self.counts.confirmed_entries,
            [
                Persisted(name, marks.persisted, marks.persisted_chunk, active_ms)
                for name, (marks, active_ms) in self.producers.items()
                if marks.persisted != NEVER
            ],
        )

    def record_snapshot(self, incarnation: int, saved: Saved) -> None:
        if incarnation == self.incarnation and not _ends_before(
            saved.position, self.saved.position
        ):
            self.saved = saved

    @classmethod
    def entered_by(cls, state: "TopicState | None", writer: Writer) -> "TopicState":
        """The state for a call by the writer: created, replaced or taken over as needed.

        Raises:
            Fenced: the writer was replaced.
        """
        if state is None or state.incarnation < writer.incarnation:
            return cls(writer.incarnation, writer.epoch)
        if state.incarnation > writer.incarnation or state.epoch > writer.epoch:
            raise Fenced("a newer writer owns the topic", epoch=state.epoch)
        if state.epoch < writer.epoch:
            state.epoch = writer.epoch
            state.withdraw_all()
        return state

    def admit(
        self,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
        *,
        now_ms: int,
        max_producers: int,
    ) -> Judged | Behind | Changed | Full:
        behind = self._confirm(confirmation) or self._compare(writer.position)
        if behind is not None:
            return behind
        if writer.revision is not None and writer.revision != self.revision:
            return Changed(self.revision)
        unknown = sum(1 for claim in claims if claim.producer not in self.producers)
        if unknown and len(self.producers) + unknown > max_producers:
            return Full(len(self.producers), unknown)

        before = self.counts.new
        verdicts = [self._judge(claim, now_ms) for claim in claims]
        if self.counts.new > before:
            self.revision += 1
        return Judged(self.revision, verdicts, self.unsaved)

    def confirm(self, writer: Writer, confirmation: Confirmation) -> Applied | Behind:
        behind = self._confirm(confirmation)
        if behind is not None:
            return behind
        self._compare(writer.position)
        return Applied(self.revision, self.unsaved)

    def rollback(
        self, writer: Writer, confirmation: Confirmation | None, withdrawals: Sequence[Withdrawal]
    ) -> Applied | Behind:
        """Apply the confirmation and withdraw claims, even if the state is behind. No withdrawals
        means all claims."""
        behind = self._confirm(confirmation) or self._compare(writer.position)
        if withdrawals:
            for producer, keep_through in withdrawals:
                if (tracked := self.producers.get(producer)) is not None:
                    marks = withdraw(tracked.marks, keep_through)
                    self.producers[producer] = tracked._replace(marks=marks)
            self.revision += 1
        else:
            self.withdraw_all()
        return behind or Applied(self.revision, self.unsaved)

    def keep(self, producers: Iterable[str], now_ms: int, slack_ms: int = 0) -> None:
        """Record producers as active, except those that were active within `slack_ms`."""
        for producer in producers:
            tracked = self.producers.get(producer)
            if tracked is not None and now_ms - slack_ms > tracked.active_ms:
                self.producers[producer] = tracked._replace(active_ms=now_ms)

    def forget(self, producers: Iterable[tuple[str, int]]) -> int:
        """Drop producers unless active since, or with claims in flight. Returns the number
        dropped."""
        gone = [
            producer
            for producer, active_ms in producers
            if (tracked := self.producers.get(producer)) is not None
            and tracked.active_ms == active_ms
            and not tracked.marks.in_flight
        ]
        for producer in gone:
            del self.producers[producer]
        return len(gone)

    def _confirm(self, confirmation: Confirmation | None) -> Behind | None:
        if confirmation is None:
            return None
        after, through, producers, entry_count, remaining = confirmation
        if _ends_before(self.confirmed, after):
            return self._behind()
        if _ends_before(self.confirmed, through):
            for producer, highest_ids, last_append_ms, chunks in producers:
                tracked = self.producers.get(producer, Tracked(Marks(), 0))
                marks = tracked.marks
                for index, highest in enumerate(highest_ids):
                    marks = advance(marks, highest, chunks.get(index))
                active_ms = max(tracked.active_ms, last_append_ms)
                self.producers[producer] = Tracked(marks, active_ms)
            self.confirmed = through
            self.remaining = remaining
            self.counts.confirmed_entries += entry_count
        return None

    def _compare(self, position: Position | None) -> Behind | None:
        if _ends_before(self.confirmed, position):
            return self._behind()
        if _ends_before(position, self.confirmed):
            raise Fenced("another writer has appended to the topic", epoch=self.epoch)
        self.remaining = 0
        return None

    def _behind(self) -> Behind:
        self.remaining = max(1, self.remaining)
        return Behind(self.confirmed)

    def _judge(self, claims: ProducerClaims, now_ms: int) -> ProducerVerdicts:
        tracked = self.producers.get(claims.producer, Tracked(Marks(), 0))
        marks, verdicts, aborts = admit(tracked.marks, claims.claims)
        self.producers[claims.producer] = Tracked(marks, max(tracked.active_ms, now_ms))
        for verdict in verdicts:
            match verdict:
                case Verdict.NEW:
                    self.counts.new += 1
                case Verdict.DUPLICATE:
                    self.counts.duplicate += 1
                case Verdict.PARTIAL:
                    self.counts.partial += 1
                case Verdict.IN_FLIGHT | Verdict.HELD:
                    self.counts.waiting += 1
                case Verdict.CHUNK_GAP | Verdict.LAYOUT_CONFLICT:
                    self.counts.misplaced += 1
        self.counts.aborted += len(aborts)
        return ProducerVerdicts(verdicts, marks.decided, aborts)

    def withdraw_all(self) -> None:
        for producer, tracked in self.producers.items():
            if tracked.marks.in_flight:
                self.producers[producer] = tracked._replace(marks=withdraw(tracked.marks))
        self.revision += 1


def _ends_before(left: Position | None, right: Position | None) -> bool:
    if left is None or right is None:
        return left is None and right is not None
    return left < right
