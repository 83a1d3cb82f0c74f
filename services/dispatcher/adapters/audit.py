"""Audit topics, over the ledger's deduplicated publish path."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from grpc import aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.owners import FollowingChannel
from seqgate.services.dispatcher.ports import AuditPage, LedgerUnavailable
from seqgate.services.runtime.status import call_failed
from seqgate.types import TopicName

RETRY_AFTER_S: Final = 1.0
"""The retry delay of refusals, in seconds."""

_THERE: Final = frozenset({pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE})


class GrpcAudit:
    """See seqgate.services.dispatcher.ports.AuditTopics."""

    def __init__(self, channel: FollowingChannel, *, timeout_s: float) -> None:
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._timeout_s = timeout_s

    async def put(self, topic: TopicName, producer: str, pages: Sequence[AuditPage]) -> None:
        call = self._stub.Publish()
        try:
            async with asyncio.timeout(self._timeout_s):
                await _publish(call, topic, producer, pages)
        except aio.AioRpcError as error:
            said = call_failed(error)
            raise _unavailable(said.reason or said.code.name) from error
        except asyncio.InvalidStateError as error:  # it ended before it was written to
            raise _unavailable("the stream ended") from error
        except TimeoutError as error:
            raise _unavailable("no answer in time") from error
        finally:
            call.cancel()


async def _publish(call: Any, topic: TopicName, producer: str, pages: Sequence[AuditPage]) -> None:
    opening = pb.Open(topic=str(topic), producer_name=producer, takeover=True)
    await call.write(pb.PublishRequest(open=opening))
    # Wait for the answer: a write to a stream that is being refused hides the reason.
    if (answer := await call.read()) is aio.EOF or not answer.HasField("opened"):
        raise _unavailable("the stream ended")
    for each in pages:
        publication = pb.Publication(request_id=each.number, entries=[_entry(producer, each)])
        publications = pb.Publications(publications=[publication])
        await call.write(pb.PublishRequest(publications=publications))
    left = len(pages)
    while left and (response := await call.read()) is not aio.EOF:
        for receipt in response.receipts.receipts:
            if receipt.status not in _THERE:
                because = receipt.error.message or pb.ReceiptStatus.Name(receipt.status)
                raise _unavailable(because)
            left -= 1
    if left:
        raise _unavailable("the stream ended")


def _entry(producer: str, page: AuditPage) -> pb.Entry:
    metadata = entry_pb2.EntryMetadata(
        producer_name=producer,
        sequence_id=page.number,
        publish_time=time.time_ns() // 1_000_000,
        partition_key=page.key,
        properties=page.properties,
    )
    return pb.Entry(metadata=metadata, payload=page.payload)


def _unavailable(because: str) -> LedgerUnavailable:
    return LedgerUnavailable(
        f"the ledger did not store a page of the audit topic: {because}",
        retry_after_s=RETRY_AFTER_S,
        because=because,
    )
