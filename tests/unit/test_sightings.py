"""Leases are judged by a number that stands still, on each observer's own clock."""

from random import Random

import pytest

from seqgate.services.cursor.adapters.memory import MemoryCursorStore
from seqgate.services.cursor.core import sightings
from seqgate.services.cursor.core.cursor import LeaseHeld
from seqgate.services.cursor.core.sightings import Sightings
from seqgate.services.cursor.core.state import Head, Lease
from seqgate.services.errors import Fenced
from seqgate.types import TopicName

TOPIC = TopicName.parse("test/sightings/topic")
NAME = "cursor"
YEAR_MS = 366 * 24 * 3_600_000
FAR = 10 * YEAR_MS


def head(number: int, *, epoch: int = 1, duration_ms: int = 1_000, name: str = NAME) -> Head:
    """A cursor as it was read: the end of its lease is by the clock of who granted it."""
    lease = Lease("owner", epoch, FAR, duration_ms)
    return Head(TOPIC, name, 0, lease=lease, lease_number=number)


def lasts(seen: Sightings, of: Head, now_ms: int) -> bool:
    lease = seen.judged(of, now_ms, matters=True)
    assert lease is not None
    return lease.lasts(now_ms)


def test_a_lease_is_over_once_its_number_stood_still_for_its_duration() -> None:
    seen = Sightings()
    assert lasts(seen, head(1), 5_000)
    assert lasts(seen, head(1), 5_999)
    assert not lasts(seen, head(1), 6_000)
    assert not lasts(seen, head(1), 60_000)


@pytest.mark.parametrize("after", [head(2), head(1, epoch=3), head(1, epoch=2), head(0, epoch=5)])
def test_a_lease_that_changed_counts_as_just_granted(after: Head) -> None:
    seen = Sightings()
    assert lasts(seen, head(1), 0)
    assert lasts(seen, after, 2_000)
    assert lasts(seen, after, 2_999)
    assert not lasts(seen, after, 3_000)


def test_an_own_grant_counts_from_the_grant() -> None:
    seen = Sightings()
    seen.changed(head(1), 100)
    assert seen.judged(head(1), 700, matters=True) == Lease("owner", 1, 1_100, 1_000)
    seen.changed(head(2), 800)
    assert seen.judged(head(2), 900, matters=True) == Lease("owner", 1, 1_800, 1_000)


def test_a_grant_that_is_reported_late_hides_no_later_one() -> None:
    seen = Sightings()
    assert lasts(seen, head(5), 500)
    seen.changed(head(4), 0)
    assert lasts(seen, head(5), 1_499)
    assert not lasts(seen, head(5), 1_500)


def test_a_released_lease_is_over_at_once() -> None:
    assert not lasts(Sightings(), head(1, duration_ms=0), 0)


def test_a_clock_that_goes_back_makes_a_lease_last_for_its_duration_at_most() -> None:
    seen = Sightings()
    assert lasts(seen, head(1), YEAR_MS)
    assert lasts(seen, head(1), 0)
    assert lasts(seen, head(1), 999)
    assert not lasts(seen, head(1), 1_000)


def test_what_does_not_matter_displaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings, "SIGHTINGS_MAX", 2)
    seen = Sightings()
    assert lasts(seen, head(1, name="a"), 0)
    assert lasts(seen, head(1, name="b"), 0)
    for i in range(10):
        assert seen.judged(head(1, name=f"{i}"), 500, matters=False)
    assert not lasts(seen, head(1, name="a"), 1_000)
    assert lasts(seen, head(1, name="c"), 1_000)  # displaces b, which was used before a
    assert not lasts(seen, head(1, name="a"), 1_000)
    assert lasts(seen, head(1, name="b"), 1_000)


class Observer:
    """A process with a clock of its own, in front of the common cursors."""

    def __init__(self, cursors: MemoryCursorStore, world: list[int], offset_ms: int) -> None:
        self.offset_ms = offset_ms
        self.store = cursors.beside(lambda: world[0] + self.offset_ms)

    async def acquire(self, owner: str, duration_ms: int) -> Lease | None:
        try:
            return await self.store.change(
                TOPIC, NAME, lambda state, now_ms: state.acquire_lease(owner, now_ms, duration_ms)
            )
        except LeaseHeld:
            return None

    async def renew(self, lease: Lease, duration_ms: int) -> Lease | None:
        try:
            return await self.store.change(
                TOPIC,
                NAME,
                lambda state, now_ms: state.renew_lease(
                    lease.owner, lease.epoch, now_ms, duration_ms
                ),
            )
        except Fenced:
            return None


@pytest.mark.parametrize("history", range(20))
async def test_two_observers_whose_clocks_differ_by_years_grant_one_lease_at_a_time(
    seed: int, history: int
) -> None:
    """Owners call either observer. None gets the lease while another's lasts, which each owner
    counts from before its call; and a lease that nobody renews is taken in time."""
    random = Random(seed + history)
    world, duration_ms = [0], 1_000
    cursors = MemoryCursorStore()
    await cursors.create(TOPIC, NAME, mark_delete=None, properties={})
    observers = [Observer(cursors, world, random.randint(-FAR, FAR)) for _ in range(2)]
    held: dict[str, tuple[Lease, int]] = {}
    for _ in range(500):
        world[0] += random.choice((1, 50, 400, 900))
        now_ms, owner = world[0], random.choice("pq")
        at = random.randrange(2)
        if random.random() < 0.02:  # it restarts, on a machine whose clock was set meanwhile
            observers[at] = Observer(cursors, world, random.randint(-FAR, FAR))
        if owner in held and random.random() < 0.7:
            lease = await observers[at].renew(held[owner][0], duration_ms)
        else:
            lease = await observers[at].acquire(owner, duration_ms)
        if lease is None:
            continue
        for other, (_, until_ms) in held.items():
            assert other == owner or until_ms <= now_ms, "two owners at once"
        held[owner] = lease, now_ms + duration_ms

    for _ in range(2):
        if await observers[0].acquire("new", duration_ms) is not None:
            return
        world[0] += duration_ms
    assert await observers[0].acquire("new", duration_ms) is not None
