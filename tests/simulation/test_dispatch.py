"""P4 to P6 over many seeded histories of a subscription (key-shared-filters.md, 122 to 135)."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from seqgate.types import Position
from services.dispatcher.core.delivering import Delivering
from services.dispatcher.core.effects import Deliver, Entry, Kind, Options
from services.dispatcher.core.flights import Flights
from services.dispatcher.core.handover import HandOver
from services.dispatcher.core.lags import Lags
from services.dispatcher.core.lane import Consumer, Lane, Large, Slot
from services.dispatcher.core.parking import Parking
from services.dispatcher.core.positions import Acknowledged, Runs
from services.dispatcher.core.returning import Returning
from services.dispatcher.core.selectors import Ring
from services.dispatcher.core.settling import Settling
from services.dispatcher.core.subscription import Durable, Item, Subscription
from tests.simulation.dispatch import SMALL, SmallSubscription, history, rebuilt

HISTORIES = 5_000
MUTANT_HISTORIES = 600
FAIR_HISTORIES = 30

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_a_key_is_at_one_consumer_in_order_and_nothing_is_lost_whatever_happens(
    seed: int, part: int
) -> None:
    size = HISTORIES // PARTS
    for each in range(seed + part * size, seed + (part + 1) * size):
        history(each)


def test_a_history_is_replayed_by_its_seed() -> None:
    assert history(7).trace == history(7).trace


NEIGHBOURS = [b"key-%d" % each for each in (107, 411, 12, 540, 18, 783)]
"""Keys of which two each share a slot (key-shared-filters.md, section 2)."""


def run_fairly(seed: int, machine: type[Subscription] = SmallSubscription) -> None:
    """Keys that have equally much to deliver are delivered equally much, up to a few turns (132),
    where permits come by turns; and consumers of a pool with room differ by a factor at most.

    Raises:
        AssertionError: one had more.
    """
    random = Random(seed)
    kind = random.choice((Kind.KEY_SHARED, Kind.SHARED))
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
                items = [Item(each.delivery) for each in effect.deliveries]
                sub.acknowledge(effect.consumer, items, 0)

    if kind is Kind.SHARED:
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


def test_keys_that_wait_at_one_consumer_have_their_turns(seed: int) -> None:
    for each in range(seed, seed + FAIR_HISTORIES):
        run_fairly(each)


# Each rule of the machine, taken out: the simulation must not be blind to any.
MUTANTS: list[tuple[type, str, str]] = [
    (Subscription, "lane.unresolved.remove(position)", "pass"),
    (
        Subscription,
        "if flight is None or flight.is_settling:\n                outcomes",
        "if flight is None:\n                outcomes",
    ),
    (Subscription, "elif item.messages >> flight.messages:", "elif False:"),
    (Subscription, "self.settling.note_succession(before, entry.position)", "pass"),
    (Subscription, "self.acknowledged.advance(mark_delete)", "pass"),
    (Subscription, "self.settling.settle_whole(entry.position, None)", "pass"),
    (
        Subscription,
        "is_last = len(entries) < SCAN_ENTRIES or entries[-1].position >= end",
        "is_last = True",
    ),
    (
        Subscription,
        "is_last = len(entries) < SCAN_ENTRIES or entries[-1].position >= end",
        "is_last = len(entries) < SCAN_ENTRIES",
    ),
    (Subscription, "known = entry.position > end or", "known ="),
    (Subscription, "if not self.parking.lags.is_scanning:", "if False:"),
    (
        Subscription,
        "for lane in self.settling.recorded():\n            self.parking.wake(lane)",
        "self.settling.recorded()",
    ),
    (
        Subscription,
        "self.parking.wake(lane)\n        self.parking.drop_if_idle(lane)\n        return",
        "self.parking.drop_if_idle(lane)\n        return",
    ),
    (
        Subscription,
        "and lane.dead is not None\n            self.parking.wake(lane)",
        "and lane.dead is not None",
    ),
    (
        Subscription,
        "self.out.add(self.gaps.forget(lane.key))\n        self.parking.wake(lane)",
        "self.out.add(self.gaps.forget(lane.key))",
    ),
    (
        Subscription,
        "now_ms)\n                    self.parking.wake(subject)",
        "now_ms)",
    ),
    (
        Subscription,
        "self.returning.take_back_after(lane, first)\n            self.parking.wake(lane)",
        "self.returning.take_back_after(lane, first)",
    ),
    (Delivering, "if lane.recording:\n", "if False:\n"),
    (Delivering, "if lane.dead is not None:\n            return", "if False:\n            return"),
    (
        Delivering,
        "if self._gaps.keys and self._gaps.is_beyond(lane.key, position, AfterDeadLetter.HOLD):",
        "if False:",
    ),
    (
        Delivering,
        "if lane.unresolved and lane.unresolved[0] < position and not is_amid:",
        "if False:",
    ),
    (Delivering, "lane.unresolved[0] < position and", "lane.unresolved[0] != position and"),
    (Delivering, "if lane.holder is not None and lane.holder != consumer.id:", "if False:"),
    (Delivering, "if rare is not None and rare.delays.get(position, 0) > now_ms:", "if False:"),
    (Delivering, "if head.not_before_ms > now_ms:", "if False:"),
    (
        Delivering,
        "elif lane.slot.queue.is_choked and not lane.returned and not is_amid:",
        "elif False:",
    ),
    (Delivering, "if limit and len(lane.flights) >= limit and not is_amid:", "if False:"),
    (Delivering, "len(lane.flights) >= limit and not is_amid:", "len(lane.flights) >= limit:"),
    (Delivering, "position > consumer.joined_at and not is_amid:", "False:"),
    (
        Delivering,
        "position > consumer.joined_at and not is_amid:",
        "position > consumer.joined_at:",
    ),
    (Delivering, "self._timers.look_at(lane, rare.delays[position])", "pass"),
    (Delivering, "self._timers.look_at(lane, head.not_before_ms)", "pass"),
    (Delivering, "unacked = settling.partial.get(position, unacked)", "pass"),
    (Delivering, "if target is consumer and not consumer.has_room:\n                break", "pass"),
    (
        Delivering,
        "self._settling.attempts.get(position, 0) > limit",
        "self._settling.attempts.get(position, 0) >= limit",
    ),
    (Delivering, "self._settling.attempts.get(position, 0) > limit", "False"),
    (
        Delivering,
        "if self._gaps.keys and self._gaps.is_beyond(lane.key, position, AfterDeadLetter.TAIL):",
        "if False:",
    ),
    (
        Returning,
        "self.take_back_after(lane, min(flight.position for flight, _ in flights))",
        "pass",
    ),
    (Returning, "lane.note_unresolved(flight.position)", "pass"),
    (Returning, "self._settling.note_failure(flight)\n            if", "if"),
    (Returning, "lost[:1] if self._options.orders_keys else lost", "lost"),
    (
        Returning,
        "else lost:\n                self._settling.note_failure(flight)",
        "else lost:\n                pass",
    ),
    (Returning, "if flight.delivery in consumer.flights:  #", "if True:  #"),
    (Returning, "self._flights.look_again(consumer, now_ms)", "pass"),
    (HandOver, "self._parking.wake_all(Reason.JOINING)", "pass"),
    (
        HandOver,
        "consumer.joined_at = None if read_position == mark_delete else read_position",
        "pass",
    ),
    (HandOver, "self._parking.hand_over(moved)\n", "pass\n"),
    (HandOver, "told[owner].append(run)", "pass"),
    (Settling, "flight.asked |= newly\n", "flight.asked |= newly\n        self._land(flight)\n"),
    (Settling, "return self._batch.number\n", "return self._batch.number - 1\n"),
    (Settling, "0 if self._persisting is None else self._persisting.number", "0"),
    (Settling, "self.partial[position] = left", "pass"),
    (Settling, "if self._persisting is not None or not self._batch:", "if not self._batch:"),
    (Settling, "self.attempts.pop(position, None)", "pass"),
    (Settling, "self.partial.pop(position, None)", "pass"),
    (
        Flights,
        "[flight for flight in gone.flights.values() if not flight.is_settling]",
        "list(gone.flights.values())",
    ),
    (Flights, "gone.timer_ms = None", "pass"),
    (Flights, "self._count(consumer, -(flight.unacked & bits).bit_count())", "pass"),
    (Flights, "self._parking.wake_all(Reason.SUBSCRIPTION_LIMIT)", "pass"),
    (
        Flights,
        "deadline_ms = now_ms + consumer.ack_timeout_ms if consumer.ack_timeout_ms else None",
        "deadline_ms = None",
    ),
    (Flights, "if flight.deadline_ms > now_ms:\n                break", "pass"),
    (
        Flights,
        "if not flight.is_settling:\n                late.append(flight)",
        "late.append(flight)",
    ),
    (Flights, "consumer.permits -= cost", "consumer.permits -= 1"),
    (Flights, "if limit and consumer.unacked >= limit:", "if limit and consumer.unacked > limit:"),
    (Flights, "elif consumer.unacked * 2 <= limit:", "elif consumer.unacked < limit:"),
    (Flights, "if limit and self.unacked >= limit:", "if False:"),
    (Flights, "elif self.is_blocked and self.unacked * 2 < limit:", "elif False:"),
    (Flights, "self._count_unacked(-gone.unacked)", "pass"),
    (Parking, "if lane is not None and lane.parked >= self._options.key_parked_max:", "if False:"),
    (
        Parking,
        "if slot.lag is None and (lane is None or lane.lag is None):",
        "if slot.lag is None:",
    ),
    (
        Parking,
        "if slot.lag is None and (lane is None or lane.lag is None):",
        "if lane is None or lane.lag is None:",
    ),
    (Parking, "if not (of_lane or slot.is_behind(position)):", "if False:"),
    (
        Parking,
        "self._push(lane, Returned(*delayed.parked))\n        self.wake(lane)",
        "self._push(lane, Returned(*delayed.parked))",
    ),
    (Parking, "if lane.slot.queue is queue:\n                    self.wake(lane)", "pass"),
    (
        Parking,
        "lane.waiting.append(entry.position, entry.messages)\n        self.wake(lane)",
        "lane.waiting.append(entry.position, entry.messages)",
    ),
    (Parking, "slot.queue = new\n", "pass\n"),
    (Parking, "if slot.queued:\n                new.slots.append(slot)", "pass"),
    (
        Parking,
        "old.lagging.discard(slot)\n                new.lagging.add(slot)",
        "pass",
    ),
    (Parking, "queue.parked += sign * slot.parked", "pass"),
    (Parking, "queue.returned += sign * slot.returned", "pass"),
    (
        Parking,
        "queue.slots = type(queue.slots)(slot for slot in queue.slots if slot.queue is queue)",
        "pass",
    ),
    (Parking, "if limit and queue.returned >= limit:", "if False:"),
    (Parking, "elif queue.is_choked and queue.returned * 2 <= limit:", "elif False:"),
    (Parking, "del self.lanes[lane.key]", "pass"),
    (Parking, "self.slots.pop(slot.number, None)", "pass"),
    (
        Lags,
        "if slot.is_behind(position) and slot not in scan.slots:\n            return False",
        "pass",
    ),
    (Lags, "lane is None or not lane.is_behind(position) or lane in scan.lanes", "True"),
    (Lags, "scan.slots.discard(slot)", "pass"),
    (Lags, "scan.lanes.discard(lane)", "pass"),
    (
        Lags,
        "if queue.lagging and (queue.is_half_empty or queue.takes_more):",
        "if queue.lagging and queue.is_half_empty:",
    ),
    (Lags, "lane.reason is Reason.READY and not lane.parked and queue.takes_more", "False"),
    (Consumer, "self.permits <= 0 or", ""),
    (Consumer, "not self.is_blocked or self.unfinished > 0", "not self.is_blocked"),
    (Consumer, "not self.is_blocked or self.unfinished > 0", "True"),
    (Lane, "or (self.rare and self.rare.later)\n", "\n"),
    (Lane, "or self.dead\n", "\n"),
    (Lane, "or self.lag\n", "\n"),
    (Lane, "(may_lag or attempt in rare.rests)", "attempt in rare.rests"),
    (Lane, "each.lane is self and ", ""),
    (Large, "not self.has_last", "False"),
    (Large, "not self.has_last", "True"),
    (Acknowledged, "position > self.highest", "position >= self.highest"),
    (Runs, "words[at + 1] += 1\n", "pass\n"),
    (Runs, "same and words[-3] + words[-2] == entry_id", "same"),
    (Runs, "and words[-1] == messages", ""),
]


@pytest.mark.parametrize(("owner", "right", "wrong"), MUTANTS)
def test_a_missing_rule_is_found(seed: int, owner: type, right: str, wrong: str) -> None:
    made = rebuilt(owner, right, wrong)
    for each in range(seed, seed + MUTANT_HISTORIES):
        try:
            history(each, made["Subscription"], made["Acknowledged"])
        except Exception:
            return
    pytest.fail(f"no history misses {right!r}")


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
    pytest.fail(f"no history misses {right!r}")
