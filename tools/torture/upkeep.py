"""What somebody must do besides: topics and subscriptions are made, keys that are held are
released, and what everybody has is trimmed away."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from grpc import StatusCode, aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.message_id import MessageId
from tools.torture.journal import Journal, journals, lines
from tools.torture.shown import At, asking

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

Q = TypeVar("Q")
R = TypeVar("R")

CALL_S: Final = 5.0
"""How long a call may take."""

RELEASE_S: Final = 2.0
"""How often keys that are held are released."""

KEYS_MAX: Final = 1_000

PATIENCE_S: Final = 60.0
"""How long making things may take, with services that have just begun."""


async def prepare(
    ledger: At, dispatcher: At, topics: Sequence[str], filtered: dict[tuple[str, str], str]
) -> None:
    """Make topics, and the subscriptions that have filters.

    Raises:
        aio.AioRpcError, TimeoutError: something was not made.
    """
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
            start = dispatcher_pb2.Start(earliest=dispatcher_pb2.Earliest())
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
    """Ask until there is an answer that is not "not now"."""
    while True:
        try:
            return await call(request, timeout=CALL_S)
        except aio.AioRpcError as error:
            if error.code() not in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
                raise
            await asyncio.sleep(0.1)


async def release_forever(dispatcher: At, holding: Sequence[tuple[str, str]]) -> None:
    """Release keys that are held, whenever there are some."""
    async with asking(dispatcher, DispatcherServiceStub) as stub:
        while True:
            for topic, subscription in holding:
                with suppress(aio.AioRpcError):  # next time
                    await _release(stub, topic, subscription)
            await asyncio.sleep(RELEASE_S)


async def _release(stub: "DispatcherServiceAsyncStub", topic: str, subscription: str) -> None:
    names = {"topic": topic, "subscription": subscription}
    report = await stub.Report(
        dispatcher_pb2.ReportRequest(**names, keys_max=KEYS_MAX), timeout=CALL_S
    )
    for key in report.keys:
        with suppress(aio.AioRpcError):  # most are not held: then it is refused
            await stub.ReleaseKey(
                dispatcher_pb2.ReleaseKeyRequest(**names, key=key.key), timeout=CALL_S
            )


class Trimming:
    """Trims a topic up to where its reader has read it, so that nothing goes that nobody has
    seen."""

    def __init__(self, ledger: At, folder: Path, journal: Journal) -> None:
        self._ledger = ledger
        self._folder = folder
        self._journal = journal

    async def trim(self, topic: str) -> None:
        """Do so; what cannot be trimmed now is left."""
        role = f"reader-{topic.rpartition('/')[2]}"
        last: str | None = None
        for line in lines(journals(self._folder)[role]):
            if line["e"] == "read":
                last = line["id"]
        if last is None:
            return
        read = MessageId.parse(last)
        before = entry_pb2.Position(ledger_id=read.ledger_id, entry_id=read.entry_id)
        async with asking(self._ledger, LedgerServiceStub) as stub:
            try:
                request = ledger_pb2.TrimTopicRequest(topic=topic, before=before)
                answer = await stub.TrimTopic(request, timeout=CALL_S)
            except aio.AioRpcError as error:
                self._journal.write("trim", topic=topic, before=last, why=str(error.details()))
            else:
                self._journal.write(
                    "trim", topic=topic, before=last, removed=answer.removed_entries
                )
