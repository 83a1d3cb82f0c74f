"""A torture's faults follow from its seed, and include each kind."""

from collections import Counter
from random import Random

import pytest

from tools.torture.faults import INTERVAL_S, Kind, Where, plan
from tools.torture.limits import LIMITS, TINY, settings_of
from tools.torture.messages import make, read
from tools.torture.roles import ProducerRole

PLACES = {where: [where.name.lower()] for where in Where}
MINUTE_S = 60.0


def test_a_seed_makes_the_same_plan_each_time() -> None:
    assert plan("1", PLACES, MINUTE_S) == plan("1", PLACES, MINUTE_S)
    assert plan("1", PLACES, MINUTE_S) != plan("2", PLACES, MINUTE_S)


def test_every_kind_of_fault_occurs_before_one_repeats(seed: int) -> None:
    faults = plan(str(seed), PLACES, 10 * MINUTE_S)
    assert Counter(each.kind for each in faults[: len(Kind)]) == Counter(Kind)


def test_a_copy_is_saved_before_it_is_restored(seed: int) -> None:
    kinds = [each.kind for each in plan(str(seed), PLACES, 10 * MINUTE_S)]
    assert kinds.index(Kind.REDIS_COPY) < kinds.index(Kind.REDIS_BACK)


def test_faults_are_bounded_in_count_and_time(seed: int) -> None:
    faults = plan(str(seed), PLACES, 10 * MINUTE_S)
    assert len(faults) < 2 * 10 * MINUTE_S / INTERVAL_S
    assert all(0 <= each.at_s < 10 * MINUTE_S for each in faults)
    assert max(each.lasts_s for each in faults) <= max(kind.most_s for kind in Kind)


def test_faults_need_an_existing_target() -> None:
    kinds = {each.kind for each in plan("1", {Where.LINK: ["l"]}, 10 * MINUTE_S)}
    assert Kind.CUT in kinds
    assert not kinds & {Kind.KILL, Kind.ROLL, Kind.KILL_APPLICATION, Kind.FULL, Kind.TRIM}


@pytest.mark.parametrize("limits", LIMITS)
def test_a_process_has_its_own_limits_or_tiny_ones(limits: str) -> None:
    told = [settings_of("ledger", limits, Random(str(each))) for each in range(20)]
    tiny = [f"SEQGATE_{name}" in each for each in told for name in TINY if "LEDGER" in name]
    assert {"default": not any(tiny), "tiny": all(tiny), "mixed": len(set(tiny)) == 2}[limits]


def test_a_message_carries_all_data_of_its_checks() -> None:
    role = ProducerRole("p", "t", keys=3, bytes_max=1_000, large_share=0.5, delays=True)
    for number in range(300):
        made = make(role, number)
        assert made == make(role, number)
        said = read(made.payload)
        assert (said.uid, said.key, said.place) == (made.uid, made.key, made.place)
        assert said.is_delayed == (made.delay_s is not None)
    assert any(len(make(role, number).payload) > 500 for number in range(20))


@pytest.mark.parametrize("damage", [b"", b"x", b"a|b\n", b"p.1|k|here|\nother"])
def test_foreign_payloads_are_no_messages(damage: bytes) -> None:
    with pytest.raises(ValueError, match=r"no message|damaged"):
        read(damage)
