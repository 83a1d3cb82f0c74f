"""The outcome of sending a message again, for every state in deduplication and the log; and the
trace of a message."""

from typing import Any

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.cli._sent_again import Standing, sent_again, snapshot_shown
from seqgate.times import duration
from seqgate.types import Position

NEW, IN_FLIGHT, DUPLICATE = (
    pb.CLAIM_VERDICT_NEW,
    pb.CLAIM_VERDICT_IN_FLIGHT,
    pb.CLAIM_VERDICT_DUPLICATE,
)
ACTIVE, ABSENT = pb.TOPIC_STATE_ACTIVE, pb.TOPIC_STATE_ABSENT

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def standing(
    verdict: int, fate: str | None, *, enabled: bool = True, inactive: int = 360, **status: Any
) -> Standing:
    policy = pb.Policy(enabled=enabled, producer_inactivity_timeout=duration(inactive * 60_000))
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
        (standing(NEW, "STORED", enabled=False), "a second time: deduplication is off"),
        (standing(NEW, "STORED", state=ABSENT), "not be stored again: the log, which has it, is"),
        (standing(IN_FLIGHT, None), "wait for the outcome of the earlier copy"),
        (standing(DUPLICATE, "STORED"), "not be stored again: the receipt has its id, 1:4:-1."),
        (standing(DUPLICATE, "STALE"), "the receipt is STALE"),
        (standing(DUPLICATE, "TRIMMED"), "the fate in the receipt is TRIMMED"),
        (standing(DUPLICATE, None), "Whether the log already has it is not known"),
        (
            standing(NEW, None, state=pb.TOPIC_STATE_RECOVERING, entries_remaining=12),
            "It would wait: 12 entries of the log are replayed to deduplication first.",
        ),
    ],
)
def test_the_outcome_of_sending_again_is_explained(of: Standing, words: str) -> None:
    assert words in sent_again(of)
    assert sent_again(of).endswith(".")


@pytest.mark.parametrize(
    ("snapshot", "covered", "words"),
    [
        (None, False, "none"),
        (common_pb2.Position(ledger_id=1, entry_id=3), False, "the newest ends at 1:3"),
        (common_pb2.Position(ledger_id=1, entry_id=4), True, "covered by the one up to 1:4"),
    ],
)
def test_the_snapshot_that_covers_an_id_is_named(
    snapshot: common_pb2.Position | None, covered: bool, words: str
) -> None:
    of = standing(DUPLICATE, "STORED", snapshot=snapshot)
    assert of.covered is covered
    assert words in snapshot_shown(of)


def test_an_unknown_snapshot_is_not_reported_as_missing() -> None:
    of = standing(NEW, "STORED", state=ABSENT, snapshot_unknown=True)
    assert of.covered is None
    assert "not known" in snapshot_shown(of)


def test_an_id_that_was_never_stored_is_in_no_snapshot() -> None:
    of = standing(NEW, None)
    assert (of.covered, snapshot_shown(of)) == (None, "none")
