"""The heap of timers: due ones come in order, and obsolete ones are dropped."""

from random import Random

from seqgate.services.dispatcher.core.lane import TIMERS_SPARE, Lane, Queue, Slot, Timers


def made_lane(key: bytes = b"key") -> Lane:
    return Lane(key, Slot(1, Queue(1)))


def next_of(timers: Timers) -> int | None:
    """The current time. A call, because mypy would keep the type narrowed by an earlier
    assertion."""
    return timers.next_ms


def test_timers_fire_by_time_and_then_by_insertion(seed: int) -> None:
    random = Random(seed)
    lanes = [made_lane(b"%d" % each) for each in range(200)]
    timers = Timers(lambda: len(lanes))
    for lane in lanes:
        timers.look_at(lane, random.randrange(50))
    first_ms = min(lane.timer_ms or 0 for lane in lanes)
    assert next_of(timers) == first_ms
    due = list(timers.due(25))
    assert due == sorted(
        (lane for lane in lanes if lane.timer_ms is not None and lane.timer_ms <= 25),
        key=lambda lane: lane.timer_ms or 0,
    )
    assert timers.next_ms is None or timers.next_ms > 25


def test_a_key_fires_once_at_its_earliest_time() -> None:
    timers, lane = Timers(lambda: 1), made_lane()
    timers.look_at(lane, 20)
    timers.look_at(lane, 10)
    timers.look_at(lane, 30)
    found = []
    for subject in timers.due(100):
        found.append(subject)
        lane.timer_ms = None
    assert found == [lane]
    assert len(timers) == 0


def test_cancelled_timers_are_dropped_and_the_others_keep_their_order() -> None:
    needed = [made_lane(b"%d" % each) for each in range(10)]
    timers = Timers(lambda: len(needed))
    for at, lane in enumerate(needed):
        timers.look_at(lane, 1_000_000 + at)
    most = 0
    for at in range(4 * TIMERS_SPARE):
        gone = made_lane()
        timers.look_at(gone, 1_000_500 - at % 1_000)
        gone.timer_ms = None
        most = max(most, len(timers))
    assert TIMERS_SPARE < most <= TIMERS_SPARE + 2 * len(needed) + 1
    assert list(timers.due(2_000_000)) == needed
