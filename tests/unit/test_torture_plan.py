"""Which faults a torture has follows from its seed, and each kind comes."""

from collections import Counter
from random import Random

import pytest

from tools.torture.faults import INTERVAL_S, SECONDS, WEIGHTS, Kind, Places, plan
from tools.torture.limits import LIMITS, TINY, settings_of
from tools.torture.messages import Making, make, read

PLACES = Places(["ledger", "ledger-1"], ["a"], ["a>ledger"], ["ledger"], ["t"])
MINUTE_S = 60.0


def test_a_seed_makes_the_same_plan_each_time() -> None:
    assert plan("1", PLACES, MINUTE_S) == plan("1", PLACES, MINUTE_S)
    assert plan("1", PLACES, MINUTE_S) != plan("2", PLACES, MINUTE_S)


def test_each_kind_comes_before_one_comes_again(seed: int) -> None:
    faults = plan(str(seed), PLACES, 10 * MINUTE_S)
    assert Counter(each.kind for each in faults[: len(Kind)]) == Counter(Kind)
    assert set(WEIGHTS) == set(SECONDS) == set(Kind)


def test_a_copy_is_put_aside_before_it_comes_back(seed: int) -> None:
    kinds = [each.kind for each in plan(str(seed), PLACES, 10 * MINUTE_S)]
    assert kinds.index(Kind.REDIS_COPY) < kinds.index(Kind.REDIS_BACK)


def test_faults_are_bounded_in_count_and_time(seed: int) -> None:
    faults = plan(str(seed), PLACES, 10 * MINUTE_S)
    assert len(faults) < 2 * 10 * MINUTE_S / INTERVAL_S
    assert all(0 <= each.at_s < 10 * MINUTE_S for each in faults)
    assert max(each.lasts_s for each in faults) <= max(most for _, most in SECONDS.values())


def test_nothing_happens_where_there_is_nothing() -> None:
    kinds = {each.kind for each in plan("1", Places([], [], ["l"], [], []), 10 * MINUTE_S)}
    assert Kind.CUT in kinds
    assert not kinds & {Kind.KILL, Kind.ROLL, Kind.KILL_APPLICATION, Kind.FULL, Kind.TRIM}


@pytest.mark.parametrize("limits", LIMITS)
def test_a_process_has_its_limits_or_those_that_are_tiny(limits: str) -> None:
    told = [settings_of("ledger", limits, Random(str(each))) for each in range(20)]
    tiny = [f"SEQGATE_{name}" in each for each in told for name in TINY if "LEDGER" in name]
    assert {"default": not any(tiny), "tiny": all(tiny), "mixed": len(set(tiny)) == 2}[limits]


def test_a_message_says_all_by_which_it_is_judged() -> None:
    making = Making("p", keys=3, bytes_max=1_000, large_share=0.5, delays=True)
    for number in range(300):
        made = make(making, number)
        assert made == make(making, number)
        said = read(made.payload)
        assert (said.uid, said.key, said.place) == (made.uid, made.key, made.place)
        assert said.is_delayed == (made.delay_s is not None)
    assert any(len(make(making, number).payload) > 500 for number in range(20))


@pytest.mark.parametrize("damage", [b"", b"x", b"a|b\n", b"p.1|k|here|\nother"])
def test_what_was_not_made_here_is_no_message(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"no message|damaged"):
        read(damage)
