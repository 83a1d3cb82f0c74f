"""Large messages of raw producers that send anything between their chunks; see between.py."""

from typing import Any

import pytest

from seqgate.client._assembler import Assembler
from seqgate.services.dispatcher.core.large import LargeMessages
from seqgate.services.ledger.core import writer
from seqgate.services.ledger.core.attempts import OpenAttempt
from seqgate.services.ledger.core.writer import TopicWriter
from seqgate.types import Chunk, Position
from tests.simulation.between import Between, check
from tests.support.depth import times

HISTORIES = times(quick=20, full=2_000)
MUTANT_HISTORIES = 1_000


def test_what_is_stored_is_delivered_whatever_lies_between_its_chunks(seed: int) -> None:
    large = 0
    for each in range(seed, seed + HISTORIES):
        try:
            world = Between(each)
            world.run()
            large += sum(1 for message in check(world) if message.uuid)
        except Exception as error:
            raise AssertionError(f"Between({each})") from error
    assert large > HISTORIES


def _admit_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As version 0.2.0 did while deduplication was off."""
    monkeypatch.setattr(writer, "is_gap", lambda *_: False)


def _end_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ended_by", lambda *_: "")


def _forget_what_the_log_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopicWriter, "left_unfinished", lambda *_: None)


def _continue_under_any_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def continues(self: OpenAttempt, _: int, chunk: Chunk) -> bool:
        return self.chunk._replace(chunk_id=self.chunk.chunk_id + 1) == chunk

    monkeypatch.setattr(OpenAttempt, "continues_with", continues)


def _keep_what_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LargeMessages, "begins_again", lambda *_: False)


def _end_what_began_later(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = Assembler.abort

    def end(self: Assembler, producer: str, uuid: str, at: Position | None = None) -> Any:
        return abort(self, producer, uuid)

    monkeypatch.setattr(Assembler, "abort", end)


@pytest.mark.deep
@pytest.mark.parametrize(
    "plant",
    [
        _admit_any_chunk,
        _end_no_attempt,
        _forget_what_the_log_says,
        _continue_under_any_id,
        _keep_what_begins_again,
        _end_what_began_later,
    ],
)
def test_a_planted_defect_is_found(plant: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for each in range(seed, seed + MUTANT_HISTORIES):
        try:
            world = Between(each)
            world.run()
            check(world)
        except AssertionError:
            return
    pytest.fail("no history finds it")
