"""One topic's publish path, as a machine: an event in, effects out.

Units arrive from many streams and are processed in the order of their arrival:

    waiting ──Admit──▶ admitting ──NEW──▶ ready ──Append──▶ writing ──▶ STORED, unconfirmed
       ▲                 │
       └── IN_FLIGHT ────┤
                         ├── DUPLICATE, PARTIAL ──LookUp──▶ a receipt
                         └── CHUNK_GAP, LAYOUT_CONFLICT ──▶ a receipt

Stored entries are confirmed with the next Admit, or alone when nothing was stored for a while.

Admitting one group overlaps with the commit of the group before it, and with no more: `ready` holds
at most one group. At most one call to deduplication and one append are pending.

Deduplication may have lost state, or hold claims that were never written. Then the machine is
ALIGNING instead of LIVE: it lets the pending append end, confirms from the log the entries that
deduplication lacks, withdraws every open claim, and becomes LIVE again. A new machine starts in
this state, so a takeover, a lost reply and a lost Redis share one procedure. Meanwhile nothing is
judged; units wait, and fail with a retry delay after `patience` failures in a row. If the log
cannot be read, or is too long to be replayed here, the machine asks deduplication before each new
attempt: a rebuild may have loaded a state past that position.

The shell's whole duty:

    for effect in writer.<event>(...):      # an event for each arrival and each answer
        start performing it; its outcome is an event

Only Answer is performed at once. Receipts are returned before any later effect can overtake them,
and STORED only after the append is durable.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, count, repeat
from typing import Final, NamedTuple, TypeVar

from seqgate.services.deduplication import (
    NEVER,
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerEntries,
    ProducerVerdicts,
    Verdict,
)
from seqgate.services.errors import DomainError, Fenced, Kind
from seqgate.services.ledger.core.attempts import OpenAttempt, ended_by, follow, is_gap
from seqgate.services.ledger.core.entry import Entry, Unit
from seqgate.services.ledger.core.receipt import (
    CHUNK_GAP,
    LAYOUT_CONFLICT,
    SKIPPED,
    Receipt,
    Repeated,
    failed,
    stored,
)
from seqgate.types import Chunk, Position

CONFIRM_AFTER_S: Final = 0.02
"""How long a topic stores nothing before its entries are confirmed alone. A publication that comes
earlier takes the confirmation along, and need not wait for another call to end."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
"""The longest pause after a failure; pauses start at BACKOFF_FIRST_S and double."""

REPLAY_PAGE_ENTRIES: Final = 5_000
"""The most entries of one replay page."""

SURPRISES_MAX: Final = 3
"""The most surprises in a row after which the machine aligns at once; after more, it pauses."""


class Limits(NamedTuple):
    """The limits of a group, and of retries."""

    group_entries_max: int = 2_000
    group_bytes_max: int = 8 * 1024 * 1024
    patience: int = 6


class Logged(NamedTuple):
    """An entry of the log, reduced to what deduplication needs; a marker has no producer. Of a
    unit's entries without chunks the last stands for all, since the last one decides the mark."""

    position: Position
    producer: str | None
    highest: int
    append_ms: int
    chunk: Chunk | None = None
    entries: int = 1


def claims_of(units: Sequence[Unit]) -> list[ProducerClaims]:
    """The claims of units by producer, in the order of first appearance."""
    claims: dict[str, list[Claim]] = {}
    for unit in units:
        claims.setdefault(unit.producer, []).append(Claim(unit.lowest, unit.highest, unit.chunk))
    return [ProducerClaims(producer, tuple(each)) for producer, each in claims.items()]


_Judgement = tuple[Verdict, int, str]
"""The answer to one claim: the verdict; the highest id of its producer of which nothing more will
be stored; and the uuid of the attempt that it aborts, or empty."""


def _judgements(
    units: Sequence[Unit], producers: Sequence[ProducerVerdicts]
) -> dict[str, Iterator[_Judgement]]:
    """The answers to `claims_of`: by producer, in the order of its units."""
    assert sum(len(each.verdicts) for each in producers) == len(units)
    names = dict.fromkeys([unit.producer for unit in units])
    return {
        producer: zip(
            verdicts,
            repeat(decided),
            map(aborts.get, count(), repeat("")) if aborts else repeat(""),
            strict=False,
        )
        for producer, (verdicts, decided, aborts) in zip(names, producers, strict=True)
    }


def confirmation_of(
    after: Position | None, through: Position, entries: Sequence[Logged], remaining: int = 0
) -> Confirmation:
    """The confirmation of entries of the log. Markers are left out."""
    producers: dict[str, list[Logged]] = {}
    for logged in entries:
        if logged.producer is not None:
            producers.setdefault(logged.producer, []).append(logged)
    listed = [
        ProducerEntries(
            producer,
            tuple([each.highest for each in its]),
            its[-1].append_ms,
            {place: each.chunk for place, each in enumerate(its) if each.chunk is not None},
        )
        for producer, its in producers.items()
    ]
    count = sum(each.entries for each in entries)
    return Confirmation(after, through, tuple(listed), count, remaining)


# Effects. Each except Answer and Stop leads to one of the events in its docstring.


@dataclass(frozen=True, slots=True)
class Answer:
    """Give a unit its receipt. Leads to no event."""

    unit: Unit
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up the fates of the messages in units that are not NEW, and answer each unit. A failure
    leads to `look_up_failed`. `refuses_conflicts`: policy refuses other content under their ids."""

    units: tuple[Repeated, ...]
    refuses_conflicts: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Submit the claims of units (`claims_of`) to deduplication. Leads to judged, behind, changed,
    disabled, or dedup_failed."""

    position: Position | None
    revision: int | None
    confirmation: Confirmation | None
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Confirm:
    """Confirm entries to deduplication. Leads to confirmed, behind, disabled, or dedup_failed."""

    position: Position | None
    confirmation: Confirmation


@dataclass(frozen=True, slots=True)
class Rollback:
    """Withdraw every open claim. Leads to aligned, behind, disabled, or dedup_failed."""

    position: Position | None
    confirmation: Confirmation | None


@dataclass(frozen=True, slots=True)
class Append:
    """Append durably. Leads to appended or append_failed."""

    expected_tail: Position | None
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Read entries after a position, without payloads. Leads to log_read, log_trimmed or
    log_failed."""

    after: Position | None
    limit: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Take the topic again, unless another writer has taken it: after a failed append the tail is
    unknown. Leads to reopened or reopen_failed."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for a random part of this time, at least half, since many topics may have failed at the
    same moment. Leads to pause_over."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait for CONFIRM_AFTER_S. Leads to rested."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Close every stream of the topic with this error and drop the machine. Leads to no event."""

    error: DomainError


Effect = (
    Answer | LookUp | Admit | Confirm | Rollback | Append | ReadLog | Reopen | Pause | Rest | Stop
)


_NEW: Final = (Verdict.NEW, NEVER, "")
_ALL_NEW: Final = repeat(_NEW)

_ALIKE: Final = (Verdict.NEW, Verdict.DUPLICATE, Verdict.HELD)
"""The verdicts on a run that hold for each of its publications."""


class _Behind(NamedTuple):
    confirmed: Position | None


_C = TypeVar("_C", Admit, Confirm, Rollback)


class Phase(Enum):
    """Whether units are processed (LIVE), wait (ALIGNING), or are refused for good (FENCED)."""

    LIVE = auto()
    ALIGNING = auto()
    FENCED = auto()


class TopicWriter:
    """See the module. Mutable, synchronous, with one owner, since it runs for every group."""

    def __init__(
        self, incarnation: int, ledger_id: int, tail: Position | None, limits: Limits
    ) -> None:
        self.incarnation = incarnation
        self.ledger_id = ledger_id
        self.tail = tail
        self.phase = Phase.ALIGNING
        self.deduplicating = True
        self.last_error: DomainError | None = None
        self._limits = limits

        self._sessions: set[int] = set()
        self._waiting: deque[Unit] = deque()
        self._admitting: list[Unit] = []
        self._ready: list[Unit] = []
        self._writing: list[Unit] = []
        self._in_doubt: list[Unit] = []  # all stored or none; known once the topic is taken again
        self._on_hold: set[int] = set()
        # By stream: the attempt that the newest entry of its producer leaves unfinished in the log.
        self._unfinished: dict[int, OpenAttempt] = {}
        self._ended_amid: set[int] = set()  # ended streams that may still store units

        self._call: Admit | Confirm | Rollback | None = None
        self._reading = False
        self._pausing = False
        self._reopening = False

        self._confirmed: Position | None = None
        self._unconfirmed: list[Logged] = []
        self._resting = False
        self._rested_at: Position | None = None  # the tail when the newest rest began
        self._revision: int | None = None
        self._behind: _Behind | None = None
        self._reopen = False
        self._recheck_after_append = False
        self._narrow = 0
        self._policy_wanted = self._policy_pending = self._policy_known = 0
        self._refuses_conflicts = False
        self._failures = 0
        self._surprises = 0

    # ---- queries of the shell

    def busy(self, producer: str) -> bool:
        """Whether units of this producer are being admitted, or admitted but not yet stored."""
        under_way = (self._admitting, self._ready, self._writing)
        return any(unit.producer == producer for units in under_way for unit in units)

    @property
    def idle(self) -> bool:
        """Whether no unit is pending and no entry is left to confirm."""
        return (
            self.phase is Phase.LIVE
            and not (self._waiting or self._admitting or self._ready or self._writing)
            and not (self._call or self._unconfirmed)
        )

    @property
    def reopening(self) -> bool:
        """Whether the topic is being taken again."""
        return self._reopening

    def knows_policy(self, number: int) -> bool:
        """Whether the query that `ask_policy` numbered so is answered."""
        return number <= self._policy_known

    # ---- arrivals

    def start(self) -> list[Effect]:
        """Begin, after the topic was taken."""
        return self._next()

    def ask_policy(self) -> tuple[int, list[Effect]]:
        """Query whether the topic deduplicates now: policy may have changed since the last Admit.
        The returned number identifies the query."""
        self._policy_wanted += 1
        return self._policy_wanted, self._next()

    def open_session(self, session: int) -> None:
        self._sessions.add(session)

    def left_unfinished(self, session: int, attempt: OpenAttempt) -> None:
        """Record that the newest entry of a stream's producer leaves this attempt unfinished. The
        producer must have nothing in flight."""
        if session in self._sessions:
            self._unfinished[session] = attempt

    def submit(self, units: Iterable[Unit]) -> list[Effect]:
        """Queue units, in order."""
        effects: list[Effect] = []
        for unit in units:
            assert unit.session in self._sessions
            if unit.resume:
                self.resume(unit.session)
            if unit.session in self._on_hold:
                effects.append(Answer(unit, SKIPPED))
            else:
                self._waiting.append(unit)
        return effects + self._next()

    def refuse(self, units: Iterable[Unit], error: DomainError) -> list[Effect]:
        """Answer units that cannot be accepted now. As after a failure, their stream goes on hold:
        later units are skipped until the producer resumes."""
        effects: list[Effect] = []
        for unit in chain.from_iterable(each.divided() for each in units):
            if unit.resume:
                self.resume(unit.session)
            if unit.session in self._on_hold:
                effects.append(Answer(unit, SKIPPED))
            else:
                effects += self._refuse([unit], error)
        return effects

    def resume(self, session: int) -> None:
        """End a stream's hold. A publication with `resume` that is refused before it gets here ends
        the hold, too: its producer has all its receipts and resends in order, and an invalid
        publication is never stored, so nothing can overtake it."""
        self._on_hold.discard(session)

    def close_session(self, session: int) -> list[Unit]:
        """End a stream. Returns its waiting units, which are dropped without an answer."""
        dropped = [unit for unit in self._waiting if unit.session == session]
        self._sessions.discard(session)
        self._on_hold.discard(session)
        self._waiting = deque(unit for unit in self._waiting if unit.session != session)
        self._ended_amid.add(session)
        self._drop_ended()
        return dropped

    # ---- answers from deduplication

    def judged(self, answer: Judged) -> list[Effect]:
        """Every claim of the Admit has a verdict."""
        call = self._answered(Admit)
        self._policy_known = self._policy_pending
        self._drop_confirmed(call.confirmation)
        self._confirmed = call.position
        self._revision = answer.revision
        self._refuses_conflicts = answer.refuses_conflicts
        if not self.deduplicating:
            # Just enabled: units admitted while it was off have no claims.
            self.deduplicating = True
            self.phase = Phase.ALIGNING
        self._failures = self._surprises = 0
        return self._sort_out(_judgements(call.units, answer.producers))

    def disabled(self) -> list[Effect]:
        """Policy has disabled deduplication: everything is new, and nothing is remembered."""
        call = self._call
        assert call is not None
        self._call = None
        self.deduplicating = False
        self._unconfirmed.clear()
        self._revision = None
        self._behind = None
        if self.phase is Phase.ALIGNING and isinstance(call, Rollback):
            self._go_live()
        if not isinstance(call, Admit):
            return self._next()
        self._policy_known = self._policy_pending
        self._failures = self._surprises = 0
        return self._sort_out(dict.fromkeys([unit.producer for unit in call.units], _ALL_NEW))

    def confirmed(self) -> list[Effect]:
        """The confirmation was applied."""
        call = self._answered(Confirm)
        self._drop_confirmed(call.confirmation)
        if self._behind is not None:
            through = call.confirmation.through
            self._behind = None if through == self.tail else _Behind(through)
        return self._next()

    def aligned(self, revision: int) -> list[Effect]:
        """Every open claim was withdrawn, and the state covers the log."""
        call = self._answered(Rollback)
        self._drop_confirmed(call.confirmation)
        self._confirmed = call.position
        self._revision = revision
        self.deduplicating = True
        self._go_live()
        return self._next()

    def behind(self, confirmed: Position | None) -> list[Effect]:
        """The state lacks the entries after `confirmed`."""
        assert self._call is not None
        self._call = None
        self._behind = _Behind(confirmed)
        self._unconfirmed.clear()  # the replay reads them from the log
        return self._surprised()

    def changed(self) -> list[Effect]:
        """The state is not the one that this machine last saw."""
        self._answered(Admit)
        return self._surprised()

    def dedup_failed(self, error: DomainError, *, outcome_known: bool = False) -> list[Effect]:
        """Deduplication refused the call, or did not answer; then the outcome is unknown, unless
        `outcome_known`: nothing was done, and there is nothing to withdraw before a retry."""
        call = self._call
        assert call is not None
        self._call = None
        if error.kind is Kind.FENCED:
            return self._fence(error)
        if error.kind is Kind.EXHAUSTED and isinstance(call, Admit):
            return self._too_many_producers(call, error)
        if self._behind is not None:
            # The page may have been confirmed: the replay continues from deduplication's position.
            self._ask_where_it_ends()
        return self._fail(error, aligning=not outcome_known)

    # ---- answers from the store

    def appended(self, append_ms: int) -> list[Effect]:
        """The entries are durable, at consecutive positions after the expected tail."""
        units, self._writing = self._writing, []
        effects: list[Effect] = []
        entry_id = self._next_entry_id()
        for unit in units:
            effects.append(Answer(unit, stored(Position(self.ledger_id, entry_id))))
            entry_id += len(unit.entries)
            position = Position(self.ledger_id, entry_id - 1)
            producer = None if unit.marker else unit.producer
            self._unconfirmed.append(
                Logged(position, producer, unit.highest, append_ms, unit.chunk, len(unit.entries))
            )
            self._track_unfinished(unit)
        self.tail = Position(self.ledger_id, entry_id - 1)
        if not self.deduplicating:
            self._unconfirmed.clear()
        self._recheck_after_append = False
        return effects + self._next()

    def append_failed(self, error: DomainError, *, outcome_known: bool) -> list[Effect]:
        """The entries were not stored or, with `outcome_known` false, may have been."""
        units, self._writing = self._writing, []
        if error.kind is Kind.FENCED:
            return self._fence(error, units)
        self._recheck_after_append = False
        self.phase = Phase.ALIGNING
        self._reopen = self._reopen or not outcome_known
        self._in_doubt = [] if outcome_known else units
        self.last_error = error
        effects = self._refuse(units, error)
        ready, self._ready = self._ready, []
        effects += self._requeue(ready)
        return effects + self._pause() + self._next()

    def log_read(self, entries: Sequence[Logged], remaining: int) -> list[Effect]:
        """The entries after the position of the ReadLog were read; about `remaining` more follow.

        Entries beyond the tail are from another writer, which owns the topic now: deduplication
        does not accept our confirmation of them, and may not know that writer yet.
        """
        assert self._reading
        assert self._behind is not None
        assert self.tail is not None
        self._reading = False
        if entries and entries[-1].position > self.tail:
            return self._fence(Fenced("another writer has appended to the topic"))
        self.last_error = None
        through = entries[-1].position if entries and remaining else self.tail
        confirmation = confirmation_of(self._behind.confirmed, through, entries, remaining)
        self._call = Confirm(self.tail, confirmation)
        return [self._call]

    def log_trimmed(self) -> list[Effect]:
        """A trim removed entries after the position of the ReadLog, and the state was dropped: it
        is rebuilt from the start of the log."""
        assert self._reading
        self._reading = False
        self._behind = _Behind(None)
        return self._next()

    def log_failed(self, error: DomainError) -> list[Effect]:
        """The log cannot be read, or is too long to be replayed here. Deduplication is asked what
        it lacks before the same position is read again."""
        assert self._reading
        self._reading = False
        self._ask_where_it_ends()
        self._surprises = 0  # lacking entries is no surprise here; _fail pauses between attempts
        return self._fail(error)

    def look_up_failed(self, unit: Unit, error: DomainError) -> list[Effect]:
        return self._refuse([unit], error) + self._next()

    def reopened(self, ledger_id: int, tail: Position | None) -> list[Effect]:
        assert self._reopening
        self._reopening = self._reopen = False
        self._unconfirmed.clear()  # the replay reports later entries of the log
        in_doubt, self._in_doubt = self._in_doubt, []
        if tail != self.tail:
            for unit in in_doubt:
                self._track_unfinished(unit)
        self.ledger_id, self.tail = ledger_id, tail
        return self._next()

    def reopen_failed(self, error: DomainError) -> list[Effect]:
        self._reopening = False
        if error.kind is Kind.FENCED:
            return self._fence(error)
        return self._fail(error)

    def pause_over(self) -> list[Effect]:
        self._pausing = False
        return self._next()

    def rested(self) -> list[Effect]:
        self._resting = False
        return self._next()

    # ---- inside

    def _answered(self, kind: type[_C]) -> _C:
        call = self._call
        assert isinstance(call, kind)
        self._call = None
        return call

    def _next(self) -> list[Effect]:
        """The effects that can start now."""
        if self._ended_amid:
            self._drop_ended()
        if self.phase is Phase.LIVE:
            return self._append_ready() + self._ask()
        if self.phase is Phase.ALIGNING:
            return self._align()
        return []

    def _append_ready(self) -> list[Effect]:
        if self._writing or not self._ready:
            return []
        self._writing, self._ready = self._ready, []
        entries = tuple(chain.from_iterable([unit.entries for unit in self._writing]))
        return [Append(self.tail, entries)]

    def _ask(self) -> list[Effect]:
        if self._call or self._ready or self._pausing:
            return []
        curious = self._policy_known < self._policy_wanted
        if (self._waiting or curious) and not (self._recheck_after_append and self._writing):
            self._admitting = self._take_group()
            self._policy_pending = self._policy_wanted
            units = tuple(unit for unit in self._admitting if not unit.marker)
            self._call = Admit(self.tail, self._revision, self._confirmation(), units)
            return [self._call]
        if self._unconfirmed and not (self._writing or self._resting):
            if self._rested_at != self.tail:
                self._resting, self._rested_at = True, self.tail
                return [Rest()]
            confirmation = self._confirmation()
            assert confirmation is not None
            self._call = Confirm(self.tail, confirmation)
            return [self._call]
        return []

    def _align(self) -> list[Effect]:
        under_way = self._call or self._writing or self._reading or self._reopening
        if under_way or self._pausing:
            return []
        ready, self._ready = self._ready, []
        effects = self._requeue(ready)
        if self._reopen:
            self._reopening = True
            return [*effects, Reopen()]
        if self._behind is not None and self._behind.confirmed != self.tail:
            self._reading = True
            return [*effects, ReadLog(self._behind.confirmed, REPLAY_PAGE_ENTRIES)]
        self._behind = None
        self._call = Rollback(self.tail, self._confirmation())
        return [*effects, self._call]

    def _ask_where_it_ends(self) -> None:
        """Make the next alignment ask deduplication again which entries it lacks."""
        self._behind = None
        self._unconfirmed.clear()  # the replay reads them, after the missing ones

    def _surprised(self) -> list[Effect]:
        """Align, since the state is not as expected; after a pause if that repeats."""
        self.phase = Phase.ALIGNING
        self._surprises += 1
        effects = self._pause() if self._surprises > SURPRISES_MAX else []
        return effects + self._back_to_waiting()

    def _go_live(self) -> None:
        self.phase = Phase.LIVE
        self.last_error = None

    def _next_entry_id(self) -> int:
        same = self.tail is not None and self.tail.ledger_id == self.ledger_id
        return self.tail.entry_id + 1 if same and self.tail else 0

    def _take_group(self) -> list[Unit]:
        group: list[Unit] = []
        entries = size_bytes = 0
        while self._waiting:
            unit = self._waiting[0]
            entries += len(unit.entries)
            size_bytes += unit.size_bytes
            full = (
                entries > self._limits.group_entries_max
                or size_bytes > self._limits.group_bytes_max
                or (self._narrow > 0 and group and group[0].producer != unit.producer)
            )
            if group and full:
                break
            group.append(self._waiting.popleft())
        self._narrow = max(0, self._narrow - len(group))
        return group

    def _confirmation(self) -> Confirmation | None:
        if not self._unconfirmed:
            return None
        through = self._unconfirmed[-1].position
        return confirmation_of(self._confirmed, through, self._unconfirmed)

    def _drop_confirmed(self, confirmation: Confirmation | None) -> None:
        if confirmation is None:
            return
        through = confirmation.through
        self._confirmed = through
        self._unconfirmed = [each for each in self._unconfirmed if each.position > through]

    def _sort_out(self, judgements: Mapping[str, Iterator[_Judgement]]) -> list[Effect]:
        """Route each unit of the Admit by its verdict. If the machine aligns, the units admitted
        here are admitted again afterwards."""
        admitting, self._admitting = self._admitting, []
        look_up: list[Repeated] = []
        again: list[Unit] = []
        effects: list[Effect] = []
        in_flight = False
        attempts = self._reached()
        gaps: set[int] = set()
        for unit in admitting:
            verdict, decided, aborted = _NEW if unit.marker else next(judgements[unit.producer])
            about_chunks = bool(attempts or gaps) or unit.chunk is not None
            if about_chunks and verdict is Verdict.NEW and not unit.marker:
                verdict = _in_turn(unit, attempts.get(unit.session), gaps)
            if unit.publications > 1 and verdict not in _ALIKE:
                again += unit.divided()  # to be judged one by one
                in_flight = in_flight or verdict is Verdict.IN_FLIGHT
                continue
            match verdict:
                case Verdict.NEW:
                    ended = (about_chunks and _ended_by(unit, attempts)) or aborted
                    self._ready.append(_ending(unit, ended) if ended else unit)
                case Verdict.DUPLICATE:
                    look_up += [Repeated(each, None, decided) for each in unit.divided()]
                case Verdict.PARTIAL:
                    look_up.append(Repeated(unit, decided + 1, decided))
                    self._hold(unit)
                case Verdict.CHUNK_GAP:
                    effects.append(Answer(unit, CHUNK_GAP))
                    self._hold(unit)
                case Verdict.LAYOUT_CONFLICT:
                    effects.append(Answer(unit, LAYOUT_CONFLICT))
                    self._hold(unit)
                case Verdict.IN_FLIGHT | Verdict.HELD:
                    in_flight = in_flight or verdict is Verdict.IN_FLIGHT
                    again.append(unit)
        effects += self._skip_on_hold() + self._requeue(again)
        if in_flight and not (self._writing or self._ready):
            if not self._unconfirmed:
                self.phase = Phase.ALIGNING  # in flight, but not in a unit of ours
        elif in_flight:
            self._recheck_after_append = True
        if look_up:
            effects.append(LookUp(tuple(look_up), self._refuses_conflicts))
        return effects + self._next()

    def _reached(self) -> dict[int, OpenAttempt]:
        """By stream: the attempt left unfinished once all units let through are stored."""
        attempts = self._unfinished.copy()
        for unit in chain(self._writing, self._ready):
            if attempts or unit.chunk is not None:
                _track(attempts, unit)
        return attempts

    def _track_unfinished(self, unit: Unit) -> None:
        """Update the unfinished attempts after a unit was stored."""
        if not self._unfinished and unit.chunk is None:
            return
        if unit.session in self._sessions or unit.session in self._ended_amid:
            _track(self._unfinished, unit)

    def _drop_ended(self) -> None:
        """Forget the unfinished attempts of ended streams without pending units."""
        let_through = chain(self._admitting, self._ready, self._writing)
        over = self._ended_amid.difference(unit.session for unit in let_through)
        self._ended_amid -= over
        for session in over:
            self._unfinished.pop(session, None)

    def _back_to_waiting(self) -> list[Effect]:
        admitting, self._admitting = self._admitting, []
        return self._requeue(admitting) + self._next()

    def _requeue(self, units: Sequence[Unit]) -> list[Effect]:
        """Put units back into the queue, in order, and skip those on hold. Units of an ended stream
        are dropped: an earlier one may have failed, and the producer resends all of them."""
        effects: list[Effect] = []
        for unit in reversed(units):
            if unit.session not in self._sessions:
                continue
            if unit.session in self._on_hold:
                effects.insert(0, Answer(unit, SKIPPED))
            else:
                self._waiting.appendleft(unit)
        return effects

    def _refuse(self, units: Iterable[Unit], error: DomainError) -> list[Effect]:
        """Fail units so that producers resend them. Their streams go on hold, or later units would
        overtake these."""
        effects: list[Effect] = []
        for unit in units:
            effects.append(Answer(unit, failed(error)))
            self._hold(unit)
        return effects + self._skip_on_hold()

    def _hold(self, unit: Unit) -> None:
        if unit.session in self._sessions:
            self._on_hold.add(unit.session)

    def _skip_on_hold(self) -> list[Effect]:
        if not self._on_hold:
            return []
        skipped = [unit for unit in self._waiting if unit.session in self._on_hold]
        if skipped:
            kept = (unit for unit in self._waiting if unit.session not in self._on_hold)
            self._waiting = deque(kept)
        return [Answer(unit, SKIPPED) for unit in skipped]

    def _too_many_producers(self, call: Admit, error: DomainError) -> list[Effect]:
        """Find the producer beyond the limit: admit one per group until these units are done."""
        admitting, self._admitting = self._admitting, []
        if len({unit.producer for unit in call.units}) > 1:
            self._narrow = len(admitting)
            return self._requeue(admitting) + self._next()
        markers = [unit for unit in admitting if unit.marker]
        refused = [unit for unit in admitting if not unit.marker]
        return self._refuse(refused, error) + self._requeue(markers) + self._next()

    def _fail(self, error: DomainError, *, aligning: bool = True) -> list[Effect]:
        """Retry after a pause; after `patience` failures in a row, fail the waiting units. Without
        `aligning`, a writer that is LIVE stays so."""
        if aligning:
            self.phase = Phase.ALIGNING
        if self.phase is Phase.ALIGNING:
            self.last_error = error
        self._failures += 1
        admitting, self._admitting = self._admitting, []
        effects = self._requeue(admitting)
        if self._failures >= self._limits.patience:
            waiting, self._waiting = self._waiting, deque()
            effects += self._refuse(waiting, error)
        return effects + self._pause() + self._next()

    def _pause(self) -> list[Effect]:
        if self._pausing:
            return []
        self._pausing = True
        seconds = BACKOFF_FIRST_S * 2 ** min(self._failures, 10)
        return [Pause(min(seconds, BACKOFF_MAX_S))]

    def _fence(self, error: DomainError, units: Sequence[Unit] = ()) -> list[Effect]:
        del units  # their streams end, and the producers resend
        self.phase = Phase.FENCED
        self._waiting.clear()
        self._admitting, self._ready, self._writing = [], [], []
        return [Stop(error if isinstance(error, Fenced) else Fenced(error.message))]


def _in_turn(unit: Unit, before: OpenAttempt | None, gaps: set[int]) -> Verdict:
    """The verdict on a unit that deduplication admits, or does not judge. After a chunk that
    continues nothing, `gaps` has its stream: nothing may overtake it."""
    if unit.session in gaps:
        return Verdict.HELD
    if is_gap(before, unit.highest, unit.chunk):
        gaps.add(unit.session)
        return Verdict.CHUNK_GAP
    return Verdict.NEW


def _ended_by(unit: Unit, attempts: dict[int, OpenAttempt]) -> str:
    """The attempt that a unit aborts, which is let through after these."""
    ended = "" if unit.marker else ended_by(attempts.get(unit.session), unit.chunk)
    _track(attempts, unit)
    return ended


def _track(attempts: dict[int, OpenAttempt], unit: Unit) -> None:
    """Update the unfinished attempts by stream after a unit."""
    if unit.marker:
        return
    chunk, session = unit.chunk, unit.session
    attempt = chunk and follow(attempts.get(session), unit.highest, chunk)
    if attempt is None:
        attempts.pop(session, None)
    else:
        attempts[session] = attempt


def _ending(unit: Unit, uuid: str) -> Unit:
    """The unit with its first entry marked as aborting an attempt at a large message."""
    first, *rest = unit.entries
    return unit._replace(entries=(first._replace(aborts=uuid), *rest))
