"""The digest of a message's content."""

from datetime import UTC, datetime
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from seqgate.client._codec import (
    Compression,
    OutgoingMessage,
    encode_batch,
    encode_single,
    seal_message,
)
from seqgate.client._outbox import METADATA_BYTES_MAX, pieces

NOON_MS = int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp() * 1000)


def message(sequence_id: int = 7, **fields: Any) -> OutgoingMessage:
    return OutgoingMessage(sequence_id, fields.pop("payload", b"2 apples"), **fields)


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        # computed with another implementation of XXH3, from entry.proto
        ({"payload": b""}, "2d06800538d394c2"),
        ({}, xxhash.xxh3_64_hexdigest(b"2 apples")),
        (
            {"key": "c-17"},
            xxhash.xxh3_64_hexdigest(b"2 apples", xxhash.xxh3_64_intdigest(b"kc-17")),
        ),
    ],
)
def test_a_digest_is_as_the_stored_format_defines_it(fields: dict[str, Any], digest: str) -> None:
    assert message(**fields).digest.hex() == digest


CONTENTS: list[dict[str, Any]] = [
    {},
    {"payload": b"3 apples"},
    {"key": "a"},
    {"key": b"a"},
    {"key": ""},
    {"ordering_key": b"a"},
    {"event_time_ms": 0},
    {"event_time_ms": 1},
    {"deliver_at_ms": 1},
    {"properties": {"a": "b"}},
    {"properties": {"b": "a"}},
    {"properties": {"a": "b", "b": ""}},
    {"properties": {"ab": ""}},
    {"key": "a", "ordering_key": b"a"},
]


def test_each_part_of_the_content_counts() -> None:
    digests = {message(**fields).digest for fields in CONTENTS}
    assert len(digests) == len(CONTENTS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"properties": {"a": "1", "b": "2"}}, {"properties": {"b": "2", "a": "1"}}),
        ({"properties": {"a": "1"}}, {"properties": {"a": "1", "traceparent": "00-1"}}),
        ({"properties": {"tracestate": "x", "baggage": "y"}}, {}),
        ({"deliver_at_ms": NOON_MS, "is_delay": True}, {"deliver_at_ms": 1, "is_delay": True}),
        ({"sequence_id": 8}, {"sequence_id": 9}),
    ],
)
def test_what_changes_between_two_sends_does_not_count(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert message(**one).digest == message(**other).digest


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3), st.binary(max_size=9))
def test_compression_and_batching_do_not_change_it(
    properties: dict[str, str], payload: bytes
) -> None:
    sent = message(payload=payload, properties=properties)
    for compression in Compression:
        single = encode_single("p", sent, compression=compression, publish_time_ms=1)
        batch = encode_batch("p", [sent, sent], compression=compression, publish_time_ms=2)
        sealed = seal_message("p", sent, compression=compression, publish_time_ms=3)
        assert single.metadata.content_digests == sent.digest
        assert batch.metadata.content_digests == sent.digest * 2
        assert sealed.metadata.content_digests == sent.digest


def test_a_batch_whose_metadata_is_too_large_is_divided() -> None:
    sent = [message(each << 40) for each in range(10_000)]

    def encode(some: Any) -> list[Any]:
        return [encode_batch("p", some, compression=Compression.NONE, publish_time_ms=1)]

    found = [*pieces(encode, sent, 2**30)]
    assert [each for some, _ in found for each in some] == sent
    assert len(found) == 2
    for _, (entry,) in found:
        assert entry.metadata.ByteSize() <= METADATA_BYTES_MAX
