"""The producers forgotten, and those kept."""

from seqgate.services.dedup.core.retention import JUMPS_MAX, Jumps, forgettable
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import Tracked

IDLE = Marks(5, 5)
BUSY = Marks(5, 6)


def test_inactive_producers_are_purged() -> None:
    producers = [("old", Tracked(IDLE, 9)), ("edge", Tracked(IDLE, 10)), ("new", Tracked(IDLE, 11))]
    chosen = forgettable(producers, inactive_before_ms=10, keep_at_most=99)
    assert chosen.purge == [("old", 9)]
    assert chosen.evict == []


def test_a_full_topic_keeps_the_most_recently_active_producers() -> None:
    producers = [(f"p{i:02}", Tracked(IDLE, i)) for i in range(15)]
    chosen = forgettable(producers, inactive_before_ms=0, keep_at_most=10)
    assert [name for name, _ in chosen.evict] == [f"p{i:02}" for i in range(5)]


def test_producers_with_claims_in_flight_are_never_forgotten() -> None:
    producers = [("busy", Tracked(BUSY, 0)), ("idle", Tracked(IDLE, 5))]
    chosen = forgettable(producers, inactive_before_ms=3, keep_at_most=0)
    assert chosen.purge == []
    assert chosen.evict == [("idle", 5)]


def test_a_purge_makes_room_before_anyone_is_evicted() -> None:
    producers = [("a", Tracked(IDLE, 1)), ("b", Tracked(IDLE, 20)), ("c", Tracked(IDLE, 30))]
    chosen = forgettable(producers, inactive_before_ms=10, keep_at_most=2)
    assert [name for name, _ in chosen.purge] == ["a"]
    assert chosen.evict == []


def test_ties_are_broken_by_name() -> None:
    producers = [("b", Tracked(IDLE, 1)), ("a", Tracked(IDLE, 1))]
    chosen = forgettable(producers, inactive_before_ms=0, keep_at_most=1)
    assert chosen.evict == [("a", 1)]


HOUR_MS = 3_600_000


def test_a_clock_set_forward_extends_timeouts_while_it_matters() -> None:
    jumps = Jumps()
    assert not jumps.look(1_000_000, 0)
    assert jumps.look(1_010_000, 10_000)
    assert jumps.allowance_ms(HOUR_MS, 10_000) == 0
    assert jumps.look(1_020_000 + HOUR_MS, 20_000)
    assert jumps.allowance_ms(60_000, 80_000) == HOUR_MS
    assert jumps.allowance_ms(60_000, 80_001) == 0
    assert jumps.allowance_ms(HOUR_MS, 80_001) == HOUR_MS
    # A jump back does not count, and the next one forward does.
    assert jumps.look(1_030_000, 30_000)
    assert jumps.allowance_ms(HOUR_MS, 30_000) == HOUR_MS
    assert jumps.look(1_040_000 + HOUR_MS, 40_000)
    assert jumps.allowance_ms(HOUR_MS, 40_000) == 2 * HOUR_MS


def test_small_jumps_add_up_and_many_are_merged() -> None:
    jumps = Jumps()
    jumps.look(0, 0)
    for each in range(1, 11):
        jumps.look(each * 100 + each, each)
    assert jumps.allowance_ms(HOUR_MS, 10) == 1_000
    for each in range(1, 2 * JUMPS_MAX):
        jumps.look(1_000 + 10 + each * 5_000, 10)
    assert jumps.allowance_ms(HOUR_MS, 10) == 1_000 + (2 * JUMPS_MAX - 1) * 5_000
    assert len(jumps._jumps) == JUMPS_MAX
