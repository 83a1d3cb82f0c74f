"""P4 to P6 over many seeded histories of a subscription."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from seqgate.services.dispatcher.core.delays import Delays, Postponed
from seqgate.services.dispatcher.core.delays import Held as HeldKeys
from seqgate.services.dispatcher.core.delivering import Delivering
from seqgate.services.dispatcher.core.effects import Deliver, Entry, Options, SubscriptionType
from seqgate.services.dispatcher.core.flights import Flights, HandOver
from seqgate.services.dispatcher.core.judging import Judging
from seqgate.services.dispatcher.core.lags import Lags
from seqgate.services.dispatcher.core.lane import Consumer, Lane, Large, Slot, Timers
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.positions import Acknowledged, Runs
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable, Gaps, Settling
from seqgate.services.dispatcher.core.subscription import Ack, Subscription
from seqgate.services.dispatcher.core.verdicts import Verdicts
from seqgate.types import Position
from tests.simulation.dispatch import KINDS, SMALL, SmallSubscription, history, rebuilt, source_of
from tests.support.depth import times

HISTORIES = times(quick=100, full=5_000)
MUTANT_HISTORIES = 600
FAIR_HISTORIES = 30

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_each_key_is_delivered_in_order_to_one_consumer_without_loss(seed: int, part: int) -> None:
    size, kinds = HISTORIES // PARTS, list(KINDS.values())
    for each in range(seed + part * size, seed + (part + 1) * size):
        history(each, **(kinds[each // 2 % len(kinds)] if each % 2 else {}))


def test_a_history_is_replayed_by_its_seed() -> None:
    assert history(7).trace == history(7).trace


NEIGHBOURS = [b"key-%d" % each for each in (107, 411, 12, 540, 18, 783)]
"""Three pairs of keys; the two keys of a pair share a slot."""


def run_fairly(seed: int, machine: type[Subscription] = SmallSubscription) -> None:
    """Check fairness: keys with equal work get equally many deliveries, up to two turns, if permits
    come by turns; consumers of a pool with room get shares that differ by a bounded factor.

    Raises:
        AssertionError: a key or consumer got more than its share.
    """
    random = Random(seed)
    kind = random.choice((SubscriptionType.KEY_SHARED, SubscriptionType.SHARED))
    keys, consumers, rounds = 2 * random.randint(1, 3), random.randint(1, 3), 20
    turn = SMALL["TURN_ENTRIES"]
    sub = machine(Options(kind=kind), Ring(), Durable(Acknowledged(None)))
    for each in range(1, consumers + 1):
        sub.join(each, name=f"c{each}", now_ms=0)
    names = NEIGHBOURS[:keys]
    log = [Entry(Position(1, at), names[at // rounds]) for at in range(keys * rounds)]
    of_key, of_consumer = Counter[bytes](), Counter[int](dict.fromkeys(sub.consumers, 0))

    def settle(effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                of_consumer[effect.consumer] += len(effect.deliveries)
                of_key.update(log[each.position[1]].key or b"" for each in effect.deliveries)
                items = [Ack(each.delivery) for each in effect.deliveries]
                sub.acknowledge(effect.consumer, items, 0)

    if kind is SubscriptionType.SHARED:
        for each in list(sub.consumers):
            settle(sub.permit(each, len(log), 0))
        while log[sum(of_consumer.values()) :]:
            start = sum(of_consumer.values())
            settle(sub.read(log[start : start + random.randint(1, 6 * turn)], 0))
            fewest, most = min(of_consumer.values()), max(of_consumer.values())
            assert most <= 3 * fewest + 4 * turn
        return
    sub.read(log, 0)
    while sum(of_key.values()) < len(log):
        for each in list(sub.consumers):
            settle(sub.permit(each, turn * random.randint(1, 3), 0))
        for each in sub.consumers:
            mine = [
                of_key[key] for key in names if sub.selector.owner(sub.selector.slot(key)) == each
            ]
            left = [done for done in mine if done < rounds]
            if left:
                assert max(mine) - min(left) <= 2 * turn


def test_waiting_keys_of_a_consumer_take_turns(seed: int) -> None:
    for each in range(seed, seed + FAIR_HISTORIES):
        run_fairly(each)


# Each rule of the machine, removed: the simulation must notice. The last column is the kind of
# history that notices soonest, if others seldom do.
MUTANTS: list[tuple[type, str, str, str]] = [
    (Subscription, "lane.unresolved.remove(position)", "pass", ""),
    (
        Subscription,
        "if flight is None or flight.is_settling:\n                outcomes",
        "if flight is None:\n                outcomes",
        "chunks",
    ),
    (Subscription, "elif item.messages >> flight.messages:", "elif False:", ""),
    (Subscription, "self.settling.record_succession(before, entry.position)", "pass", ""),
    (Subscription, "self.acknowledged.advance(mark_delete)", "pass", "classic"),
    (Subscription, "self.settling.acknowledge_entry(entry.position, None)", "pass", ""),
    (Subscription, "None if reached is None or reached >= end else reached", "None", ""),
    (
        Subscription,
        "if entries else self._scanned_to",
        "if len(entries) == 4 else self.read_position",
        "",
    ),
    (Subscription, "known = entry.position > end or", "known =", ""),
    (Settling, "left &= ~_pending(batch, position)", "pass", "batches"),
    (Settling, "if persisting is not None and persisting.parts:", "if False:", "batches"),
    (Flights, "if each.lane.reason is Reason.DRAINING:", "if False:", "chunks"),
    (Delivering, "return holder if holder.has_room else None", "return holder", "chunks"),
    (Parking, "if self.lags.is_scanning:\n            return None", "pass", ""),
    (
        Subscription,
        "self.parking.wake(lane)\n            self.parking.drop_if_idle(lane)  #",
        "self.parking.drop_if_idle(lane)  #",
        "",
    ),
    (
        Subscription,
        "self.parking.wake(lane)\n        self.parking.drop_if_idle(lane)\n        return",
        "self.parking.drop_if_idle(lane)\n        return",
        "",
    ),
    (
        Subscription,
        "and lane.dead is not None\n            self.parking.wake(lane)",
        "and lane.dead is not None",
        "",
    ),
    (
        Subscription,
        "self.out.add(self.gaps.forget(lane.key))\n        self.parking.wake(lane)",
        "self.out.add(self.gaps.forget(lane.key))",
        "",
    ),
    (Subscription, "now_ms)\n                    self.parking.wake(subject)", "now_ms)", ""),
    (
        Subscription,
        "self.flights.take_back_after(lane, min(places))\n            self.parking.wake(lane)",
        "self.flights.take_back_after(lane, min(places))",
        "little room",
    ),
    (
        Subscription,
        (
            "for position in self.parking.take_before(last.lane, last.position, whole=whole):\n    "
            "        self.settling.acknowledge_entry(position, last.lane)"
        ),
        "",
        "exclusive",
    ),
    (
        Subscription,
        "if flight.position < last.position and (chunk",
        "if True and (chunk",
        "exclusive",
    ),
    (
        Subscription,
        "item.messages or (1 << last.messages) - 1",
        "(1 << last.messages) - 1",
        "exclusive",
    ),
    (Subscription, "self.flights.take_back_after(lane, min(places))", "pass", "exclusive"),
    (
        Subscription,
        "if self.options.orders_keys:\n            lane.record_unresolved(position)",
        "pass",
        "gaps",
    ),
    (
        Subscription,
        "if len(self.consumers) == 1:\n            self.handover",
        "if False:\n            self.handover",
        "classic",
    ),
    (Subscription, "self.flights.renew(known, flight, now_ms)", "pass", "time-outs"),
    (Subscription, "subject.timer_ms = None", "pass", "delays"),
    (Delivering, "if lane.recording:\n", "if False:\n", ""),
    (
        Delivering,
        "if lane.dead is not None:\n            return",
        "if False:\n            return",
        "",
    ),
    (
        Delivering,
        "and self._gaps.is_beyond(lane.key, position, AfterDeadLetter.HOLD)",
        "and False",
        "",
    ),
    (
        Delivering,
        "if lane.unresolved and not is_amid and lane.is_behind_unresolved(position):",
        "if False:",
        "",
    ),
    (Lane, "if each >= position:", "if each == position:", "exclusive"),
    (
        Delivering,
        "if lane.holder is not None and lane.holder != consumer.id:",
        "if False:",
        "classic",
    ),
    (Delivering, "if rare is not None and rare.delays.get(position, 0) > now_ms:", "if False:", ""),
    (Delivering, "if head.not_before_ms > now_ms:", "if False:", "exclusive"),
    (
        Delivering,
        "elif lane.slot.queue.is_choked and not lane.returned and not is_amid:",
        "elif False:",
        "chunks",
    ),
    (Delivering, "if limit and len(lane.flights) >= limit and not is_amid:", "if False:", ""),
    (Delivering, "len(lane.flights) >= limit and not is_amid:", "len(lane.flights) >= limit:", ""),
    (Delivering, "position > consumer.joined_at and not is_amid:", "False:", "classic"),
    (
        Delivering,
        "position > consumer.joined_at and not is_amid:",
        "position > consumer.joined_at:",
        "classic",
    ),
    (Delivering, "self._timers.look_at(lane, rare.delays[position])", "pass", ""),
    (Delivering, "self._timers.look_at(lane, head.not_before_ms)", "pass", ""),
    (
        Settling,
        "left = self.partial.get(position, (1 << messages) - 1)",
        "left = (1 << messages) - 1",
        "exclusive",
    ),
    (
        Delivering,
        "if target is consumer and not consumer.has_room:\n                break",
        "pass",
        "",
    ),
    (
        Delivering,
        "if self._gaps.keys and self._gaps.is_beyond(lane.key, position, AfterDeadLetter.TAIL):",
        "if False:",
        "",
    ),
    (
        Delivering,
        "elif self._flights.is_blocked and not consumer.unfinished:",
        "elif False:",
        "batches",
    ),
    (
        Delivering,
        "lane.unresolved and not is_amid and",
        "lane.unresolved and",
        "chunks",
    ),
    (Delivering, "or not lane.is_amid_message(holder):", "or True:", "pool"),
    (Delivering, "self._gaps.gap(lane.key) if self._gaps.keys else None", "None", "gaps"),
    (Delivering, "settling.attempts.get(position, 0) if settling.attempts else 0", "0", ""),
    (
        Flights,
        "self.take_back_after(lane, min(flight.position for flight, _, _ in flights))",
        "pass",
        "time-outs",
    ),
    (Flights, "lane.record_unresolved(flight.position)", "pass", ""),
    (
        Flights,
        "self._settling.record_failure(flight, how, consumer, now_ms, reason)\n            if",
        "if",
        "",
    ),
    (Flights, "lost[:1] if self._options.orders_keys else lost", "lost", "chunks"),
    (
        Flights,
        "self._settling.record_failure(flight, How.LOST, consumer, now_ms)",
        "pass",
        "",
    ),
    (Flights, "if flight.delivery in consumer.flights:  #", "if True:  #", "draining"),
    (Flights, "self.look_again(consumer, now_ms)", "pass", "time-outs"),
    (
        Flights,
        "if flight.position > position and not flight.is_settling:",
        "if not flight.is_settling:",
        "exclusive",
    ),
    (
        Flights,
        "if flight.position > position and not flight.is_settling:",
        "if flight.position > position:",
        "time-outs",
    ),
    (
        Flights,
        "for flight in lane.flights.values() if not flight.is_settling]",
        "for flight in lane.flights.values()]",
        "draining",
    ),
    (HandOver, "self._parking.wake_all(Reason.JOINING)", "pass", "classic"),
    (
        HandOver,
        "consumer.joined_at = None if read_position == mark_delete else read_position",
        "pass",
        "",
    ),
    (HandOver, "self._parking.hand_over(moved)\n", "pass\n", ""),
    (HandOver, "told[owner].append(run)", "pass", ""),
    (
        HandOver,
        "self._timers.look_at(lane, now_ms + self._options.drain_deadline_ms)",
        "pass",
        "draining",
    ),
    (HandOver, "wanted.setdefault(holder.id, []).extend(open_)", "pass", "draining"),
    (
        HandOver,
        "if lane.reason is not Reason.READY:\n                self._parking.wake(lane)",
        "pass",
        "classic",
    ),
    (HandOver, "or not self._options.orders_keys:", "or False:", "unordered"),
    (
        HandOver,
        "None if read_position == mark_delete else read_position",
        "read_position",
        "classic",
    ),
    (HandOver, "if classic and self._flights.consumers:", "if classic:", "classic"),
    (HandOver, "or len(consumers) == 1", "", "classic"),
    (
        Settling,
        "flight.pending |= newly\n",
        "flight.pending |= newly\n        self._land(flight)\n",
        "",
    ),
    (Settling, "return self._batch.number\n", "return self._batch.number - 1\n", ""),
    (Settling, "0 if self._persisting is None else self._persisting.number", "0", ""),
    (Settling, "self.partial[position] = left", "pass", ""),
    (Settling, "if self._persisting is not None or not self._batch:", "if not self._batch:", ""),
    (Settling, "self.attempts.pop(position, None)", "pass", ""),
    (Settling, "self.partial.pop(position, None)", "pass", ""),
    (Settling, "if not newly:\n            return", "pass", ""),
    (
        Settling,
        "if before is None and position.entry_id == 0 and position.ledger_id == 1:",
        "if False:",
        "",
    ),
    (Settling, "self.acknowledged.add(position)", "pass", ""),
    (
        Settling,
        "if self._recording is not None or not self._to_record:",
        "if not self._to_record:",
        "draining",
    ),
    (Gaps, "state.after is after and ", "", "tail"),
    (
        Gaps,
        "return self._options.after_dead_letter if before is None else before.after",
        "return AfterDeadLetter.CONTINUE",
        "tail",
    ),
    (
        Flights,
        "[flight for flight in gone.flights.values() if not flight.is_settling]",
        "list(gone.flights.values())",
        "",
    ),
    (Flights, "gone.timer_ms = None", "pass", ""),
    (Flights, "self._count(consumer, -(flight.unacked & bits).bit_count())", "pass", ""),
    (Flights, "self._parking.wake_all(Reason.SUBSCRIPTION_LIMIT)", "pass", ""),
    (
        Flights,
        "deadline_ms = now_ms + consumer.ack_timeout_ms if consumer.ack_timeout_ms else None",
        "deadline_ms = None",
        "",
    ),
    (Flights, "if flight.deadline_ms > now_ms:\n                break", "pass", ""),
    (
        Flights,
        "if not flight.is_settling:\n                late.append(flight)",
        "late.append(flight)",
        "",
    ),
    (Flights, "consumer.permits -= cost", "consumer.permits -= 1", ""),
    (
        Flights,
        "if limit and consumer.unacked >= limit:",
        "if limit and consumer.unacked > limit:",
        "",
    ),
    (Flights, "elif consumer.unacked * 2 <= limit:", "elif consumer.unacked < limit:", ""),
    (Flights, "if limit and self.unacked >= limit:", "if False:", ""),
    (Flights, "elif self.is_blocked and self.unacked * 2 < limit:", "elif False:", ""),
    (Flights, "self._count_unacked(-gone.unacked)", "pass", ""),
    (
        Flights,
        "if limit and self.unacked >= limit:",
        "if limit and self.unacked > limit:",
        "batches",
    ),
    (
        Flights,
        "each.has_room and (each.unfinished or not self.is_blocked)",
        "each.has_room",
        "batches",
    ),
    (
        Flights,
        "each.has_room and (each.unfinished or not self.is_blocked)",
        "each.unfinished or not self.is_blocked",
        "",
    ),
    (Flights, "flight.unacked &= ~bits", "pass", "batches"),
    (Flights, "flight.deadline_ms = now_ms + consumer.ack_timeout_ms", "pass", "time-outs"),
    (
        Flights,
        "consumer.flights[flight.delivery] = consumer.flights.pop(flight.delivery)",
        "pass",
        "time-outs",
    ),
    (Flights, "late.sort(key=lambda flight: flight.position)", "pass", "time-outs"),
    (Flights, "lane.holder = consumer.id", "pass", "draining"),
    (Flights, "large.has_last = chunks > 0", "large.has_last = True", "chunks"),
    (Flights, "if not large.in_flight:", "if False:", "chunks"),
    (
        Parking,
        "if lane is not None and lane.parked >= self._options.key_parked_max:",
        "if False:",
        "",
    ),
    (
        Parking,
        "if slot.lag is None and (lane is None or lane.lag is None):",
        "if slot.lag is None:",
        "",
    ),
    (
        Parking,
        "if slot.lag is None and (lane is None or lane.lag is None):",
        "if lane is None or lane.lag is None:",
        "",
    ),
    (Parking, "elif not is_behind or self._knows(lane, position):", "elif False:", ""),
    (
        Parking,
        "self._count_parked(lane, 1)\n                self.wake(lane)",
        "self._count_parked(lane, 1)",
        "",
    ),
    (Parking, "if lane.slot.queue is queue:\n                    self.wake(lane)", "pass", ""),
    (
        Parking,
        "entry.messages, lane))\n        self.wake(lane)",
        "entry.messages, lane))",
        "",
    ),
    (Parking, "slot.queue = new\n", "pass\n", ""),
    (Parking, "if slot.queued:\n                new.slots.append(slot)", "pass", ""),
    (Parking, "old.lagging.discard(slot)\n                new.lagging.add(slot)", "pass", ""),
    (Parking, "queue.parked += sign * slot.parked", "pass", ""),
    (Parking, "queue.returned += sign * slot.returned", "pass", ""),
    (
        Parking,
        "queue.slots = type(queue.slots)(slot for slot in queue.slots if slot.queue is queue)",
        "pass",
        "",
    ),
    (Parking, "if limit and queue.returned >= limit:", "if False:", ""),
    (Parking, "elif queue.is_choked and queue.returned * 2 <= limit:", "elif False:", ""),
    (Parking, "del self.lanes[lane.key]", "pass", ""),
    (Parking, "self.slots.pop(slot.number, None)", "pass", ""),
    (Parking, "queue.slots if slot.queue is queue)", "queue.slots)", ""),
    (
        Parking,
        "            self._check_returned(queue)\n        self",
        "            pass\n        self",
        "unordered",
    ),
    (Delays, "options.orders_keys and options.delay_holds_key", "options.orders_keys", "exclusive"),
    (Parking, "(each for each in lane.rare.later if each < end)", "(lane.rare.later)", "exclusive"),
    (
        Parking,
        "self._forget_delay(lane.rare, position)\n                self._forget",
        "self._forget",
        "exclusive",
    ),
    (Parking, "and self.lanes.get(lane.key) is lane", "", ""),
    (
        Parking,
        "if lane.is_ready or not (lane.returned or lane.waiting):",
        "if not (lane.returned or lane.waiting):",
        "",
    ),
    (
        Lags,
        "if slot.is_behind(position) and slot not in scan.slots:\n            return False",
        "pass",
        "",
    ),
    (Lags, "lane is None or not lane.is_behind(position) or lane in scan.lanes", "True", ""),
    (Lags, "scan.slots.discard(slot)", "pass", ""),
    (Lags, "scan.lanes.discard(lane)", "pass", ""),
    (
        Lags,
        "if queue.lagging and (queue.is_half_empty or queue.takes_more):",
        "if queue.lagging and queue.is_half_empty:",
        "",
    ),
    (Lags, "lane.reason is Reason.READY and not lane.parked and queue.takes_more", "False", ""),
    (Lags, "self._candidates.add(lane)", "pass", "chunks, little room"),
    (Timers, "or when_ms < subject.timer_ms", "", "draining"),
    (Consumer, "if self.permits <= 0:\n            return False", "pass", ""),
    (Consumer, "not self.is_blocked or self.unfinished > 0", "not self.is_blocked", ""),
    (Consumer, "not self.is_blocked or self.unfinished > 0", "True", ""),
    (Lane, "or (self.rare and (self.rare.later or self.rare.kept_back))\n", "\n", ""),
    (Lane, "or self.dead\n", "\n", ""),
    (Lane, "or self.lag\n", "\n", ""),
    (Lane, "(may_lag or attempt in rare.rests)", "attempt in rare.rests", ""),
    (Lane, "each.lane is self and ", "", ""),
    (
        Slot,
        "self.ready, lane.next_ready = lane.next_ready, None",
        "self.ready = lane.next_ready",
        "filters, pool",
    ),
    (Slot, "if self.ready is None:\n                self.last = None", "pass", "pool"),
    (Large, "not self.has_last", "False", ""),
    (Large, "not self.has_last", "True", ""),
    (Acknowledged, "position > self.highest", "position >= self.highest", ""),
    (Runs, "words[at + 1] += 1\n", "pass\n", ""),
    (Runs, "same and words[-3] + words[-2] == entry_id", "same", ""),
    (Runs, "and words[-1] == messages", "", ""),
    (
        Subscription,
        "if entry.verdict or entry.chunk is not None:\n                keeps",
        "if False:\n                keeps",
        "filters",
    ),
    (
        Subscription,
        "if entry.verdict or entry.chunk is not None:\n                keeps",
        "if entry.verdict:\n                keeps",
        "filters",
    ),
    (
        Subscription,
        "if entry.verdict or entry.chunk is not None:\n            if not",
        "if False:\n            if not",
        "filters",
    ),
    (
        Subscription,
        "if not self.parking.was_passed_over(key, entry.position):\n                return",
        "pass",
        "filters, little room",
    ),
    (
        Subscription,
        "or self.settling.is_settled(entry.position)",
        "or entry.position in self.acknowledged",
        "filters, exclusive",
    ),
    (
        Subscription,
        "keeps = self.parking.scans_for(key, entry.position)",
        "keeps = True",
        "filters, little room",
    ),
    (Subscription, "keeps = self.parking.keeps(key)", "keeps = True", "filters, chunks"),
    (Subscription, "if self.verdicts.back:", "if False:", "filters"),
    (Subscription, "self.verdicts.take_due(subject, now_ms)", "[]", "filters"),
    (Subscription, ", self.verdicts.ask())", ")", "filters"),
    (Subscription, "and not self.verdicts.is_full:", "and True:", "filters"),
    (Subscription, "self.verdicts.is_filtered = is_filtered", "pass", "filters, pool"),
    (
        Delivering,
        "if lane.undecided is not None and head.position in lane.undecided.states:",
        "if False:",
        "filters",
    ),
    (
        Delivering,
        "if self._orders_keys:\n                    reason",
        "if True:\n                    reason",
        "filters, pool",
    ),
    (Lane, "or (self.undecided and self.undecided.aside)\n", "\n", "filters, pool"),
    (Parking, "if entry.verdict != ACCEPT:", "if False:", "filters"),
    (Parking, "min(entry.verdict, self._options.reschedule_max_ms)", "entry.verdict", "filters"),
    (
        Parking,
        "self.verdicts.forget(lane, head.position)\n        self._count_parked",
        "pass\n        self._count_parked",
        "filters",
    ),
    (Parking, "if self.verdicts.is_filtered and not is_return:", "if False:", "filters"),
    (Parking, "self._count_parked(lane, -gone)", "pass", "filters"),
    (
        Parking,
        "if isinstance(aside, Returned):\n            self._push(lane, aside)",
        "if False:\n            pass",
        "filters, pool",
    ),
    (Parking, "elif aside is not None:", "elif False:", "filters, pool"),
    (Parking, "(slot is not None and slot.lag is not None) or", "", "filters, chunks"),
    (
        Parking,
        "is_behind = of_lane or (slot is not None and slot.is_behind(position))",
        "is_behind = of_lane",
        "filters, chunks",
    ),
    (Parking, "taken += self.delays.take_before(end)", "pass", "delays, exclusive"),
    (Parking, "self.delays.postpone(each, NEVER_MS)", "pass", "delays, held"),
    (Parking, "self.delays.hold(lane.key, lane.slot.number)", "pass", "delays, held"),
    (Parking, "self.delays.hold(key, slot.number)", "pass", "delays, held"),
    (Parking, "self.delays.visit(position)", "pass", "delays, no room"),
    (
        Parking,
        "elif not is_behind or self._knows(lane, position):",
        "elif not is_behind:",
        "delays, no room",
    ),
    (
        Parking,
        "elif not self._keep(entry, key, lane, slot, now_ms, is_new=False):\n            "
        "self.delays.postponed.add(position, NEVER_MS)",
        "elif not self._keep(entry, key, lane, slot, now_ms, is_new=False):\n            pass",
        "delays, exclusive",
    ),
    (Delays, "now_ms + 1, key=_when", "now_ms + 30, key=_when", "delays, no room"),
    (Delays, "self._horizon_ms <= now_ms or (", "(", "delays, no room"),
    (Delays, "len(self._kept) > 1 and not self._has_room(0, 0)", "False", "delays, held"),
    (Delays, "or (is_new and self._held.has(key, slot))", "", "delays, held"),
    (Delays, "self._held_anew.add(key, slot)", "pass", "delays, held"),
    (Delays, "self._count(-self._kept.pop(at).size_bytes)", "self._kept.pop(at)", "delays, held"),
    (Delays, "self._count(-sum(each.size_bytes for each in due))", "pass", "delays, no room"),
    (HeldKeys, "self._slots |= 1 << slot", "pass", "delays, held"),
    (
        Postponed,
        "stretch.soonest_ms = stretch.visited_soonest_ms",
        "stretch.soonest_ms = NEVER_MS",
        "delays, no room",
    ),
    (Settling, "position in self._batch.whole:", "False:", "filters"),
    (Settling, "position in self._persisting.whole", "False", "filters"),
    (
        Settling,
        "self.attempts.get(position, 0) > limit",
        "self.attempts.get(position, 0) >= limit",
        "filters",
    ),
    (
        Settling,
        "return limit is not None and self.attempts.get(position, 0) > limit",
        "return False",
        "filters",
    ),
    (
        Verdicts,
        "if state == UNJUDGED:\n            self._to_ask",
        "if False:\n            self._to_ask",
        "filters",
    ),
    (Verdicts, "self._timers.look_at(lane, until_ms)", "pass", "filters"),
    (Verdicts, "self._timers.look_at(lane, min(later_ms))", "pass", "filters"),
    (Verdicts, "if 0 < state <= now_ms:", "if 0 < state:", "filters, exclusive"),
    (Verdicts, "lane.undecided.times[position] = times\n", "pass\n", "filters"),
    (Verdicts, "lane.undecided.times.pop(position, None)", "pass", "filters, unordered"),
    (Verdicts, "self._pending = {}", "pass", "filters"),
    (Verdicts, "nsmallest(share, unjudged)", "unjudged[-share:]", "filters"),
    (Verdicts, "if len(pending) >= JUDGE_ENTRIES:", "if False:", "filters"),
    (Verdicts, "more.append(lane)", "pass", "filters"),
    (
        Verdicts,
        "if self._pending is not None or not self._to_ask:",
        "if not self._to_ask:",
        "filters",
    ),
    (Verdicts, "if self._counts[UNJUDGED] >= UNJUDGED_MAX:", "if False:", "filters"),
    (
        Verdicts,
        "return limit is not None and sum(self._counts.values()) >= limit",
        "return False",
        "filters, pool",
    ),
    (
        Judging,
        "if not keeps:\n                return entry",
        "if False:\n                return entry",
        "filters, chunks",
    ),
    (
        Judging,
        "if self.is_beyond(entry.position):\n            return",
        "if False:\n            return",
        "filters",
    ),
    (
        Judging,
        "if entry.verdict > 0 and not self._options.reschedules_max:",
        "if False:",
        "filters",
    ),
    (
        Judging,
        "if self.is_rejected(chunk):\n            return REJECT",
        "pass",
        "filters, exclusive",
    ),
    (
        Judging,
        "return state if state < 0 else max(1, state - now_ms)",
        "return entry.verdict",
        "filters",
    ),
    (
        Judging,
        "return ACCEPT if known else entry.verdict",
        "return entry.verdict",
        "filters, exclusive",
    ),
    (Judging, "if any(each in lane.flights for each in chunks) or", "if", "filters, pool"),
    (
        Judging,
        "chunks = [position] if chunk is None else self._chunks(lane, chunk)",
        "chunks = [position]",
        "filters, pool",
    ),
    (
        Judging,
        "if not self.is_beyond(each):\n                self._verdicts.record",
        "if True:\n                self._verdicts.record",
        "filters",
    ),
    (
        Judging,
        "if state != UNJUDGED or position in gone:\n                continue",
        "if False:\n                continue",
        "filters",
    ),
    (Judging, "shared = self._shared(lane, position)", "shared = [position]", "filters"),
    (Judging, "and times <= self._options.reschedules_max", "and True", "filters"),
    (Judging, "min(verdict, self._options.reschedule_max_ms)", "verdict", "filters"),
    (
        Judging,
        "if lane.rare is not None:\n            for position in sorted",
        "if False:\n            for position in sorted",
        "filters",
    ),
    (Judging, "self._parking.discard(lane, positions)", "pass", "filters"),
    (Judging, "lane.unresolved.remove(position)", "pass", "filters, chunks"),
    (Judging, "self._settling.acknowledge_entry(position, None)", "pass", "filters"),
    (
        Judging,
        "self._parking.wake(lane)\n        self._parking.drop",
        "pass\n        self._parking.drop",
        "filters",
    ),
    (Judging, "self._parking.drop_all_idle(rejected)", "pass", "filters"),
    (Parking, "slot.skip_idle()", "()", "filters, little room"),
    (Judging, "self._verdicts.is_filtered = is_filtered", "pass", "filters"),
    (Judging, "self._verdicts.ask_anew()", "pass", "filters, chunks"),
    (Judging, "self._verdicts.judge_anew(lane, position)", "pass", "filters"),
    (Judging, "if position >= start:", "if position > start:", "filters, pool"),
    (Judging, "if undecided is not None or lane.undecided is not None:", "if False:", "filters"),
]


def test_every_rule_that_is_taken_away_is_there() -> None:
    """The deep tests below run seldom."""
    for owner, right, _, _ in MUTANTS:
        assert right in source_of(owner), f"{owner.__name__} has no {right!r}"


@pytest.mark.deep
@pytest.mark.parametrize(("owner", "right", "wrong", "kind"), MUTANTS)
def test_a_missing_rule_is_found(seed: int, owner: type, right: str, wrong: str, kind: str) -> None:
    made = rebuilt(owner, right, wrong)
    kinds = [KINDS[kind]] if kind else list(KINDS.values())
    for each in range(seed, seed + MUTANT_HISTORIES):
        forced = kinds[each % len(kinds)]
        try:
            history(each, made["Subscription"], made["Acknowledged"], **forced)
        except Exception:
            return
    pytest.fail(f"every history passes without {right!r}")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("owner", "right", "wrong"),
    [
        (Delivering, "for _ in range(TURN_ENTRIES):", "for _ in range(1_000):"),
        (Delivering, "slot = slots.popleft()", "slot = slots.pop()"),
        (Delivering, "if not turns:\n                return True", "pass"),
        (
            Slot,
            "if self.last is None:\n            self.ready = lane\n        else:",
            "lane.next_ready, self.ready = self.ready, lane\n        if False:",
        ),
    ],
)
def test_a_missing_turn_is_found(seed: int, owner: type, right: str, wrong: str) -> None:
    machine = rebuilt(owner, right, wrong)["Subscription"]
    for each in range(seed, seed + FAIR_HISTORIES):
        try:
            run_fairly(each, machine)
        except AssertionError:
            return
    pytest.fail(f"every history passes without {right!r}")
