"""The wire of the dispatcher service: check, translate, call, translate back."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.api.entry.v1 import entry_pb2
from seqgate.types import (
    SEQUENCE_ID_MAX,
    InvalidNameError,
    Position,
    TopicName,
    check_cursor_name,
)
from services.dispatcher import reporting
from services.dispatcher.config import DispatcherConfig
from services.dispatcher.core.effects import AfterDeadLetter, Kind, Options
from services.dispatcher.core.selectors import SlotRange
from services.dispatcher.core.subscription import Item, Refused
from services.dispatcher.dead import INTERNAL, default_topic
from services.dispatcher.live import Joining, Live, Session
from services.dispatcher.placement import Placement
from services.dispatcher.ports import Cursor
from services.dispatcher.refusals import (
    CumulativeAckRefused,
    InvalidConsumer,
    InvalidOptions,
    InvalidPermits,
    InvalidPosition,
    InvalidSettlement,
    InvalidStart,
    InvalidSubscriptionName,
    NotSubscribed,
)
from services.dispatcher.service import (
    After,
    At,
    AtTime,
    Dispatcher,
    Earliest,
    Latest,
    Start,
)
from services.errors import DomainError, Draining, InvalidPage, InvalidTopicName
from services.runtime.drain import Drain
from services.runtime.status import status_of
from services.runtime.tasks import end

ITEMS_MAX: Final = 10_000
"""How many deliveries one request may name."""

PERMIT_MAX: Final = 1_000_000
PERMITS_MAX: Final = 10_000_000
"""How many messages one request may permit, and how many permits a consumer may have."""

DELAY_MAX_MS: Final = 86_400_000
"""The longest delay, time-out or deadline, in milliseconds: a day."""

ACK_TIMEOUT_MIN_MS: Final = 100
"""The shortest time-out of a delivery, in milliseconds."""

WEIGHT_MAX: Final = 100
"""The largest weight of a consumer."""

RANGES_MAX: Final = 1_000
"""How many ranges a consumer may take."""

UNACKED_MAX: Final = 1_000_000
"""The highest limit of unacknowledged messages."""

IN_FLIGHT_MAX: Final = 10_000
"""The highest limit of a key's entries in flight."""

REDELIVERIES_MAX: Final = 1_000
"""The highest number of redeliveries."""

PAGE_DEFAULT: Final = 100
PAGE_MAX: Final = 1_000
"""How many subscriptions a page holds, unless asked otherwise, and at most."""

KEYS_DEFAULT: Final = 20
KEYS_MAX: Final = 1_000
"""How many keys a report lists, unless asked otherwise, and at most."""

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
            raise NotSubscribed("a stream starts with Subscribe", field="subscribe")
        subscribe = first.subscribe
        topic, name = _topic(subscribe.topic), _name(subscribe.subscription)
        joining = self._joining(topic, name, subscribe)
        create_at = _start(subscribe.create_at) if subscribe.HasField("create_at") else None
        session = await self._dispatcher.subscribe(
            topic, name, joining, create_at, dict(subscribe.properties)
        )
        failure = asyncio.create_task(session.failure())
        tasks = [
            failure,
            asyncio.create_task(self._receive(session, context)),
            asyncio.create_task(self._tell_draining(session)),
        ]
        try:
            cursor = await self._dispatcher.get(topic, name)
            sending = asyncio.create_task(self._send(session, cursor, context))
            tasks.append(sending)
            # Who does not read what it is sent is told so, and holds nobody up.
            await asyncio.wait({sending, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            await sending
        finally:
            session.live.leave(session)
            await end(*tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # the first is enough

    async def _send(self, session: Session, cursor: Cursor, context: Context) -> None:
        await context.write(_subscribed(session, cursor))
        async for response in session.responses():
            await context.write(response)

    async def _receive(self, session: Session, context: Context) -> None:
        """Take what the consumer says, until it says goodbye or closes its side."""
        try:
            while (request := await context.read()) is not aio.EOF:
                await session.live.ready()
                if not await self._handle(session, request):
                    return
            session.live.leave(session)
            session.finish()
        except Exception as error:
            session.live.leave(session)
            session.finish(error)

    async def _tell_draining(self, session: Session) -> None:
        await self._drain.wait()
        session.put(pb.ConsumeResponse(draining=pb.Draining()))
        await self._drain.wait_over()
        error = Draining("the service is shutting down", retry_after_s=0.1)
        session.live.say_goodbye(session, error)

    async def _handle(self, session: Session, request: pb.ConsumeRequest) -> bool:
        """Do what a consumer asks; False: nothing more is to come."""
        live = session.live
        kind = request.WhichOneof("request")
        if kind not in _UNANSWERED:
            session.asked()
        match kind:
            case "permit":
                live.permit(session, _permits(live, session, request.permit.messages))
            case "leave":
                live.say_goodbye(session)
                return False
            case "seek":
                await self._seek(session, request.seek)
            case "subscribe" | None:
                raise NotSubscribed(
                    "a stream has one Subscribe, and no empty request", field="request"
                )
            case _:
                self._settle(session, kind, getattr(request, kind))
        return True

    def _settle(self, session: Session, kind: str, request: Any) -> None:
        live = session.live
        try:
            if kind == "acknowledge_through":
                if live.options.kind is not Kind.EXCLUSIVE:
                    raise CumulativeAckRefused(
                        "everything before a message is acknowledged only where there is one "
                        "consumer",
                        field="acknowledge_through",
                    )
                item = _through(request.settlement)
                if request.epoch != live.epoch:
                    live.stale(session, request.request_id, 1)
                else:
                    live.acknowledge_through(session, request.request_id, item)
                return
            items = _items(kind, request)
        except DomainError as error:
            live.refused(session, request.request_id, status_of(error))
            return
        if request.epoch != live.epoch:
            live.stale(session, request.request_id, len(items))
        else:
            getattr(live, kind)(session, request.request_id, items)

    async def _seek(self, session: Session, request: pb.Seek) -> None:
        live = session.live
        try:
            mark_delete = await self._dispatcher.resolve(live.topic, _start(request.start))
        except InvalidStart as error:
            live.refused(session, request.request_id, status_of(error))
            return
        await live.reset(mark_delete)
        settled = pb.Settled(request_id=request.request_id)
        session.put(pb.ConsumeResponse(settled=settled))

    # ---- administration

    async def CreateSubscription(
        self, request: pb.CreateSubscriptionRequest, context: Context
    ) -> pb.CreateSubscriptionResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        cursor, created = await self._dispatcher.create(
            topic, name, _start(request.start), dict(request.properties)
        )
        return pb.CreateSubscriptionResponse(
            subscription=_to_subscription(topic, cursor), created=created
        )

    async def GetSubscription(
        self, request: pb.GetSubscriptionRequest, context: Context
    ) -> pb.GetSubscriptionResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        cursor = await self._dispatcher.get(topic, name)
        return pb.GetSubscriptionResponse(subscription=_to_subscription(topic, cursor))

    async def ListSubscriptions(
        self, request: pb.ListSubscriptionsRequest, context: Context
    ) -> pb.ListSubscriptionsResponse:
        topic = _topic(request.topic)
        limit = _limited(request.page_size, PAGE_DEFAULT, PAGE_MAX)
        cursors, token = await self._dispatcher.page(topic, limit=limit, token=request.page_token)
        return pb.ListSubscriptionsResponse(
            subscriptions=[_to_subscription(topic, cursor) for cursor in cursors],
            next_page_token=token,
        )

    async def DeleteSubscription(
        self, request: pb.DeleteSubscriptionRequest, context: Context
    ) -> pb.DeleteSubscriptionResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        await self._dispatcher.delete(topic, name, force=request.force)
        return pb.DeleteSubscriptionResponse()

    async def ResetSubscription(
        self, request: pb.ResetSubscriptionRequest, context: Context
    ) -> pb.ResetSubscriptionResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        cursor = await self._dispatcher.reset(topic, name, _start(request.start))
        return pb.ResetSubscriptionResponse(subscription=_to_subscription(topic, cursor))

    async def UpdateSubscriptionProperties(
        self, request: pb.UpdateSubscriptionPropertiesRequest, context: Context
    ) -> pb.UpdateSubscriptionPropertiesResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        cursor = await self._dispatcher.set_properties(
            topic, name, dict(request.put), list(request.remove)
        )
        return pb.UpdateSubscriptionPropertiesResponse(subscription=_to_subscription(topic, cursor))

    async def ReleaseKey(
        self, request: pb.ReleaseKeyRequest, context: Context
    ) -> pb.ReleaseKeyResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        await self._dispatcher.release_key(topic, name, request.key)
        return pb.ReleaseKeyResponse()

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        keys_max = _limited(request.keys_max, KEYS_DEFAULT, KEYS_MAX, "keys_max")
        return reporting.report(await self._dispatcher.live(topic, name), keys_max)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        topic, name = _topic(request.topic), _name(request.subscription)
        subject = request.WhichOneof("subject")
        if subject is None:
            raise InvalidPosition("a key or a position is required", field="subject")
        position = _position("position", request.position, InvalidPosition)
        live = await self._dispatcher.live(topic, name)
        if subject == "key":
            return reporting.explain_key(live, request.key)
        return await reporting.explain_position(live, position)

    def _joining(self, topic: TopicName, name: str, subscribe: pb.Subscribe) -> Joining:
        given = subscribe.options
        consumer_name = subscribe.consumer_name or f"consumer-{uuid.uuid4().hex[:12]}"
        try:
            check_cursor_name(consumer_name)
        except InvalidNameError as error:
            raise InvalidConsumer(
                "a consumer's name is 1 to 255 bytes of UTF-8, without control characters",
                field="consumer_name",
            ) from error
        timeout_ms = subscribe.ack_timeout_ms
        if timeout_ms and not ACK_TIMEOUT_MIN_MS <= timeout_ms <= DELAY_MAX_MS:
            raise InvalidConsumer(
                f"a time-out is {ACK_TIMEOUT_MIN_MS} to {DELAY_MAX_MS} ms", field="ack_timeout_ms"
            )
        if subscribe.weight > WEIGHT_MAX:
            raise InvalidConsumer(f"a weight is 1 to {WEIGHT_MAX}", field="weight")
        if len(subscribe.ranges) > RANGES_MAX:
            raise InvalidConsumer(f"at most {RANGES_MAX} ranges", field="ranges")
        return Joining(
            consumer_name,
            self._options(given),
            _PLACEMENTS[given.placement],
            _dead_letter_topic(topic, name, given.dead_letter_topic),
            [SlotRange(each.first, each.last) for each in subscribe.ranges],
            subscribe.weight or 1,
            timeout_ms,
        )

    def _options(self, given: pb.SubscriptionOptions) -> Options:
        if given.type not in _KINDS:
            raise InvalidOptions("a type is required", field="options.type")
        if given.placement not in _PLACEMENTS or given.after_dead_letter not in _AFTER:
            raise InvalidOptions("the placement, or after_dead_letter, is unknown", field="options")
        defaults = Options()
        limits = {
            "max_in_flight_per_key": IN_FLIGHT_MAX,
            "max_unacked_per_consumer": UNACKED_MAX,
            "max_unacked": UNACKED_MAX,
            "max_redeliveries": REDELIVERIES_MAX,
            "drain_deadline_ms": DELAY_MAX_MS,
        }
        for field, most in limits.items():
            if getattr(given, field) > most:
                raise InvalidOptions(f"{field} is at most {most}", field=f"options.{field}")
        return Options(
            kind=_KINDS[given.type],
            in_order=not given.allow_out_of_order_delivery,
            max_in_flight_per_key=given.max_in_flight_per_key,
            consumer_unacked_max=given.max_unacked_per_consumer
            if given.HasField("max_unacked_per_consumer")
            else defaults.consumer_unacked_max,
            unacked_max=given.max_unacked
            if given.HasField("max_unacked")
            else defaults.unacked_max,
            key_parked_max=self._config.key_parked_max,
            consumer_parked_max=self._config.consumer_parked_max,
            classic_join=given.classic_join,
            delay_holds_key=given.delay_holds_key,
            drain_deadline_ms=given.drain_deadline_ms,
            redeliveries_max=given.max_redeliveries if given.HasField("max_redeliveries") else None,
            after_dead_letter=_AFTER[given.after_dead_letter],
        )


_UNANSWERED: Final = frozenset({"permit", "leave", "subscribe", None})
"""Requests that nothing is said of."""

_KINDS: Final = {
    pb.SUBSCRIPTION_TYPE_KEY_SHARED: Kind.KEY_SHARED,
    pb.SUBSCRIPTION_TYPE_SHARED: Kind.SHARED,
    pb.SUBSCRIPTION_TYPE_EXCLUSIVE: Kind.EXCLUSIVE,
}
_PLACEMENTS: Final = {
    pb.PLACEMENT_UNSPECIFIED: Placement.CONSISTENT_HASHING,
    pb.PLACEMENT_CONSISTENT_HASHING: Placement.CONSISTENT_HASHING,
    pb.PLACEMENT_AUTO_SPLIT: Placement.AUTO_SPLIT,
    pb.PLACEMENT_STICKY: Placement.STICKY,
}
_AFTER: Final = {
    pb.AFTER_DEAD_LETTER_UNSPECIFIED: AfterDeadLetter.CONTINUE,
    pb.AFTER_DEAD_LETTER_CONTINUE: AfterDeadLetter.CONTINUE,
    pb.AFTER_DEAD_LETTER_HOLD: AfterDeadLetter.HOLD,
    pb.AFTER_DEAD_LETTER_TAIL: AfterDeadLetter.TAIL,
}


def _topic(text: str) -> TopicName:
    try:
        return TopicName.parse(text)
    except InvalidNameError as error:
        raise InvalidTopicName(str(error), field="topic") from error


def _name(text: str) -> str:
    try:
        check_cursor_name(text)
    except InvalidNameError as error:
        raise InvalidSubscriptionName(str(error), field="subscription") from error
    if text.startswith(INTERNAL):
        raise InvalidSubscriptionName(
            f"names that begin with {INTERNAL} are not yours", field="subscription"
        )
    return text


def _dead_letter_topic(topic: TopicName, name: str, given: str) -> TopicName:
    try:
        return TopicName.parse(given) if given else default_topic(topic, name)
    except InvalidNameError as error:
        raise InvalidOptions(str(error), field="options.dead_letter_topic") from error


def _start(start: pb.Start) -> Start:
    match start.WhichOneof("start"):
        case "earliest":
            return Earliest()
        case "latest":
            return Latest()
        case "at":
            return At(_position("start.at", start.at))
        case "after":
            return After(_position("start.after", start.after))
        case "time":
            if start.time > SEQUENCE_ID_MAX:
                raise InvalidStart("a time is at most 2^63 - 1", field="start.time")
            return AtTime(start.time)
    raise InvalidStart("a start is required", field="start")


def _position(
    field: str,
    wire: entry_pb2.Position,
    refusal: type[InvalidStart | InvalidPosition] = InvalidStart,
) -> Position:
    if max(wire.ledger_id, wire.entry_id) > SEQUENCE_ID_MAX:
        raise refusal("ids are at most 2^63 - 1", field=field)
    return Position(wire.ledger_id, wire.entry_id)


def _permits(live: Live, session: Session, messages: int) -> int:
    known = live.machine.consumers.get(session.consumer)
    have = 0 if known is None else known.permits
    if not 1 <= messages <= PERMIT_MAX or have + messages > PERMITS_MAX:
        raise InvalidPermits(
            f"permits are granted by 1 to {PERMIT_MAX}, and a consumer has at most {PERMITS_MAX}",
            field="messages",
        )
    return messages


def _items(kind: str, request: Any) -> Sequence[Any]:
    match kind:
        case "acknowledge":
            return [_item(each) for each in _counted(request.settlements)]
        case "refuse":
            return [_refusal(each) for each in _counted(request.refusals)]
    return list(_counted(request.deliveries))


def _counted(items: Any) -> Iterable[Any]:
    if not 1 <= len(items) <= ITEMS_MAX:
        raise InvalidSettlement(f"a request names 1 to {ITEMS_MAX} deliveries", field="request")
    return items  # type: ignore[no-any-return]


def _item(settlement: pb.Settlement) -> Item:
    bits = 0
    for index in settlement.indexes:
        if index >= ITEMS_MAX:
            raise InvalidSettlement(f"an index is below {ITEMS_MAX}", field="indexes")
        bits |= 1 << index
    return Item(settlement.delivery, bits)


def _through(settlement: pb.Settlement) -> Item:
    """The messages of a batch up to the last one that is meant."""
    item = _item(settlement)
    return Item(item.delivery, (1 << item.messages.bit_length()) - 1)


def _refusal(refusal: pb.Refusal) -> Refused:
    if refusal.delay_ms > DELAY_MAX_MS:
        raise InvalidSettlement(f"a delay is at most {DELAY_MAX_MS} ms", field="delay_ms")
    return Refused(refusal.delivery, refusal.delay_ms if refusal.HasField("delay_ms") else None)


def _limited(asked: int, default: int, most: int, field: str = "page_size") -> int:
    if not 0 <= asked <= most:
        raise InvalidPage(f"0 to {most}", field=field)
    return asked or default


def _subscribed(session: Session, cursor: Cursor) -> pb.ConsumeResponse:
    live = session.live
    return pb.ConsumeResponse(
        subscribed=pb.Subscribed(
            consumer_name=session.joining.name,
            consumer_id=session.consumer,
            epoch=live.epoch,
            ranges=reporting.ranges(live, session.consumer),
            properties=_own(cursor),
        )
    )


def _to_subscription(topic: TopicName, cursor: Cursor) -> pb.Subscription:
    created = Timestamp()
    created.FromMilliseconds(cursor.created_ms)
    mark_delete = cursor.mark_delete
    return pb.Subscription(
        topic=str(topic),
        name=cursor.name,
        properties=_own(cursor),
        mark_delete=None
        if mark_delete is None
        else entry_pb2.Position(ledger_id=mark_delete.ledger_id, entry_id=mark_delete.entry_id),
        acknowledged_entries=cursor.acknowledged_entries,
        created=created,
        owner=cursor.owner,
    )


def _own(cursor: Cursor) -> dict[str, str]:
    """The properties that are the application's."""
    return {
        name: value for name, value in cursor.properties.items() if not name.startswith(INTERNAL)
    }
