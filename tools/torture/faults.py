"""What goes wrong, and when: drawn from the seed before anything begins.

Each fault has a place, a beginning and an end, after which it is made good. Several may be under
way at a time, in different places.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Final, NamedTuple


class Kind(StrEnum):
    """A fault, and how it is told."""

    KILL = "SIGKILL of a service"
    STOP = "SIGSTOP of a service, then SIGCONT"
    RESTART = "SIGTERM of a service, and a new start"
    ROLL = "rolling restart of everything"
    KILL_APPLICATION = "SIGKILL of an application"
    STOP_APPLICATION = "SIGSTOP of an application, then SIGCONT"
    CUT = "connections cut"
    CLOSED = "nobody gets through"
    SLOW = "slow connections"
    SILENT = "silent connections; what was sent arrives late"
    LOST = "silent connections; what was sent is lost"
    REDIS_KILL = "SIGKILL of Redis"
    REDIS_STOP = "SIGSTOP of Redis, then SIGCONT"
    REDIS_EMPTY = "Redis is emptied"
    REDIS_COPY = "a copy of Redis's files is put aside"
    REDIS_BACK = "Redis is rolled back to the copy"
    REDIS_FAILOVER = "a lagging replica becomes Redis's master"
    FULL = "a disk is full"
    CLOCK = "a process's clock is set back, then right"
    TRIM = "a topic is trimmed"


WEIGHTS: Final[Mapping[Kind, int]] = {
    Kind.KILL: 10,
    Kind.STOP: 7,
    Kind.RESTART: 4,
    Kind.ROLL: 1,
    Kind.KILL_APPLICATION: 5,
    Kind.STOP_APPLICATION: 3,
    Kind.CUT: 8,
    Kind.CLOSED: 4,
    Kind.SLOW: 5,
    Kind.SILENT: 4,
    Kind.LOST: 4,
    Kind.REDIS_KILL: 2,
    Kind.REDIS_STOP: 2,
    Kind.REDIS_EMPTY: 3,
    Kind.REDIS_COPY: 3,
    Kind.REDIS_BACK: 3,
    Kind.REDIS_FAILOVER: 3,
    Kind.FULL: 3,
    Kind.CLOCK: 4,
    Kind.TRIM: 5,
}
"""How often each comes, beside the others."""

OF_REDIS: Final = tuple(kind for kind in Kind if kind.name.startswith("REDIS"))

SECONDS: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.KILL: (0.1, 4.0),
    Kind.STOP: (0.2, 6.0),
    Kind.RESTART: (0.0, 2.0),
    Kind.ROLL: (0.0, 0.0),
    Kind.KILL_APPLICATION: (0.1, 4.0),
    Kind.STOP_APPLICATION: (0.2, 8.0),
    Kind.CUT: (0.0, 0.0),
    Kind.CLOSED: (0.2, 5.0),
    Kind.SLOW: (1.0, 8.0),
    Kind.SILENT: (0.3, 5.0),
    Kind.LOST: (0.3, 5.0),
    Kind.REDIS_KILL: (0.1, 3.0),
    Kind.REDIS_STOP: (0.2, 4.0),
    Kind.REDIS_EMPTY: (0.0, 0.0),
    Kind.REDIS_COPY: (0.0, 0.0),
    Kind.REDIS_BACK: (0.0, 0.0),
    Kind.REDIS_FAILOVER: (0.2, 3.0),
    Kind.FULL: (1.0, 6.0),
    Kind.CLOCK: (1.0, 15.0),
    Kind.TRIM: (0.0, 0.0),
}
"""How long each lasts: at least, at most."""

BACK_S: Final = (0.5, 2.0, 30.0, 3_600.0, 86_400.0)
"""By how much clocks are set back, in seconds."""

INTERVAL_S: Final = 1.2
"""How long it is from one fault to the next, about."""

QUIET_S: Final = 3.0
"""How long nothing goes wrong at first."""


class Places(NamedTuple):
    """Where something can go wrong, by names."""

    services: Sequence[str]
    applications: Sequence[str]
    links: Sequence[str]
    stores: Sequence[str]
    topics: Sequence[str]


class Fault(NamedTuple):
    """What goes wrong, where, from when on and how long, in seconds."""

    at_s: float
    kind: Kind
    place: str
    lasts_s: float
    back_s: float = 0.0
    """Of CLOCK: by how much."""


def plan(seed: str, places: Places, seconds: float) -> list[Fault]:
    """Every fault of a torture of so many seconds, in the order in which they begin.

    Each kind comes before any comes a second time, if there is time for that many; Redis's copy is
    put aside before it comes back.
    """
    random = Random(f"{seed}/faults")
    kinds = [kind for kind in Kind if _places_of(kind, places)]
    faults: list[Fault] = []
    at_s, due = QUIET_S, _shuffled(random, kinds)
    while True:
        at_s += random.expovariate(1 / INTERVAL_S)
        if at_s >= seconds:
            return faults
        kind = due.pop() if due else random.choices(kinds, [WEIGHTS[each] for each in kinds])[0]
        place = random.choice(_places_of(kind, places))
        lasts_s = round(random.uniform(*SECONDS[kind]), 2)
        back_s = random.choice(BACK_S) if kind is Kind.CLOCK else 0.0
        faults.append(Fault(round(at_s, 2), kind, place, lasts_s, back_s))


def _shuffled(random: Random, kinds: Sequence[Kind]) -> list[Kind]:
    """Taken from the end."""
    order = random.sample(kinds, len(kinds))
    if {Kind.REDIS_COPY, Kind.REDIS_BACK} <= set(order):
        order.remove(Kind.REDIS_COPY)
        order.append(Kind.REDIS_COPY)
    return order


def _places_of(kind: Kind, places: Places) -> Sequence[str]:
    if kind in OF_REDIS:
        return ["redis"]
    match kind:
        case Kind.KILL | Kind.STOP | Kind.RESTART | Kind.CLOCK:
            return places.services
        case Kind.ROLL:
            return ["everything"] if places.services else []
        case Kind.KILL_APPLICATION | Kind.STOP_APPLICATION:
            return places.applications
        case Kind.CUT | Kind.CLOSED | Kind.SLOW | Kind.SILENT | Kind.LOST:
            return places.links
        case Kind.FULL:
            return places.stores
        case _:
            return places.topics
