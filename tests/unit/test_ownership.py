"""core/ownership.py: who is over, and who hands over, without comparing clocks."""

from random import Random

import pytest

from seqgate.services.ledger.core.ownership import (
    BEAT_S,
    CONFIRM_S,
    FORGET_S,
    HANDED_OVER_MAX,
    LEASE_S,
    SLACK,
    STEADY_BEATS,
    Beat,
    Watch,
)

ME = "me"


class World:
    """An observer named ME, and other instances that beat when told to."""

    def __init__(self, *others: str) -> None:
        self.watch = Watch(ME, "me:1")
        self.now_s = 1_000.0
        self.beats = {name: Beat(name, f"{name}:1", 1, 0) for name in (ME, *others)}

    def beat(self, *names: str, after_s: float = BEAT_S, took_s: float = 0.0) -> None:
        """Let some instances beat, and the observer look."""
        self.now_s += after_s
        for name in (ME, *names):
            before = self.beats[name]
            self.beats[name] = before._replace(beats=before.beats + 1)
        sent_s = self.now_s
        self.now_s += took_s
        self.watch.look([*self.beats.values()], sent_s=sent_s, now_s=self.now_s)

    def own(self, **topics: int) -> None:
        for name, count in topics.items():
            self.beats[name] = self.beats[name]._replace(topics=count)


def test_an_instance_that_beats_is_not_over() -> None:
    it = World("one")
    for _ in range(20):
        it.beat("one")
        assert it.watch.address_of("one") == "one:1"


def test_an_instance_that_pauses_for_three_seconds_keeps_its_topics() -> None:
    it = World("one")
    for _ in range(10):
        it.beat("one")
        for _ in range(3):
            it.beat()
            assert not it.watch.is_over("one")


def test_an_instance_is_over_after_it_stood_still_for_its_lease() -> None:
    it = World("one")
    it.beat("one")
    still_s = 0.0
    while not it.watch.is_over("one"):
        it.beat()
        still_s += BEAT_S
    assert LEASE_S <= still_s < LEASE_S + 2 * BEAT_S
    assert it.watch.address_of("one") is None
    it.beat("one")
    assert it.watch.address_of("one") == "one:1"


def test_an_observer_that_stood_still_itself_takes_nobody_for_over() -> None:
    """It cannot know whether the others beat meanwhile."""
    it = World("one")
    it.beat("one")
    it.beat("one", after_s=1_000)
    assert not it.watch.is_over("one")


def test_a_counter_stands_still_from_when_its_beat_was_answered() -> None:
    """It may have beaten just before the answer."""
    it = World("one")
    it.beat("one", took_s=2 * BEAT_S)
    for _ in range(round(LEASE_S / BEAT_S) - 1):
        it.beat()
        assert not it.watch.is_over("one")
    it.beat()
    assert it.watch.is_over("one")


@pytest.mark.parametrize("away_s", [LEASE_S, 8.0, 600.0])
def test_whoever_reaches_the_store_first_after_an_outage_takes_nobody_for_over(
    away_s: float,
) -> None:
    """Nobody could beat meanwhile."""
    it = World("one")
    it.beat("one")
    it.beat(after_s=away_s)
    assert not it.watch.is_over("one")
    it.beat()
    assert not it.watch.is_over("one")
    it.beat("one")
    it.beat()
    assert not it.watch.is_over("one")


def test_an_instance_that_does_not_come_back_after_an_outage_is_over_soon() -> None:
    it = World("killed")
    it.beat("killed")
    it.beat(after_s=8)
    for _ in range(3):
        it.beat()
    assert it.watch.is_over("killed")


def test_a_slow_answer_does_not_age_the_others() -> None:
    it = World("one")
    it.beat("one")
    it.beat(took_s=100)
    assert not it.watch.is_over("one")


def test_an_observer_that_begins_waits_for_a_lease() -> None:
    it = World("killed")
    it.beat()
    assert not it.watch.is_over("killed")
    for _ in range(5):
        it.beat()
    assert it.watch.is_over("killed")


def test_an_instance_without_a_row_is_over() -> None:
    it = World("one")
    it.beat("one")
    assert it.watch.is_over("unknown")
    del it.beats["one"]
    it.beat()
    assert it.watch.is_over("one")
    assert not it.watch.is_over(ME)


def test_an_earlier_process_at_the_same_address_is_over_at_once() -> None:
    it = World("earlier", "other")
    it.beats["earlier"] = it.beats["earlier"]._replace(address="me:1")
    it.beat("earlier", "other")
    assert it.watch.is_over("earlier")
    assert it.watch.forgotten() == ["earlier"]


def test_two_instances_told_by_one_address_let_each_other_live() -> None:
    """Otherwise each would remove the other's row, and its topics, with every beat."""
    it = World("twin")
    it.beats["twin"] = it.beats["twin"]._replace(address="me:1")
    it.beat("twin")
    for _ in range(3):
        it.beat("twin")
        assert not it.watch.is_over("twin")
        assert not it.watch.forgotten()
    for _ in range(6):
        it.beat()
    assert it.watch.is_over("twin")


def test_an_instance_is_forgotten_long_after_it_is_over() -> None:
    it = World("one")
    it.beat("one")
    for _ in range(round(FORGET_S / BEAT_S) - 1):
        it.beat()
    assert not it.watch.forgotten()
    it.beat()
    it.beat()
    assert it.watch.forgotten() == ["one"]


def test_a_beat_confirms_from_when_it_was_sent() -> None:
    it = World()
    assert not it.watch.is_confirmed(it.now_s)
    it.beat(took_s=1)
    assert it.watch.is_confirmed(it.now_s)
    assert it.watch.is_confirmed(it.now_s - 1 + CONFIRM_S - 0.01)
    assert not it.watch.is_confirmed(it.now_s - 1 + CONFIRM_S)
    assert CONFIRM_S < LEASE_S


def test_nobody_is_over_for_another_while_it_is_confirmed_for_itself() -> None:
    """Two observers with clocks years apart, answers that take their time, and pauses."""
    random = Random(7)
    for _ in range(300):
        counts = {"a": 0, "b": 0}
        watches = {name: Watch(name, f"{name}:1") for name in counts}
        offsets = {"a": 0.0, "b": random.uniform(-1e8, 1e8)}
        now_s = 0.0
        for _ in range(200):
            name = random.choice("ab")
            now_s += random.choice([0.1, 0.5, 1.0, 1.0, 1.0, 3.0, 7.0])
            sent_s = now_s
            counts[name] += 1
            beats = [Beat(each, f"{each}:1", count, 0) for each, count in counts.items()]
            now_s += random.choice([0.0, 0.0, 0.2, 4.0])
            watches[name].look(beats, sent_s=sent_s + offsets[name], now_s=now_s + offsets[name])
            other = "b" if name == "a" else "a"
            if watches[name].is_over(other):
                assert not watches[other].is_confirmed(now_s + offsets[other])


@pytest.mark.parametrize(
    ("mine", "theirs", "handed_over"),
    [
        (100, 0, HANDED_OVER_MAX),
        (10, 0, 5),
        (6, 4, 1),
        (5, 5, 0),
        (50, 40, 0),
        (1, 0, 0),
        (2, 0, 1),
        (0, 9, 0),
    ],
)
def test_who_owns_more_than_its_share_hands_over(mine: int, theirs: int, handed_over: int) -> None:
    it = World("one")
    it.own(me=mine, one=theirs)
    for _ in range(STEADY_BEATS):
        it.beat("one")
        assert it.watch.surplus() is None
    it.beat("one")
    surplus = it.watch.surplus()
    assert (surplus.topics if surplus else 0) == handed_over


@pytest.mark.parametrize(
    "topics",
    [
        [40] * 5 + [10] * 5,
        [100, 0, 0],
        [100, 100, 0],
        [9, 9, 9, 9, 9, 9, 9, 9, 0],
        [50, 50, 50, 49, 1],
        [20, 20, 20, 20, 0, 15],
        *[[Random(f"{seed} {each}").randrange(200) for each in range(9)] for seed in range(50)],
    ],
)
def test_instances_that_hand_over_at_once_move_no_topic_twice(topics: list[int]) -> None:
    """All decide by the same look, before any has acted: the plan must be one."""
    owned = {f"i{number}": count for number, count in enumerate(topics)}
    share = -(-sum(topics) // len(topics))
    excess = sum(max(0, each - share) for each in topics)
    watches = {name: Watch(name, f"{name}:1") for name in owned}
    received, moved = set[str](), 0
    for beat in range(100):
        beats = [Beat(name, f"{name}:1", beat, count) for name, count in owned.items()]
        for watch in watches.values():
            watch.look(beats, sent_s=beat, now_s=beat)
        for name, watch in watches.items():
            surplus = watch.surplus()
            if surplus is None:
                continue
            assert name not in received
            owned[name] -= surplus.topics
            owned[surplus.successor.instance] += surplus.topics
            assert owned[surplus.successor.instance] <= share
            received.add(surplus.successor.instance)
            moved += surplus.topics
    assert moved <= excess
    assert sum(owned.values()) == sum(topics)
    assert max(owned.values()) <= share + share // SLACK


def test_nothing_is_handed_over_while_instances_come_and_go() -> None:
    it = World("one", "two")
    it.own(me=100)
    for _ in range(10 * STEADY_BEATS):
        it.beat("one", "two", after_s=0.1)
        it.beats.pop("three", None)
        it.beat("one", "two", after_s=0.1)
        it.beats["three"] = Beat("three", "three:1", 1, 0)
        assert it.watch.surplus() is None


def test_topics_move_until_all_have_their_share_and_no_longer() -> None:
    names = ["a", "b", "c"]
    watches = {name: Watch(name, f"{name}:1") for name in names}
    topics = {"a": 301, "b": 7, "c": 0}
    moved = at = 0
    for beat in range(200):
        for name, watch in watches.items():
            beats = [Beat(each, f"{each}:1", beat, topics[each]) for each in names]
            watch.look(beats, sent_s=beat, now_s=beat)
            surplus = watch.surplus()
            if surplus is not None:
                topics[name] -= surplus.topics
                topics[surplus.successor.instance] += surplus.topics
                moved += surplus.topics
                at = beat
    assert max(topics.values()) <= 103 + 103 // 8
    assert moved <= 200
    assert at < 100
    assert watches["a"].is_first()
    assert not watches["b"].is_first()
