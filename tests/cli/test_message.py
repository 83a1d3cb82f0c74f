"""Messages as lines of JSON."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.cli._failure import InvalidInput
from seqgate.cli._message import FIELDS, Draft, parse, record
from seqgate.client import Message, MessageId

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBER = st.integers(0, 2**63 - 1)


def test_only_a_payload_is_required() -> None:
    assert parse(b'{"payload": "caf\xc3\xa9"}') == Draft("café".encode())
    assert parse(b'{"payload": ""}\r') == Draft(b"")
    assert parse(b'{"payload": "a", "key": null, "sequence_id": null}') == Draft(b"a")


def test_a_line_may_set_every_field() -> None:
    line = {
        "payload_base64": base64.b64encode(b"\xff\x00").decode(),
        "key": "k",
        "ordering_key": "o",
        "properties": {"a": "b"},
        "sequence_id": 2**63 - 1,
        "event_time_ms": 0,
    }
    assert parse(json.dumps(line).encode()) == Draft(
        b"\xff\x00", "k", b"o", {"a": "b"}, 2**63 - 1, 0
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"payload", r"not JSON: Expecting value \(column 1\)"),
        (b'{"payload": "a"} {}', "not JSON: Extra data"),
        (b'{"payload": "\xff"}', "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "JSON nested too deeply or with too long a number"),
        (
            b'{"sequence_id": ' + b"9" * 5_000 + b"}",
            "JSON nested too deeply or with too long a number",
        ),
        (b"{}", "payload or payload_base64 is required"),
        (b'{"payload": null}', "payload or payload_base64 is required"),
        (b'{"payload": "a", "colour": 1}', "unknown field 'colour'"),
        (b'{"payload": 1}', "payload must be a string"),
        (b'{"payload": "\\ud800"}', "payload is not valid Unicode"),
        (
            b'{"payload": "a", "payload_base64": "YQ=="}',
            "payload and payload_base64 are mutually exclusive",
        ),
        (b'{"payload_base64": "YQ"}', "payload_base64 is not base64"),
        (b'{"payload_base64": "Y!Q="}', "payload_base64 is not base64"),
        (b'{"payload_base64": "\xc3\xa9"}', "payload_base64 is not base64"),
        (b'{"payload": "a", "key": 7}', "key must be a string"),
        (b'{"payload": "a", "properties": []}', "properties must be an object"),
        (b'{"payload": "a", "properties": {"n": 1}}', "property 'n' must be a string"),
        (b'{"payload": "a", "properties": {"\\udc00": ""}}', "name is not valid Unicode"),
        (b'{"payload": "a", "sequence_id": -1}', "sequence_id must be a number from 0"),
        (b'{"payload": "a", "sequence_id": 9223372036854775808}', "sequence_id must be a number"),
        (b'{"payload": "a", "sequence_id": 1.0}', "sequence_id must be a number"),
        (b'{"payload": "a", "sequence_id": true}', "sequence_id must be a number"),
        (b'{"payload": "a", "event_time_ms": "now"}', "event_time_ms must be a number"),
    ],
)
def test_an_invalid_line_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(line)


@given(
    payload=st.binary(),
    key=st.none() | TEXT,
    ordering_key=st.none() | st.binary(),
    properties=st.dictionaries(TEXT, TEXT, max_size=3),
    sequence_id=NUMBER,
    event_time_ms=st.none() | NUMBER,
)
def test_the_output_of_read_can_be_published(**fields: Any) -> None:
    message = Message(
        topic="a/b/c",
        id=MessageId(1, 2),
        producer_name="p",
        publish_time_ms=3,
        append_time_ms=4,
        **fields,
    )

    line = {name: value for name, value in record(message).items() if name in FIELDS}

    assert parse(json.dumps(line, ensure_ascii=False).encode()) == Draft(**fields)
