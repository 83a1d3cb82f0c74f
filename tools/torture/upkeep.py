"""An administrator's work: creates topics and subscriptions, releases keys, and trims messages."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.message_id import MessageId
from tools.stack.journal import Journal, lines, path_of
from tools.torture.roles import reader_of
from tools.torture.shown import At, asking

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

Q = TypeVar("Q")
R = TypeVar("R")

CALL_S: Final = 5.0

RELEASE_S: Final = 2.0

KEYS_MAX: Final = 1_000

PATIENCE_S: Final = 60.0
"""How long preparation may take with services that have just started."""


async def prepare(
    ledger: At, dispatcher: At, topics: Sequence[str], filtered: dict[tuple[str, str], str]
) -> None:
    """Create the topics, and the subscriptions with filters."""
    async with (
        asyncio.timeout(PATIENCE_S),
        asking(ledger, LedgerServiceStub) as ledgers,
        asking(dispatcher, DispatcherServiceStub) as dispatchers,
    ):
        for topic in topics:
            request = ledger_pb2.CreateTopicRequest(topic=topic)
            await _insist(ledgers.CreateTopic, request)
        for (topic, subscription), place in filtered.items():
            names: dict[str, Any] = {"topic": topic, "subscription": subscription}
            start = common_pb2.Start(earliest=common_pb2.Earliest())
            expression = f"properties.place == '{place}'"
            chain = [filter_pb2.Filter(name="place", version=1, expression=expression)]
            await _insist(
                dispatchers.CreateSubscription,
                dispatcher_pb2.CreateSubscriptionRequest(**names, start=start),
            )
            await _insist(
                dispatchers.SetFilters,
                dispatcher_pb2.SetFiltersRequest(**names, filters=chain, start=start),
            )


async def _insist(call: "aio.UnaryUnaryMultiCallable[Q, R]", request: Q) -> R:
    """Repeat a call until it succeeds, or fails other than temporarily."""
    while True:
        try:
            return await call(request, timeout=CALL_S)
        except aio.AioRpcError as error:
            if error.code() not in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
                raise
            await asyncio.sleep(0.1)


async def release_forever(dispatcher: At, holding: Sequence[tuple[str, str]]) -> None:
    """Release held keys, every RELEASE_S."""
    async with asking(dispatcher, DispatcherServiceStub) as stub:
        while True:
            for topic, subscription in holding:
                with suppress(aio.AioRpcError):  # try again in the next round
                    await _release(stub, topic, subscription)
            await asyncio.sleep(RELEASE_S)


async def _release(stub: "DispatcherServiceAsyncStub", topic: str, subscription: str) -> None:
    names = {"topic": topic, "subscription": subscription}
    report = await stub.Report(
        dispatcher_pb2.ReportRequest(**names, max_keys=KEYS_MAX), timeout=CALL_S
    )
    for key in report.keys:
        with suppress(aio.AioRpcError):  # most keys are not held, and refused
            await stub.ReleaseKey(
                dispatcher_pb2.ReleaseKeyRequest(**names, key=key.key), timeout=CALL_S
            )


async def trim(ledger: At, folder: Path, journal: Journal, topic: str) -> None:
    """Trim a topic up to the last message that its reader has read, according to the journal in
    the folder. A failure is only recorded."""
    read = [line["id"] for line in lines(path_of(folder, reader_of(topic))) if line["e"] == "read"]
    if not read:
        return
    last = MessageId.parse(read[-1])
    before = common_pb2.Position(ledger_id=last.ledger_id, entry_id=last.entry_id)
    request = ledger_pb2.TrimTopicRequest(topic=topic, before=before)
    async with asking(ledger, LedgerServiceStub) as stub:
        try:
            answer = await stub.TrimTopic(request, timeout=CALL_S)
        except aio.AioRpcError as error:
            journal.write("trim", topic=topic, before=read[-1], why=str(error.details()))
        else:
            journal.write("trim", topic=topic, before=read[-1], removed=answer.removed_entries)
