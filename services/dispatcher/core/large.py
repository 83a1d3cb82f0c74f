"""Large messages in the log: where each begins, and whether it can be whole.

    chunk 0 ──▶ an attempt ──chunk n──▶ follows, while the first is there and not acknowledged

A large message has the position of its last chunk, and is delivered whole or not at all. So a chunk
without the first chunk is useless: the subscription began after the first, or was moved there; the
first was trimmed, rejected by filters, or acknowledged without the rest. Unacknowledged entries are
read from the first one on, in order, so all of that is known when a chunk is read.

A message of which a chunk was dead-lettered is dead-lettered whole, by whoever then owns the
subscription: a new owner starts with the large letters on their way.

The number of remembered messages is bounded. Forgotten is not missing: a chunk that may belong to a
forgotten message is delivered, and its consumer finds out.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.effects import LargeLetter
from seqgate.services.dispatcher.core.lane import Chunk
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.types import Position

UNFINISHED_MAX: Final = 10_000
"""Limit of remembered messages whose last chunk was not read. Beyond it the oldest is forgotten,
and from then on chunks without a known first chunk are delivered, and may fail."""

FINISHED_MAX: Final = 1_000
"""Limit of remembered messages whose last chunk was read and is not acknowledged: their chunks may
be read again. Beyond it the oldest is forgotten, and up to its end chunks without a known first
chunk are delivered."""

OVER_MAX: Final = 1_000
"""Limit of remembered attempts that the log aborts, some 400 bytes each."""


@dataclass(slots=True)
class LargeMessage:
    """A large message; `last` is None until its last chunk is read. If one chunk is dead-lettered
    (`is_dead`), all are."""

    first: Position
    key: bytes
    last: Position | None = None
    is_dead: bool = False


class Ended(NamedTuple):
    """The range of an aborted attempt's chunks, which excludes `end`: beyond it, and before
    `first`, the attempt may have been stored as well."""

    first: Position
    end: Position


class LargeMessages:
    """Large messages by attempt: a message that is sent again is another one."""

    def __init__(self, settling: Settling, letters: Mapping[str, Position] = {}) -> None:
        """`letters`: the first chunk of each large letter on its way."""
        self._settling = settling
        self._unfinished: OrderedDict[str, LargeMessage] = OrderedDict()
        for name, first in letters.items():
            self._unfinished[name] = LargeMessage(first, b"", is_dead=True)
        self._finished: OrderedDict[str, LargeMessage] = OrderedDict()
        self._over: OrderedDict[str, list[Ended]] = OrderedDict()
        self._over_count = 0
        self._has_forgotten = False
        self._forgotten_to: Position | None = None

    def record_read(self, chunk: Chunk, position: Position, key: bytes) -> None:
        """Record an unacknowledged chunk that was read for the first time."""
        known = self._get(chunk.attempt)
        is_again = known is not None and known.is_dead and known.first == position
        if not chunk.number and not is_again and (chunk.number == 0 or known is None):
            before = self._finished.pop(chunk.attempt, None)
            if before is not None:  # the same attempt, stored once more
                self._forget(before)
            self._unfinished[chunk.attempt] = LargeMessage(position, key)
            if len(self._unfinished) > UNFINISHED_MAX:
                self._unfinished.popitem(last=False)
                self._has_forgotten = True
        if chunk.is_last and chunk.attempt in self._unfinished:
            attempt = self._finished[chunk.attempt] = self._unfinished.pop(chunk.attempt)
            attempt.last = position
            self._keep_few()

    def record_return(self, chunk: Chunk) -> None:
        """Forget how a message ended before it comes back: a replay is the same attempt."""
        if chunk.number == 0:
            self._finished.pop(chunk.attempt, None)

    def record_done(self, name: str, position: Position) -> None:
        """Forget an attempt whose last chunk, at this position, is durably acknowledged, unless it
        is dead."""
        attempt = self._finished.get(name)
        if attempt is not None and attempt.last == position and not attempt.is_dead:
            del self._finished[name]

    def begins_again(self, chunk: Chunk, position: Position) -> bool:
        """Whether a chunk is the first of an attempt that began before: the log names no abort."""
        if chunk.number != 0:
            return False
        attempt = self._unfinished.get(chunk.attempt)
        return attempt is not None and attempt.first < position

    def record_abort(self, name: str, position: Position) -> LargeMessage | None:
        """Record that the log aborts an attempt at this position. Returns it, if it is known."""
        attempt = self._unfinished.pop(name, None)
        if attempt is not None or name not in self._finished:
            first = Position(0, 0) if attempt is None else attempt.first
            self._remember_over(name, Ended(first, position))
        return attempt

    def _remember_over(self, name: str, ended: Ended) -> None:
        self._over.setdefault(name, []).append(ended)
        self._over.move_to_end(name)
        self._over_count += 1
        if self._over_count > OVER_MAX:
            oldest, ranges = next(iter(self._over.items()))
            del ranges[0]
            self._over_count -= 1
            if not ranges:
                del self._over[oldest]

    def record_dead(self, name: str, position: Position, key: bytes) -> None:
        """Dead-letter the message of the chunk at this position, even if it was forgotten."""
        attempt = self._get(name)
        if attempt is None:
            attempt = self._finished[name] = LargeMessage(position, key, last=position)
            self._keep_few()
        attempt.is_dead = True

    def is_over(self, name: str, position: Position) -> bool:
        """Whether the log aborts the attempt of the chunk at this position, as far as is known."""
        return any(each.first <= position < each.end for each in self._over.get(name, ()))

    def is_finished(self, name: str) -> bool:
        """Whether the last chunk of an attempt was read, as far as is known."""
        return name in self._finished

    def is_rest_of(self, chunk: Chunk, first: Position) -> bool:
        """Whether a chunk continues the message that begins at this position, as far as is known:
        amid a message, a take-over forgets where it begins."""
        attempt = self._get(chunk.attempt) if chunk.number else None
        return attempt is not None and attempt.first == first

    def is_dead(self, chunk: Chunk) -> bool:
        """Whether a chunk follows others of its message to the dead letter topic."""
        attempt = self._get(chunk.attempt)
        return attempt is not None and attempt.is_dead

    def letter_of(self, chunk: Chunk) -> LargeLetter | None:
        """The large letter that a chunk belongs to; None: its message is not dead-lettered."""
        attempt = self._get(chunk.attempt)
        if attempt is None or not attempt.is_dead:
            return None
        return LargeLetter(chunk.attempt, attempt.first, chunk.is_last)

    def is_headless(self, chunk: Chunk, position: Position) -> bool:
        """Whether a chunk continues a message that cannot be whole."""
        if not chunk.number:
            return False
        attempt = self._get(chunk.attempt)
        if attempt is None or attempt.first > position:
            return not self._may_be_forgotten(position)
        if attempt.is_dead:
            return False
        return self._settling.is_gone(attempt.first)

    def _may_be_forgotten(self, position: Position) -> bool:
        """Whether a chunk may belong to a message that was read and forgotten."""
        beyond = self._forgotten_to is None or position > self._forgotten_to
        return self._has_forgotten or not beyond

    def _keep_few(self) -> None:
        if len(self._finished) > FINISHED_MAX:
            self._forget(self._finished.popitem(last=False)[1])

    def _forget(self, attempt: LargeMessage) -> None:
        """Record that a message was forgotten. If it is acknowledged it need not be known: a chunk
        that continues it is headless."""
        if self._settling.is_gone(attempt.first) and not attempt.is_dead:
            return
        assert attempt.last is not None
        self._forgotten_to = max(attempt.last, self._forgotten_to or attempt.last)

    def _get(self, name: str) -> LargeMessage | None:
        return self._unfinished.get(name) or self._finished.get(name)
