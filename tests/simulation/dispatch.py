"""A subscription's machine in a simulated world: a log, a store, consumers, time.

All events are drawn from a seed. Each effect of the machine waits until the world performs it, in
any order that the machine allows; one that ends in a store may be performed twice, because its
answer was lost. After every step the world checks the promises: one consumer per key at a time; a
key's messages in order; no delivery of a message that is durably acknowledged, rejected by filters,
not accepted yet, or part of a partly rejected large message; no lost entry; consistent counts; a
true reason for everything withheld. At the end of a history, everything deliverable must have been
delivered.
"""

import inspect
import sys
import textwrap
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import chain
from random import Random
from types import CodeType
from typing import Any, Final

from seqgate.services.dispatcher.core.delays import DelayedBytes, Delays, Kept, Postponed
from seqgate.services.dispatcher.core.delays import Held as HeldKeys
from seqgate.services.dispatcher.core.delivering import Delivering
from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    FILTER_FAILED,
    REJECT,
    UNJUDGED,
    AfterDeadLetter,
    Assigned,
    DeadLetter,
    Deliver,
    Delivery,
    Drain,
    Effect,
    Entry,
    ForgetKey,
    Gap,
    Judge,
    KeyState,
    Options,
    Outcome,
    Outgoing,
    Passed,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.flights import Flights, HandOver
from seqgate.services.dispatcher.core.judging import Judging
from seqgate.services.dispatcher.core.lags import Lags
from seqgate.services.dispatcher.core.lane import (
    Chunk,
    Consumer,
    Lane,
    Large,
    Queue,
    Rare,
    Reason,
    Slot,
    Timers,
    Undecided,
)
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.positions import Acknowledged, Runs
from seqgate.services.dispatcher.core.selectors import (
    AutoSplit,
    NoSlotsLeft,
    RangeConflict,
    Ring,
    Selector,
    SlotRange,
    Sticky,
)
from seqgate.services.dispatcher.core.settling import Durable, Gaps, Settling
from seqgate.services.dispatcher.core.subscription import Ack, Nack, Subscription
from seqgate.services.dispatcher.core.verdicts import Verdicts
from seqgate.types import Position

SMALL: Final = {
    "TURN_ENTRIES": 2,
    "SCAN_ENTRIES": 4,
    "GAPS_MAX": 2,
    "TIMERS_SPARE": 3,
    "JUDGE_ENTRIES": 3,
    "UNJUDGED_MAX": 6,
    "STRETCH_ENTRIES": 4,
    "HELD_KEYS_MAX": 1,
    "TABLE_FIRST": 2,
    "KEPT_LEAST": 2,
}
"""The machine's own limits, reduced so that histories reach them."""

OPTIONS: Final = {each.name for each in fields(Options)}

SPAN_STEPS: Final = 60
"""Steps of a history."""

SETTLE_ROUNDS_MAX: Final = 2_000
"""Rounds of effects after which the machine counts as looping."""


PARTS: Final[tuple[type, ...]] = (
    Runs,
    Acknowledged,
    Large,
    Rare,
    Slot,
    Undecided,
    Lane,
    Consumer,
    Timers,
    Postponed,
    HeldKeys,
    Kept,
    Delays,
    Lags,
    Verdicts,
    Parking,
    Outgoing,
    Flights,
    Gaps,
    Settling,
    Judging,
    HandOver,
    Delivering,
    Subscription,
)
"""The classes of the machine, each after those it depends on."""


def rebuilt(
    owner: type = Subscription,
    right: str = "",
    wrong: str = "",
    limits: Mapping[str, int] = SMALL,
) -> dict[str, Any]:
    """Recompile the machine's classes with other limits and, in one class, `right` replaced by
    `wrong`. Returns them by name."""
    made: dict[str, Any] = {}
    for part in PARTS:
        source = source_of(part)
        if part is owner and right:
            assert right in source, f"{owner.__name__} has no {right!r}"
            source = source.replace(right, wrong)
        scope = {**vars(sys.modules[part.__module__]), **limits, **made}
        exec(_compiled(part, source), scope)
        made[part.__name__] = scope[part.__name__]
    return made


@cache
def source_of(part: type) -> str:
    return textwrap.dedent(inspect.getsource(part))


@cache
def _compiled(part: type, source: str) -> CodeType:
    """Compile at the class's own file and lines, so that tracebacks and coverage show them."""
    home = inspect.getsourcefile(part)
    _, first_line = inspect.getsourcelines(part)
    return compile("\n" * (first_line - 1) + source, home or part.__name__, "exec")


SmallSubscription: Final[type[Subscription]] = rebuilt()["Subscription"]


@dataclass(slots=True, eq=False)
class Held:
    """A delivery as its consumer sees it."""

    delivery: int
    position: Position
    key: bytes
    messages: int
    unacked: int
    deadline_ms: int | None
    asked: int = 0

    @property
    def is_settling(self) -> bool:
        return not self.unacked & ~self.asked


@dataclass(slots=True, eq=False)
class Peer:
    """A consumer, at its end of the stream.

    Attributes:
        owed: permits to return, for chunks before the last of their message.
        gone: tokens of past deliveries.
    """

    name: str
    permits: int = 0
    timeout_ms: int = 0
    owed: int = 0
    joined_at: Position | None = None
    blocked: bool = False
    ranges: tuple[SlotRange, ...] | None = None
    held: dict[int, Held] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Store:
    """The state that outlives the machine.

    Attributes:
        large: large letters on their way, by their first chunk: the attempt, and the last chunk
            once it is dead-lettered.
    """

    done: set[Position] = field(default_factory=set)
    mark_delete: Position | None = None
    partial: dict[Position, int] = field(default_factory=dict)
    attempts: dict[Position, int] = field(default_factory=dict)
    keys: dict[bytes, KeyState] = field(default_factory=dict)
    dead: list[Position] = field(default_factory=list)
    large: dict[Position, tuple[str, Position | None]] = field(default_factory=dict)
    successions: set[tuple[Position, Position]] = field(default_factory=set)


class Broken(AssertionError):
    """A broken promise."""


def drawn_options(random: Random) -> Options:
    """Options of a subscription; limits are small as often as they are out of reach."""
    kind = random.choice(
        (SubscriptionType.KEY_SHARED,) * 5 + (SubscriptionType.SHARED, SubscriptionType.EXCLUSIVE)
    )
    return Options(
        kind=kind,
        in_order=random.random() < 0.85,
        max_in_flight_per_key=random.choice((0, 0, 1, 2)),
        consumer_unacked_max=random.choice((0, 4, 1000)),
        unacked_max=random.choice((0, 0, 8, 1000)),
        key_parked_max=random.choice((1, 3, 1000)),
        consumer_parked_max=random.choice((2, 5, 1000)),
        delayed_max=random.choice((1, 2, 4, 1000)),
        delayed_bytes_max=random.choice((1, 4_000, 1_000_000)),
        returned_max=random.choice((0, 0, 3, 1000)),
        classic_join=random.random() < 0.15,
        delay_holds_key=random.random() < 0.5,
        drain_deadline_ms=random.choice((0, 0, 500)),
        redeliveries_max=random.choice((None, None, 0, 2)),
        after_dead_letter=random.choice(list(AfterDeadLetter)),
        retry_first_ms=10,
        retry_max_ms=100,
        reschedule_max_ms=random.choice((50, 200)),
        reschedules_max=random.choice((0, 1, 3)),
    )


class World:
    """A subscription's machine, with everything around it.

    Args:
        forced: replaces drawn settings: options of the subscription; `delays`, `batches`, `chunks`,
            `faulty`, `filters`; `timeouts`, of consumers; `pace`, the share of steps that advance
            time or renew deliveries.
    """

    def __init__(
        self,
        seed: int,
        machine: type[Subscription] = SmallSubscription,
        acknowledged: type[Acknowledged] = Acknowledged,
        **forced: Any,
    ) -> None:
        self.random = random = Random(seed)
        self.machine, self.set = machine, acknowledged
        of_options = {each: forced.pop(each) for each in set(forced) & OPTIONS}
        self.options = replace(drawn_options(random), **of_options)
        self.mode = random.choice((Ring, Ring, AutoSplit, Sticky))
        if self.options.kind is not SubscriptionType.KEY_SHARED:
            self.mode = Ring
        self.ordered = self.options.orders_keys
        self.keys = [b"key-%d" % each for each in range(random.choice((1, 3, 8)))]
        self.delays = random.random() < 0.3
        self.batches = random.random() < 0.4
        self.chunks = random.random() < 0.25
        self.faulty = random.random() < 0.5
        self.filters = random.random() < 0.4
        self.timeouts = (0, 0, 300)
        self.pace = 0.0
        for name, value in forced.items():
            setattr(self, name, value)
        self.log: list[Entry] = []
        self.positions: list[Position] = []
        self.entries: dict[Position, Entry] = {}
        self.own: dict[Position, bytes] = {}
        self.of_key: dict[bytes, list[Position]] = {}
        self.undone: dict[Position, Entry] = {}
        self.attempts_open: dict[str, list[Position]] = {}
        self.chunks_of: dict[str, list[Position]] = {}
        self.aborted: set[str] = set()
        self.overtaken: set[Position] = set()
        self.ledger_id = random.choice((1, 1, 2))
        self.filtered = self.filters and random.random() < 0.8
        self.outage = False
        self.kind_word = False
        self.store = Store()
        self.delayed = DelayedBytes(random.choice((1, 4_000, 1_000_000)))
        self.now_ms = 1_000
        self.next_peer = 1
        self.trace: list[str] = []
        self._start()

    def _start(self) -> None:
        store = self.store
        acknowledged = self.set(store.mark_delete)
        for position in sorted(store.done):
            acknowledged.add(position)
        selector: Selector = self.mode() if self.mode is not Ring else Ring(points=5)
        self.told = dict(store.partial)
        self.left = dict(store.partial)
        large = {attempt: first for first, (attempt, _) in store.large.items()}
        durable = Durable(
            acknowledged, store.partial, store.attempts, dict(store.keys), large_letters=large
        )
        self.delayed.size_bytes = 0
        self.sub = self.machine(
            self.options, selector, durable, is_filtered=self.filtered, delayed=self.delayed
        )
        self.pending: list[Effect] = []
        self.peers: dict[int, Peer] = {}
        self.where: dict[Position, tuple[int, Held]] = {}
        self.ghosts: dict[Position, bytes] = {}
        self.passed: set[Position] = set()
        self.failed: dict[bytes, set[Position]] = {}
        self.not_before: dict[Position, int] = {}
        self.failures = Counter(store.attempts)
        self.unsure: set[Position] = set()
        self.shown: set[Position] = set()
        self.promised: list[tuple[int, Position, int]] = []
        self.blocked = False
        self.totals = Counter[str]()
        self.to_drain: set[int] = set()
        self.lost: set[Position] = set()
        self.cut: set[bytes] = set()
        """Keys with a large message that is dead-lettered after part of it was delivered."""
        self.back: dict[bytes, Position] = {}
        self.draining: dict[bytes, int] = {}
        self.said: dict[Position, int] = {}
        self.rescheduled: Counter[Position] = Counter()
        self.rejected: set[Position] = set()
        self.rejecting: set[str] = set()
        self.accepting: set[str] = set()
        self.paged: dict[Position, int] = {}
        self.asks_anew = False
        self.asked_with = 0

    def restart(self) -> None:
        """Lose the machine with all that is not durable, and its consumers."""
        self.trace.append("restart")
        self._start()

    def key_of(self, entry: Entry) -> bytes:
        """The key that orders an entry; its own if nothing does."""
        assert entry.key is not None
        if self.options.kind is SubscriptionType.KEY_SHARED:
            return entry.key
        if self.options.kind is SubscriptionType.EXCLUSIVE:
            return b""
        return entry.chunk.attempt.encode() if entry.chunk else b"%d:%d" % entry.position

    def owner(self, key: bytes) -> int | None:
        """The owner of a key; for a pool, any consumer."""
        if self.options.kind is not SubscriptionType.KEY_SHARED:
            return next(iter(self.peers), None)
        return self.sub.selector.owner(self.sub.selector.slot(key))

    # ---- effects

    def do(self, effects: Sequence[Effect]) -> None:
        """Perform the machine's effects, or queue them."""
        for effect in effects:
            if isinstance(effect, Passed):
                self._record_passed(effect.positions)
        self._record_rejected()
        shown: list[tuple[Delivery, int]] = []
        for effect in effects:
            match effect:
                case Deliver(consumer, deliveries):
                    shown += [(delivery, consumer) for delivery in deliveries]
                case Revoke(consumer, deliveries):
                    for each in deliveries:
                        self._revoked(self.peers[consumer], each)
                case Drain(consumer, deliveries):
                    self._moved(consumer, deliveries)
                case Assigned(consumer, ranges):
                    self.peers[consumer].ranges = ranges
                case Passed():
                    pass  # above
                case ForgetKey(key):
                    self.store.keys.pop(key, None)
                case DeadLetter():
                    self._dies(effect)
                    self.pending.append(effect)
                case Persist() if any(map(self._is_done_for_good, effect.entries)) or {
                    *effect.entries
                } & {each for each, _, _ in effect.parts}:
                    raise Broken("an acknowledgement is persisted twice")
                case Judge(positions):
                    self._check_asked(positions)
                    self.pending.append(effect)
                case Persist() if not all(map(self._is_settled, effect.entries)):
                    raise Broken("an entry is persisted without an acknowledgement")
                case _:
                    if isinstance(effect, Scan):
                        self.asked_with = len(self.log)
                    if any(type(each) is type(effect) for each in self.pending):
                        raise Broken(f"two {type(effect).__name__} effects are pending")
                    self.pending.append(effect)
        for _, held in self.where.values():
            first = self.back.get(held.key, held.position)
            if held.position > first and not held.is_settling:
                raise Broken(f"{held.position} is not taken back")
        for delivery, consumer in sorted(shown):  # in the order of the machine's decisions
            self._shown(consumer, delivery)
        self.lost, self.back, self.cut = set(), {}, set()
        takes = any(
            self._has_room(peer) and (not self.blocked or self._unfinished(peer))
            for peer in self.peers.values()
        )
        if any(isinstance(each, Read) for each in effects):
            if not takes:
                raise Broken("the log is read although no consumer has room")
            if self._is_full():
                raise Broken("the log is read although too many entries wait for filters")

    def _is_done_for_good(self, position: Position) -> bool:
        """True if an entry is durable and cannot have been acknowledged again. In a batch, the last
        message of one delivery may become durable after all of another delivery."""
        return position in self.store.done and self.entries[position].messages == 1

    def _is_settled(self, position: Position) -> bool:
        """True if an entry was acknowledged or needs no acknowledgement."""
        if position in self.where:
            return self.where[position][1].is_settling
        if self.entries[position].key is None or position in self.store.done:
            return True
        return position in self.ghosts or position in self.store.dead or position in self.rejected

    def _revoked(self, peer: Peer, delivery: int) -> None:
        """The machine revoked a delivery: it timed out, exceeded the drain deadline, or follows one
        that is no longer in flight."""
        held = self._back(peer, delivery)
        self.totals["back"] += 1
        if held.is_settling:
            raise Broken(f"{held.position} is revoked although it is acknowledged")
        first = self.back.get(held.key, held.position)
        if held.position not in self.lost and first >= held.position:
            raise Broken(f"{held.position} is revoked without need")

    def _back(self, peer: Peer, delivery: int) -> Held:
        held = peer.held.pop(delivery)
        peer.gone.append(delivery)
        del self.where[held.position]
        self._unjudge(held.position)
        self._block(peer)
        return held

    def _moved(self, consumer: int, deliveries: tuple[int, ...]) -> None:
        self.to_drain.update(deliveries)
        if not deliveries:
            raise Broken("a Drain is empty")
        for delivery in deliveries:
            held = self.peers[consumer].held[delivery]
            if held.is_settling:
                raise Broken(f"{held.position} drains although it is acknowledged")
            if self.owner(held.key) == consumer or not self.ordered:
                raise Broken(f"{held.position} drains although no other consumer waits for its key")

    # ---- promises about a delivery

    def _shown(self, consumer: int, delivery: Delivery) -> None:
        peer = self.peers[consumer]
        position = delivery.position
        entry, key = self.entries[position], self.own[position]
        self.trace.append(f"{position} of {key!r} to {consumer}")
        if position in self.store.done:
            raise Broken(f"{position} is delivered after its acknowledgement")
        if position in self.where or position in self.ghosts:
            raise Broken(f"{position} is in flight twice")
        self._check_accepted(entry)
        whole = (1 << entry.messages) - 1
        if delivery.unacked != self.left.get(position, whole):
            raise Broken(f"{position} shows other messages than its unacknowledged ones")
        self._check_attempts(position, delivery.attempts)
        state = self.store.keys.get(key)
        if delivery.gap != (None if state is None else state.gap):
            raise Broken(f"{position} reports the gap {delivery.gap}")
        goes_on = state is None or state.after is AfterDeadLetter.CONTINUE
        if state is not None and state.gap.position < position and not goes_on:
            raise Broken(f"{position} is delivered although its key is held or dead")
        if entry.deliver_at_ms > self.now_ms or self.not_before.get(position, 0) > self.now_ms:
            raise Broken(f"{position} is delivered early")
        self._check_limits(entry, key, consumer, peer)
        for other, held in self.where.values():
            if held.key == key and other != consumer and self.ordered:
                raise Broken(f"{key!r} is in flight at {other} and {consumer}")
        if self.ordered and any(
            own == key and each not in self.passed for each, own in self.ghosts.items()
        ):
            raise Broken(f"{key!r} is unsettled at a consumer that left")
        is_placed = self.options.kind is SubscriptionType.KEY_SHARED
        if is_placed and self.owner(key) != consumer and key not in self._unfinished(peer):
            raise Broken(f"{position} goes to {consumer}, which does not own its key")
        if self.ordered:
            self._check_order(entry, key, self._unfinished(peer))
        want = self.now_ms + peer.timeout_ms if peer.timeout_ms else None
        if delivery.deadline_ms != want:
            raise Broken(f"{position} has the deadline {delivery.deadline_ms}, not {want}")
        self.totals["delivered_entries"] += 1
        self.totals["delivered_messages"] += delivery.unacked.bit_count()
        self.shown.add(position)
        peer.permits -= delivery.unacked.bit_count()
        if entry.chunk is not None and not entry.chunk.is_last:
            peer.owed += 1
        held = Held(
            delivery.delivery, position, key, entry.messages, delivery.unacked, delivery.deadline_ms
        )
        peer.held[delivery.delivery] = held
        self.where[position] = consumer, held
        self._block(peer)

    def _check_attempts(self, position: Position, attempts: int) -> None:
        if position in self.unsure:
            self.unsure.discard(position)
            self.failures[position] = attempts
        if attempts != self.failures[position]:
            raise Broken(f"{position} reports {attempts} attempts, not {self.failures[position]}")
        if attempts != self.store.attempts.get(position, 0):
            raise Broken(f"{position} is delivered before its failure is recorded")
        limit = self.options.redeliveries_max
        if limit is not None and attempts > limit:
            raise Broken(f"{position} is delivered after {attempts} failures (limit {limit})")

    def _unfinished(self, peer: Peer) -> set[bytes]:
        """Keys of which a consumer holds part of a large message."""
        if not self.chunks:
            return set()
        attempts: dict[str, tuple[bytes, bool]] = {}
        for held in peer.held.values():
            chunk = self.entries[held.position].chunk
            if chunk is not None:
                _, has_last = attempts.get(chunk.attempt, (b"", False))
                attempts[chunk.attempt] = held.key, has_last or chunk.is_last
        return {key for key, has_last in attempts.values() if not has_last}

    def _check_limits(self, entry: Entry, key: bytes, consumer: int, peer: Peer) -> None:
        options, amid = self.options, self._unfinished(peer)
        if peer.permits <= 0:
            raise Broken(f"{entry.position} is delivered without a permit")
        if peer.blocked and not amid:
            raise Broken(f"{entry.position} exceeds the consumer's limit")
        if entry.position not in self.shown and not (amid or entry.deliver_at_ms):
            if self.blocked:
                raise Broken(f"{entry.position} exceeds the subscription's limit")
            returned = self.ordered and any(
                (p in self.shown or self.entries[p].deliver_at_ms)
                and p not in self.store.done
                and p not in self.where
                for p in self.of_key[key]
            )
            if self.sub.lanes[key].slot.queue.is_choked and not returned:
                raise Broken(f"{entry.position} is delivered before returned entries")
        if peer.joined_at and entry.position > peer.joined_at and key not in amid:
            raise Broken(f"{entry.position} reaches {consumer} before older entries are done")
        of_key = sum(held.key == key for held in peer.held.values())
        limit = options.max_in_flight_per_key
        if limit and of_key >= limit and key not in amid:
            raise Broken(f"{entry.position} exceeds the limit of its key")

    def _block(self, peer: Peer) -> None:
        """Update the blocking of a consumer, and of all: on at the limit of unacknowledged
        messages, off at half of it."""
        self._block_all()
        unacked = sum(held.unacked.bit_count() for held in peer.held.values())
        limit = self.options.consumer_unacked_max
        if limit and unacked >= limit:
            peer.blocked = True
        elif unacked * 2 <= limit:
            peer.blocked = False

    def _block_all(self) -> None:
        unacked = sum(held.unacked.bit_count() for _, held in self.where.values())
        limit = self.options.unacked_max
        if limit and unacked >= limit:
            self.blocked = True
        elif unacked * 2 < limit or not limit:
            self.blocked = False

    def _check_order(self, entry: Entry, key: bytes, amid: set[bytes]) -> None:
        """Every earlier entry of the key is in flight or done."""
        failed = self.failed.get(key, ())
        for earlier in self.of_key[key]:
            if earlier >= entry.position:
                break
            if earlier in self.store.done or earlier in self.rejected:
                continue
            if earlier in self.store.dead and (key in amid or key in self.cut):
                continue
            if self._is_of_a_letter(earlier):
                continue
            if earlier in failed and key not in amid:
                raise Broken(f"{entry.position} is delivered while {earlier} is being retried")
            at_ms = self.entries[earlier].deliver_at_ms
            if at_ms and not self.options.delay_holds_key:
                continue
            if earlier not in self.where:
                raise Broken(f"{entry.position} is delivered before {earlier}")

    def _chunks_with(self, position: Position) -> list[Position]:
        """The chunks of an entry's large message; empty for other entries."""
        chunk = self.entries[position].chunk
        return [] if chunk is None else self.chunks_of[chunk.attempt]

    def _is_of_a_letter(self, position: Position) -> bool:
        """True if any chunk of an entry's large message is dead or beyond its redeliveries, so that
        the whole message is dead-lettered."""
        store, limit = self.store, self.options.redeliveries_max
        return any(
            each in store.dead or (limit is not None and store.attempts.get(each, 0) > limit)
            for each in self._chunks_with(position)
        )

    # ---- consumers' actions

    def join(self) -> None:
        """Connect a consumer."""
        random = self.random
        if self.options.kind is SubscriptionType.EXCLUSIVE and self.peers:
            return
        ranges = []
        if self.mode is Sticky:
            start = random.randrange(65_536)
            ranges = [SlotRange(start, min(65_535, start + random.randrange(40_000)))]
        peer = Peer(random.choice("abc"), timeout_ms=random.choice(self.timeouts))
        self._join(peer, random.choice((1, 1, 3)), ranges)

    def _join(self, peer: Peer, weight: int, ranges: list[SlotRange]) -> None:
        number, self.next_peer = self.next_peer, self.next_peer + 1
        read_position = self.sub.read_position
        mark_delete = self.sub.acknowledged.mark_delete  # the store's may be ahead
        classic = self.options.classic_join and self.options.kind is SubscriptionType.KEY_SHARED
        if classic and self.ordered and self.peers and read_position != mark_delete:
            peer.joined_at = read_position
        self.peers[number] = peer
        try:
            effects = self.sub.join(
                number,
                name=peer.name,
                now_ms=self.now_ms,
                weight=weight,
                ranges=ranges,
                ack_timeout_ms=peer.timeout_ms,
            )
        except (RangeConflict, NoSlotsLeft):
            del self.peers[number]
            return
        self.trace.append(f"join {number}")
        self.do(effects)

    def leave(self, number: int) -> None:
        """Kill a consumer."""
        lanes: dict[bytes, list[Position]] = {}
        for held in self._remove(number):
            self.totals["lost_consumers"] += 1
            lanes.setdefault(held.key, []).append(held.position)
        for positions in lanes.values():
            for position in sorted(positions)[: 1 if self.ordered else None]:
                self.failures[position] += 1
        self.do(self.sub.leave(number, now_ms=self.now_ms))

    def close(self, number: int) -> None:
        """Close a consumer's stream."""
        self.totals["back"] += len(self._remove(number))
        self.do(self.sub.close(number, self.now_ms))

    def _remove(self, number: int) -> list[Held]:
        self.trace.append(f"{number} is gone")
        some = []
        for held in self.peers.pop(number).held.values():
            del self.where[held.position]
            self._unjudge(held.position)
            if held.is_settling:
                self.ghosts[held.position] = held.key
            else:
                some.append(held)
        self._block_all()
        self._all_joined(self.sub.acknowledged.mark_delete)
        return some

    def _all_joined(self, mark_delete: Position | None) -> None:
        reached = mark_delete or Position(0, -1)
        for peer in self.peers.values():
            if peer.joined_at and (len(self.peers) == 1 or reached >= peer.joined_at):
                peer.joined_at = None

    def permit(self, number: int, messages: int) -> None:
        """Grant permits."""
        self.peers[number].permits += messages
        self.do(self.sub.permit(number, messages, self.now_ms))

    def repay(self) -> None:
        """Return the permits of chunks before the last of their messages."""
        while any(peer.owed for peer in self.peers.values()):
            for number, peer in self.peers.items():
                if peer.owed:
                    owed, peer.owed = peer.owed, 0
                    self.permit(number, owed)

    def can_settle(self, peer: Peer, held: Held) -> list[Held]:
        """The deliveries settled together with one: all chunks of a large message, or none yet."""
        chunk = self.entries[held.position].chunk
        if chunk is None:
            return [held]
        mine = {each.position: each for each in peer.held.values()}
        positions = self.chunks_of[chunk.attempt]
        left = [each for each in positions if each not in self.store.done]
        whole = chunk.attempt not in self.attempts_open and all(each in mine for each in left)
        if whole or chunk.attempt in self.aborted:
            return [mine[each] for each in left if each in mine]
        return []

    def acknowledge(self, number: int, some: list[tuple[Held, int]]) -> None:
        """Acknowledge deliveries, or some of their messages. The request may also contain tokens
        of other consumers and old ones."""
        random, peer = self.random, self.peers[number]
        items, expected = [], []
        for held, messages in some:
            items.append(Ack(held.delivery, messages))
            expected.append(Outcome.DONE)
            if random.random() < 0.1:
                items.append(items[-1])
                expected.append(Outcome.DONE)
            if random.random() < 0.05:
                items.append(Ack(held.delivery, 1 << held.messages))
                expected.append(Outcome.INVALID)
        for dead in self._strange(number):
            items.append(Ack(dead, random.choice((0, 1))))
            expected.append(Outcome.STALE)
        effects, outcomes, durable_with = self.sub.acknowledge(number, items, self.now_ms)
        if outcomes != expected:
            raise Broken(f"acknowledgements: {outcomes}, not {expected}")
        self.totals["stale"] += expected.count(Outcome.STALE)
        for held, messages in some:
            self._ask(peer, held, messages, durable_with)
        self.do(effects)

    def _ask(self, peer: Peer, held: Held, messages: int, durable_with: int) -> None:
        bits = messages or (1 << held.messages) - 1
        held.asked |= bits & held.unacked
        self.left[held.position] = self.left.get(held.position, (1 << held.messages) - 1) & ~bits
        self.promised.append((durable_with, held.position, bits))
        if not durable_with:
            self._check_durable(0)

    def acknowledge_cumulative(self, number: int, last: Held) -> None:
        """Acknowledge cumulatively, as an exclusive consumer."""
        peer = self.peers[number]
        messages = 0 if last.messages == 1 else self.random.randrange(1 << last.messages)
        item = Ack(last.delivery, messages)
        effects, outcome, number = self.sub.acknowledge_cumulative(number, item, self.now_ms)
        if outcome is not Outcome.DONE:
            raise Broken(f"through {last.position}: {outcome}")
        for held in peer.held.values():
            if held.position < last.position:
                self._ask(peer, held, 0, number)
        self._ask(peer, last, messages, number)
        for position in self.undone:
            if position < last.position and position not in self.where:
                self.promised.append((number, position, (1 << 10) - 1))
                if self.entries[position].key is not None:
                    self.ghosts.setdefault(position, b"")
                    self.passed.add(position)
        self.do(effects)

    def _strange(self, number: int) -> list[int]:
        """Tokens of other consumers, and old ones."""
        if self.random.random() < 0.8:
            return []
        peer = self.peers[number]
        others = [d for n, other in self.peers.items() if n != number for d in other.held]
        dead = [10**9, *peer.gone[-2:], *others[:1]]
        return [self.random.choice(dead)]

    def negative_acknowledge(self, number: int, some: list[Held]) -> None:
        """Refuse deliveries."""
        peer, random = self.peers[number], self.random
        expected, items = [], []
        for held in some:
            delay_ms = random.choice((None, 0, 50, 400))
            expected.append(Outcome.STALE if held.is_settling else Outcome.DONE)
            items.append(Nack(held.delivery, delay_ms))
            if random.random() < 0.1:
                expected.append(expected[-1])
                items.append(Nack(held.delivery, 5))
            if held.is_settling:
                continue
            if delay_ms is None:
                delay_ms = min(10 << self.failures[held.position], 100)
            self._fails(held, delay_ms)
            self._back(peer, held.delivery)
            self.totals["negative_acknowledgements"] += 1
        for dead in self._strange(number):
            if all(dead != each.delivery for each in items):
                items.append(Nack(dead))
                expected.append(Outcome.STALE)
        effects, outcomes = self.sub.negative_acknowledge(number, items, self.now_ms)
        if outcomes != expected:
            raise Broken(f"refusals: {outcomes}, not {expected}")
        self.totals["stale"] += expected.count(Outcome.STALE)
        self.do(effects)

    def _fails(self, held: Held, delay_ms: int) -> None:
        self._is_back(held)
        self.failures[held.position] += 1
        self.not_before[held.position] = self.now_ms + delay_ms
        if self.ordered:
            self.failed.setdefault(held.key, set()).add(held.position)

    def _is_back(self, held: Held) -> None:
        """With ordered keys, later deliveries of the key must be revoked."""
        if self.ordered:
            self.back[held.key] = min(held.position, self.back.get(held.key, held.position))

    def give_back(self, number: int, some: list[Held]) -> None:
        """Give back deliveries."""
        peer = self.peers[number]
        expected = []
        for held in some:
            expected.append(Outcome.STALE if held.is_settling else Outcome.DONE)
            if not held.is_settling:
                self._back(peer, held.delivery)
                self.lost.update(self._rest_of(held, peer))
                if (last := self._end_of(held, peer)) is not None:
                    self._is_back(last)
                self.totals["back"] += 1
        items = [held.delivery for held in some] + self._strange(number)
        expected += [Outcome.STALE] * (len(items) - len(expected))
        effects, outcomes = self.sub.give_back(number, items, self.now_ms)
        if outcomes != expected:
            raise Broken(f"returns: {outcomes}, not {expected}")
        self.totals["stale"] += expected.count(Outcome.STALE)
        self.do(effects)

    def _end_of(self, held: Held, peer: Peer) -> Held | None:
        """The last chunk delivered of a delivery's message; None if it is not with this
        consumer."""
        chunk = self.entries[held.position].chunk
        if chunk is None or chunk.is_last:
            return held
        of_attempt = self.chunks_of[chunk.attempt]
        mine = {each.position: each for each in peer.held.values()}
        last = mine.get(of_attempt[-1])
        return last if last and self._chunk_at(last).is_last else None

    def _rest_of(self, held: Held, peer: Peer) -> set[Position]:
        """A consumer's chunks of a large message after this one, which are revoked as well."""
        chunk = self.entries[held.position].chunk
        of_attempt = [] if chunk is None else self.chunks_of[chunk.attempt]
        mine = {each.position for each in peer.held.values()}
        return {each for each in of_attempt if each > held.position and each in mine}

    def _chunk_at(self, held: Held) -> Chunk:
        chunk = self.entries[held.position].chunk
        assert chunk is not None
        return chunk

    def renew(self, number: int, some: list[Held]) -> None:
        """Renew deliveries."""
        peer = self.peers[number]
        for held in some:
            if held.deadline_ms is not None:
                held.deadline_ms = self.now_ms + peer.timeout_ms
        expected = [Outcome.DONE for _ in some]
        items = [held.delivery for held in some] + self._strange(number)
        expected += [Outcome.STALE] * (len(items) - len(expected))
        if self.sub.renew(number, items, self.now_ms) != expected:
            raise Broken("renewals have other outcomes")

    def stale(self) -> None:
        """Use a token as an unknown consumer."""
        before = self._counts()
        some = [*self.where.values()]
        token = some[0][1].delivery if some else 1
        nobody = 999_999
        effects, outcomes, _ = self.sub.acknowledge(nobody, [Ack(token)], self.now_ms)
        self.do(effects)
        refused, more = self.sub.negative_acknowledge(nobody, [Nack(token)], self.now_ms)
        self.do(refused)
        returned, most = self.sub.give_back(nobody, [token], self.now_ms)
        self.do(returned)
        self.do(self.sub.permit(nobody, 100, self.now_ms))
        renewed = self.sub.renew(nobody, [token], self.now_ms)
        if {*outcomes, *more, *most, *renewed} != {Outcome.STALE}:
            raise Broken("a stale token is accepted")
        self.totals["stale"] += 3
        if before != self._counts():
            raise Broken("a stale token has an effect")

    def _counts(self) -> tuple[int, ...]:
        sub = self.sub
        return sub.unacked, sub.parked, len(sub.lanes), len(self.where), sub.delayed

    # ---- filters

    def change_filters(self) -> None:
        """Start or end an outage of the filter service, or change the filters."""
        random = self.random
        choice = random.random()
        if choice < 0.5:
            self.outage = not self.outage
        elif choice < 0.75:
            self.refilter(is_filtered=self.filtered)
        else:
            start = random.choice(self.positions) if self.log and random.random() < 0.5 else None
            self.refilter(is_filtered=random.random() < 0.8, start=start)

    def refilter(self, *, is_filtered: bool, start: Position | None = None) -> None:
        """Judge waiting entries by other filters from now on."""
        self.trace.append(f"refilter {is_filtered} {start}")
        self.filtered = is_filtered
        self.asks_anew = any(isinstance(each, Judge) for each in self.pending)
        if not is_filtered:
            self.accepting.update(self.chunks_of)
        for position in self._waiting():
            said = self.said.get(position, ACCEPT)
            if not is_filtered:
                self.said.pop(position, None)
            elif said != ACCEPT or (start is not None and start <= position):
                self.said[position] = UNJUDGED
            self.rescheduled.pop(position, None)
        self.do(self.sub.refilter(self.now_ms, is_filtered=is_filtered, start=start))

    def _verdict(self) -> int:
        """Draw a verdict."""
        choice = self.random.random()
        if not self.filtered or choice < 0.5:
            return ACCEPT
        if choice < 0.75 or self.kind_word:
            return REJECT
        return FILTER_FAILED if choice < 0.85 else self.random.choice((1, 40, 300))

    def _judged_page(
        self, entries: Sequence[Entry], known: set[Position] | None = None
    ) -> list[Entry]:
        """Entries with drawn verdicts. Those of already known entries do not count."""
        late = self.filtered and (self.outage or self.random.random() < 0.2)
        judged = []
        for entry in entries:
            if entry.key is not None:
                entry = entry._replace(verdict=UNJUDGED if late else self._verdict())
                if entry.position not in (known or self.store.done):
                    self.rescheduled.pop(entry.position, None)
                    self._say(entry.position, entry.verdict)
            judged.append(entry)
        return judged

    def _say(self, position: Position, verdict: int) -> None:
        """Record a filter's verdict on an entry."""
        chunk = self.entries[position].chunk
        if chunk is not None and verdict == REJECT:
            self.rejecting.add(chunk.attempt)
        if verdict == ACCEPT or self._is_beyond(position):
            verdict = ACCEPT
        elif verdict > 0:
            self.rescheduled[position] += 1
            parts = [position] if chunk is None else self.chunks_of[chunk.attempt]
            if sum(self.rescheduled[each] for each in parts) > self.options.reschedules_max:
                verdict = ACCEPT
            else:
                verdict = self.now_ms + min(verdict, self.options.reschedule_max_ms)
        if chunk is not None and verdict == ACCEPT:
            self.accepting.add(chunk.attempt)
        self.said[position] = verdict

    def _judge(self, positions: Sequence[Position]) -> None:
        """Answer the machine's question to the filters."""
        verdicts = {}
        for position in positions:
            verdicts[position] = UNJUDGED if self.random.random() < 0.1 else self._verdict()
            if verdicts[position] == UNJUDGED and self.random.random() < 0.5:
                del verdicts[position]
        waiting, before = self._waiting(), Counter(self.rescheduled)
        asked = self.sub.verdicts._pending or {}
        for position, verdict in verdicts.items():
            if verdict == UNJUDGED or self.asks_anew or position not in waiting:
                continue
            if asked.get(position) is not self.sub.lanes[self.own[position]]:
                continue  # it was postponed and read again meanwhile
            if self._said(self.sub.lanes[self.own[position]], position) == UNJUDGED:
                self._say(position, verdict)
                rescheduled = self.said[position] > 0
                self.totals["rescheduled"] += (
                    rescheduled and self.rescheduled[position] > before[position]
                )
        self.asks_anew = False
        worked = {each: lane for each, lane in self.sub.lanes.items() if not lane.is_idle}
        self.do(self.sub.judged(verdicts, self.now_ms))
        if any(worked.get(each) is lane and lane.is_idle for each, lane in self.sub.lanes.items()):
            raise Broken("a key with only rejected entries is kept")

    def _unjudge(self, position: Position) -> None:
        """Require a new verdict on an entry that was in flight."""
        self.rescheduled.pop(position, None)
        if self.filtered:
            self.said[position] = UNJUDGED
        else:
            self.said.pop(position, None)

    def _is_beyond(self, position: Position) -> bool:
        limit = self.options.redeliveries_max
        return limit is not None and self.sub.attempts.get(position, 0) > limit

    def _said(self, lane: Lane, position: Position) -> int:
        """The effective verdict on a waiting entry. The chunks of a large message share one, which
        only the machine knows."""
        if self.entries[position].chunk is not None:
            return self.sub.verdict_of(lane, position)
        return ACCEPT if self._is_beyond(position) else self.said.get(position, ACCEPT)

    def _waiting(self) -> set[Position]:
        parking = self.sub.parking
        return {each for lane in self.sub.lanes.values() for each in parking.waiting(lane)}

    def _known(self) -> set[Position]:
        """Entries that the machine remembers, that are done, or that were not read yet."""
        end = self.sub.read_position
        known = {each for each in self.positions if end is None or each > end}
        known |= self._waiting() | {*self.sub.settling.unsettled}
        for lane in self.sub.lanes.values():
            known |= {*lane.flights, *([] if lane.dead is None else [lane.dead])}
        return known | self.store.done

    def _count_rescheduled(self, entries: Sequence[Entry], known: set[Position]) -> None:
        """Count the rescheduled entries among those newly read and kept."""
        kept = self._known() - known
        self.totals["rescheduled"] += sum(
            each.verdict > 0 and each.position in kept and self.said.get(each.position, 0) > 0
            for each in entries
        )

    def _is_full(self) -> bool:
        """True if the machine must not read on before the filters answer."""
        states = [
            state
            for lane in self.sub.lanes.values()
            for state in (lane.undecided.states.values() if lane.undecided else ())
        ]
        if (
            self.options.kind is SubscriptionType.SHARED
            and len(states) >= self.options.consumer_parked_max
        ):
            return True
        return states.count(UNJUDGED) >= SMALL["UNJUDGED_MAX"]

    def _record_passed(self, positions: Sequence[Position]) -> None:
        """Chunks were passed: the first chunk of their message must be acknowledged."""
        for position in positions:
            chunk = self.entries[position].chunk
            if chunk is None or not chunk.number:
                raise Broken(f"{position} is passed although it can be delivered")
            if not self._is_settled(self.chunks_of[chunk.attempt][0]):
                raise Broken(f"{position} is passed although its message may be whole")
            if self.chunks_of[chunk.attempt][0] in self.store.dead:
                raise Broken(f"{position} is passed although its message is dead-lettered")
            if self.chunks_of[chunk.attempt][0] in self.rejected:
                raise Broken(f"{position} is passed although its message was rejected")
            if position in self.where or position in self.rejected:
                raise Broken(f"{position} is passed although it is in flight or settled")
            self.rejected.add(position)
            self.totals["passed_entries"] += 1

    def _record_rejected(self) -> None:
        """An entry acknowledged by no consumer must have been rejected."""
        for position in self.sub.settling.unsettled:
            entry = self.entries[position]
            known = position in self.where or position in self.ghosts or position in self.rejected
            if known or entry.key is None or position in self.store.dead:
                continue
            chunk = entry.chunk
            # A kept entry may be postponed by an earlier entry of the page that contains it.
            told = REJECT in (self.said.get(position), self.paged.get(position))
            if not (told or (chunk is not None and chunk.attempt in self.rejecting)):
                raise Broken(f"{position} is acknowledged, but by no consumer")
            others = [] if chunk is None else self.chunks_of[chunk.attempt]
            if any(other in self.where for other in others):
                raise Broken(f"{position} is rejected while another part of it is in flight")
            self.rejected.add(position)
            self.failed.get(self.own[position], set()).discard(position)
            self.totals["rejected_entries"] += 1

    def _check_accepted(self, entry: Entry) -> None:
        """Filters must accept an entry before its delivery."""
        position, chunk = entry.position, entry.chunk
        if position in self.rejected:
            raise Broken(f"{position} is delivered after its rejection")
        if chunk is None:
            if self.said.get(position, ACCEPT) != ACCEPT:
                raise Broken(f"{position} is delivered, but its verdict is {self.said[position]}")
        elif self.filtered and chunk.attempt not in self.accepting:
            raise Broken(f"{position} is delivered, but filters never accepted its message")
        elif any(other in self.rejected for other in self.chunks_of[chunk.attempt]):
            raise Broken(f"{position} is delivered, but a part of its message was rejected")

    def _check_asked(self, positions: Sequence[Position]) -> None:
        """Questions to filters: one at a time, about waiting entries, oldest of each key first."""
        if any(isinstance(each, Judge) for each in self.pending):
            raise Broken("two Judge effects are pending")
        if not 0 < len(positions) <= SMALL["JUDGE_ENTRIES"] or len({*positions}) < len(positions):
            raise Broken(f"{len(positions)} entries are in a Judge")
        waiting = self._waiting()
        for position in positions:
            lane = self.sub.lanes[self.own[position]]
            if position not in waiting or self._said(lane, position) != UNJUDGED:
                raise Broken(f"{position} is in a Judge, but is not unjudged")
            assert lane.undecided is not None
            before = [
                each
                for each, state in lane.undecided.states.items()
                if state == UNJUDGED and each < position
            ]
            if not {*before} <= {*positions}:
                raise Broken(f"{position} is in a Judge, but not {before[0]} before it")

    def _check_undecided(
        self, lane: Lane, waiting: set[Position], aside: Sequence[Position]
    ) -> None:
        """A key's undecided entries are those that filters have not accepted."""
        undecided = lane.undecided
        states = {} if undecided is None else undecided.states
        if undecided is not None and not states:
            raise Broken(f"{lane.key!r} waits for filters without an undecided entry")
        if not {*aside} <= {*states} <= waiting or (aside and self.ordered):
            raise Broken(f"{lane.key!r} has an undecided entry that does not wait")
        if undecided is not None and not {*undecided.times} <= {*states}:
            raise Broken(f"{lane.key!r} counts reschedules of an entry that is not undecided")
        for position in waiting:
            chunk, state = self.entries[position].chunk, states.get(position, ACCEPT)
            if position in self.sub.acknowledged:
                continue
            if chunk is None:
                if state != self._said(lane, position):
                    raise Broken(f"{position} is {state}, not {self._said(lane, position)}")
                continue
            if self._is_of_a_letter(position):  # no verdict counts any more
                continue
            others = self.chunks_of[chunk.attempt]
            if state != ACCEPT and any(other in lane.flights for other in others):
                raise Broken(f"{position} waits for filters while part of it is in flight")
            if any(
                states.get(other, ACCEPT) != state
                for other in others
                if other in waiting and not (self._is_beyond(other) or self._is_beyond(position))
            ):
                raise Broken(f"{position} has verdict {state}, unlike other parts of it")

    def _check_filters(self) -> None:
        verdicts = self.sub.verdicts
        states = [
            state
            for lane in self.sub.lanes.values()
            for state in (lane.undecided.states.values() if lane.undecided else ())
        ]
        counts = (
            states.count(UNJUDGED),
            states.count(FILTER_FAILED),
            sum(each > 0 for each in states),
        )
        if (verdicts.unjudged, verdicts.failed, verdicts.rescheduled) != counts:
            raise Broken(f"entries that wait for filters are miscounted, not {counts}")
        if any(0 < each <= self.now_ms for each in states):
            raise Broken("an entry is rescheduled for longer than filters asked")
        if verdicts.unjudged and not any(isinstance(each, Judge) for each in self.pending):
            raise Broken("an entry is unjudged, and no Judge is pending")
        for position, said in self.said.items():
            is_whole = said == REJECT and self.entries[position].chunk is None
            if is_whole and not self.sub.settling.is_settled(position):
                raise Broken(f"{position} is not settled after its rejection")

    # ---- the log, the store

    def publish(self, count: int) -> None:
        """Append entries to the log."""
        random = self.random
        if random.random() < 0.1 and self.log:
            self.ledger_id += random.choice((1, 2))
        for _ in range(count):
            same = self.log and self.log[-1].position.ledger_id == self.ledger_id
            entry_id = self.log[-1].position.entry_id + 1 if same else 0
            position = Position(self.ledger_id, entry_id)
            key = None if random.random() < 0.03 else random.choice(self.keys)
            chunk = None
            if key is not None and self.chunks and random.random() < 0.5:
                chunk = self._chunk(position, key)
            messages = random.randint(2, 4) if self.batches and random.random() < 0.5 else 1
            late = self.delays and random.random() < 0.2
            at_ms = self.now_ms + random.randrange(1, 400) if late and not chunk else 0
            self._append(Entry(position, key, 1 if chunk else messages, at_ms, chunk))

    def _chunk(self, position: Position, key: bytes) -> Chunk:
        """The next chunk of an unfinished large message, or the first of a new one."""
        random = self.random
        own = [
            attempt
            for attempt, positions in self.attempts_open.items()
            if self.entries[positions[0]].key == key
        ]
        if own and random.random() < 0.8:
            attempt = random.choice(own)
        else:
            attempt = f"attempt-{len(self.chunks_of)}"
            self.attempts_open[attempt] = self.chunks_of[attempt] = []
        self.chunks_of[attempt].append(position)
        is_last = random.random() < 0.4
        if is_last:
            del self.attempts_open[attempt]
        return Chunk(attempt, is_last, len(self.chunks_of[attempt]) - 1)

    def _append(self, entry: Entry) -> None:
        self.log.append(entry)
        self.positions.append(entry.position)
        self.entries[entry.position] = entry
        self.undone[entry.position] = entry
        if entry.key is not None:
            key = self.own[entry.position] = self.key_of(entry)
            self.of_key.setdefault(key, []).append(entry.position)

    def abort(self) -> None:
        """Abort all unfinished large messages."""
        self.aborted.update(self.attempts_open)
        self.attempts_open.clear()

    def complete(self, effect: Effect) -> bool:
        """Perform an effect. Returns False if it has to wait."""
        lost = self.faulty and self.random.random() < 0.2
        match effect:
            case Read(after):
                start = 0 if after is None else bisect_right(self.positions, after)
                entries = self.log[start : start + self.random.randint(1, 5)]
                if not entries:
                    return False
                self.pending.remove(effect)
                entries = self._judged_page(entries)
                self.do(self.sub.read(entries, self.now_ms))
                self._count_rescheduled(entries, set())
            case Scan(at, after, limit):
                self.pending.remove(effect)
                start = 0 if after is None else bisect_right(self.positions, after)
                start = start if at is None else bisect_left(self.positions, at)
                page = self.log[start : self.random.randint(self.asked_with, len(self.log))]
                if page:
                    page = page[: self.random.choice((limit, self.random.randint(1, limit)))]
                self.totals["scanned_entries"] += len(page)
                known = self._known()
                page = self._judged_page(page, known)
                self.paged = {each.position: each.verdict for each in page}
                self.do(self.sub.scanned(page, self.now_ms))
                self.paged = {}
                self._count_rescheduled(page, known)
            case Persist():
                self._store(effect)
                if not lost:
                    self.pending.remove(effect)
                    self._persisted(effect)
            case Record(failed):
                for position, times, _ in failed:
                    if position not in self.store.done:
                        self.store.attempts[position] = times
                if not lost:
                    self.pending.remove(effect)
                    self.do(self.sub.recorded(self.now_ms))
            case DeadLetter():
                self._dead_letter(effect)
                if not lost:
                    self.pending.remove(effect)
                    self.totals["dead_lettered"] += 1
                    self.do(self.sub.dead_lettered(effect.position, effect.key, self.now_ms))
            case Judge(positions):
                if self.outage:
                    return False
                self.pending.remove(effect)
                self._judge(positions)
        return True

    def _dead_letter(self, effect: DeadLetter) -> None:
        store, position = self.store, effect.position
        if position not in store.dead:
            store.dead.append(position)
        gap = Gap(position, effect.attempts)
        store.keys[effect.key] = effect.state or KeyState(effect.after, gap)
        if (large := effect.large) is not None:
            store.large[large.first] = large.attempt, position if large.is_last else None

    def _dies(self, effect: DeadLetter) -> None:
        """Check the reasons of a dead letter."""
        store, position, key = self.store, effect.position, effect.key
        if position in store.done or position in self.rejected:
            raise Broken(f"{position} is dead-lettered after its acknowledgement")
        if effect.attempts != store.attempts.get(position, 0):
            raise Broken(f"{position} is dead-lettered after {effect.attempts} attempts")
        limit, state = self.options.redeliveries_max, store.keys.get(key)
        assert limit is not None
        tail = state is not None and state.after is AfterDeadLetter.TAIL
        if self.entries[position].chunk is not None:
            self.lost.update(self._chunks_with(position))
            self.cut.add(key)
        follows = self._is_of_a_letter(position)
        if effect.attempts <= limit and not (tail or follows):
            raise Broken(f"{position} is dead-lettered too early")
        held = state is not None and state.after is AfterDeadLetter.HOLD
        if state is not None and held and position > state.gap[0] and not follows:
            raise Broken(f"{position} is dead-lettered although its key is held")
        waited = self.entries[position].deliver_at_ms and not self.options.delay_holds_key
        self.overtaken.update(p for p in self.of_key[key] if p in self.where and p < position)
        if (
            self.ordered
            and tail
            and not (waited or position in self.overtaken)
            and any(p > position and p in store.dead for p in self.of_key[key])
        ):
            raise Broken(f"{position} is dead-lettered after its successor")
        after = self.options.after_dead_letter if state is None else state.after
        if effect.after is not after and self.options.kind is not SubscriptionType.SHARED:
            raise Broken(f"{position} is dead-lettered with {effect.after}, not {after}")

    def _store(self, effect: Persist) -> None:
        """Store acknowledgements. The machine may not learn of it."""
        store = self.store
        for position in effect.entries:
            self._done(position)
        for position, messages, bits in effect.parts:
            if position in store.done:
                continue
            store.partial[position] = store.partial.get(position, (1 << messages) - 1) & ~bits
            if not store.partial[position]:
                self._done(position)
        for last, next_ in effect.successions:
            at = bisect_left(self.positions, next_)
            before = self.positions[at - 1] if at else Position(0, 0)
            if self.positions[at] != next_ or before != last or next_ == Position(1, 0):
                raise Broken(f"the succession {last} to {next_} is false")
            store.successions.add((before, next_))
        reached = store.mark_delete
        start = 0 if reached is None else bisect_right(self.positions, reached)
        for position in self.positions[start:]:
            before = reached or Position(0, 0)
            neighbour = reached is not None and reached.ledger_id == position.ledger_id
            first = reached is None and position == Position(1, 0)
            if position not in store.done:
                break
            if not neighbour and not first and (before, position) not in store.successions:
                break
            reached = position
        store.mark_delete = reached

    def _done(self, position: Position) -> None:
        store = self.store
        store.done.add(position)
        store.partial.pop(position, None)
        store.attempts.pop(position, None)
        for first in [each for each, (_, last) in store.large.items() if last == position]:
            del store.large[first]
        self.undone.pop(position, None)

    def _persisted(self, effect: Persist) -> None:
        """Tell the machine of stored acknowledgements: done deliveries are not in flight."""
        store = self.store
        self.totals["acknowledged_entries"] += len(effect.entries)
        for position, messages, bits in effect.parts:
            self.told[position] = self.told.get(position, (1 << messages) - 1) & ~bits
            self.totals["acknowledged_entries"] += not self.told[position]
        for position in (*effect.entries, *(position for position, _, _ in effect.parts)):
            if position in store.done:
                self.ghosts.pop(position, None)
                self.not_before.pop(position, None)
                if position in self.own:
                    self.failed.get(self.own[position], set()).discard(position)
            number, held = self.where.get(position, (0, None))
            if held is None:
                continue
            if position in store.done:
                self._back(self.peers[number], held.delivery)
            else:
                held.unacked &= store.partial[position]
                held.asked &= held.unacked
            self._block(self.peers[number])
        self._all_joined(store.mark_delete)
        self._check_durable(effect.number)
        self.do(self.sub.persisted(store.mark_delete, self.now_ms))
        if not all(each in self.sub.acknowledged for each in effect.entries):
            raise Broken("a persisted entry is not acknowledged")

    def _check_durable(self, number: int) -> None:
        for with_, position, bits in self.promised:
            left = self.store.partial.get(position, -1)
            if with_ <= number and position not in self.store.done and left & bits:
                raise Broken(f"{position} is reported as durable, but is not")
        self.promised = [each for each in self.promised if each[0] > number]

    # ---- time

    def advance(self, ms: int) -> None:
        """Let time pass."""
        end = self.now_ms + ms
        if self.random.random() < 0.3:
            self.now_ms = end  # the machine did not see the time between
        while (when := self.sub.next_timer_ms) is not None and when <= end:
            self.now_ms = max(self.now_ms, when)
            self._expire()
            for position, said in self.said.items():
                if 0 < said <= self.now_ms:
                    self.said[position] = UNJUDGED
            self.do(self.sub.tick(self.now_ms))
            for _, held in self.where.values():
                if held.deadline_ms and held.deadline_ms <= self.now_ms and not held.is_settling:
                    raise Broken(f"{held.position} is overdue and not timed out")
        self.now_ms = end
        for _, held in self.where.values():
            if held.deadline_ms and held.deadline_ms < end and not held.is_settling:
                raise Broken(f"{held.position} never times out")
        self._check_drained()

    def _check_drained(self) -> None:
        """At the drain deadline, a draining key is revoked from a consumer that does not own it."""
        deadline_ms = self.options.drain_deadline_ms
        for key, since_ms in self.draining.items():
            open_ = [
                n for n, held in self.where.values() if held.key == key and not held.is_settling
            ]
            late = deadline_ms and since_ms + deadline_ms <= self.now_ms and not self.chunks
            if late and any(number != self.owner(key) for number in open_):
                raise Broken(f"{key!r} drains beyond the deadline")

    def _start_draining(self) -> None:
        held = {each.key for n, each in self.where.values() if n != self.owner(each.key)}
        moved = held if self.ordered and self.options.kind is SubscriptionType.KEY_SHARED else ()
        for number, each in self.where.values():
            new = each.key in moved and each.key not in self.draining and not each.is_settling
            if new and number != self.owner(each.key) and each.delivery not in self.to_drain:
                raise Broken(f"consumer {number} is not told that {each.position} drains")
        self.draining = {key: self.draining.get(key, self.now_ms) for key in moved}

    def _expire(self) -> None:
        """Record the deliveries that consumers lose now, by time-out or drain deadline."""
        late: dict[bytes, list[Held]] = {}
        for _, held in self.where.values():
            if held.deadline_ms and held.deadline_ms <= self.now_ms and not held.is_settling:
                late.setdefault(held.key, []).append(held)
        drained = set()
        deadline_ms = self.options.drain_deadline_ms
        for lane in self.sub.lanes.values():
            since_ms = lane.draining_since_ms
            if since_ms is None or not deadline_ms or since_ms + deadline_ms > self.now_ms:
                continue
            open_ = sorted(p for p, flight in lane.flights.items() if not flight.is_settling)
            if open_:
                drained.add(lane.key)
                self.lost.update(open_)
        for key, some in late.items():
            if key in drained:  # the order of the two is open
                self.unsure.update(self.of_key[key])
                for each in self.of_key[key]:
                    self.not_before[each] = 0
            some.sort(key=lambda held: held.position)
            self.lost.update(held.position for held in some)
            for held in some[: 1 if self.ordered else None]:  # the first one revokes later ones
                self._fails(held, 0)

    # ---- checks

    def check(self) -> None:
        """Every entry is in one place, counts add up, and reasons for withholding are true."""
        sub = self.sub
        places: Counter[Position] = Counter()
        heads: dict[Lane, Position] = {}
        for lane in sub.lanes.values():
            heads.update(self._check_lane(lane, places))
        for position in self.rejected:
            if position in places:
                raise Broken(f"{position} waits after its rejection")
        for position in sub.settling.unsettled:
            places[position] = max(places[position], 1)
        for position in self.postponed:
            places[position] += 1
        self._check_filters()
        self._check_totals()
        self._start_draining()
        self._check_places(places)
        self._check_queues()
        self._check_consumers()
        idle = not any(isinstance(each, Persist | Record) for each in self.pending)
        if idle != sub.is_idle:
            raise Broken(f"is_idle should be {idle}")
        if sum(map(len, sub.withheld.values())) != sum(
            lane.reason is not Reason.READY for lane in sub.lanes.values()
        ):
            raise Broken("withheld keys are miscounted")
        timed = len(sub.lanes) + len(sub.consumers)
        if len(sub.timers) > 2 * (timed + 1) + SMALL["TIMERS_SPARE"]:
            raise Broken(f"{len(sub.timers)} timers are kept")
        for kept in (sub.attempts, sub.partial):
            if any(position in sub.acknowledged for position in kept):
                raise Broken("state of an acknowledged entry is kept")
        held = sum(state.after is not AfterDeadLetter.CONTINUE for state in sub.keys.values())
        if len(sub.keys) > SMALL["GAPS_MAX"] + held:
            raise Broken("too many gaps are kept")

    def _check_totals(self) -> None:
        totals = dict(self.sub.totals)
        totals["back"] = sum(totals.pop(each) for each in ("returned", "timed_out", "drained"))
        if self.chunks or self.delays:  # an entry may be kept only briefly
            del totals["rescheduled"]
        for name, count in totals.items():
            if count != self.totals[name]:
                raise Broken(f"{name}: {count}, not {self.totals[name]}")

    def _check_lane(self, lane: Lane, places: Counter[Position]) -> Iterator[tuple[Lane, Position]]:
        sub, options = self.sub, self.options
        returned = [each.position for each in lane.returned or ()]
        later = lane.rare.later if lane.rare is not None else ()
        waiting = [each.position for each in lane.waiting or ()]
        aside = () if lane.undecided is None else tuple(lane.undecided.aside)
        self._check_undecided(lane, {*returned, *waiting, *later, *aside}, aside)
        for position in chain(returned, waiting, later, aside, lane.flights):
            places[position] += 1
        if lane.dead is not None:
            places[lane.dead] += 1
        if waiting and len(waiting) > options.key_parked_max:
            raise Broken(f"{lane.key!r} has {len(waiting)} waiting entries")
        if lane.parked != len(returned) + len(waiting) + len(aside):
            raise Broken(f"{lane.key!r} miscounts its parked entries")
        if lane.is_idle and not lane.is_ready:
            raise Broken(f"{lane.key!r} is kept without work")
        if (lane.reason is not Reason.READY) != (lane in sub.withheld[lane.reason]):
            raise Broken(f"{lane.key!r} is not among the keys withheld by {lane.reason.name}")
        failed = self.failed.get(lane.key, set())
        if self.ordered and not failed.issubset(lane.unresolved or ()):
            raise Broken(f"{lane.key!r} forgot the failures of {failed}")
        parked = sorted(each for each in returned + waiting if each not in sub.acknowledged)
        if parked:
            yield lane, parked[0]
            if lane.reason is not Reason.READY:
                heads = parked[:1] if self.ordered else [*returned[:1], *waiting[:1], parked[0]]
                if not any(self._is_withheld(lane, each) for each in heads):
                    raise Broken(f"{parked[0]} is not withheld by {lane.reason.name}")
            elif not lane.is_ready:
                raise Broken(f"{parked[0]} waits, but its key has no turn")
            elif self._takes(lane):
                raise Broken(f"{parked[0]} of {lane.key!r} waits although its owner has room")

    def _takes(self, lane: Lane) -> bool:
        """True if the owner of a key has room."""
        owner = self.owner(lane.key)
        if self.options.kind is SubscriptionType.KEY_SHARED:
            return owner is not None and self._has_room(self.peers[owner])
        return any(map(self._has_room, self.peers.values()))

    def _has_room(self, peer: Peer) -> bool:
        return peer.permits > 0 and (not peer.blocked or bool(self._unfinished(peer)))

    def _is_withheld(self, lane: Lane, head: Position) -> bool:
        """True if the world confirms the reason that withholds a key."""
        options, key, now_ms = self.options, lane.key, self.now_ms
        owner = self.owner(key)
        holders = {number for number, held in self.where.values() if held.key == key}
        ghosts = sum(each == key for each in self.ghosts.values())
        match lane.reason:
            case Reason.RECORDING:
                stored = self.store.attempts
                return any(self.failures[p] > stored.get(p, 0) for p in self.of_key[key]) or any(
                    self.own[position] == key
                    for effect in self.pending
                    if isinstance(effect, Record)
                    for position, *_ in effect.failed
                )
            case Reason.DEAD_LETTERING:
                return any(isinstance(e, DeadLetter) and e.key == key for e in self.pending)
            case Reason.HELD:
                state = self.store.keys.get(key)
                return state is not None and state.after is AfterDeadLetter.HOLD
            case Reason.RETRY:
                dead = any(p < head for p in self.of_key[key] if p in self.store.dead)
                return dead or any(p < head for p in self.failed.get(key, ()))
            case Reason.DRAINING:
                with_room = {each for each in holders if self._has_room(self.peers[each])}
                if any(self._goes_on_at(head, each) for each in with_room):
                    return False
                if any(key in self._unfinished(self.peers[each]) for each in holders - with_room):
                    return True
                return self.ordered and bool(ghosts or holders - {owner})
            case Reason.DELAYED:
                return self.entries[head].deliver_at_ms > now_ms and options.delay_holds_key
            case Reason.RETRY_DELAY:
                return self.not_before.get(head, 0) > now_ms
            case Reason.SUBSCRIPTION_LIMIT:
                return self.blocked
            case Reason.RETURNED_LIMIT:
                return self._queue_returned(lane.slot.queue) * 2 > options.returned_max
            case Reason.IN_FLIGHT_LIMIT:
                flights = sum(held.key == key for _, held in self.where.values())
                return 0 < options.max_in_flight_per_key <= flights + ghosts
            case Reason.FILTERING:
                return self._said(lane, head) == UNJUDGED and self.ordered
            case Reason.FILTER_FAILED:
                return self._said(lane, head) == FILTER_FAILED and self.ordered
            case Reason.RESCHEDULED:
                return self._said(lane, head) > now_ms and self.ordered
            case Reason.JOINING:
                joined_at = None if owner is None else self.peers[owner].joined_at
                return joined_at is not None and head > joined_at
        return False

    def _goes_on_at(self, head: Position, consumer: int) -> bool:
        """True if an entry is the next chunk of a large message that a consumer holds in part."""
        chunk = self.entries[head].chunk
        held = self.peers[consumer].held.values()
        chunks = [self.entries[each.position].chunk for each in held]
        of_message = [each for each in chunks if each and chunk and each.attempt == chunk.attempt]
        return bool(of_message) and not any(each.is_last for each in of_message)

    def _queue_returned(self, queue: Queue) -> int:
        return sum(
            len(lane.returned or ()) for lane in self.sub.lanes.values() if lane.slot.queue is queue
        )

    def _check_places(self, places: Counter[Position]) -> None:
        end, done = self.sub.read_position, self.sub.acknowledged
        lagging = [slot for slot in self.sub.parking.slots.values() if slot.lag is not None]
        for position, times in places.items():
            if times > 1:
                raise Broken(f"{position} is in {times} places")
        if end is None:
            return
        for position, entry in self.undone.items():
            if position > end:
                break
            if position not in places and not self._is_behind(entry, lagging):
                raise Broken(f"{position} is lost")
        for position in self.store.done:
            if position in done and position in self.where:
                raise Broken(f"{position} is done and in flight")

    def _is_behind(self, entry: Entry, lagging: list[Any]) -> bool:
        if entry.key is None:
            return False
        key = self.own[entry.position]
        lane = self.sub.lanes.get(key)
        if lane is not None and lane.lag is not None and lane.lag <= entry.position:
            return True
        shared = self.options.kind is SubscriptionType.KEY_SHARED
        number = self.sub.selector.slot(key) if shared else 1
        return any(slot.number == number and slot.lag <= entry.position for slot in lagging)

    def _check_queues(self) -> None:
        sub = self.sub
        parked: Counter[Queue] = Counter()
        returned: Counter[Queue] = Counter()
        for number, slot in sub.parking.slots.items():
            line = list(_line(slot))
            if {*line} != {lane for lane in slot.lanes if lane.is_ready} or slot.last not in (
                *line[-1:],
                *(() if line else (None,)),
            ):
                raise Broken(f"slot {number} has a ready key without a turn, or with two")
            if slot.parked != sum(lane.parked for lane in slot.lanes):
                raise Broken(f"slot {number} miscounts {slot.parked} parked entries")
            if slot.returned != sum(len(lane.returned or ()) for lane in slot.lanes):
                raise Broken(f"slot {number} miscounts {slot.returned} returned entries")
            if slot.queue is not sub.parking.queue_of(number):
                raise Broken(f"slot {number} is in another owner's queue")
            if not (slot.lanes or slot.lag or slot.queued):
                raise Broken(f"slot {number} is kept without work")
            if (slot.lag is not None) != (slot in slot.queue.lagging):
                raise Broken(f"slot {number} lags, and its queue does not know, or vice versa")
            parked[slot.queue] += slot.parked
            returned[slot.queue] += slot.returned
        consumers, queues = sub.consumers.values(), sub.parking.queues
        is_placed = self.options.kind is SubscriptionType.KEY_SHARED
        if len(queues) != 1 + is_placed * len(consumers):
            raise Broken("the number of queues differs from that of owners")
        if not is_placed and set(sub.parking.slots) - {1}:
            raise Broken("a pool has more than one slot")
        takers = sum(len(queue.takers) for queue in queues)
        if takers != len(consumers) or any(each not in each.queue.takers for each in consumers):
            raise Broken("a consumer is not among the takers of its queue")
        for queue in queues:
            turns = list(queue.slots)
            if len({*turns}) != len(turns) or not all(each.queued for each in turns):
                raise Broken("a slot has two turns")
            if (queue.parked, queue.returned) != (parked[queue], returned[queue]):
                raise Broken(f"a queue miscounts {queue.parked} parked, {queue.returned} returned")
            limit = self.options.returned_max
            if limit and queue.returned >= limit and not queue.is_choked:
                raise Broken(f"a queue with {queue.returned} returned entries is not choked")
        if sub.parked != sum(parked.values()):
            raise Broken("the subscription miscounts its parked entries")
        self._check_delays()
        if {lane for lane in sub.lanes.values() if lane.lag is not None} != sub.parking.lags.lanes:
            raise Broken("the lagging keys are not those recorded")

    def _check_delays(self) -> None:
        """Delayed entries are remembered within their limits."""
        delays, options = self.sub.parking.delays, self.options
        rares = [(lane, lane.rare) for lane in self.sub.lanes.values() if lane.rare is not None]
        later = sum(len(rare.later) for _, rare in rares)
        held = sum(
            rare.delays[each.position] > self.now_ms
            for lane, rare in rares
            for each in lane.waiting or ()
            if each.position in rare.delays
        )
        if len(delays) < later + held or (not delays.holds_keys and len(delays) > later):
            raise Broken(f"{len(delays)} delayed entries are kept, not {later + held}")
        if self.sub.delayed != later + len(self.postponed):
            raise Broken(f"{self.sub.delayed} delayed entries are reported")
        size_bytes = sum(each.size_bytes for each in delays._kept)
        if self.delayed.size_bytes != size_bytes:
            raise Broken(f"delayed entries count {self.delayed.size_bytes} bytes, not {size_bytes}")
        if len(delays) > 1 and (
            len(delays) > options.delayed_max
            or size_bytes > options.delayed_bytes_max
            or (len(delays) > SMALL["KEPT_LEAST"] and size_bytes > self.delayed.bytes_max)
        ):
            raise Broken("too many delayed entries are kept")
        if len(delays.postponed) != len(self.postponed):
            raise Broken("postponed entries are miscounted")

    @property
    def postponed(self) -> set[Position]:
        """Entries that were read, and are not remembered because they are delayed."""
        everything = Position(0, 0), Position(2**40, 0)
        return {*self.sub.parking.delays.postponed.between(*everything)}

    def _may_be_postponed(self, position: Position) -> bool:
        """True if an entry is not due, or follows one that is not due and holds its key. The
        machine may know held keys only by their slots."""
        if self.entries[position].deliver_at_ms > self.now_ms:
            return True
        if not self.sub.parking.delays.holds_keys:
            return False
        slot_number = self.sub.parking.slot_number
        slot = slot_number(self.own[position])
        return any(
            each < position
            and entry.deliver_at_ms > self.now_ms
            and slot_number(self.own[each]) == slot
            for each, entry in self.undone.items()
            if entry.key is not None
        )

    def _check_consumers(self) -> None:
        sub = self.sub
        total = 0
        for number, consumer in sub.consumers.items():
            peer = self.peers[number]
            unacked = sum(held.unacked.bit_count() for held in peer.held.values())
            total += unacked
            if (consumer.unacked, consumer.permits) != (unacked, peer.permits):
                raise Broken(f"consumer {number} is miscounted")
            if consumer.is_blocked != peer.blocked:
                raise Broken(f"is_blocked of consumer {number} should be {peer.blocked}")
            if set(consumer.flights) != set(peer.held):
                raise Broken(f"consumer {number} holds other deliveries than the machine believes")
            deadlines = [flight.deadline_ms or 0 for flight in consumer.flights.values()]
            known = [peer.held[each].deadline_ms or 0 for each in consumer.flights]
            if deadlines != known or deadlines != sorted(deadlines):
                raise Broken(f"deliveries of consumer {number} time out at {deadlines}")
            if bool(consumer.unfinished) != bool(self._unfinished(peer)):
                raise Broken(f"consumer {number} has {consumer.unfinished} unfinished messages")
            if consumer.joined_at != peer.joined_at:
                raise Broken(f"consumer {number} joined at {consumer.joined_at}")
            is_placed = self.options.kind is SubscriptionType.KEY_SHARED and self.mode is not Ring
            if is_placed and peer.ranges != sub.selector.ranges(number):
                raise Broken(f"consumer {number} was told other ranges than it owns")
        limit = self.options.unacked_max
        if sub.unacked != total or (limit and total >= limit and not sub.is_blocked):
            raise Broken("the subscription's unacked messages are miscounted")
        if sub.is_blocked != self.blocked:
            raise Broken(f"is_blocked of the subscription should be {self.blocked}")

    def settle(self) -> None:
        """Perform all pending effects. Then everything deliverable must be delivered."""
        self.repay()
        for _ in range(SETTLE_ROUNDS_MAX):
            pending = list(self.pending)
            done = [self.complete(effect) for effect in pending if effect in self.pending]
            if not any(done):
                self._check_live()
                return
            self.repay()
            self.check()
        raise Broken(f"effects do not end after {SETTLE_ROUNDS_MAX:,} rounds")

    def _check_live(self) -> None:
        """No key waits without a reason to withhold it (P5)."""
        if self.sub.is_blocked:
            return
        postponed = self.postponed
        for position, entry in self.undone.items():
            if entry.key is None:
                continue
            if position in postponed and self._may_be_postponed(position):
                continue
            lane = self.sub.lanes.get(self.own[position])
            if lane is not None:
                later = lane.rare is not None and lane.rare.later
                aside = lane.undecided is not None and lane.undecided.aside
                if lane.flights or later or aside or lane.reason is not Reason.READY:
                    continue
                if self._takes(lane):
                    raise Broken(f"{position} waits although its owner has room")
            elif not self._is_full():
                owner = self.owner(self.own[position])
                if owner is not None and self._has_room(self.peers[owner]):
                    raise Broken(f"{position} is not read although its owner has room")

    def drain(self) -> None:
        """Deliver and acknowledge everything. Nothing may be left: no loss, no stall."""
        self.abort()
        self.outage = False
        while self.mode is Sticky and self.peers:
            self.close(next(iter(self.peers)))
        if not self.peers:
            self._join(Peer("all"), 1, [SlotRange(0, 65_535)])
        for turn in range(3 * len(self.log) + 30):
            for number in list(self.peers):
                self.permit(number, 1_000)
            self.settle()
            self.kind_word = turn > len(self.log)
            if self.sub.verdicts.failed:
                self.refilter(is_filtered=self.filtered)
            for key in list(self.sub.keys):
                if self.sub.keys[key].after is not AfterDeadLetter.CONTINUE:
                    self.do(self.sub.release_key(key, self.now_ms))
            for number, peer in list(self.peers.items()):
                for held in list(peer.held.values()):
                    if held.delivery not in peer.held or held.is_settling:
                        continue
                    whole = self.can_settle(peer, held)
                    if whole:
                        self.acknowledge(number, [(each, 0) for each in whole])
                    elif turn % 5 == 4 and not self.ordered:
                        self.give_back(number, [held])
            self.settle()
            self.check()
            if not self.undone:
                break
            self.advance(200)
        if self.undone:
            raise Broken(f"entries are never done: {list(self.undone)}")
        self.settle()
        if self.sub.lanes or self.sub.parking.slots:
            raise Broken("keys without work are kept")
        if self.postponed or self.delayed.size_bytes:
            raise Broken("delayed entries are kept")
        if self.sub.attempts or self.sub.partial:
            raise Broken("state of an acknowledged entry is kept")
        if not self.sub.is_idle or self.sub.unacked or self.sub.lagging:
            raise Broken("the machine is not idle")
        if self.log and self.store.mark_delete != self.positions[-1]:
            raise Broken(f"the mark-delete position stays at {self.store.mark_delete}")

    # ---- a history

    def step(self) -> None:
        """Perform one event."""
        random = self.random
        number = random.choice([*self.peers, 0])
        peer = self.peers.get(number)
        held = list(peer.held.values()) if peer else []
        if self.filters and random.random() < 0.08:
            self.change_filters()
        choice = random.random()
        if self.pace and random.random() < self.pace:
            self.advance(random.choice((100, 400, 600)))
        elif self.pace and held and random.random() < self.pace:
            self.renew(number, random.sample(held, random.randint(1, min(3, len(held)))))
        elif choice < 0.15:
            self.publish(random.randint(1, 6))
        elif choice < 0.44 and self.pending:
            self.complete(random.choice(self.pending))
        elif choice < 0.49 and len(self.peers) < 4:
            self.join()
        elif choice < 0.51 and peer:
            self.leave(number)
        elif choice < 0.53 and peer:
            self.close(number)
        elif choice < 0.63 and peer:
            self.permit(number, random.choice((1, 2, 5, 20)) + peer.owed)
            peer.owed = 0
        elif choice < 0.81 and held:
            self.settle_some(number)
        elif choice < 0.86 and held:
            self.negative_acknowledge(
                number, random.sample(held, random.randint(1, min(3, len(held))))
            )
        elif choice < 0.89 and held:
            self.give_back(number, random.sample(held, random.randint(1, min(3, len(held)))))
        elif choice < 0.90:
            self.stale()
        elif choice < 0.91 and held:
            self.renew(number, random.sample(held, random.randint(1, min(3, len(held)))))
        elif choice < 0.92 and self.sub.keys:
            self.do(self.sub.release_key(random.choice(list(self.sub.keys)), self.now_ms))
        elif choice < 0.97:
            self.advance(random.choice((1, 20, 100, 400)))
        elif choice < 0.98:
            self.settle()
        elif choice < 0.985:
            self.restart()
        elif choice < 0.99:
            self.abort()

    def settle_some(self, number: int) -> None:
        """Acknowledge one or more deliveries, or messages of them."""
        random, peer = self.random, self.peers[number]
        held = list(peer.held.values())
        one = random.choice(held) if random.random() < 0.4 else held[0]
        if (
            self.options.kind is SubscriptionType.EXCLUSIVE
            and random.random() < 0.3
            and not self.chunks
        ):
            self.acknowledge_cumulative(number, one)
            return
        some: list[tuple[Held, int]] = []
        for each in (one, *random.sample(held, min(2, len(held) - 1))):
            if all(each is not known for known, _ in some):
                part = each.messages > 1 and random.random() < 0.5
                messages = random.randrange(1 << each.messages) if part else 0
                some += [(whole, messages) for whole in self.can_settle(peer, each)]
            if random.random() < 0.6:
                break
        if not some:
            return
        self.acknowledge(number, list(dict(some).items()))
        rest = [each for each, messages in some if messages and each.delivery in peer.held]
        if rest and number in self.peers and random.random() < 0.3:
            random.choice((self.negative_acknowledge, self.give_back))(number, rest[:1])


def _line(slot: Slot) -> Iterator[Lane]:
    """The lanes of a slot that have a turn, in order."""
    lane = slot.ready
    for _ in range(len(slot.lanes) + 1):
        if lane is None:
            return
        yield lane
        lane = lane.next_ready
    raise Broken(f"the turns of slot {slot.number} form a cycle")


KINDS: Final[dict[str, dict[str, Any]]] = {
    "little room": {
        "kind": SubscriptionType.KEY_SHARED,
        "key_parked_max": 1,
        "consumer_parked_max": 5,
    },
    "draining": {
        "kind": SubscriptionType.KEY_SHARED,
        "in_order": True,
        "drain_deadline_ms": 500,
        "max_in_flight_per_key": 0,
        "pace": 0.1,
    },
    "anything": {},
    "time-outs": {"kind": SubscriptionType.KEY_SHARED, "timeouts": (300,), "pace": 0.1},
    "exclusive": {
        "kind": SubscriptionType.EXCLUSIVE,
        "delays": True,
        "delay_holds_key": False,
        "chunks": False,
        "batches": True,
    },
    "unordered": {"kind": SubscriptionType.KEY_SHARED, "in_order": False, "returned_max": 3},
    "chunks": {
        "kind": SubscriptionType.KEY_SHARED,
        "chunks": True,
        "consumer_unacked_max": 4,
        "returned_max": 3,
    },
    "chunks, little room": {
        "kind": SubscriptionType.KEY_SHARED,
        "chunks": True,
        "unacked_max": 8,
        "key_parked_max": 1,
    },
    "held": {
        "kind": SubscriptionType.KEY_SHARED,
        "redeliveries_max": 0,
        "after_dead_letter": AfterDeadLetter.HOLD,
    },
    "tail": {
        "kind": SubscriptionType.KEY_SHARED,
        "redeliveries_max": 0,
        "after_dead_letter": AfterDeadLetter.TAIL,
    },
    "gaps": {
        "kind": SubscriptionType.KEY_SHARED,
        "redeliveries_max": 0,
        "after_dead_letter": AfterDeadLetter.CONTINUE,
    },
    "pool": {
        "kind": SubscriptionType.SHARED,
        "delays": True,
        "key_parked_max": 3,
        "consumer_parked_max": 2,
    },
    "batches": {
        "kind": SubscriptionType.KEY_SHARED,
        "batches": True,
        "unacked_max": 8,
        "returned_max": 3,
    },
    "classic": {
        "kind": SubscriptionType.KEY_SHARED,
        "in_order": True,
        "classic_join": True,
        "chunks": True,
    },
    "delays": {
        "kind": SubscriptionType.KEY_SHARED,
        "delays": True,
        "delay_holds_key": True,
        "consumer_parked_max": 2,
    },
    "delays, no room": {
        "kind": SubscriptionType.KEY_SHARED,
        "delays": True,
        "delay_holds_key": False,
        "delayed_max": 2,
        "consumer_parked_max": 5,
    },
    "delays, held": {
        "kind": SubscriptionType.KEY_SHARED,
        "in_order": True,
        "delays": True,
        "delay_holds_key": True,
        "delayed_max": 2,
    },
    "delays, exclusive": {
        "kind": SubscriptionType.EXCLUSIVE,
        "delays": True,
        "delay_holds_key": False,
        "delayed_max": 1,
        "key_parked_max": 1,
        "chunks": False,
    },
    "filters": {"kind": SubscriptionType.KEY_SHARED, "filters": True},
    "filters, little room": {
        "kind": SubscriptionType.KEY_SHARED,
        "filters": True,
        "key_parked_max": 3,
        "consumer_parked_max": 5,
    },
    "filters, chunks": {"kind": SubscriptionType.KEY_SHARED, "filters": True, "chunks": True},
    "filters, unordered": {
        "kind": SubscriptionType.KEY_SHARED,
        "in_order": False,
        "filters": True,
        "returned_max": 3,
    },
    "filters, pool": {"kind": SubscriptionType.SHARED, "filters": True, "consumer_parked_max": 5},
    "filters, exclusive": {"kind": SubscriptionType.EXCLUSIVE, "filters": True},
    "filters, dead letters": {
        "kind": SubscriptionType.KEY_SHARED,
        "filters": True,
        "redeliveries_max": 0,
    },
}
"""Kinds of histories, by the events that they make frequent."""


def history(
    seed: int,
    machine: type[Subscription] = SmallSubscription,
    acknowledged: type[Acknowledged] = Acknowledged,
    **forced: Any,
) -> World:
    """Run one history; `forced` sets its kind (see World).

    Raises:
        Broken: a promise is broken. The message has the seed.
    """
    world = World(seed, machine, acknowledged, **forced)
    try:
        for _ in range(SPAN_STEPS):
            world.step()
            world.check()
        world.settle()
        world.drain()
    except Exception as error:
        raise Broken(f"history({seed}): {type(error).__name__}: {error}") from error
    return world
