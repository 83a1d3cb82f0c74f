"""Every violation in deliveries is found, and correct ones pass."""

import pytest

from seqgate.types import Position
from tests.support.delivery_checkers import Deliveries, Token, anomalies


def history(*events: str) -> Deliveries:
    """A history of one key. `a1=5` gives consumer a, under token 1 of epoch 1, message 5; `2.a1=5`
    under epoch 2; `?1` asks to acknowledge token 1; `!1` answers that it is durable."""
    made = Deliveries()
    for event in events:
        epoch, _, rest = event.rpartition(".")
        if rest[0] == "?":
            made.asked(Token(int(epoch or 1), int(rest[1:])))
        elif rest[0] == "!":
            made.done(Token(int(epoch or 1), int(rest[1:])))
        else:
            number, _, entry = rest[1:].partition("=")
            token = Token(int(epoch or 1), int(number))
            made.delivered(rest[0], token, "k", Position(1, int(entry)))
    return made


@pytest.mark.parametrize(
    ("events", "published", "anomaly"),
    [
        (("a1=0", "?1", "!1"), 1, ""),
        (("a1=0", "a2=1", "?1", "!1", "?2", "!2"), 2, ""),
        (("a1=0", "b2=0", "?2", "!2"), 1, ""),  # revoked before it was settled
        (("a1=0", "?1", "b2=1", "!1", "?2", "!2"), 2, ""),  # read in another order than sent
        (("a1=0", "?1", "2.b1=1", "2.?1", "2.!1"), 2, ""),  # the answer was lost
        (("2.b1=0", "a1=0", "2.?1", "2.!1"), 1, ""),  # sent by an earlier owner, read late
        (("a1=0", "?1"), 2, "LOST"),
        (("a1=0",), 1, "LOST"),
        (("a1=1", "a2=0", "?1", "?2"), 2, "REORDERED"),
        (("a1=0", "a2=1", "?2", "!2", "?1", "!1"), 2, "OVERTAKEN"),
        (("a1=0", "b2=1", "?1", "!1", "?2", "!2"), 2, "SHARED"),
        (("a1=0", "2.b1=0", "?1", "!1", "2.?1", "2.!1"), 1, "SHARED"),
        (("a1=0", "?1", "!1", "b2=0", "?2"), 1, "RESURRECTED"),
        (("a1=0", "?1", "!1", "2.b1=0", "2.?1"), 1, "RESURRECTED"),
    ],
)
def test_violations_are_found(events: tuple[str, ...], published: int, anomaly: str) -> None:
    found = anomalies(history(*events), [Position(1, each) for each in range(published)])
    if anomaly:
        assert anomaly in {each.partition(" ")[0] for each in found}
    else:
        assert found == []
