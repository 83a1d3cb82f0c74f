"""Large messages in the log: where each begins, and whether it can be whole.

    chunk 0 ──▶ an attempt ──chunk n──▶ follows, as long as the first is there and not acknowledged

A large message is where its last chunk is, and is delivered whole or not at all. So a chunk whose
first is missing is useless: the subscription began after it, or was moved there; it was trimmed;
filters rejected it; or it was acknowledged without the rest. What is not acknowledged is read from
its beginning, in order, so all of that is known when a chunk is read.

The number of remembered messages is bounded. Forgotten is not missing: a chunk that may belong to a
forgotten message is delivered, and its consumer finds out.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.lane import Chunk
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.types import Position

UNFINISHED_MAX: Final = 10_000
"""How many large messages are remembered of which the last chunk was not read; then the oldest is
forgotten, and from then on chunks that continue nothing are delivered, and may fail."""

FINISHED_MAX: Final = 1_000
"""How many others are of which the last chunk is not acknowledged: their chunks may be read again.
Then the oldest is forgotten, and chunks up to where it ends that continue nothing are delivered."""

OVER_MAX: Final = 1_000
"""Of how many it is remembered that the log says that they will not be finished, some 400 bytes
each."""


@dataclass(slots=True)
class LargeMessage:
    """A large message, as far as it was read.

    Attributes:
        first: where its first chunk is.
        key: of its lane.
        last: where its last chunk is; None: that was not read.
        is_dead: whether a chunk of it went to the dead letter topic, so that all do.
    """

    first: Position
    key: bytes
    last: Position | None = None
    is_dead: bool = False


class Ended(NamedTuple):
    """Between which two entries the chunks of an attempt lie that make no message, the first of
    them included: behind the second it may have been begun again."""

    first: Position
    end: Position


class LargeMessages:
    """Large messages by attempt: one that is sent again is another one."""

    def __init__(self, settling: Settling) -> None:
        self._settling = settling
        self._unfinished: OrderedDict[str, LargeMessage] = OrderedDict()
        self._finished: OrderedDict[str, LargeMessage] = OrderedDict()
        self._over: OrderedDict[str, Ended] = OrderedDict()
        self._has_forgotten = False
        self._forgotten_to: Position | None = None

    def record_read(self, chunk: Chunk, position: Position, key: bytes) -> None:
        """A chunk was read for the first time, and is not acknowledged."""
        if not chunk.number and (chunk.number == 0 or self._get(chunk.attempt) is None):
            self._finished.pop(chunk.attempt, None)
            self._unfinished[chunk.attempt] = LargeMessage(position, key)
            if len(self._unfinished) > UNFINISHED_MAX:
                self._unfinished.popitem(last=False)
                self._has_forgotten = True
        if chunk.is_last and chunk.attempt in self._unfinished:
            attempt = self._finished[chunk.attempt] = self._unfinished.pop(chunk.attempt)
            attempt.last = position
            self._keep_few()

    def record_done(self, name: str) -> None:
        """The last chunk of an attempt is acknowledged, durably: nobody waits for the others."""
        attempt = self._finished.get(name)
        if attempt is not None and not attempt.is_dead:
            del self._finished[name]

    def record_abort(self, name: str, position: Position) -> LargeMessage | None:
        """The log says there that an attempt will not be finished. Returns it, if it is known."""
        attempt = self._unfinished.pop(name, None)
        if attempt is not None or name not in self._finished:
            first = Position(0, 0) if attempt is None else attempt.first
            self._over[name] = Ended(first, position)
            self._over.move_to_end(name)
            if len(self._over) > OVER_MAX:
                self._over.popitem(last=False)
        return attempt

    def record_dead(self, name: str, position: Position, key: bytes) -> None:
        """A chunk, there, goes to the dead letter topic, and so do the others of its message, also
        when that was forgotten."""
        attempt = self._get(name)
        if attempt is None:
            attempt = self._finished[name] = LargeMessage(position, key, last=position)
            self._keep_few()
        attempt.is_dead = True

    def is_over(self, name: str, position: Position) -> bool:
        """Whether the log says that the attempt will not be finished that a chunk there is of, as
        far as is known."""
        over = self._over.get(name)
        return over is not None and over.first <= position < over.end

    def is_finished(self, name: str) -> bool:
        """Whether the last chunk of an attempt was read, as far as is known."""
        return name in self._finished

    def is_dead(self, chunk: Chunk) -> bool:
        """Whether a chunk belongs where others of its message went: to the dead letter topic."""
        attempt = self._get(chunk.attempt)
        return attempt is not None and attempt.is_dead

    def is_headless(self, chunk: Chunk, position: Position) -> bool:
        """Whether a chunk continues something that nobody can have: its message cannot be whole."""
        if not chunk.number:
            return False
        attempt = self._get(chunk.attempt)
        if attempt is None:
            return not self._may_be_forgotten(position)
        if attempt.is_dead:
            return False
        return self._settling.is_settled(attempt.first)

    def _may_be_forgotten(self, position: Position) -> bool:
        """Whether a chunk may be of a message that was read, and is not remembered."""
        beyond = self._forgotten_to is None or position > self._forgotten_to
        return self._has_forgotten or not beyond

    def _keep_few(self) -> None:
        if len(self._finished) > FINISHED_MAX:
            self._forget(self._finished.popitem(last=False)[1])

    def _forget(self, attempt: LargeMessage) -> None:
        """There are too many. Of what is acknowledged already nothing need be known: what continues
        it continues nothing."""
        if self._settling.is_settled(attempt.first) and not attempt.is_dead:
            return
        assert attempt.last is not None
        self._forgotten_to = max(attempt.last, self._forgotten_to or attempt.last)

    def _get(self, name: str) -> LargeMessage | None:
        return self._unfinished.get(name) or self._finished.get(name)
