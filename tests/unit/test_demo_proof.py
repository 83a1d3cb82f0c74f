"""The demo's proof finds every way in which a promise can be broken."""

from dataclasses import replace

import pytest

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Dropped, DropReason, Message, MessageId
from tools.demo.dataset import Original
from tools.demo.proof import ChunkProof, Findings, MessageProof
from tools.demo.relay import Crashes, Stalled
from tools.demo.report import broken

FLIGHTS = [
    Original("UA", 10, "N1", {"origin": "JFK", "destination": "LAX"}, b"ten"),
    Original("UA", 11, None, {"origin": "JFK", "destination": "BOS"}, b"eleven"),
    Original("DL", 10, "N2", {"origin": "EWR", "destination": "ATL"}, b"other"),
]


def stored(flight: Original, entry_id: int) -> Message:
    return Message(
        topic="nyc/2013/flights",
        id=MessageId(1, entry_id),
        payload=flight.payload,
        producer_name=flight.producer,
        sequence_id=flight.sequence_id,
        publish_time_ms=0,
        append_time_ms=0,
        key=flight.key,
        properties=flight.properties,
    )


GOOD = [stored(flight, entry_id) for entry_id, flight in enumerate(FLIGHTS)]


def judge(
    messages: list[Message], receipts: list[tuple[str, int, str]], marks: dict[str, int | None]
) -> Findings:
    proof = MessageProof(FLIGHTS)
    for message in messages:
        proof.see_message(message)
    for receipt in receipts:
        proof.see_receipt(*receipt)
    for carrier, mark in marks.items():
        proof.see_mark(carrier, mark)
    return proof.findings()


def test_a_complete_log_passes() -> None:
    findings = judge(GOOD, [("UA", 11, "1:1:-1")], {"UA": 11, "DL": 10})
    assert (findings.counts["stored"], findings.counts["receipts"]) == (3, 1)
    assert (findings.broken, findings.examples, broken(findings.counts)) == (0, {}, [])


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
    assert findings.counts[anomaly] == findings.broken == 1
    assert list(findings.examples) == broken(findings.counts) == [anomaly]


@pytest.mark.parametrize("message_id", ["1:2:-1", "1:1:-1:0"])
def test_a_receipt_with_a_wrong_position_is_found(message_id: str) -> None:
    findings = judge(GOOD, [("UA", 11, message_id)], {})
    assert findings.counts["receipts_wrong"] == findings.broken == 1


def test_a_receipt_for_a_missing_message_is_found() -> None:
    findings = judge(GOOD[:2], [("DL", 10, "1:2:-1")], {})
    assert (findings.counts["receipts_wrong"], findings.counts["lost"]) == (1, 1)


@pytest.mark.parametrize("mark", [None, 10, 12])
def test_a_mark_that_differs_from_the_log_is_found(mark: int | None) -> None:
    findings = judge(GOOD, [], {"UA": mark})
    assert findings.counts["marks_wrong"] == findings.broken == 1


def entry(entry_id: int, uuid: str, chunk_id: int, aborts: str = "") -> pb.StoredEntry:
    """One of a message's three chunks."""
    chunk = EntryMetadata(
        producer_name="EWR",
        sequence_id=201301,
        uuid=uuid,
        chunk_id=chunk_id,
        num_chunks_from_msg=3,
    )
    position = Position(ledger_id=1, entry_id=entry_id)
    return pb.StoredEntry(position=position, metadata=chunk, aborts=aborts)


# An attempt that a crash ended after two chunks, and the one that replaced it.
LOG = [
    entry(0, "old", 0),
    entry(1, "old", 1),
    entry(2, "new", 0, aborts="old"),
    entry(3, "new", 1),
    entry(4, "new", 2),
]
READ = [4]
TOLD = ["old"]
CRASHES = [[Stalled("EWR", "old", 2)]]


def judge_chunks(
    log: list[pb.StoredEntry],
    read: list[int],
    told: list[str],
    crashes: Crashes,
    messages: Findings | None = None,
) -> Findings:
    proof = ChunkProof()
    for stored_entry in log:
        proof.see_entry(stored_entry)
    for entry_id in read:
        proof.see_message(stored(FLIGHTS[0], entry_id))
    for uuid in told:
        proof.see_dropped(Dropped(DropReason.ABORTED, "EWR", 201301, uuid, ()))
    return proof.findings(messages or Findings(), sent=1, crashes=crashes)


def test_a_large_message_interrupted_by_a_crash_is_complete() -> None:
    found = judge_chunks(LOG, READ, TOLD, CRASHES)
    assert (found.examples, broken(found.counts)) == ({}, [])
    assert found.counts == {
        "large_messages_sent": 1,
        "large_messages_read": 1,
        "large_messages_chunks": 5,
        "large_messages_wrong": 0,
        "large_message_crashes": 1,
        "large_message_attempts_aborted": 1,
        "orphan_chunks_delivered": 0,
    }


@pytest.mark.parametrize(
    ("anomaly", "log", "read", "told"),
    [
        ("orphan_chunks_delivered", LOG, [1], TOLD),
        ("large_messages_wrong", LOG, READ, []),
        ("large_messages_wrong", LOG, READ, ["old", "new"]),
        ("large_messages_wrong", [*LOG, entry(5, "left", 0)], READ, TOLD),
        ("large_messages_wrong", [LOG[0], entry(1, "old", 0), *LOG[2:]], READ, TOLD),
        ("large_messages_wrong", [*LOG[:4], entry(4, "new", 1)], READ, TOLD),
    ],
)
def test_an_anomaly_among_the_chunks_is_found(
    anomaly: str, log: list[pb.StoredEntry], read: list[int], told: list[str]
) -> None:
    found = judge_chunks(log, read, told, CRASHES)
    assert found.counts[anomaly] == 1
    assert list(found.examples) == broken(found.counts) == [anomaly]


def test_a_large_message_that_is_not_read_once_is_found() -> None:
    for read in ([], [4, 4]):
        found = judge_chunks(LOG, read, TOLD, CRASHES)
        assert found.counts["large_messages_wrong"] == found.broken == 1


def test_an_altered_large_message_is_found() -> None:
    messages = Findings("altered")
    messages.note("altered", "EWR")
    found = judge_chunks(LOG, READ, TOLD, CRASHES, messages)
    assert found.counts["large_messages_wrong"] == 1
    assert broken(found.counts) == ["large_messages_wrong"]
    assert found.examples == {"altered": ["EWR"]}


@pytest.mark.parametrize(
    "stalled",
    [
        [],
        [Stalled("EWR", "old", 3)],  # more than the log has
        [Stalled("EWR", "new", 3)],  # the message was complete
        [Stalled("EWR", "old", 0)],  # it had not begun
        [Stalled("EWR", "none", 1)],
        [Stalled("JFK", "old", 1)],
    ],
)
def test_a_crash_counts_only_if_the_log_has_half_a_message(stalled: list[Stalled]) -> None:
    found = judge_chunks(LOG, READ, TOLD, [stalled])
    assert broken(found.counts) == ["large_message_crashes"]


def test_the_proof_requires_an_aborted_attempt() -> None:
    found = judge_chunks(LOG[2:], READ, [], [[Stalled("EWR", "new", 1)]])
    assert broken(found.counts) == ["large_messages_wrong"]
    whole = [entry(0, "new", 0), entry(1, "new", 1), entry(2, "new", 2)]
    found = judge_chunks(whole, [2], [], [[Stalled("EWR", "new", 1)]])
    assert broken(found.counts) == ["large_message_attempts_aborted"]
