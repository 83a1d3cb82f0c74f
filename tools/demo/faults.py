"""What goes wrong while messages are published, and when.

A plan lists faults by progress: the share of flights that is known to be stored. The seed moves
them; their order stays, so that each run has all of them.
"""

from enum import Enum
from random import Random
from typing import Final, NamedTuple


class Kind(Enum):
    """A fault: its text on the screen, and the processes of the stack that are killed, in this
    order, and restarted in reverse."""

    KILL_AIRLINE = ("kill -9 of an airline's process",)
    KILL_STATIONS = ("kill -9 of the weather stations' process",)
    KILL_LEDGER = "kill -9 of the ledger", "ledger"
    KILL_DEDUP = "kill -9 of dedup", "dedup"
    KILL_BOTH = "kill -9 of the ledger and an airline", "ledger"
    KILL_ALL = "kill -9 of the ledger, dedup and Redis", "ledger", "dedup", "redis"
    COPY_REDIS = ("a copy of Redis's files is put aside",)
    WIPE_REDIS = ("Redis loses everything (FLUSHALL)",)
    RESTORE_REDIS = "kill -9 of Redis, and back comes the older copy", "redis"

    def __init__(self, text: str, *killed: str) -> None:
        self.text = text
        self.killed = killed

    @property
    def interrupts_stations(self) -> bool:
        """Whether it crashes the weather stations, or a service that they publish to."""
        return self not in (Kind.KILL_AIRLINE, Kind.COPY_REDIS)


class Fault(NamedTuple):
    at: float
    kind: Kind


_ORDER: Final = (
    Kind.KILL_AIRLINE,
    Kind.KILL_STATIONS,
    Kind.KILL_DEDUP,
    Kind.COPY_REDIS,
    Kind.KILL_LEDGER,
    Kind.KILL_AIRLINE,
    Kind.WIPE_REDIS,
    Kind.KILL_STATIONS,
    Kind.KILL_BOTH,
    Kind.KILL_DEDUP,
    Kind.RESTORE_REDIS,
    Kind.KILL_AIRLINE,
    Kind.KILL_LEDGER,
    Kind.KILL_STATIONS,
    Kind.KILL_ALL,
    Kind.KILL_AIRLINE,
    Kind.KILL_LEDGER,
)
"""The stations are killed before anything that they publish to: a small demo ends early, and needs
an aborted attempt."""


def plan(random: Random) -> list[Fault]:
    """Divide the way into equal parts, and place each fault near the middle of one."""
    width = 1 / (len(_ORDER) + 1)
    return [
        Fault(round((i + 0.5 + random.uniform(-0.3, 0.3)) * width, 4), kind)
        for i, kind in enumerate(_ORDER)
    ]
