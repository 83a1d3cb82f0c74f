"""The durable records of redrives of many."""

from collections.abc import Mapping
from typing import Final

import pytest

from seqgate.services.dispatcher.letters.record import (
    EXPRESSION_BYTES_MAX,
    KEY_BYTES_MAX,
    RECORDS_MAX,
    TEXT_MAX,
    Extent,
    RedriveOutcome,
    RedriveRecord,
    Selection,
    State,
    forgotten,
    records_of,
)
from seqgate.types import TOPIC_NAME_BYTES_MAX, Position, TopicName

PROPERTY_BYTES_MAX: Final = 4 * 1024
"""The limit of a cursor's property: its name and its value."""

LAST: Final = Position(2**63 - 1, 2**63 - 1)
COUNTS: Final[Mapping[RedriveOutcome, int]] = dict.fromkeys(RedriveOutcome, 2**63 - 1)


def record(number: int = 1, **values: object) -> RedriveRecord:
    given: dict[str, object] = {
        "request_id": "r",
        "caller": "sub:alice",
        "source": TopicName.parse("a/b/c"),
        "selection": Selection(),
        "stretch": Extent(None, None),
        "letters_s": 0,
        "total": 0,
        "started_ms": 1,
    }
    return RedriveRecord(number, **given | values)  # type: ignore[arg-type]


LONGEST: Final = record(
    2**63 - 1,
    request_id="\x00" * 64,
    caller="\U0001f600" * TEXT_MAX,
    source=TopicName.parse("a/b/".ljust(TOPIC_NAME_BYTES_MAX, "c")),
    selection=Selection(b"\xff" * KEY_BYTES_MAX, "\n" * EXPRESSION_BYTES_MAX),
    stretch=Extent(LAST, LAST),
    letters_s=10_000,
    total=2**63 - 1,
    started_ms=2**53,
    after=LAST,
    scanned=2**63 - 1,
    counts=COUNTS,
    state=State.FAILED,
    failure="\U0001f600" * TEXT_MAX,
    ended_ms=2**53,
)


@pytest.mark.parametrize("each", [record(), LONGEST], ids=["empty", "longest"])
def test_a_record_is_read_as_it_was_written_and_fits_into_a_property(each: RedriveRecord) -> None:
    assert records_of({each.name: each.to_text(), "other": "x"}) == {each.number: each}
    assert len(each.name.encode()) + len(each.to_text().encode()) <= PROPERTY_BYTES_MAX


def test_the_oldest_records_are_forgotten_for_a_new_one() -> None:
    records = [record(number) for number in range(1, RECORDS_MAX + 1)]
    assert forgotten(records[:-1]) == []
    assert [each.number for each in forgotten(records)] == [1]


def test_long_texts_of_a_record_are_cut() -> None:
    each = record(caller="\x00" * 999, failure="\\" * 999)
    (kept,) = records_of({each.name: each.to_text()}).values()
    assert (kept.caller, kept.failure) == ("?" * TEXT_MAX, "\\" * TEXT_MAX)
