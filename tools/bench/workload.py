"""What clients do in a measurement, as values that travel to the process that does it.

The load has a process of its own, so that what it computes is told apart from what the services
compute. It runs its workloads in turn, round by round: what disturbs the machine meanwhile disturbs
all of them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self

from tools.bench.rounds import Round

Kind = Literal["publish", "resend", "one at a time", "read"]
"""publish: new messages, as many as may be pending. resend: messages that are stored already, by a
producer that starts again. one at a time: each message waits for the receipt of the one before it.
read: a topic, from its start."""

CLIENT = "client"
"""The process that does the work, among those whose computing is measured."""


OTHERS = "others"
"""Everything else on the machine: what disturbs a measurement, and what the kernel does for it."""


class Workload(NamedTuple):
    """One thing to measure."""

    name: str
    kind: Kind
    address: str
    topic: str
    batched: bool
    payload_bytes: int
    producers: int = 1
    processes: Sequence[str] = ()
    """Whose computing is measured, beside the client's."""
    chunk_bytes: int = 0
    """Messages are cut into chunks of so many bytes; 0: they are not."""


class Job(NamedTuple):
    """What the process is told."""

    workloads: list[Workload]
    rounds: int
    seconds: float
    pids: dict[str, int]

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The opposite of to_json."""
        workloads, rounds, seconds, pids = json.loads(text)
        return cls([Workload(*each) for each in workloads], rounds, seconds, pids)


class Outcome(NamedTuple):
    """What the process answers for one workload; `cpu_s` by process, over all rounds."""

    rounds: list[Round]
    cpu_s: dict[str, float]

    @property
    def cpu(self) -> dict[str, float]:
        """By process, how much it computed, in percent of one core."""
        elapsed_s = sum(each.elapsed_s for each in self.rounds)
        # Clocks tick: what others computed is a small difference of large numbers.
        return {name: max(0.0, 100 * each / elapsed_s) for name, each in self.cpu_s.items()}


def outcomes_to_json(outcomes: Mapping[str, Outcome]) -> str:
    """As they travel."""
    return json.dumps(outcomes)


def outcomes_from_json(text: str) -> dict[str, Outcome]:
    """The opposite of outcomes_to_json."""
    return {
        name: Outcome([Round(*each) for each in rounds], cpu_s)
        for name, (rounds, cpu_s) in json.loads(text).items()
    }
