"""Records of messages of the services."""

import pytest

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._wire import bytes_record, enum_name, record


def test_a_record_has_every_field_of_its_message() -> None:
    report = pb.KeyReport(key=b"k", slot=7, reason=pb.REASON_HELD, owner="c")
    report.since.FromMilliseconds(1_700_000_000_123)
    report.oldest.ledger_id, report.oldest.entry_id = 3, 9
    assert record(report) == {
        "key": "k",
        "slot": 7,
        "reason": "HELD",
        "since_ms": 1_700_000_000_123,
        "holder": None,
        "owner": "c",
        "oldest": "3:9",
        "attempts": 0,
        "in_flight_entries": 0,
        "parked_entries": 0,
        "next_retry_ms": None,
    }


def test_records_are_nested_and_their_properties_sorted() -> None:
    cursor = cursor_pb2.Cursor(topic="t", name="n", properties={"b": "2", "a": "1"})
    cursor.lease.owner = "me"
    found = record(cursor)
    assert found["cursor"] == "n"
    assert list(found["properties"]) == ["a", "b"]
    assert found["lease"] == {"owner": "me", "epoch": 0, "expires_ms": None}
    assert found["mark_delete"] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, {"key": None}), (b"", {"key": ""}), (b"\xff", {"key_base64": "/w=="})],
)
def test_bytes_that_are_not_text_are_base64(
    value: bytes | None, expected: dict[str, str | None]
) -> None:
    assert bytes_record("key", value) == expected


def test_an_enum_value_of_a_newer_service_stays_a_number() -> None:
    assert enum_name(pb.Reason, pb.REASON_READY) == "READY"
    assert enum_name(pb.Reason, 12_345) == "12345"
