"""What is known of a history that a checker goes by."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.system.seen import Place, Seen, Subscription, Token


@dataclass(slots=True)
class Terms:
    """See the module.

    Attributes:
        next_delivery: of a subscription that an instance has by this epoch, what names its next
            delivery; None: no instance has it.
        import_s: for how long after an instance took a cursor that was imported what is stored may
            count as acknowledged: it asks where the log ends.
        clocks_agree: whether all processes have the same time.
        payload_bytes_max: how large a payload may be that the ledger never refused.
        refusing: topics that were given so low a limit of producers that they may refuse one.
        has_been_full: whether a store was full: letters may be refused until they are given up.
        is_exact: whether nothing fails in this history but what consumers refuse.
    """

    next_delivery: Callable[[str, str, int], Token | None] = lambda *_: None
    import_s: float = 30.0
    clocks_agree: bool = False
    payload_bytes_max: int = sys.maxsize
    refusing: set[str] = field(default_factory=set)
    has_been_full: bool = False
    is_exact: bool = False


def key_of(seen: Seen, subscription: Subscription, number: int, place: Place) -> object:
    """What keeps the order of a message in a subscription: its key, if it has one."""
    if subscription.kind == "EXCLUSIVE":
        return ""
    sent = seen.sent[number]
    return place if sent.key is None or not sent.is_keyed else sent.key
