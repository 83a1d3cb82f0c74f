"""What becomes of a key of which a message was dead-lettered.

    fails too often ──▶ DeadLetter ──▶ a gap in its key
        CONTINUE   what follows says what is missing
        HOLD       nothing follows, until the key is released
        TAIL       what follows goes there, too, until the key is released

A gap is remembered until a message after it is acknowledged, or its key is released. Where there
is no order there is none: nothing follows anything.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from seqgate.types import Position
from services.dispatcher.core.effects import (
    AfterDeadLetter,
    ForgetKey,
    Gap,
    KeyState,
    Kind,
    Options,
)

GAPS_MAX: Final = 1_000
"""Of how many keys it is remembered that a message is missing; then the oldest is forgotten."""

KEY_BYTES_MAX: Final = 2_000
"""The longest key that is remembered as it is, in bytes; a longer one, by its digest."""


def remembered(key: bytes) -> bytes:
    """What stands for a key in what is remembered of keys: itself, or what it is known by."""
    if len(key) <= KEY_BYTES_MAX:
        return key
    return b"blake2b:" + blake2b(key, digest_size=32).digest()


class Gaps:
    """See the module.

    Attributes:
        keys: those of which a message was dead-lettered, by what is remembered of each, the oldest
            first.
    """

    def __init__(self, options: Options, keys: Mapping[bytes, KeyState]) -> None:
        self.keys = dict(keys)
        self._options = options

    def state(self, key: bytes) -> KeyState | None:
        """What is known of a key."""
        return self.keys.get(remembered(key))

    def gap(self, key: bytes) -> Gap | None:
        """What is missing in a key."""
        state = self.state(key)
        return None if state is None else state.gap

    def is_beyond(self, key: bytes, position: Position, after: AfterDeadLetter) -> bool:
        """Whether a message of this key was dead-lettered before this one, and this becomes of what
        follows."""
        state = self.state(key)
        return state is not None and state.after is after and state.gap.position < position

    def after(self, key: bytes) -> AfterDeadLetter:
        """What becomes of a key when one of its messages is dead-lettered now."""
        if self._options.kind is Kind.SHARED:
            return AfterDeadLetter.CONTINUE
        before = self.state(key)
        return self._options.after_dead_letter if before is None else before.after

    def add(self, key: bytes, gap: Gap) -> ForgetKey | None:
        """A message was dead-lettered. Then the oldest gap may be forgotten."""
        after = self.after(key)
        self.keys.pop(remembered(key), None)
        self.keys[remembered(key)] = KeyState(after, gap)
        if len(self.keys) > GAPS_MAX:
            for each, state in self.keys.items():
                if state.after is AfterDeadLetter.CONTINUE:
                    return self.forget(each)
        return None

    def forget(self, key: bytes) -> ForgetKey | None:
        """Nothing need be known of a key any more. Returns what to do; None: nothing was."""
        return None if self.keys.pop(remembered(key), None) is None else ForgetKey(key)
