"""The ledger's short look at plain entries returns what the long one would."""

from typing import Any, cast

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.errors import DomainError
from seqgate.services.ledger.core.entry import METADATA_BYTES_MAX
from seqgate.services.ledger.servicer import PROPERTIES_MAX, EntryLimits, LedgerServicer
from seqgate.types import SEQUENCE_ID_MAX

SERVICER = LedgerServicer(cast("Any", None), cast("Any", None), EntryLimits(100, 10_000, 5))

PLAIN = {
    "producer_name": st.just("p"),
    "sequence_id": st.sampled_from([0, 7, SEQUENCE_ID_MAX]),
    "publish_time": st.just(1_700_000_000_000),
    "partition_key": st.sampled_from(["key", "a2V5"]),
    "properties": st.sampled_from([{}, {"a": "b"}, {"c": "d" * 1_000}]),
    "ordering_key": st.just(b"order"),
    "event_time": st.just(5),
}
UNUSUAL = {
    "producer_name": st.sampled_from(["p", "q", ""]),
    "sequence_id": st.sampled_from([0, SEQUENCE_ID_MAX + 1]),
    "highest_sequence_id": st.integers(0, 2),
    "num_messages_in_batch": st.integers(-1, 2),
    "sequence_id_steps": st.lists(st.integers(0, 1), max_size=2),
    "marker_type": st.integers(0, 1),
    "uuid": st.sampled_from(["", "u"]),
    "chunk_id": st.integers(-1, 1),
    "num_chunks_from_msg": st.integers(0, 2),
    "total_chunk_msg_size": st.integers(0, 101),
    "partition_key_b64_encoded": st.booleans(),
    "deliver_at_time": st.integers(-1, 1),
    "compression": st.just(entry_pb2.COMPRESSION_TYPE_LZ4),
    "uncompressed_size": st.integers(0, 5),
    "payload_crc32c": st.sampled_from([0, google_crc32c.value(b""), google_crc32c.value(b"abc")]),
    "properties": st.sampled_from(
        [
            {"a": "b" * METADATA_BYTES_MAX},
            {str(each): "" for each in range(PROPERTIES_MAX)},
            {str(each): "" for each in range(PROPERTIES_MAX + 1)},
        ]
    ),
}


@given(
    st.fixed_dictionaries({}, optional=PLAIN),
    st.dictionaries(st.sampled_from(sorted(UNUSUAL)), st.none(), max_size=3).flatmap(
        lambda some: st.fixed_dictionaries({name: UNUSUAL[name] for name in some})
    ),
    st.sampled_from([b"", b"abc", b"x" * 100, b"x" * 101]),
)
def test_a_plain_entry_is_what_the_long_look_finds(
    plain: dict[str, Any], unusual: dict[str, Any], payload: bytes
) -> None:
    entry = pb.Entry(metadata=entry_pb2.EntryMetadata(**(plain | unusual)), payload=payload)
    short = SERVICER._plain_entry("p", entry)
    if short is None:
        return
    try:
        long = SERVICER._entry("p", entry)
    except DomainError as error:
        raise AssertionError(f"passed, though {error.message}") from error
    assert short == long
    assert type(short) is type(long)


def test_a_common_message_is_plain() -> None:
    metadata = entry_pb2.EntryMetadata(
        producer_name="p",
        sequence_id=1,
        publish_time=2,
        partition_key="key",
        properties={"a": "b"},
        payload_crc32c=google_crc32c.value(b"abc"),
    )
    assert SERVICER._plain_entry("p", pb.Entry(metadata=metadata, payload=b"abc")) is not None
