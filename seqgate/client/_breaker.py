"""A brake for failures that hit everything.

A message that fails is tried again, and holds what follows in its key: that is right for a failure
of one message, or of one key. When whatever the handlers need is gone, each key would go through
its retries on its own, to the dead letter topic. Then nothing more should be handed out at all:

               the share of failures reaches the ratio
       CLOSED ───────────────────────────────────────▶ OPEN
         ▲                                             │  ▲
         │ the probe is         when the pause is over │  │ the probe is refused:
         │ acknowledged                                ▼  │ twice the pause
         └────────────────────────────────────── HALF_OPEN

Half open, one message is handed out, the probe. Only what the application says of a message is an
outcome: one that timed out, or was taken back, says nothing. Outcomes of messages that were handed
out before say nothing any more, either, until it is closed again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from seqgate.client._subscribing import DELAY_MAX_S

OUTCOMES_MAX: Final = 10_000
"""How many outcomes a breaker looks at, at most."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a consumer stops handing out messages because they fail, whatever their key, and when it
    tries again.

    It opens when `ratio` or more of the last `outcomes` messages were refused. Nothing is handed
    out for a pause then; what is handed out already goes on, and what waits keeps its place, and
    its time. After it, one message is handed out: if it is acknowledged, everything goes on; if it
    is refused, there is another pause, twice as long, of `pause_max_s` at most. If its delivery
    counts no more, or nothing is said of it for `pause_max_s`, the next one is tried.

    Consumers have one unless they are told otherwise. It takes 100 failures without a success
    between them, which a message that is bad among good ones does not bring about; and what it
    prevents cannot be undone: a topic that uses up its deliveries while a database is away. Where
    nothing but failures is ordinary, or a bad message is all that a topic has for hours and what
    comes next must not wait for up to `pause_max_s`, give None, or another ratio.

    Attributes:
        outcomes: how many outcomes are looked at, 1 to 10,000; with fewer, it does not open.
        ratio: which share of them are failures, above 0, up to 1.
        pause_min_s, pause_max_s: seconds, 0.001 to 86,400.

    Raises:
        ValueError: one is out of its bounds, or pause_min_s is above pause_max_s.
    """

    outcomes: int = 100
    ratio: float = 1.0
    pause_min_s: float = 1.0
    pause_max_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.outcomes <= OUTCOMES_MAX:
            raise ValueError("a breaker looks at 1 to 10,000 outcomes")
        if not 0 < self.ratio <= 1:
            raise ValueError("a share of failures is above 0, up to 1")
        if not 0.001 <= self.pause_min_s <= self.pause_max_s <= DELAY_MAX_S:
            raise ValueError("0.001 <= pause_min_s <= pause_max_s <= 86,400")


class BreakerState(Enum):
    """What a breaker does."""

    CLOSED = "closed"
    """Messages are handed out."""
    OPEN = "open"
    """Nothing is handed out."""
    HALF_OPEN = "half open"
    """One message is handed out; what becomes of it says how it goes on."""


class Brake:
    """A breaker at work. Mutable, synchronous, one owner, who asks `admits` before a message is
    handed out, and calls `advance` when `due_ms` is reached. Times are milliseconds of one clock.

    Messages are named by their delivery, and a bit of it.
    """

    def __init__(self, breaker: Breaker) -> None:
        self.state = BreakerState.CLOSED
        self.due_ms: int | None = None
        """When something changes if nothing happens; None: never."""
        self._breaker = breaker
        self._count = 0  # of outcomes since it was closed
        self._failures: deque[int] = deque()  # which of the last ones were failures
        self._pause_ms = 0
        self._probe: int | None = None
        self._probes: dict[int, int] = {}  # the bits of all that were tried in this state

    def admits(self, now_ms: int, counts: Callable[[int], bool]) -> bool:
        """Whether a message may be handed out, given which deliveries count."""
        self.advance(now_ms)
        if self.state is not BreakerState.HALF_OPEN:
            return self.state is BreakerState.CLOSED
        is_late = self.due_ms is not None and now_ms >= self.due_ms
        return self._probe is None or is_late or not counts(self._probe)

    def advance(self, now_ms: int) -> None:
        """It is later now."""
        if self.state is BreakerState.OPEN and self.due_ms is not None and now_ms >= self.due_ms:
            self.state = BreakerState.HALF_OPEN
            self.due_ms = None

    def record_taken(self, delivery: int, bit: int, now_ms: int) -> None:
        """A message was handed out."""
        if self.state is BreakerState.HALF_OPEN:
            self._probe = delivery
            self._probes[delivery] = self._probes.get(delivery, 0) | bit
            self.due_ms = now_ms + _to_ms(self._breaker.pause_max_s)

    def record_acknowledged(self, delivery: int, bits: int) -> None:
        """Messages were acknowledged."""
        if self.state is BreakerState.CLOSED:
            self._count += 1
        elif self._is_probe(delivery, bits):
            self._enter(BreakerState.CLOSED, None)
            self._pause_ms = 0

    def record_refused(self, delivery: int, bit: int, now_ms: int) -> None:
        """A message was refused."""
        if self.state is BreakerState.CLOSED:
            self._count += 1
            self._failures.append(self._count)
            outcomes = self._breaker.outcomes
            while self._failures[0] <= self._count - outcomes:
                self._failures.popleft()
            share = len(self._failures) / outcomes
            if self._count >= outcomes and share >= self._breaker.ratio:
                self._open(now_ms)
        elif self._is_probe(delivery, bit):
            self._open(now_ms)

    def forget_probes(self) -> None:
        """No delivery counts any more."""
        self._probe = None
        self._probes.clear()

    def _is_probe(self, delivery: int, bits: int) -> bool:
        is_tried = self.state is BreakerState.HALF_OPEN
        return is_tried and bool(self._probes.get(delivery, 0) & bits)

    def _open(self, now_ms: int) -> None:
        shortest_ms = _to_ms(self._breaker.pause_min_s)
        longest_ms = _to_ms(self._breaker.pause_max_s)
        self._pause_ms = min(max(2 * self._pause_ms, shortest_ms), longest_ms)
        self._enter(BreakerState.OPEN, now_ms + self._pause_ms)

    def _enter(self, state: BreakerState, due_ms: int | None) -> None:
        self.state = state
        self.due_ms = due_ms
        self._count = 0
        self._failures.clear()
        self.forget_probes()


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)
