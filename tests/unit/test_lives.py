"""The earlier lives of dead letters: services/dispatcher/letters/lives.py."""

import json

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.letters.lives import LIVES_BYTES_MAX, lives_of, with_life
from seqgate.services.dispatcher.ports import ATTEMPTS, FAILURES, LIVES, REASON


def test_the_oldest_lives_are_left_out_beyond_the_limit() -> None:
    properties = {
        ATTEMPTS: "10",
        REASON: "REDELIVERIES",
        FAILURES: json.dumps([["LOST", 1, "c" * 200]] * 10),
    }
    kept = []
    for number in range(20):
        letter = StoredEntry(
            position=common_pb2.Position(ledger_id=1, entry_id=number),
            metadata=entry_pb2.EntryMetadata(properties=properties),
        )
        properties[LIVES] = with_life(letter)
        assert len(properties[LIVES].encode()) <= LIVES_BYTES_MAX
        lives = lives_of(properties)
        assert lives[-1].letter.entry_id == number
        kept.append(len(lives))
    assert kept[:3] == [1, 2, 3]
    assert kept[-1] == kept[-2] < 20


@pytest.mark.parametrize(
    "text", ["", "x", "1", "[1]", "[[]]", '[[1, 2, "x", "", 0, []]]', "[" * 5000]
)
def test_forged_lives_are_ignored(text: str) -> None:
    assert lives_of({LIVES: text}) == ()


@pytest.mark.parametrize("failures", ["x", "7", "[7]", '[["UNKNOWN", 1, "c"]]'])
def test_forged_failures_are_ignored(failures: str) -> None:
    letter = StoredEntry(metadata=entry_pb2.EntryMetadata(properties={FAILURES: failures}))
    (life,) = lives_of({LIVES: with_life(letter)})
    assert (life.failures, life.why, life.attempts) == ((), None, 0)
