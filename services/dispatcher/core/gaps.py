"""What becomes of a key of which a message was dead-lettered.

    fails too often ──▶ DeadLetter ──▶ a gap in its key
        CONTINUE   what follows says what is missing
        HOLD       nothing follows, until the key is released
        TAIL       what follows goes there, too, until the key is released

A gap is remembered until a message after it is acknowledged, or its key is released. Where there
is no order there is none: nothing follows anything.
"""

from collections.abc import Mapping
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


class Gaps:
    """See the module.

    Attributes:
        keys: those of which a message was dead-lettered, the oldest first.
    """

    def __init__(self, options: Options, keys: Mapping[bytes, KeyState]) -> None:
        self.keys = dict(keys)
        self._options = options

    def gap(self, key: bytes) -> Gap | None:
        """What is missing in a key."""
        state = self.keys.get(key)
        return None if state is None else state.gap

    def is_beyond(self, key: bytes, position: Position, after: AfterDeadLetter) -> bool:
        """Whether a message of this key was dead-lettered before this one, and this becomes of what
        follows."""
        state = self.keys.get(key)
        return state is not None and state.after is after and state.gap.position < position

    def after(self, key: bytes) -> AfterDeadLetter:
        """What becomes of a key when one of its messages is dead-lettered now."""
        if self._options.kind is Kind.SHARED:
            return AfterDeadLetter.CONTINUE
        before = self.keys.get(key)
        return self._options.after_dead_letter if before is None else before.after

    def add(self, key: bytes, gap: Gap) -> ForgetKey | None:
        """A message was dead-lettered. Then the oldest gap may be forgotten."""
        after = self.after(key)
        self.keys.pop(key, None)
        self.keys[key] = KeyState(after, gap)
        if len(self.keys) > GAPS_MAX:
            for each, state in self.keys.items():
                if state.after is AfterDeadLetter.CONTINUE:
                    return self.forget(each)
        return None

    def forget(self, key: bytes) -> ForgetKey | None:
        """Nothing need be known of a key any more. Returns what to do; None: nothing was."""
        return None if self.keys.pop(key, None) is None else ForgetKey(key)
