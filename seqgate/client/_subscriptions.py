"""The admin client's calls about subscriptions, and why they do not deliver."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.client._arguments import flag, properties_of, text, texts
from seqgate.client._calls import PAGE, Calls
from seqgate.client._fields import (
    enum_name,
    full_name,
    key_bytes,
    optional,
    optional_position,
    stored_position,
    time_of,
)
from seqgate.client._reader import EARLIEST
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.errors import InvalidRequestError
from seqgate.message_id import MessageId
from seqgate.types import Position


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription.

    Attributes:
        mark_delete: everything up to here is acknowledged; None: nothing is.
        acknowledged_entries: how many entries beyond it are.
        owner: the address of the dispatcher instance that owns it; None: none does.
    """

    topic: str
    name: str
    mark_delete: Position | None
    acknowledged_entries: int
    properties: Mapping[str, str]
    created_at: datetime
    owner: str | None


class Reason(NamedTuple):
    """One reason why messages are not delivered.

    Attributes:
        reason: as Reason in dispatcher.proto names it.
        text: the reason as a sentence.
        consumer: the consumer concerned.
        position: the entry concerned.
        since: when it began.
        until: when it ends by itself; None: only an event ends it.
    """

    reason: str
    text: str
    consumer: str | None
    position: Position | None
    since: datetime | None
    until: datetime | None


class SubscriptionCalls:
    """The part of Admin for subscriptions."""

    _calls: Calls

    async def create_subscription(
        self,
        topic: str,
        subscription: str,
        *,
        start: Place = EARLIEST,
        properties: Mapping[str, str] | None = None,
    ) -> SubscriptionInfo:
        """Create a subscription; an existing one is left unchanged.

        Args:
            start: where it starts: for a message in a batch, with the whole batch; for a large
                message, with its first chunk.
            properties: at most 64, of at most 4 KiB each.

        Raises:
            NotFoundError: there is no such topic.
            InvalidRequestError: an argument is invalid.
        """
        request = dispatcher_pb2.CreateSubscriptionRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            start=start_to_wire(start),
            properties=properties_of("properties", properties),
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def subscription(self, topic: str, subscription: str) -> SubscriptionInfo:
        """A subscription. Raises NotFoundError."""
        request = dispatcher_pb2.GetSubscriptionRequest(
            topic=full_name(topic), subscription=text("subscription", subscription)
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def subscriptions(self, topic: str) -> AsyncIterator[SubscriptionInfo]:
        """A topic's subscriptions, sorted by name."""
        request = dispatcher_pb2.ListSubscriptionsRequest(topic=full_name(topic), page_size=PAGE)
        async for each in self._calls.pages(request):
            yield _subscription(each)

    async def reset_subscription(
        self, topic: str, subscription: str, to: Place
    ) -> SubscriptionInfo:
        """Move a subscription forwards or backwards. Acknowledgements beyond the place are
        discarded; consumers stay connected. Raises NotFoundError."""
        request = dispatcher_pb2.ResetSubscriptionRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            start=start_to_wire(to),
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def update_subscription(
        self,
        topic: str,
        subscription: str,
        *,
        put: Mapping[str, str] | None = None,
        remove: tuple[str, ...] = (),
    ) -> SubscriptionInfo:
        """Set and remove properties of a subscription. Raises NotFoundError."""
        request = dispatcher_pb2.UpdateSubscriptionPropertiesRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            put=properties_of("put", put),
            remove=texts("remove", remove),
        )
        return _subscription((await self._calls.call(request)).subscription)

    async def delete_subscription(
        self, topic: str, subscription: str, *, force: bool = False
    ) -> None:
        """Delete a subscription and its acknowledgements.

        Args:
            force: also with connected consumers, which are disconnected.

        Raises:
            NotFoundError: there is no such subscription, or no longer.
            InUseError: consumers are connected.
        """
        request = dispatcher_pb2.DeleteSubscriptionRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            force=flag("force", force),
        )
        await self._calls.call(request)

    async def release_key(self, topic: str, subscription: str, key: str | bytes) -> None:
        """Deliver a key again that a dead letter holds up."""
        request = dispatcher_pb2.ReleaseKeyRequest(
            topic=full_name(topic),
            subscription=text("subscription", subscription),
            key=key_bytes(key),
        )
        await self._calls.call(request)

    async def explain_delivery(
        self,
        topic: str,
        subscription: str,
        *,
        key: str | bytes | None = None,
        message_id: MessageId | None = None,
    ) -> list[Reason]:
        """Why a key's messages, or one message, are not delivered: the nearest reason first.

        Raises:
            InvalidRequestError: neither or both of key and message_id are given.
            NotFoundError: there is no such subscription.
        """
        if (key is None) == (message_id is None):
            raise InvalidRequestError("give either a key or a message's id")
        request = dispatcher_pb2.ExplainRequest(
            topic=full_name(topic), subscription=text("subscription", subscription)
        )
        if key is not None:
            request.key = key_bytes(key)
        if message_id is not None:
            request.position.CopyFrom(stored_position("message_id", message_id))
        return [_reason(each) for each in (await self._calls.call(request)).reasons]


def _subscription(wire: dispatcher_pb2.Subscription) -> SubscriptionInfo:
    return SubscriptionInfo(
        topic=wire.topic,
        name=wire.name,
        mark_delete=optional_position(optional(wire, "mark_delete")),
        acknowledged_entries=wire.acknowledged_entries,
        properties=dict(wire.properties),
        created_at=time_of(wire.created),
        owner=wire.owner or None,
    )


def _reason(wire: dispatcher_pb2.Explanation) -> Reason:
    since, until = (optional(wire, each) for each in ("since", "until"))
    return Reason(
        enum_name(dispatcher_pb2.Reason, wire.reason),
        wire.text,
        wire.consumer or None,
        optional_position(optional(wire, "position")),
        None if since is None else time_of(since),
        None if until is None else time_of(until),
    )
