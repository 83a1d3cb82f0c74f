"""The earlier lives of dead letters: services/dispatcher/letters/lives.py."""

import json

import pytest

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.core.effects import FailedDelivery, How
from seqgate.services.dispatcher.letters.listing import mend_of
from seqgate.services.dispatcher.letters.lives import (
    FAILURES_BYTES_MAX,
    LIVES_BYTES_MAX,
    failures_of,
    fitting,
    lives_of,
    with_life,
)
from seqgate.services.dispatcher.letters.returns import REDRIVES_MAX
from seqgate.services.dispatcher.ports import ATTEMPTS, FAILURES, LIVES, MEND, REASON
from seqgate.types import Position


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


def test_reasons_are_kept_and_those_of_the_oldest_lives_are_left_out_first() -> None:
    """A life has them as long as there is room: the failures themselves are worth more."""
    failed = [["REFUSED", 1, "crew", "r" * 256], ["LOST", 2, "crew"]] * 5
    properties = {ATTEMPTS: "10", REASON: "REDELIVERIES", FAILURES: json.dumps(failed)}
    for number in range(REDRIVES_MAX):
        letter = StoredEntry(
            position=common_pb2.Position(ledger_id=1, entry_id=number),
            metadata=entry_pb2.EntryMetadata(properties=properties),
        )
        properties[LIVES] = with_life(letter)
    assert len(properties[LIVES].encode()) <= LIVES_BYTES_MAX
    lives = lives_of(properties)
    assert [each.letter.entry_id for each in lives] == list(range(REDRIVES_MAX))
    assert {len(each.failures) for each in lives} == {10}
    kept = ["".join(it.reason for it in each.failures) for each in lives]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == ("", "r" * 5 * 256)


@pytest.mark.parametrize("failed", [("LOST", 7, "c"), ("REFUSED", 7, "c", "kein Lager für 'é'")])
def test_failures_are_read_with_and_without_a_reason(failed: tuple[str | int, ...]) -> None:
    (found,) = failures_of(json.dumps([failed]))
    assert found.to_json() == [*failed]


def test_a_letters_failures_are_bounded() -> None:
    given = [FailedDelivery(How.REFUSED, each, "c" * 200, "é" * 128) for each in range(10)]
    kept = fitting(given)
    text = json.dumps([each.to_json() for each in kept], ensure_ascii=False)
    assert len(text.encode()) <= FAILURES_BYTES_MAX
    assert [each.at_ms for each in kept] == [4, 5, 6, 7, 8, 9]
    assert fitting([]) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1", "[1]", "[[]]", '[[1, 2, "x", "", 0, []]]', "[" * 5000),
        *('[[-1, 2, 3, "", 0, []]]', f'[[{2**64}, 2, 3, "", 0, []]]'),
        '[[1, 2, 1e400, "", 0, []]]',
    ],
)
def test_forged_lives_are_ignored(text: str) -> None:
    assert lives_of({LIVES: text}) == ()


@pytest.mark.parametrize(
    "failures",
    [
        *("x", "7", "[7]", '[["UNKNOWN", 1, "c"]]', '[["LOST", 1e400, "c"]]'),
        *('[["LOST", 1, "\\ud800"]]', '[["LOST", 1, "c", "r", "?"]]'),
    ],
)
def test_forged_failures_are_ignored(failures: str) -> None:
    letter = StoredEntry(metadata=entry_pb2.EntryMetadata(properties={FAILURES: failures}))
    (life,) = lives_of({LIVES: with_life(letter)})
    assert (life.failures, life.why, life.attempts) == ((), None, 0)


@pytest.mark.parametrize(
    "mend",
    [
        *("x", "7", '["1:2", "id", "me"]', '["1:2", "id", "me", 1e400]'),
        *('["-1:2", "id", "me", 3]', f'["1:{2**64}", "id", "me", 3]'),
        '["1:2", "id", "\\ud800", 3]',
    ],
)
def test_forged_mends_are_ignored(mend: str) -> None:
    assert mend_of(entry_pb2.EntryMetadata(properties={MEND: mend})) is None
    right = entry_pb2.EntryMetadata(properties={MEND: '["1:2", "id", "me", 3]'})
    assert mend_of(right) == (Position(1, 2), "id", "me", 3)
