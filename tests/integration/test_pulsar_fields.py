"""Pulsar's metadata fields that Seqgate does not read are stored and delivered unchanged."""

from typing import Final

import pytest

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from tests.integration.services import Services
from tests.support.publisher import publishing
from tests.support.raw_consumer import consuming

FOREIGN: Final = {
    "encryption_keys (13)": b"\x6a\x06\x0a\x01k\x12\x01v",
    "encryption_algo (14)": b"\x72\x03aes",
    "encryption_param (15)": b"\x7a\x02iv",
    "schema_version (16)": b"\x82\x01\x08\x00\x00\x00\x00\x00\x00\x00\x07",
    "null_value (25)": b"\xc8\x01\x01",
    "null_partition_key (30)": b"\xf0\x01\x01",
    "schema_id (32)": b"\x82\x02\x02id",
}
"""Each field in its wire encoding, by its name and number in Pulsar."""


def with_fields(*fields: bytes) -> EntryMetadata:
    metadata = EntryMetadata(producer_name="p", sequence_id=1, publish_time=7)
    metadata.MergeFromString(b"".join(fields))
    return metadata


@pytest.mark.parametrize("fields", [*([each] for each in FOREIGN.values()), [*FOREIGN.values()]])
async def test_pulsars_fields_pass_through(
    services: Services, topic: str, fields: list[bytes]
) -> None:
    metadata = with_fields(*fields)
    sent = pb.Publication(request_id=1, entries=[pb.Entry(metadata=metadata, payload=b"x")])
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(sent)).status == pb.RECEIPT_STATUS_STORED
    (stored,) = await services.read(topic)
    assert stored.metadata.SerializeToString() == metadata.SerializeToString()
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (delivery,) = await consumer.received(1)
    assert delivery.metadata.SerializeToString() == metadata.SerializeToString()
