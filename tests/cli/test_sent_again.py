"""What would become of a message, for all that deduplication and the log may say of it; and which
trace a message belongs to."""

from typing import Any

import pytest

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.cli._sent_again import Standing, sent_again, snapshot_shown
from seqgate.types import Position

NEW, IN_FLIGHT, DUPLICATE = pb.VERDICT_NEW, pb.VERDICT_IN_FLIGHT, pb.VERDICT_DUPLICATE
ACTIVE, ABSENT = pb.TOPIC_STATE_ACTIVE, pb.TOPIC_STATE_ABSENT

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def standing(
    verdict: int, fate: str | None, *, enabled: bool = True, inactive: int = 360, **status: Any
) -> Standing:
    policy = pb.Policy(enabled=enabled, producer_inactivity_timeout_minutes=inactive)
    found = pb.ExplainResponse(
        verdict=verdict,  # type: ignore[arg-type]
        status=pb.GetTopicStatusResponse(policy=policy, **{"state": ACTIVE} | status),
    )
    stored = fate == "STORED"
    return Standing(found, fate, "1:4:-1" if stored else None, Position(1, 4) if stored else None)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (standing(NEW, None), "It would be stored."),
        (standing(NEW, "STORED"), "a second time: its producer was forgotten, after 360 minutes"),
        (standing(NEW, "STORED", inactive=0), "was forgotten, because the topic was full"),
        (standing(NEW, "STORED", enabled=False), "a second time: nothing is deduplicated here"),
        (standing(NEW, "STORED", state=ABSENT), "not be stored again: before anything is, what"),
        (standing(IN_FLIGHT, None), "wait for what becomes of the earlier copy"),
        (standing(DUPLICATE, "STORED"), "not be stored again: the answer is its id, 1:4:-1."),
        (standing(DUPLICATE, "STALE"), "the answer is STALE"),
        (standing(DUPLICATE, "TRIMMED"), "the answer is TRIMMED"),
        (standing(DUPLICATE, None), "the log would tell"),
        (
            standing(NEW, None, state=pb.TOPIC_STATE_RECOVERING, entries_remaining=12),
            "It would wait: what deduplication lacks is read from the log, 12 entries.",
        ),
    ],
)
def test_what_would_become_of_it(of: Standing, words: str) -> None:
    assert words in sent_again(of)
    assert sent_again(of).endswith(".")


@pytest.mark.parametrize(
    ("snapshot", "covered", "words"),
    [
        (None, False, "there is none"),
        (entry_pb2.Position(ledger_id=1, entry_id=3), False, "the newest ends at 1:3"),
        (entry_pb2.Position(ledger_id=1, entry_id=4), True, "the one up to 1:4 covers it"),
    ],
)
def test_which_snapshot_covers_it(
    snapshot: entry_pb2.Position | None, covered: bool, words: str
) -> None:
    of = standing(DUPLICATE, "STORED", snapshot=snapshot)
    assert of.covered is covered
    assert words in (snapshot_shown(of) or "")


def test_it_is_not_claimed_that_there_is_no_snapshot_when_nobody_can_tell() -> None:
    of = standing(NEW, "STORED", state=ABSENT, snapshot_unknown=True)
    assert of.covered is None
    assert "not known" in (snapshot_shown(of) or "")


def test_what_is_nowhere_is_covered_by_nothing() -> None:
    of = standing(NEW, None)
    assert (of.covered, snapshot_shown(of)) == (None, None)
