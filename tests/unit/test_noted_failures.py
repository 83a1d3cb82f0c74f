"""Failed deliveries that are kept until their message is settled: services/dispatcher/letters."""

from random import Random

import pytest

from seqgate.services.cursor.core.cursor import NOTE_BYTES_MAX
from seqgate.services.dispatcher.core.effects import FailedDelivery, FailedEntry, How
from seqgate.services.dispatcher.core.settling import FAILURES_MAX
from seqgate.services.dispatcher.letters.lives import NOTED_BYTES_MAX, failures_of, noted
from seqgate.services.dispatcher.letters.returns import RETURN_BYTES_MAX, Return
from seqgate.types import CURSOR_NAME_BYTES_MAX, NACK_REASON_BYTES_MAX, Position, TopicName
from tests.support.shells import NAME, TOPIC, shell, virtually

NAMES = {"": 10, "c": 10, "ü" * 60: 6, '"' * CURSOR_NAME_BYTES_MAX: 1}
"""Names of consumers, and how many of ten failures fit."""


def failures(consumer: str) -> tuple[FailedDelivery, ...]:
    return tuple(FailedDelivery(How.TIMED_OUT, 2**42 + each, consumer) for each in range(10))


@pytest.mark.parametrize(("consumer", "kept"), NAMES.items())
def test_the_oldest_failures_are_left_out_beyond_the_limit(consumer: str, kept: int) -> None:
    assert len(failures(consumer)) == FAILURES_MAX
    text = noted(failures(consumer))
    assert len(text.encode()) <= NOTED_BYTES_MAX == NOTE_BYTES_MAX
    assert failures_of(text) == failures(consumer)[-kept:]
    assert failures_of(noted(())) == ()


def test_the_oldest_reasons_are_left_out_first() -> None:
    reasons = ["\0" * NACK_REASON_BYTES_MAX, "r" * NACK_REASON_BYTES_MAX]
    given = [each._replace(reason=reason) for each in failures("c") for reason in reasons][-10:]
    kept = failures_of(noted(given))
    assert [each.at_ms for each in kept] == [each.at_ms for each in given]
    assert [each.reason for each in kept] == [""] * 9 + reasons[1:]


@pytest.mark.parametrize("consumer", NAMES)
@pytest.mark.parametrize("messages", [1, 10_000])
def test_a_return_keeps_failures_as_far_as_they_fit(messages: int, consumer: str) -> None:
    topic = TopicName.parse(f"t/n/{'x' * 247}")
    made = Return(topic, Position(2**63 - 1, 2**63 - 1), 2**63, messages, (1 << messages - 1) - 1)
    failed = made._replace(attempts=2**32 - 1, failures=failures(consumer))
    assert len(failed.to_text().encode()) <= RETURN_BYTES_MAX
    again = Return.from_text(failed.to_text())
    assert again == failed._replace(failures=again.failures)
    assert again.failures == failures(consumer)[-len(again.failures) :]
    assert Return.from_text(made.to_text()) == made


async def _taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("seqgate.services.dispatcher.shell.live.FAILED_ENTRIES_MAX", 2)
    async with shell(Random(7)) as it:
        for _ in range(4):
            it.log.append(b"k")
        failed = [
            FailedEntry(Position(1, each), 1 + each, failures(f"{each}")) for each in range(3)
        ]
        failed.append(FailedEntry(Position(1, 3), 9))
        await it.cursors.record(TOPIC, NAME, failed, it.live.epoch)
        await it.live.load()
        settling = it.live.machine.settling
        assert settling.attempts == {each.position: each.attempts for each in failed}
        found = [settling.failures(each.position) for each in failed]
        assert found == [(), failed[1].failures, failed[2].failures, ()]


def test_a_new_owner_knows_the_failures_of_a_bounded_number_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtually(lambda: _taken(monkeypatch))
