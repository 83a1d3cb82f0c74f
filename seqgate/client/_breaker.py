"""A circuit breaker for failures that affect every key.

A failed message is retried, and blocks later messages of its key. That is right if one message or
one key fails. But if a dependency of the handlers is down, each key would exhaust its retries on
its own and go to the dead letter topic. Handing out messages must stop altogether:

               the share of failures reaches the ratio
       CLOSED ───────────────────────────────────────▶ OPEN
         ▲                                             │  ▲
         │ the probe is                 the pause ends │  │ the probe is refused:
         │ acknowledged                                ▼  │ twice the pause
         └────────────────────────────────────── HALF_OPEN

Half open, the breaker lets one message through, the probe. Only the application's acknowledgement
or refusal is an outcome; a time-out or a revocation is not. Outcomes of messages handed out before
the breaker opened are ignored until it closes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from seqgate.client._arguments import invalid, real, settle, whole
from seqgate.client._subscribing import DELAY_MAX_S

OUTCOMES_MAX: Final = 10_000

PAUSE_MIN_S: Final = 0.001
"""The shortest pause: a millisecond."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a consumer stops handing out messages because they fail, whatever their key, and when it
    tries again.

    It opens when `ratio` or more of the last `outcomes` messages were refused, and then hands out
    nothing for a pause. Messages already handed out can still be settled; buffered ones keep their
    order, and their time-outs are renewed. After the pause one message is handed out: if it is
    acknowledged, the breaker closes; if it is refused, the pause doubles, up to `pause_max_s`. If
    it is revoked or times out, or has no outcome after `pause_max_s`, the next message is tried.

    Consumers have one by default. It opens after 100 failures in a row, which one bad message among
    good ones does not cause, and it prevents a loss that cannot be undone: a topic that exhausts
    its redeliveries while a database is down. Pass None, or another ratio, if continuous failures
    are normal, or if a bad message may be the topic's only one for hours and the next must not wait
    for up to `pause_max_s`.

    Attributes:
        outcomes: the window, 1 to 10,000; the breaker does not open before it is full.
        ratio: the share of failures that opens it, above 0, up to 1.
        pause_min_s, pause_max_s: seconds, 0.001 to 86,400.

    Raises:
        InvalidRequestError: one is no number, or out of its bounds, or pause_min_s is above
            pause_max_s.
    """

    outcomes: int = 100
    ratio: float = 1.0
    pause_min_s: float = 1.0
    pause_max_s: float = 60.0

    def __post_init__(self) -> None:
        settle(
            self,
            outcomes=whole("outcomes", self.outcomes, 1, OUTCOMES_MAX),
            ratio=real("ratio", self.ratio, 0, 1, "", above=True),
            pause_min_s=real("pause_min_s", self.pause_min_s, PAUSE_MIN_S, DELAY_MAX_S),
            pause_max_s=real("pause_max_s", self.pause_max_s, PAUSE_MIN_S, DELAY_MAX_S),
        )
        if self.pause_min_s > self.pause_max_s:
            invalid("pause_min_s must be at most pause_max_s")


class BreakerState(Enum):
    """The state of a breaker."""

    CLOSED = "closed"
    """Messages are handed out."""
    OPEN = "open"
    """Nothing is handed out."""
    HALF_OPEN = "half open"
    """One message is handed out; its outcome closes or opens the breaker."""


class Brake:
    """The state machine of a Breaker. Mutable, synchronous, one owner: it calls `admits` before it
    hands out a message, and `advance` when `due_ms` is reached. Times are milliseconds of one
    clock. A delivery and a bit of it identify a message.
    """

    def __init__(self, breaker: Breaker) -> None:
        self.state = BreakerState.CLOSED
        self.due_ms: int | None = None
        """When `advance` changes the state; None: no change is due."""
        self._breaker = breaker
        self._count = 0  # outcomes since it closed
        self._failures: deque[int] = deque()  # the failures in the window, by their count
        self.pause_ms = 0
        """How long it pauses, or paused last; 0 when it is closed."""
        self._probe: int | None = None
        self._probes: dict[int, int] = {}  # the bits of all probes since the breaker is half open

    def admits(self, now_ms: int, is_live: Callable[[int], bool]) -> bool:
        """Whether a message may be handed out. `is_live` is true of live deliveries."""
        self.advance(now_ms)
        if self.state is not BreakerState.HALF_OPEN:
            return self.state is BreakerState.CLOSED
        is_late = self.due_ms is not None and now_ms >= self.due_ms
        return self._probe is None or is_late or not is_live(self._probe)

    def advance(self, now_ms: int) -> None:
        if self.state is BreakerState.OPEN and self.due_ms is not None and now_ms >= self.due_ms:
            self.state = BreakerState.HALF_OPEN
            self.due_ms = None

    def record_taken(self, delivery: int, bit: int, now_ms: int) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._probe = delivery
            self._probes[delivery] = self._probes.get(delivery, 0) | bit
            self.due_ms = now_ms + _to_ms(self._breaker.pause_max_s)

    def record_acknowledged(self, delivery: int, bits: int) -> None:
        if self.state is BreakerState.CLOSED:
            self._count += bits.bit_count()
        elif self._is_probe(delivery, bits):
            self._enter(BreakerState.CLOSED, None)
            self.pause_ms = 0

    def record_refused(self, delivery: int, bit: int, now_ms: int) -> None:
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

    def forget_probe(self, delivery: int) -> None:
        """Forget that a delivery was handed out: another may be the probe."""
        if self._probe == delivery:
            self._probe = None

    def forget_probes(self) -> None:
        """Forget all probes: no delivery is live any more."""
        self._probe = None
        self._probes.clear()

    def _is_probe(self, delivery: int, bits: int) -> bool:
        is_tried = self.state is BreakerState.HALF_OPEN
        return is_tried and bool(self._probes.get(delivery, 0) & bits)

    def _open(self, now_ms: int) -> None:
        shortest_ms = _to_ms(self._breaker.pause_min_s)
        longest_ms = _to_ms(self._breaker.pause_max_s)
        self.pause_ms = min(max(2 * self.pause_ms, shortest_ms), longest_ms)
        self._enter(BreakerState.OPEN, now_ms + self.pause_ms)

    def _enter(self, state: BreakerState, due_ms: int | None) -> None:
        self.state = state
        self.due_ms = due_ms
        self._count = 0
        self._failures.clear()
        self.forget_probes()


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)
