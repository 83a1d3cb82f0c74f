"""The gRPC servicer: parse, call the service, translate back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from grpc import aio
from opentelemetry.trace import INVALID_SPAN, Span

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import SubscriptionType
from seqgate.services.dispatcher.errors import (
    CumulativeAckRefused,
    InvalidDiscard,
    InvalidMend,
    InvalidPosition,
    InvalidRedrive,
    InvalidStart,
    NotSubscribed,
)
from seqgate.services.dispatcher.letters.graveyard import default_topic
from seqgate.services.dispatcher.ports import Cursor
from seqgate.services.dispatcher.service import Dispatcher
from seqgate.services.dispatcher.shell.answers import settled_response
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.shell.session import Session
from seqgate.services.dispatcher.wire import (
    explaining,
    lettering,
    parsing,
    recalling,
    redriving,
    reporting,
)
from seqgate.services.errors import DomainError, Draining
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.guard import caller_of
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.refusal_log import in_stream
from seqgate.services.runtime.requests import (
    read_limit,
    read_position,
    read_position_token,
    read_start,
    read_topic,
    to_position_token,
)
from seqgate.services.runtime.tasks import end
from seqgate.telemetry import names, spans
from seqgate.times import timestamp
from seqgate.types import TopicName

Context = aio.ServicerContext[Any, Any]


class DispatcherServicer(pb_grpc.DispatcherServiceServicer):
    """See dispatcher.proto."""

    def __init__(self, dispatcher: Dispatcher, drain: Drain, config: DispatcherConfig) -> None:
        self._dispatcher = dispatcher
        self._drain = drain
        self._config = config

    # A coroutine that reads and writes on the context; grpc's stubs know only generators.
    async def Consume(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ConsumeRequest], context: Context
    ) -> None:
        first = await context.read()
        if first is aio.EOF or not first.HasField("subscribe"):
            raise NotSubscribed("subscribe is required in the first request", field="subscribe")
        subscribe = first.subscribe
        topic, name = parsing.names(subscribe)
        joining = parsing.joining(topic, name, subscribe, self._config)
        create_at = (
            read_start(subscribe.create_at, InvalidStart)
            if subscribe.HasField("create_at")
            else None
        )
        # This may take long: while the cursor or ledger service is away.
        async with self._drain.unless_begun():
            live, session = await self._dispatcher.subscribe(
                topic, name, joining, create_at, dict(subscribe.properties)
            )
        if first.HasField("breaker"):
            session.take_breaker(parsing.breaker(first.breaker))
        failure = asyncio.create_task(session.failure())
        tasks: list[asyncio.Task[Any]] = [failure]
        try:
            cursor = await self._dispatcher.get(topic, name)
            # Before the tasks start: a stream whose first message an error cuts off never ends.
            await context.write(_subscribed(live, session, cursor))
            sending = asyncio.create_task(self._send(session, context))
            receiving = asyncio.create_task(self._receive(live, session, context))
            tasks += sending, receiving, asyncio.create_task(self._tell_draining(live, session))
            # A slow reader gets an error and does not block others.
            await asyncio.wait({sending, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            await sending
        finally:
            live.leave(session)
            await end(*tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # retrieve it, or asyncio logs it: the first was raised

    async def _send(self, session: Session, context: Context) -> None:
        async with aclosing(session.responses()) as responses:
            async for response in responses:
                await context.write(response)

    async def _receive(self, live: Live, session: Session, context: Context) -> None:
        """Handle requests until the consumer leaves or closes its side."""
        try:
            while (request := await context.read()) is not aio.EOF:
                await live.ready()
                if not await self._handle(live, session, request):
                    return
            live.leave(session)
            session.finish()
        except Exception as error:
            live.leave(session)
            session.finish(error)

    async def _tell_draining(self, live: Live, session: Session) -> None:
        await self._drain.wait()
        session.put_first(pb.ConsumeResponse(draining=common_pb2.Draining()))
        await self._drain.wait_over()
        error = Draining("the service is shutting down", retry_after_s=0.1)
        live.say_goodbye(session, error)

    async def _handle(self, live: Live, session: Session, request: pb.ConsumeRequest) -> bool:
        """Handle a request. Returns False after the last one."""
        if request.HasField("breaker"):
            session.take_breaker(parsing.breaker(request.breaker))
        kind = request.WhichOneof("request")
        if kind not in _UNANSWERED:
            session.count_request()
        match kind:
            case "permit":
                session.permit(parsing.permits(request.permit.messages, session.permits))
            case "leave":
                live.say_goodbye(session)
                return False
            case "seek":
                await self._seek(live, session, request.seek)
            case "subscribe" | None:
                raise NotSubscribed("empty request, or a second subscribe", field="request")
            case _:
                _settle(live, session, kind, request)
        return True

    async def _seek(self, live: Live, session: Session, request: pb.Seek) -> None:
        try:
            mark_delete = await self._dispatcher.resolve(
                live.topic, read_start(request.start, InvalidStart)
            )
        except InvalidStart as error:
            session.refused(request.request_id, in_stream(error))
            return
        await live.reset(mark_delete)
        session.put(settled_response(request.request_id))

    # ---- administration

    async def CreateSubscription(
        self, request: pb.CreateSubscriptionRequest, context: Context
    ) -> pb.CreateSubscriptionResponse:
        topic, name = parsing.names(request)
        cursor, created = await self._dispatcher.create(
            topic, name, read_start(request.start, InvalidStart), dict(request.properties)
        )
        return pb.CreateSubscriptionResponse(
            subscription=_to_subscription(topic, cursor), created=created
        )

    async def GetSubscription(
        self, request: pb.GetSubscriptionRequest, context: Context
    ) -> pb.GetSubscriptionResponse:
        topic, name = parsing.names(request)
        cursor = await self._dispatcher.get(topic, name)
        return pb.GetSubscriptionResponse(subscription=_to_subscription(topic, cursor))

    async def ListSubscriptions(
        self, request: pb.ListSubscriptionsRequest, context: Context
    ) -> pb.ListSubscriptionsResponse:
        topic = read_topic(request.topic)
        limit = read_limit(request.page_size, parsing.PAGE_DEFAULT, parsing.PAGE_MAX)
        cursors, token = await self._dispatcher.page(topic, limit=limit, token=request.page_token)
        return pb.ListSubscriptionsResponse(
            subscriptions=[_to_subscription(topic, cursor) for cursor in cursors],
            next_page_token=token,
        )

    async def DeleteSubscription(
        self, request: pb.DeleteSubscriptionRequest, context: Context
    ) -> pb.DeleteSubscriptionResponse:
        topic, name = parsing.names(request)
        await self._dispatcher.delete(topic, name, force=request.force)
        return pb.DeleteSubscriptionResponse()

    async def ResetSubscription(
        self, request: pb.ResetSubscriptionRequest, context: Context
    ) -> pb.ResetSubscriptionResponse:
        topic, name = parsing.names(request)
        cursor = await self._dispatcher.reset(topic, name, read_start(request.start, InvalidStart))
        return pb.ResetSubscriptionResponse(subscription=_to_subscription(topic, cursor))

    async def UpdateSubscriptionProperties(
        self, request: pb.UpdateSubscriptionPropertiesRequest, context: Context
    ) -> pb.UpdateSubscriptionPropertiesResponse:
        topic, name = parsing.names(request)
        cursor = await self._dispatcher.set_properties(
            topic, name, dict(request.put), list(request.remove), caller=caller_of(context)
        )
        return pb.UpdateSubscriptionPropertiesResponse(subscription=_to_subscription(topic, cursor))

    async def ReleaseKey(
        self, request: pb.ReleaseKeyRequest, context: Context
    ) -> pb.ReleaseKeyResponse:
        topic, name = parsing.names(request)
        await self._dispatcher.release_key(topic, name, request.key)
        return pb.ReleaseKeyResponse()

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Context
    ) -> pb.ListDeadLettersResponse:
        topic, name = parsing.names(request)
        live, where, shown, last = await self._dispatcher.dead_letters(
            topic,
            name,
            parsing.dead_letter_topic(request),
            key=request.key if request.HasField("key") else None,
            after=read_position_token(request.page_token),
            limit=read_limit(request.page_size, parsing.PAGE_DEFAULT, parsing.PAGE_MAX),
        )
        return pb.ListDeadLettersResponse(
            letters=[lettering.letter(live, where, *each) for each in shown],
            next_page_token=to_position_token(last),
            dead_letter_topic=str(where),
        )

    async def GetDeadLetter(
        self, request: pb.GetDeadLetterRequest, context: Context
    ) -> pb.GetDeadLetterResponse:
        topic, name = parsing.names(request)
        position = read_position("position", request.position, InvalidPosition)
        live, where, entry, first = await self._dispatcher.dead_letter(
            topic, name, parsing.dead_letter_topic(request), position
        )
        return pb.GetDeadLetterResponse(
            letter=lettering.letter(live, where, entry, first),
            entry=entry,
            dead_letter_topic=str(where),
        )

    async def RedriveDeadLetters(
        self, request: pb.RedriveDeadLettersRequest, context: Context
    ) -> pb.RedriveDeadLettersResponse:
        topic, name = parsing.names(request)
        redrive, repeated = await self._dispatcher.redrive(
            topic,
            name,
            parsing.dead_letter_topic(request),
            parsing.letters(request, InvalidRedrive),
            parsing.request_id(request, InvalidRedrive),
            is_trial=request.dry_run,
            caller=caller_of(context),
        )
        return pb.RedriveDeadLettersResponse(
            redrive=redrive.number, letters=redrive.letters, repeated=repeated
        )

    async def StartRedrive(
        self, request: pb.StartRedriveRequest, context: Context
    ) -> pb.StartRedriveResponse:
        topic, name = parsing.names(request)
        live, record, repeated = await self._dispatcher.start_redrive(
            topic,
            name,
            redriving.wanted(request),
            redriving.letters_s(request),
            parsing.request_id(request, InvalidRedrive),
            caller_of(context),
        )
        return pb.StartRedriveResponse(redrive=redriving.redrive(live, record), repeated=repeated)

    async def EstimateRedrive(
        self, request: pb.EstimateRedriveRequest, context: Context
    ) -> pb.EstimateRedriveResponse:
        topic, name = parsing.names(request)
        found = await self._dispatcher.estimate_redrive(
            topic,
            name,
            redriving.wanted(request),
            entries_max=read_limit(
                request.max_entries,
                redriving.ESTIMATED_DEFAULT,
                redriving.ESTIMATED_MAX,
                "max_entries",
            ),
            seconds_max=parsing.analysis_s(request),
        )
        return redriving.estimated(found)

    async def GetRedrive(
        self, request: pb.GetRedriveRequest, context: Context
    ) -> pb.GetRedriveResponse:
        live = await self._dispatcher.live(*parsing.names(request))
        return pb.GetRedriveResponse(redrive=redriving.find(live, request.number))

    async def ListRedrives(
        self, request: pb.ListRedrivesRequest, context: Context
    ) -> pb.ListRedrivesResponse:
        live = await self._dispatcher.live(*parsing.names(request))
        return pb.ListRedrivesResponse(redrives=redriving.redrives(live))

    async def StopRedrive(
        self, request: pb.StopRedriveRequest, context: Context
    ) -> pb.StopRedriveResponse:
        live = await self._dispatcher.live(*parsing.names(request))
        if request.number in live.redriving.records:
            await live.stop_redrive(request.number)
        return pb.StopRedriveResponse(redrive=redriving.find(live, request.number))

    async def DiscardDeadLetters(
        self, request: pb.DiscardDeadLettersRequest, context: Context
    ) -> pb.DiscardDeadLettersResponse:
        topic, name = parsing.names(request)
        made, repeated = await self._dispatcher.discard(
            topic,
            name,
            parsing.dead_letter_topic(request),
            parsing.letters(request, InvalidDiscard),
            parsing.request_id(request, InvalidDiscard),
            reason=parsing.discard_reason(request),
            caller=caller_of(context),
        )
        return pb.DiscardDeadLettersResponse(
            operation=made.number, letters=made.size, repeated=repeated
        )

    async def MendDeadLetter(
        self, request: pb.MendDeadLetterRequest, context: Context
    ) -> pb.MendDeadLetterResponse:
        topic, name = parsing.names(request)
        made, repeated = await self._dispatcher.mend(
            topic,
            name,
            parsing.dead_letter_topic(request) or default_topic(topic, name),
            read_position("position", request.position, InvalidMend),
            parsing.change(request),
            parsing.request_id(request, InvalidMend),
            caller=caller_of(context),
        )
        return pb.MendDeadLetterResponse(
            operation=made.number, letter=to_position(made.successor), repeated=repeated
        )

    async def ListLetterOperations(
        self, request: pb.ListLetterOperationsRequest, context: Context
    ) -> pb.ListLetterOperationsResponse:
        live = await self._dispatcher.live(*parsing.names(request))
        latest = reversed(live.amending.latest)
        return pb.ListLetterOperationsResponse(operations=map(lettering.operation, latest))

    async def SetFilters(
        self, request: pb.SetFiltersRequest, context: Context
    ) -> pb.SetFiltersResponse:
        topic, name = parsing.names(request)
        chains = await self._dispatcher.set_filters(
            topic,
            name,
            parsing.chain(request),
            read_start(request.start, InvalidStart) if request.HasField("start") else None,
            is_shadow=request.mode == pb.FILTER_MODE_SHADOW,
            caller=caller_of(context),
        )
        return pb.SetFiltersResponse(filters=reporting.filters(chains))

    async def GetFilters(
        self, request: pb.GetFiltersRequest, context: Context
    ) -> pb.GetFiltersResponse:
        topic, name = parsing.names(request)
        chains = await self._dispatcher.filters(topic, name)
        return pb.GetFiltersResponse(filters=reporting.filters(chains))

    async def AnalyzeBacklog(
        self, request: pb.AnalyzeBacklogRequest, context: Context
    ) -> pb.AnalyzeBacklogResponse:
        topic, name = parsing.names(request)
        analysis = await self._dispatcher.analyze(
            topic,
            name,
            parsing.chain(request) if request.filters else None,
            entries_max=read_limit(
                request.max_entries, parsing.ANALYZED_DEFAULT, parsing.ANALYZED_MAX, "max_entries"
            ),
            seconds_max=parsing.analysis_s(request),
        )
        return reporting.analysis(analysis)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        topic, name = parsing.names(request)
        max_keys = read_limit(request.max_keys, parsing.KEYS_DEFAULT, parsing.KEYS_MAX, "max_keys")
        return reporting.report(await self._dispatcher.live(topic, name), max_keys)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        topic, name = parsing.names(request)
        subject = request.WhichOneof("subject")
        if subject is None:
            raise InvalidPosition("subject is required: set one of key, position", field="subject")
        position = read_position("position", request.position, InvalidPosition)
        live = await self._dispatcher.live(topic, name)
        if subject == "key":
            explained = explaining.explain_key(live, request.key)
        else:
            explained = await explaining.explain_position(live, position)
        explaining.tell_breakers(live, explained)
        return explained

    async def GetMessageHistory(
        self, request: pb.GetMessageHistoryRequest, context: Context
    ) -> pb.GetMessageHistoryResponse:
        topic, name = parsing.names(request)
        position = read_position("position", request.position, InvalidPosition)
        return await recalling.history(await self._dispatcher.live(topic, name), position)


_UNANSWERED: Final = frozenset({"permit", "leave", "subscribe", None})
"""Requests without a response."""


def _settle(live: Live, session: Session, kind: str, asked: pb.ConsumeRequest) -> None:
    """Settle deliveries by a request of this kind; those of another epoch are stale. The span of a
    request with a trace lasts until its response: for acknowledgements, until they are durable."""
    request = getattr(asked, kind)
    request_id = request.request_id
    span: Span = INVALID_SPAN
    if asked.HasField("trace"):
        about = {
            names.MESSAGING_SYSTEM: names.SEQGATE,
            names.MESSAGING_OPERATION_NAME: kind,
            names.MESSAGING_DESTINATION_NAME: str(live.topic),
            names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: live.name,
        }
        span = spans.begun(f"{names.SETTLE} {live.topic}", asked.trace, about)
    try:
        if kind == "acknowledge_cumulative":
            if live.options.kind is not SubscriptionType.EXCLUSIVE:
                raise CumulativeAckRefused(
                    "acknowledge_cumulative requires an EXCLUSIVE subscription",
                    field="acknowledge_cumulative",
                )
            through = parsing.through(request.settlement)
            if request.epoch != live.epoch:
                session.stale(request_id, 1, span)
            else:
                session.acknowledge_cumulative(request_id, through, span)
            return
        if kind == "acknowledge":
            acks, whole = parsing.acknowledged(request)
            if request.epoch != live.epoch:
                session.stale(request_id, len(acks) + len(whole), span)
            else:
                session.acknowledge(request_id, acks, whole, span)
            return
        items = parsing.items(kind, request)
    except DomainError as error:
        session.refused(request_id, in_stream(error))
        span.set_attribute(names.REASON, error.reason)
        span.end()
        return
    if request.epoch != live.epoch:
        session.stale(request_id, len(items), span)
    elif kind == "give_back":
        session.give_back(request_id, items, span, no_room=request.no_room)
    else:
        getattr(session, kind)(request_id, items, span)


def _subscribed(live: Live, session: Session, cursor: Cursor) -> pb.ConsumeResponse:
    return pb.ConsumeResponse(
        subscribed=pb.Subscribed(
            consumer_name=session.joining.name,
            consumer_id=session.consumer,
            epoch=live.epoch,
            ranges=reporting.ranges(live, session.consumer),
            properties=cursor.own,
        )
    )


def _to_subscription(topic: TopicName, cursor: Cursor) -> pb.Subscription:
    return pb.Subscription(
        topic=str(topic),
        name=cursor.name,
        properties=cursor.own,
        mark_delete=to_position(cursor.mark_delete),
        acknowledged_entries=cursor.acknowledged_entries,
        created=timestamp(cursor.created_ms),
        owner=cursor.owner,
    )
