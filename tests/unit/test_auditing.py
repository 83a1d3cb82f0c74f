"""Audit topics: pages, and their publication beside delivery."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dispatcher.auditing.pages import is_about, page_of, told
from seqgate.services.dispatcher.auditing.publishing import PAGE_BYTES_MAX, Auditing
from seqgate.services.dispatcher.core.history import (
    Event,
    Histories,
    History,
    What,
    find,
    records_of,
    records_of_runs,
)
from seqgate.services.dispatcher.core.positions import runs_of
from seqgate.services.dispatcher.ports import AuditPage, LedgerUnavailable
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("public/default/orders")
AUDIT = TopicName.parse("public/default/orders-AUDIT")
OTHER = TopicName.parse("public/default/others")
AT = st.builds(Position, st.integers(1, 3), st.integers(0, 12))
DETAILS = {
    What.REJECTED: ("eu", "3"),
    What.DELIVERED: ("crew",),
    What.FAILED: ("REFUSED", "2", "crew", "no \0 stock"),
    What.PARTLY_ACKNOWLEDGED: ("5",),
    What.DEAD_LETTERED: ("1000001", "3", "public/default/dlq", "REDELIVERIES"),
}


class Ledger:
    """Audit topics in memory, with the ledger's deduplication."""

    def __init__(self) -> None:
        self.away: set[TopicName] = set()
        self.loses_answers = False
        self.pages: list[tuple[TopicName, str, Mapping[str, Any]]] = []
        self._last: dict[tuple[TopicName, str], int] = {}

    async def put(self, topic: TopicName, producer: str, pages: Sequence[AuditPage]) -> None:
        await asyncio.sleep(0)
        if topic in self.away:
            raise LedgerUnavailable("away", retry_after_s=1)
        for number, key, _, payload in pages:
            if number > self._last.get((topic, producer), 0):
                self._last[topic, producer] = number
                self.pages.append((topic, key, json.loads(payload)))
        if self.loses_answers:
            raise LedgerUnavailable("no answer", retry_after_s=1)

    def entries(self, topic: TopicName = AUDIT) -> list[list[int]]:
        pages = [page for where, _, page in self.pages if where == topic]
        return [each["entries"] for page in pages for each in page["events"]]


def audited(auditing: Auditing, topic: TopicName = TOPIC, name: str = "s") -> History:
    made = Histories(0).of(topic, name)
    made.audit = auditing.queue(topic, name)
    assert made.audit is not None
    return made


def record(history: History, *numbers: int) -> None:
    for number in numbers:
        history.record(What.DELIVERED, number, [Position(1, number)], "crew")


@given(
    what=st.sampled_from(list(DETAILS)),
    given=st.sets(AT, min_size=1, max_size=20),
    about=AT,
    mark_delete=AT,
)
def test_a_page_tells_of_an_entry_what_the_records_do(
    what: What, given: set[Position], about: Position, mark_delete: Position
) -> None:
    made = Histories(1_000_000).of(TOPIC, "s")
    made.begin(1, 7, "me")
    made.record_reset(2, mark_delete)
    records = [
        *made.records,
        *records_of(what, 3, list(given), DETAILS[what]),
        *records_of_runs(4, runs_of(given)),
    ]
    page = page_of("s", "me", records, lost=0)
    assert told(page.payload, about).events == find(records, about)
    assert is_about(page.properties, "s", about)
    assert not is_about(page.properties, "t", about)


def test_a_failure_without_a_reason_is_told_as_it_was_recorded() -> None:
    at, details = Position(1, 4), ("LOST", "1", "crew")
    page = page_of("s", "me", records_of(What.FAILED, 3, [at], details), lost=0)
    assert b"text" not in page.payload  # as versions without reasons wrote it
    assert told(page.payload, at).events == [Event(What.FAILED, 3, details)]


def test_a_page_is_looked_at_for_its_entries_alone() -> None:
    records = records_of(What.DELIVERED, 3, [Position(1, 4), Position(1, 9)], ("crew",))
    page = page_of("s", "me", records, lost=2)
    found = [is_about(page.properties, "s", Position(1, each)) for each in (3, 4, 9, 10)]
    assert found == [False, True, True, False]
    assert told(page.payload, Position(1, 4)) == (
        [Event(What.DELIVERED, 3, ("crew",))],
        2,
    )
    assert json.loads(page.payload)["events"] == [
        {"at_ms": 3, "event": "DELIVERED", "ledger": 1, "entries": [4, 9], "consumer": "crew"}
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        b'{"lost": 0, "events": [{"event": "DELIVERED"}]}',
        b'{"lost": 0, "events": [{"event": "X", "entries": []}]}',
        b'{"lost": 0, "events": [{"event": "DELIVERED", "ledger": "a", "entries": []}]}',
        b'{"lost": 0, "events": [{"event": "DELIVERED", "ledger": 1, "entries": 1}]}',
        b'{"lost": 0, "events": [{"event": "DELIVERED", "ledger": 1, "entries": [[]]}]}',
        b'{"lost": 0, "events": [{"event": "RESET", "ledger": 1, "entries": []}]}',
    ],
)
def test_what_is_no_page_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        told(payload, Position(1, 2))


async def test_each_event_is_published_once_whatever_the_ledger_does() -> None:
    ledger = Ledger()
    auditing = Auditing(ledger, ["public/default/ord*"], "me")
    history = audited(auditing)
    record(history, 0, 1)
    await auditing.flush()
    ledger.away = {AUDIT}
    record(history, 2)
    await auditing.flush()
    record(history, 3)
    await auditing.flush()
    ledger.away, ledger.loses_answers = set(), True
    await auditing.flush()
    ledger.loses_answers = False
    record(history, 4)
    await auditing.flush()

    assert ledger.entries() == [[each] for each in range(5)]
    assert {key for _, key, _ in ledger.pages} == {"s"}
    assert (auditing.waiting_bytes, auditing.counts) == (0, {"published": 5, "dropped": 0})
    await auditing.flush()
    assert len(ledger.pages) == 3


async def test_events_without_room_are_dropped_and_the_next_page_says_so() -> None:
    ledger = Ledger()
    ledger.away = {AUDIT}
    auditing = Auditing(ledger, ["*/*/*"], "me", bytes_max=2_000)
    history = audited(auditing)
    record(history, *range(100))
    await auditing.flush()
    record(history, *range(100, 200))
    dropped = auditing.counts["dropped"]
    assert dropped > 150
    assert auditing.waiting_bytes <= 2_000
    ledger.away = set()
    await auditing.flush()
    record(history, 200)
    await auditing.flush()

    assert ledger.entries() == [*([each] for each in range(200 - dropped)), [200]]
    assert sum(page["lost"] for _, _, page in ledger.pages) == dropped
    assert auditing.counts == {"published": 201 - dropped, "dropped": dropped}


async def test_a_topic_that_is_away_does_not_hold_up_another() -> None:
    ledger = Ledger()
    ledger.away = {AUDIT}
    auditing = Auditing(ledger, ["*/*/*"], "me")
    for topic in (TOPIC, OTHER):
        record(audited(auditing, topic), 1)
    await auditing.flush()
    assert [topic for topic, _, _ in ledger.pages] == [TopicName.parse(f"{OTHER}-AUDIT")]
    assert len(auditing.waiting) == 0
    assert auditing.waiting_bytes > 0


async def test_a_topic_that_is_refused_for_good_leaves_room_for_others() -> None:
    ledger = Ledger()
    ledger.away = {AUDIT}
    auditing = Auditing(ledger, ["*/*/*"], "me", bytes_max=2_000)
    history, other = audited(auditing), audited(auditing, OTHER)
    record(history, *range(100))
    assert 900 < auditing.waiting_bytes < 1_100  # half, and one record
    record(other, *range(3))
    await auditing.flush()
    assert ledger.entries(TopicName.parse(f"{OTHER}-AUDIT")) == [[0], [1], [2]]
    assert set(auditing.bytes_of) == {AUDIT}


async def test_long_pages_are_cut() -> None:
    ledger = Ledger()
    auditing = Auditing(ledger, ["*/*/*"], "me")
    record(audited(auditing), *range(PAGE_BYTES_MAX // 50))
    await auditing.flush()
    assert ledger.entries() == [[each] for each in range(PAGE_BYTES_MAX // 50)]
    assert len(ledger.pages) > 1


async def test_what_waits_is_published_at_the_end() -> None:
    ledger = Ledger()
    auditing = Auditing(ledger, ["*/*/*"], "me")
    record(audited(auditing), 1)
    await auditing.close(5)
    assert ledger.entries() == [[1]]


def test_an_audit_topic_is_not_audited_and_names_have_a_limit() -> None:
    auditing = Auditing(Ledger(), ["*/*/*"], "me")
    assert auditing.topic_of(TOPIC) == AUDIT
    assert auditing.topic_of(AUDIT) is None
    assert auditing.queue(AUDIT, "s") is None
    assert auditing.topic_of(TopicName.parse("a/b/" + "c" * 251)) is None
    assert Auditing(Ledger(), ["public/*/ord*"], "me").topic_of(OTHER) is None
