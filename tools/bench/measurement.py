"""A figure beside its limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.bench.rounds import Round
from tools.bench.statistics import Spread, over_rounds, percentile_over_rounds, ratio


class BenchError(Exception):
    """What was measured is not what was meant to be."""


class Limit(NamedTuple):
    """What a figure cannot exceed, in the figure's unit; a latency cannot fall below it."""

    name: str
    value: float


class Measured(NamedTuple):
    """What was measured under a name."""

    name: str
    rounds: Sequence[Round]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A figure.

    Attributes:
        name: what was done.
        unit: of the figure and of its limit.
        spread: the figure, and the lowest and the highest of its rounds.
        rounds: how many.
        limit: None: this is a limit of other figures, or has none.
        lower_is_better: it is a latency.
        cpu: by process, how much it computed meanwhile, in percent of one core.
        payload_bytes: how many bytes of payload one of what is counted has; None: it has none, or
            that is of no interest.
        pairs: how close each round comes to the round of the limit that was measured next to it;
            None: they were not measured in turn.
    """

    name: str
    unit: str
    spread: Spread
    rounds: int
    limit: Limit | None = None
    lower_is_better: bool = False
    cpu: Mapping[str, float] | None = None
    payload_bytes: int | None = None
    pairs: Spread | None = None

    @property
    def value(self) -> float:
        """The figure itself."""
        return self.spread.value

    @property
    def mb_per_s(self) -> float | None:
        """The figure in megabytes of payload a second, where it has any."""
        return None if self.payload_bytes is None else self.value * self.payload_bytes / 1e6

    @property
    def ratio(self) -> float | None:
        """How close it comes to its limit; 1 reaches it."""
        if self.pairs is not None:
            return self.pairs.value
        if self.limit is None:
            return None
        return ratio(self.value, self.limit.value, lower_is_better=self.lower_is_better)


def rate(
    name: str,
    unit: str,
    rounds: Sequence[Round],
    *,
    each: float = 1,
    limit: Limit | None = None,
    cpu: Mapping[str, float] | None = None,
    payload_bytes: int | None = None,
    beside: Measured | None = None,
) -> Measurement:
    """How many `unit` a second, where one call does `each` of them. `beside`: a limit whose rounds
    were measured in turn with these, and count the same."""
    spread = over_rounds([round_.rate * each for round_ in rounds])
    unit = f"{unit}/s"
    pairs = None
    if beside is not None:
        limit = Limit(
            beside.name, over_rounds([other.rate * each for other in beside.rounds]).value
        )
        both = zip(rounds, beside.rounds, strict=True)
        pairs = over_rounds([ratio(mine.rate, other.rate) for mine, other in both])
    return Measurement(
        name, unit, spread, len(rounds), limit, cpu=cpu, payload_bytes=payload_bytes, pairs=pairs
    )


def computing(
    name: str, unit: str, rounds: Sequence[Round], cpu_s: float, limit: Limit | None = None
) -> Measurement:
    """How many microseconds a process computed for each `unit`: what others compute meanwhile, on a
    machine that is shared, changes little of it."""
    value = cpu_s * 1e6 / sum(each.calls for each in rounds)
    spread = Spread(value, value, value)
    return Measurement(name, f"µs/{unit}", spread, len(rounds), limit, lower_is_better=True)


def latency(
    name: str, share: float, rounds: Sequence[Round], limit: Limit | None = None
) -> Measurement:
    """A percentile of how long a call takes."""
    spread = percentile_over_rounds(
        [[each * 1000 for each in round_.latencies_s] for round_ in rounds], share
    )
    return Measurement(
        f"{name}, p{share * 100:.0f}", "ms", spread, len(rounds), limit, lower_is_better=True
    )


def lowest(*limits: Limit) -> Limit:
    """The limit that is reached first."""
    return min(limits, key=lambda limit: limit.value)
