"""P4 to P6 over many seeded histories of a subscription (key-shared-filters.md, 122 to 135)."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from seqgate.types import Position
from services.dispatcher.core.effects import Deliver, Entry, Kind, Options
from services.dispatcher.core.lane import Consumer, Lane, Large
from services.dispatcher.core.positions import Acknowledged, Runs
from services.dispatcher.core.selectors import Ring
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
    (Subscription, "if lane.recording:\n", "if False:\n"),
    (
        Subscription,
        "if lane.dead is not None:\n            return",
        "if False:\n            return",
    ),
    (
        Subscription,
        "if self.keys and self._is_beyond_gap(lane, position, AfterDeadLetter.HOLD):",
        "if False:",
    ),
    (
        Subscription,
        "if lane.unresolved and lane.unresolved[0] < position and not is_amid:",
        "if False:",
    ),
    (Subscription, "lane.unresolved[0] < position and", "lane.unresolved[0] != position and"),
    (Subscription, "if lane.holder is not None and lane.holder != consumer.id:", "if False:"),
    (Subscription, "if lane.delays and lane.delays.get(position, 0) > now_ms:", "if False:"),
    (Subscription, "if head.not_before_ms > now_ms:", "if False:"),
    (
        Subscription,
        "elif lane.slot.queue.is_choked and not lane.returned and not is_amid:",
        "elif False:",
    ),
    (Subscription, "if limit and len(lane.flights) >= limit and not is_amid:", "if False:"),
    (Subscription, "len(lane.flights) >= limit and not is_amid:", "len(lane.flights) >= limit:"),
    (Subscription, "position > consumer.joined_at and not is_amid:", "False:"),
    (
        Subscription,
        "position > consumer.joined_at and not is_amid:",
        "position > consumer.joined_at:",
    ),
    (Subscription, "self._set_lane_timer(lane, lane.delays[position])", "pass"),
    (Subscription, "self._set_lane_timer(lane, head.not_before_ms)", "pass"),
    (
        Subscription,
        "self._take_back_after(lane, min(flight.position for flight, _ in flights))",
        "pass",
    ),
    (Subscription, "insort(lane.unresolved, flight.position)", "pass"),
    (Subscription, "self._note_failure(flight)\n            if", "if"),
    (Subscription, "lane.unresolved.remove(position)", "pass"),
    (
        Subscription,
        "if flight is None or flight.is_settling:\n                outcomes",
        "if flight is None:\n                outcomes",
    ),
    (Subscription, "flights[:1] if self.options.orders_keys else flights", "flights"),
    (Subscription, "for flight in failed:\n                self._note_failure(flight)", "pass"),
    (
        Subscription,
        "[flight for flight in gone.flights.values() if not flight.is_settling]",
        "list(gone.flights.values())",
    ),
    (Subscription, "gone.flights = {}", "pass"),
    (
        Subscription,
        "flight.asked |= newly\n",
        "flight.asked |= newly\n        self._land(flight)\n",
    ),
    (Subscription, "return self._batch.number\n", "return self._batch.number - 1\n"),
    (Subscription, "0 if self._persisting is None else self._persisting.number", "0"),
    (Subscription, "self._count_consumer_unacked(consumer, -newly)", "pass"),
    (Subscription, "unacked = self.partial.get(position, unacked)", "pass"),
    (Subscription, "self.partial[position] = left", "pass"),
    (Subscription, "if self._persisting is None and self._batch:", "if self._batch:"),
    (Subscription, "elif item.messages >> flight.messages:", "elif False:"),
    (Subscription, "self._note_succession(before, entry.position)", "pass"),
    (Subscription, "self.acknowledged.advance(mark_delete)", "pass"),
    (Subscription, "self._batch.whole[entry.position] = None", "pass"),
    (
        Subscription,
        "if lane is not None and lane.parked >= self.options.key_parked_max:",
        "if False:",
    ),
    (
        Subscription,
        "if slot.lag is None and (lane is None or lane.lag is None):",
        "if slot.lag is None:",
    ),
    (
        Subscription,
        "if slot.lag is None and (lane is None or lane.lag is None):",
        "if lane is None or lane.lag is None:",
    ),
    (Subscription, "if not (of_slot or of_lane):", "if False:"),
    (
        Subscription,
        ("elif (of_slot and slot not in scan.slots) or (of_lane and lane not in scan.lanes):"),
        "elif False:",
    ),
    (Subscription, "scan.slots -= {slot} if slot.lag == entry.position else set()", "pass"),
    (
        Subscription,
        ("scan.lanes -= {lane} if lane is not None and lane.lag == entry.position else set()"),
        "pass",
    ),
    (Subscription, "if len(entries) < SCAN_ENTRIES or entries[-1].position >= end:", "if True:"),
    (
        Subscription,
        "if len(entries) < SCAN_ENTRIES or entries[-1].position >= end:",
        "if len(entries) < SCAN_ENTRIES:",
    ),
    (Subscription, "known = entry.position > end or", "known ="),
    (
        Subscription,
        "if queue.lagging and (queue.is_half_empty or self._takes_more(queue)):",
        "if queue.lagging and queue.is_half_empty:",
    ),
    (
        Subscription,
        "lane.reason is Reason.READY and not lane.parked and self._takes_more(queue)",
        "False",
    ),
    (Subscription, "if self._scanning is None:\n            self._start_scan()", "pass"),
    (
        Subscription,
        "lane.recording -= 1\n            self._wake(lane, now_ms)",
        "lane.recording -= 1",
    ),
    (
        Subscription,
        "self._forget_old_gaps()\n        self._wake(lane, now_ms)",
        "self._forget_old_gaps()",
    ),
    (
        Subscription,
        "and lane.dead is not None\n            self._wake(lane, now_ms)",
        "and lane.dead is not None",
    ),
    (
        Subscription,
        "self._out.append(ForgetKey(lane.key))\n        self._wake(lane, now_ms)",
        "self._out.append(ForgetKey(lane.key))",
    ),
    (
        Subscription,
        ("self._drain_over(subject, now_ms)\n                self._wake(subject, now_ms)"),
        "self._drain_over(subject, now_ms)",
    ),
    (
        Subscription,
        "self._count_returned(lane, 1)\n        self._wake(lane, now_ms)",
        "self._count_returned(lane, 1)",
    ),
    (
        Subscription,
        (
            "for lane in list(self.withheld[Reason.SUBSCRIPTION_LIMIT]):\n"
            "                self._wake(lane, lane.since_ms)"
        ),
        "pass",
    ),
    (
        Subscription,
        ("if lane.slot.queue is queue:\n                    self._wake(lane, lane.since_ms)"),
        "pass",
    ),
    (
        Subscription,
        (
            "if changed:\n"
            "            for lane in list(self.withheld[Reason.JOINING]):\n"
            "                self._wake(lane, now_ms)"
        ),
        "pass",
    ),
    (
        Subscription,
        ("lane.waiting.append(entry.position, entry.messages)\n        self._wake(lane, now_ms)"),
        "lane.waiting.append(entry.position, entry.messages)",
    ),
    (
        Subscription,
        "self._take_back_after(lane, first)\n            self._wake(lane, now_ms)",
        "self._take_back_after(lane, first)",
    ),
    (Subscription, "joined.joined_at = self.read_position", "pass"),
    (Subscription, "self._hand_over(moved)\n", "pass\n"),
    (Subscription, "slot.queue = new\n", "pass\n"),
    (Subscription, "if slot.queued:\n                new.slots.append(slot)", "pass"),
    (
        Subscription,
        (
            "if slot.lag is not None:\n"
            "                old.lagging.discard(slot)\n"
            "                new.lagging.add(slot)"
        ),
        "pass",
    ),
    (Subscription, "queue.parked += sign * slot.parked", "pass"),
    (Subscription, "queue.returned += sign * slot.returned", "pass"),
    (
        Subscription,
        ("queue.slots = type(queue.slots)(slot for slot in queue.slots if slot.queue is queue)"),
        "pass",
    ),
    (Subscription, "told[owner].append(run)", "pass"),
    (
        Subscription,
        ("deadline_ms = now_ms + consumer.ack_timeout_ms if consumer.ack_timeout_ms else None"),
        "deadline_ms = None",
    ),
    (Subscription, "if flight.deadline_ms > now_ms:\n                break", "pass"),
    (
        Subscription,
        "if not flight.is_settling:\n                late.append(flight)",
        "late.append(flight)",
    ),
    (Subscription, "if flight.delivery in consumer.flights:  #", "if True:  #"),
    (Subscription, "self._set_time_out(consumer, now_ms)", "pass"),
    (Subscription, "consumer.permits -= cost", "consumer.permits -= 1"),
    (
        Subscription,
        "if limit and consumer.unacked >= limit:",
        "if limit and consumer.unacked > limit:",
    ),
    (Subscription, "elif consumer.unacked * 2 <= limit:", "elif consumer.unacked < limit:"),
    (Subscription, "if limit and self.unacked >= limit:", "if False:"),
    (Subscription, "elif self.is_blocked and self.unacked * 2 < limit:", "elif False:"),
    (Subscription, "if limit and queue.returned >= limit:", "if False:"),
    (Subscription, "elif queue.is_choked and queue.returned * 2 <= limit:", "elif False:"),
    (Subscription, "self._count_unacked(-gone.unacked)", "pass"),
    (
        Subscription,
        "if target is consumer and not consumer.has_room:\n                break",
        "pass",
    ),
    (
        Subscription,
        "self.attempts.get(position, 0) > limit",
        "self.attempts.get(position, 0) >= limit",
    ),
    (Subscription, "self.attempts.get(position, 0) > limit", "False"),
    (
        Subscription,
        "if self.keys and self._is_beyond_gap(lane, position, AfterDeadLetter.TAIL):",
        "if False:",
    ),
    (Subscription, "del self.lanes[lane.key]", "pass"),
    (Subscription, "self.attempts.pop(position, None)", "pass"),
    (Subscription, "self.partial.pop(position, None)", "pass"),
    (Subscription, "self._slots.pop(slot.number, None)", "pass"),
    (Lane, "or self.later\n", "\n"),
    (Lane, "or self.dead\n", "\n"),
    (Lane, "or self.lag\n", "\n"),
    (Lane, "(may_lag or attempt in self.rests)", "attempt in self.rests"),
    (Lane, "each.lane is self and ", ""),
    (Large, "not self.has_last", "False"),
    (Large, "not self.has_last", "True"),
    (Consumer, "self.permits <= 0 or", ""),
    (Consumer, "not self.is_blocked or self.unfinished > 0", "not self.is_blocked"),
    (Consumer, "not self.is_blocked or self.unfinished > 0", "True"),
    (Runs, "words[at + 1] += 1\n", "pass\n"),
    (Runs, "same and words[-3] + words[-2] == entry_id", "same"),
    (Runs, "and words[-1] == messages", ""),
    (Acknowledged, "position > self.highest", "position >= self.highest"),
]


@pytest.mark.parametrize(("owner", "right", "wrong"), MUTANTS)
def test_a_missing_rule_is_found(seed: int, owner: type, right: str, wrong: str) -> None:
    machine, acknowledged = mutated(owner, right, wrong)
    for each in range(seed, seed + MUTANT_HISTORIES):
        try:
            history(each, machine, acknowledged)
        except Exception:
            return
    pytest.fail(f"no history misses {right!r}")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for _ in range(TURN_ENTRIES):", "for _ in range(1_000):"),
        ("lane = slot.ready.popleft()", "lane = slot.ready.pop()"),
        ("slot = slots.popleft()", "slot = slots.pop()"),
        ("if self._pool is not None and not turns:\n                return True", "pass"),
    ],
)
def test_a_missing_turn_is_found(seed: int, right: str, wrong: str) -> None:
    machine = rebuilt(Subscription, right, wrong)
    for each in range(seed, seed + FAIR_HISTORIES):
        try:
            run_fairly(each, machine)
        except AssertionError:
            return
    pytest.fail(f"no history misses {right!r}")


def mutated(owner: type, right: str, wrong: str) -> tuple[type[Subscription], type[Acknowledged]]:
    """The machine, and its set of what is acknowledged, with one place changed."""
    if owner is Subscription:
        return rebuilt(Subscription, right, wrong), Acknowledged
    other: Any = rebuilt(owner, right, wrong)
    if owner is Acknowledged:
        return SmallSubscription, other
    return rebuilt(Subscription, **{owner.__name__: other}), Acknowledged
