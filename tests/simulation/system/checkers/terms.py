"""Facts about a history that its checkers rely on."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.system.seen import Place, Seen, Subscription, Token


@dataclass(slots=True)
class Terms:
    """Facts about a history that its checkers rely on.

    Attributes:
        next_delivery: returns the token of a subscription's next delivery under an epoch; None if
            no instance holds it.
        import_s: how long after an instance took an imported cursor new entries may still count as
            acknowledged, while it asks for the end of the log.
        clocks_agree: all processes have the same time.
        payload_bytes_max: the largest payload that the ledger never refused.
        refusing: topics whose limit of producers is low enough to refuse one.
        has_been_full: the ledger's store was full, so letters may have been abandoned.
        is_exact: nothing fails in this history except messages that consumers refuse.
    """

    next_delivery: Callable[[str, str, int], Token | None] = lambda *_: None
    import_s: float = 30.0
    clocks_agree: bool = False
    payload_bytes_max: int = sys.maxsize
    refusing: set[str] = field(default_factory=set)
    has_been_full: bool = False
    is_exact: bool = False


def key_of(seen: Seen, subscription: Subscription, number: int, place: Place) -> object:
    """The key that orders a message in a subscription; unique if it has none."""
    if subscription.kind == "EXCLUSIVE":
        return ""
    sent = seen.sent[number]
    return place if sent.key is None or not sent.is_keyed else sent.key
