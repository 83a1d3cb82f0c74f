"""Messages with the largest and the smallest values that a producer may store."""

from collections.abc import Collection
from typing import Any, Final

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.times import TIME_MAX_MS
from seqgate.types import SEQUENCE_ID_MAX
from tests.support.publisher import publishing, single

_TIMES: Final = ("publish_time", "event_time", "deliver_at_time")

FIELDS: Final[dict[str, dict[str, int]]] = {
    "the beginning": dict.fromkeys(_TIMES, 0),
    "the end of the year 9999": dict.fromkeys(_TIMES, TIME_MAX_MS),
    "the millisecond after": dict.fromkeys(_TIMES, TIME_MAX_MS + 1),
    "the largest": {
        "publish_time": 2**64 - 1,
        "event_time": 2**64 - 1,
        "deliver_at_time": 2**63 - 1,
    },
}
"""The times of the messages, by name."""

FIRST_ID: Final = SEQUENCE_ID_MAX - len(FIELDS) + 1


async def store_extremes(ledger: Any, topic: str, without: Collection[str] = ()) -> None:
    """Store a message for each of FIELDS, at 1:0 and up, with the last sequence ids there are."""
    async with publishing(ledger, topic, "p") as publisher:
        for number, fields in enumerate(FIELDS.values()):
            given: dict[str, Any] = {
                name: value for name, value in fields.items() if name not in without
            }
            receipt = await publisher.store(single(number + 1, FIRST_ID + number, **given))
            assert receipt.status == pb.RECEIPT_STATUS_STORED, receipt
