"""A scripted ledger, which holds a topic or redirects to the instance that does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio
from grpc_status import rpc_status

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import (
    LedgerServiceServicer,
    add_LedgerServiceServicer_to_server,
)
from seqgate.services.dispatcher.ports import NotOwner
from seqgate.services.errors import Draining
from seqgate.services.runtime.status import status_of
from seqgate.status import code_of


class Instance(LedgerServiceServicer):
    """An instance. `owner` is where it redirects callers; empty if it holds the topic."""

    def __init__(self) -> None:
        self.address = ""
        self.owner = ""
        self.is_draining = False
        self.calls = 0
        self.opened: list[str] = []
        """The topics of Publish streams, from their first requests."""
        self.hands_over_to = ""
        """The owner from when a stream has been opened; empty for no change."""

    async def _check(self, context: Any) -> None:
        self.calls += 1
        error: Draining | NotOwner | None = None
        if self.is_draining:
            error = Draining("the instance goes away", retry_after_s=0.1)
        elif self.owner:
            error = NotOwner("another instance holds the topic", owner=self.owner)
        if error is not None:
            status = status_of(error)
            context.set_code(code_of(status))
            await context.abort_with_status(rpc_status.to_status(status))

    async def _hand_over(self, context: Any) -> None:
        if self.hands_over_to:
            self.owner = self.hands_over_to
            await self._check(context)

    async def GetTopic(self, request: Any, context: Any) -> Any:
        await self._check(context)
        return pb.GetTopicResponse(topic=pb.Topic(name=self.address))

    async def ListTopics(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return pb.ListTopicsResponse(topics=[pb.Topic(name=self.address)])

    async def Read(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._check(context)
        yield pb.ReadResponse(started=pb.Started())
        await self._hand_over(context)
        yield pb.ReadResponse(draining=common_pb2.Draining())

    async def ReadColumns(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._check(context)
        yield pb.ReadColumnsResponse()

    async def Publish(  # type: ignore[override]  # reads and writes by its context
        self, request_iterator: Any, context: Any
    ) -> None:
        opening = (await context.read()).open
        self.opened.append(opening.topic)
        await self._check(context)
        name = opening.producer_name or self.address
        opened = pb.Opened(producer_name=name, max_message_bytes=1024)  # no window yet
        await context.write(pb.PublishResponse(opened=opened))
        await self._hand_over(context)
        while (request := await context.read()) is not aio.EOF:
            receipt = pb.Receipt(request_id=request.publications.publications[0].request_id)
            await context.write(pb.PublishResponse(receipts=pb.Receipts(receipts=[receipt])))


@asynccontextmanager
async def running_instance() -> AsyncIterator[Instance]:
    """A running instance on a free port."""
    instance = Instance()  # type: ignore[abstract]  # implements only the methods called
    server = aio.server()
    add_LedgerServiceServicer_to_server(instance, server)
    instance.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield instance
    finally:
        await server.stop(None)
