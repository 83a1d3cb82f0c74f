"""The admin client, and its calls about the lives of messages. Its other calls have a module for
each of their subjects."""

import asyncio
from datetime import datetime

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.client._arguments import text
from seqgate.client._calls import Calls
from seqgate.client._cursors import CursorCalls
from seqgate.client._deduplication import DeduplicationCalls
from seqgate.client._fields import enum_name, full_name, optional, stored_position, time_of
from seqgate.client._letters import LetterCalls, dead_letter_of
from seqgate.client._life import MessageEvent, MessageLife, SubscriptionLife, life
from seqgate.client._loops import of_one_loop
from seqgate.client._redrives import RedriveCalls
from seqgate.client._subscriptions import SubscriptionCalls
from seqgate.client._topics import TopicCalls
from seqgate.message_id import MessageId


@of_one_loop
class Admin(
    TopicCalls, DeduplicationCalls, SubscriptionCalls, LetterCalls, RedriveCalls, CursorCalls
):
    """Manages topics, policies, subscriptions and cursors. Made by Client.admin; it needs no close.

    Topics are named as everywhere: tenant/namespace/name, or a name in public/default. Each method
    raises InvalidNameError for an invalid name, UnavailableError if the service does not answer in
    time, PermissionDeniedError without the right to administer, and ValueError if the client was
    not given the service's address.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def message_history(
        self, topic: str, subscription: str, message_id: MessageId
    ) -> SubscriptionLife:
        """What became of one message in one subscription, and what the subscription says of it now.
        Of a large message, its last chunk. Raises NotFoundError if there is no such subscription.
        """
        names = {"topic": full_name(topic), "subscription": text("subscription", subscription)}
        position = stored_position("message_id", message_id)
        found, why = await asyncio.gather(
            self._calls.call(dispatcher_pb2.GetMessageHistoryRequest(**names, position=position)),
            self.explain_delivery(topic, subscription, message_id=message_id),
        )
        since = optional(found, "complete_since")
        return SubscriptionLife(
            subscription=subscription,
            events=tuple(map(_event, found.events)),
            complete_since=None if since is None else time_of(since),
            letters=tuple(dead_letter_of(each, found.dead_letter_topic) for each in found.letters),
            more_letters=found.more_letters,
            redrive=found.redrive or None,
            reasons=tuple(why),
            audit_topic=found.audit_topic or None,
            audit_missing=found.audit_missing,
        )

    async def message_life(
        self,
        topic: str,
        *,
        message_id: MessageId | None = None,
        producer: str | None = None,
        sequence_id: int | None = None,
        trace_id: str | None = None,
        since: datetime | None = None,
    ) -> MessageLife:
        """The life of one message: deduplication's verdict, its place in the log, and what became
        of it in each subscription that the caller may see. A service that does not answer, or
        refuses, leaves its part unknown; only the ledger must answer.

        Args:
            message_id: the message's id; or
            producer, sequence_id: its identity; or
            trace_id: the id of its producer's trace, as 32 hexadecimal digits. The first message of
                the trace is looked for among 20,000 entries.
            since: the time from which the trace is looked for; by default, the latest entries are.

        Raises:
            InvalidRequestError: none of these, or several, are given, or trace_id is none.
            NotFoundError: there is no such topic, or no such message yet, or no message of the
                trace among those entries.
        """
        return await life(
            self,
            self._calls,
            full_name(topic),
            message_id=message_id,
            producer=producer,
            sequence_id=sequence_id,
            trace_id=trace_id,
            since=since,
        )


def _event(wire: dispatcher_pb2.MessageEvent) -> MessageEvent:
    until = optional(wire, "until")
    return MessageEvent(
        kind=enum_name(dispatcher_pb2.MessageEventKind, wire.kind),
        at=time_of(wire.time),
        consumer=wire.consumer or None,
        failure=enum_name(dispatcher_pb2.DeliveryFailure, wire.failure) if wire.failure else None,
        attempts=wire.attempts,
        filter=wire.filter or None,
        filter_version=wire.filter_version,
        number=wire.number,
        target=wire.target or None,
        until=None if until is None else time_of(until),
        indexes=tuple(wire.indexes),
        text=wire.text,
        caller=wire.caller or None,
    )
