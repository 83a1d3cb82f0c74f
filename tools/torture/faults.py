"""The faults and their times, drawn from the seed in advance.

Each fault has a place, a start and an end, at which it is undone. Faults in different places may
overlap.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from random import Random
from typing import Final, NamedTuple


class Where(Enum):
    SERVICE = auto()
    EVERYTHING = auto()
    APPLICATION = auto()
    LINK = auto()
    REDIS = auto()
    STORE = auto()
    POSTGRES = auto()
    TOPIC = auto()


class Kind(Enum):
    """A fault: its text, target, relative frequency, and shortest and longest duration in
    seconds."""

    KILL = "SIGKILL of a service", Where.SERVICE, 10, 0.1, 4.0
    STOP = "SIGSTOP of a service, then SIGCONT", Where.SERVICE, 7, 0.2, 6.0
    RESTART = "SIGTERM of a service, and a new start", Where.SERVICE, 4, 0.0, 2.0
    ROLL = "rolling restart of everything", Where.EVERYTHING, 1
    KILL_APPLICATION = "SIGKILL of an application", Where.APPLICATION, 5, 0.1, 4.0
    STOP_APPLICATION = "SIGSTOP of an application, then SIGCONT", Where.APPLICATION, 3, 0.2, 8.0
    CUT = "connections cut", Where.LINK, 8
    CLOSED = "connections refused", Where.LINK, 4, 0.2, 5.0
    SLOW = "slow connections", Where.LINK, 5, 1.0, 8.0
    SILENT = "silent connections; what was sent arrives late", Where.LINK, 4, 0.3, 5.0
    LOST = "silent connections; what was sent is lost", Where.LINK, 4, 0.3, 5.0
    REDIS_KILL = "SIGKILL of Redis", Where.REDIS, 2, 0.1, 3.0
    REDIS_STOP = "SIGSTOP of Redis, then SIGCONT", Where.REDIS, 2, 0.2, 4.0
    REDIS_EMPTY = "Redis is emptied", Where.REDIS, 3
    REDIS_COPY = "a copy of Redis's files is put aside", Where.REDIS, 3
    REDIS_BACK = "Redis is rolled back to the copy", Where.REDIS, 3
    REDIS_FAILOVER = "a lagging replica becomes Redis's master", Where.REDIS, 3, 0.2, 3.0
    FULL = "a disk is full", Where.STORE, 3, 1.0, 6.0
    CLOCK = "a process's clock is set back, then right", Where.SERVICE, 4, 1.0, 15.0
    TRIM = "a topic is trimmed", Where.TOPIC, 5
    POSTGRES_KILL = "SIGKILL of PostgreSQL's primary, and a start", Where.POSTGRES, 3, 0.1, 4.0
    POSTGRES_STOP = "SIGSTOP of PostgreSQL's primary, then SIGCONT", Where.POSTGRES, 3, 0.2, 6.0
    POSTGRES_RESTART = "SIGINT of PostgreSQL's primary, and a start", Where.POSTGRES, 2, 0.0, 2.0
    POSTGRES_ALONE = "SIGSTOP of PostgreSQL's standbys, then SIGCONT", Where.POSTGRES, 2, 0.2, 6.0
    POSTGRES_FAILOVER = "a standby replaces the killed primary", Where.POSTGRES, 3, 0.1, 3.0
    POSTGRES_ZOMBIE = "a standby replaces the suspended primary", Where.POSTGRES, 3, 0.2, 6.0

    def __init__(
        self, text: str, where: Where, weight: int, least_s: float = 0.0, most_s: float = 0.0
    ) -> None:
        self.text = text
        self.where = where
        self.weight = weight
        self.least_s = least_s
        self.most_s = most_s


BACK_S: Final = (0.5, 2.0, 30.0, 3_600.0, 86_400.0)
"""Offsets by which clocks are set back, in seconds."""

INTERVAL_S: Final = 1.2
"""The mean time between faults."""

QUIET_S: Final = 3.0
"""The time before the first fault."""


class Fault(NamedTuple):
    """A fault with its time, place and duration, in seconds."""

    at_s: float
    kind: Kind
    place: str
    lasts_s: float
    back_s: float = 0.0
    """The offset of a CLOCK fault."""


def plan(seed: str, places: Mapping[Where, Sequence[str]], seconds: float) -> list[Fault]:
    """Draw every fault of a torture, in order of their starts.

    If time allows, each kind that has a place occurs once before any occurs twice, and a copy of
    Redis is made before a rollback to it.
    """
    random = Random(f"{seed}/faults")
    kinds = [kind for kind in Kind if places.get(kind.where)]
    faults: list[Fault] = []
    at_s, due = QUIET_S, _shuffled(random, kinds)
    while True:
        at_s += random.expovariate(1 / INTERVAL_S)
        if at_s >= seconds:
            return faults
        kind = due.pop() if due else random.choices(kinds, [each.weight for each in kinds])[0]
        place = random.choice(places[kind.where])
        lasts_s = round(random.uniform(kind.least_s, kind.most_s), 2)
        back_s = random.choice(BACK_S) if kind is Kind.CLOCK else 0.0
        faults.append(Fault(round(at_s, 2), kind, place, lasts_s, back_s))


def _shuffled(random: Random, kinds: Sequence[Kind]) -> list[Kind]:
    """A random order, to be taken from the end."""
    order = random.sample(kinds, len(kinds))
    if Kind.REDIS_COPY in order:
        order.remove(Kind.REDIS_COPY)
        order.append(Kind.REDIS_COPY)
    return order
