"""The demo's proof finds each way in which a promise can be broken."""

from dataclasses import replace

import pytest

from seqgate.client import Message, MessageId
from tools.demo.flights import Flight
from tools.demo.proof import Findings, Proof

FLIGHTS = [
    Flight("UA", 10, "N1", "JFK", "LAX", b"ten"),
    Flight("UA", 11, None, "JFK", "BOS", b"eleven"),
    Flight("DL", 10, "N2", "EWR", "ATL", b"other"),
]


def stored(flight: Flight, entry_id: int) -> Message:
    return Message(
        topic="nyc/2013/flights",
        id=MessageId(1, entry_id),
        payload=flight.payload,
        producer_name=flight.carrier,
        sequence_id=flight.sequence_id,
        publish_time_ms=0,
        append_time_ms=0,
        key=flight.aircraft,
        properties=flight.properties,
    )


GOOD = [stored(flight, entry_id) for entry_id, flight in enumerate(FLIGHTS)]


def judge(
    messages: list[Message], receipts: list[tuple[str, int, str]], marks: dict[str, int | None]
) -> Findings:
    proof = Proof(FLIGHTS)
    for message in messages:
        proof.see_message(message)
    for receipt in receipts:
        proof.see_receipt(*receipt)
    for carrier, mark in marks.items():
        proof.see_mark(carrier, mark)
    return proof.findings()


def test_a_whole_log_is_found_whole() -> None:
    findings = judge(GOOD, [("UA", 11, "1:1:-1")], {"UA": 11, "DL": 10})
    assert (findings.stored, findings.receipts, findings.broken) == (3, 1, 0)
    assert findings.examples == {}


@pytest.mark.parametrize(
    ("anomaly", "messages"),
    [
        ("lost", GOOD[:2]),
        ("stored_twice", [*GOOD, stored(FLIGHTS[0], 3)]),
        ("out_of_order", [GOOD[1], GOOD[0], GOOD[2]]),
        ("altered", [replace(GOOD[0], payload=b"nine"), *GOOD[1:]]),
        ("altered", [replace(GOOD[0], key=None), *GOOD[1:]]),
        ("altered", [replace(GOOD[0], properties={}), *GOOD[1:]]),
        ("unknown", [*GOOD, replace(GOOD[0], sequence_id=12)]),
        ("unknown", [*GOOD, replace(GOOD[0], producer_name="XX")]),
    ],
)
def test_an_anomaly_in_the_log_is_found(anomaly: str, messages: list[Message]) -> None:
    findings = judge(messages, [], {})
    assert getattr(findings, anomaly) == findings.broken == 1
    assert list(findings.examples) == [anomaly]


@pytest.mark.parametrize("message_id", ["1:2:-1", "1:1:-1:0"])
def test_a_receipt_that_names_another_place_is_found(message_id: str) -> None:
    findings = judge(GOOD, [("UA", 11, message_id)], {})
    assert findings.receipts_wrong == findings.broken == 1


def test_a_receipt_for_what_is_not_in_the_log_is_found() -> None:
    findings = judge(GOOD[:2], [("DL", 10, "1:2:-1")], {})
    assert (findings.receipts_wrong, findings.lost) == (1, 1)


@pytest.mark.parametrize("mark", [None, 10, 12])
def test_a_mark_that_is_not_where_the_log_ends_is_found(mark: int | None) -> None:
    findings = judge(GOOD, [], {"UA": mark})
    assert findings.marks_wrong == findings.broken == 1
