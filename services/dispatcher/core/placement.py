"""Which selector a subscription asks for."""

from enum import Enum, auto

from services.dispatcher.core.effects import Kind
from services.dispatcher.core.selectors import AutoSplit, Ring, Selector, Sticky


class Placement(Enum):
    """How hash slots are assigned to consumers; dispatcher.proto says it in full."""

    CONSISTENT_HASHING = auto()
    AUTO_SPLIT = auto()
    STICKY = auto()


def selector_of(kind: Kind, placement: Placement) -> Selector:
    """A selector without consumers."""
    if kind is not Kind.KEY_SHARED or placement is Placement.CONSISTENT_HASHING:
        return Ring()
    return AutoSplit() if placement is Placement.AUTO_SPLIT else Sticky()
