"""Who is forgotten, and who is not."""

from services.dedup.core.retention import forgettable
from services.dedup.core.sequence import Marks
from services.dedup.core.topic import Tracked

IDLE = Marks(5, 5)
BUSY = Marks(5, 6)


def test_the_inactive_are_purged() -> None:
    producers = [("old", Tracked(IDLE, 9)), ("edge", Tracked(IDLE, 10)), ("new", Tracked(IDLE, 11))]
    chosen = forgettable(producers, inactive_before_ms=10, keep_at_most=99)
    assert chosen.purge == [("old", 9)]
    assert chosen.evict == []


def test_on_a_full_topic_the_most_recently_active_stay() -> None:
    producers = [(f"p{i:02}", Tracked(IDLE, i)) for i in range(15)]
    chosen = forgettable(producers, inactive_before_ms=0, keep_at_most=10)
    assert [name for name, _ in chosen.evict] == [f"p{i:02}" for i in range(5)]


def test_what_is_in_flight_is_never_forgotten() -> None:
    producers = [("busy", Tracked(BUSY, 0)), ("idle", Tracked(IDLE, 5))]
    chosen = forgettable(producers, inactive_before_ms=3, keep_at_most=0)
    assert chosen.purge == []
    assert chosen.evict == [("idle", 5)]


def test_a_purge_makes_room_before_anyone_is_evicted() -> None:
    producers = [("a", Tracked(IDLE, 1)), ("b", Tracked(IDLE, 20)), ("c", Tracked(IDLE, 30))]
    chosen = forgettable(producers, inactive_before_ms=10, keep_at_most=2)
    assert [name for name, _ in chosen.purge] == ["a"]
    assert chosen.evict == []


def test_names_decide_between_equals() -> None:
    producers = [("b", Tracked(IDLE, 1)), ("a", Tracked(IDLE, 1))]
    chosen = forgettable(producers, inactive_before_ms=0, keep_at_most=1)
    assert chosen.evict == [("a", 1)]
