"""Entries that wait for nobody are delivered as they are read, as if they had been parked first."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqgate.services.dispatcher.core.delivering import Delivering
from seqgate.services.dispatcher.core.effects import Entry, SubscriptionType
from seqgate.types import Position
from tests.support.depth import times
from tests.unit.test_subscription import A, B, C, Stage

KEYS = (A, B, C)
ENOUGH = 10_000  # permits: with fewer, which keys are delivered depends on turns


@dataclass
class Event:
    """A page of the log, or something else that happens; the numbers choose its subjects."""

    kind: str
    page: tuple[tuple[bytes, int, int], ...] = ()  # keys, messages, delays in ms
    number: int = 0


PAGES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(1, 2), st.sampled_from((0, 0, 0, 20, 90))),
    min_size=1,
    max_size=8,
).map(lambda page: Event("read", tuple(page)))
OTHERS = st.builds(
    Event,
    st.sampled_from(
        (
            "acknowledge",
            "refuse",
            "give back",
            "join",
            "join",
            "leave",
            "wait",
            "acknowledge a part",
        )
    ),
    st.just(()),
    st.integers(0, 100),
)


def happens(it: Stage, event: Event, at: int, mine: dict[int, list[int]]) -> None:
    """Let the event happen that is number `at`."""
    held = sorted((consumer, entry) for consumer, some in mine.items() for entry in some)
    match event.kind:
        case "read":
            start = len(it.log)
            entries = [
                Entry(
                    Position(1, start + at), key, messages, it.now_ms + delay_ms if delay_ms else 0
                )
                for at, (key, messages, delay_ms) in enumerate(event.page)
            ]
            it.log += entries
            it.do(it.sub.read(entries, it.now_ms))
        case "join":
            it.connect(100 + at, ENOUGH)
        case "leave" if len(it.sub.consumers) > 1:
            number = sorted(it.sub.consumers)[event.number % len(it.sub.consumers)]
            it.leave(number)
            mine.pop(number, None)
        case "wait":
            it.wait(event.number)
        case _ if held:
            consumer, entry = held[event.number % len(held)]
            if event.kind == "acknowledge a part":
                it.acknowledge(consumer, entry, messages=1)
                if it.log[entry].messages > 1:
                    return
            elif event.kind == "acknowledge":
                it.acknowledge(consumer, entry)
            elif event.kind == "refuse":
                it.negative_acknowledge(consumer, entry)
            else:
                it.give_back(consumer, entry)
            mine[consumer].remove(entry)


def played(events: list[Event], **options: Any) -> list[dict[int, list[tuple[bytes, int]]]]:
    """What each consumer got after each event, by key, each key's in order."""
    it = Stage(**options)
    mine: dict[int, list[int]] = {}
    it.connect(1, ENOUGH)
    told = []
    for at, event in enumerate(events):
        happens(it, event, at, mine)
        got = {consumer: it.got(consumer) for consumer in sorted(it.sub.consumers)}
        for consumer, some in got.items():
            mine.setdefault(consumer, []).extend(some)
        flights = it.sub.consumers
        for consumer, some in mine.items():  # those that were revoked are not its own anymore
            there = {each.position.entry_id for each in flights[consumer].flights.values()}
            some[:] = sorted(there.intersection(some))
        keyed = {
            consumer: sorted(((it.log[each].key or b"", each) for each in some), key=_key)
            for consumer, some in got.items()
        }
        told.append(keyed)
    return told


def _key(each: tuple[bytes, int]) -> bytes:
    return each[0]


@settings(max_examples=times(quick=100, full=5_000))
@given(
    st.lists(st.one_of(PAGES, PAGES, OTHERS), min_size=5, max_size=15),
    st.booleans(),
    st.sampled_from((0, 2)),
    st.sampled_from((1, 1_000)),
    st.sampled_from((SubscriptionType.KEY_SHARED, SubscriptionType.EXCLUSIVE)),
)
def test_every_consumer_gets_the_same(
    events: list[Event],
    holds: bool,
    in_flight_max: int,
    delayed_max: int,
    kind: SubscriptionType,
) -> None:
    if kind is SubscriptionType.EXCLUSIVE:
        events = [each for each in events if each.kind != "join"]
    options: dict[str, Any] = {
        "kind": kind,
        "delay_holds_key": holds,
        "max_in_flight_per_key": in_flight_max,
        "delayed_max": delayed_max,
    }
    passing = played(events, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Delivering, "may_pass", False)
        assert played(events, **options) == passing


def test_a_message_behind_one_that_was_just_postponed_waits() -> None:
    it = Stage(delay_holds_key=True, delayed_max=1)
    it.connect(1, ENOUGH)
    delays = ((B, 50), (A, 100), (A, 0), (C, 0))
    page = [Entry(Position(1, at), key, 1, when) for at, (key, when) in enumerate(delays)]
    it.log += page
    it.do(it.sub.read(page, it.now_ms))
    assert it.got(1) == [3]
    it.wait(100)
    assert it.got(1) == [0, 1, 2]
