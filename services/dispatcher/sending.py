"""From deliveries to what is sent: each with its entry, and none that counts no more."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

import structlog

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.message_id import MessageId
from seqgate.telemetry import names
from seqgate.telemetry.propagation import TRACEPARENT
from seqgate.types import Position, TopicName
from services.dispatcher.core.effects import Delivery
from services.dispatcher.core.subscription import Item
from services.dispatcher.entries import position_of
from services.dispatcher.performing import Performing
from services.dispatcher.ports import Log
from services.dispatcher.spans import MessageSpans
from services.dispatcher.work import Work

log = structlog.get_logger()

RESPONSE_ENTRIES_MAX: Final = 500
RESPONSE_BYTES_MAX: Final = 2 * 1024 * 1024
"""How many entries, and bytes of them, one message to a consumer holds; one entry always is."""


class Sending:
    """See the module."""

    def __init__(
        self, topic: TopicName, name: str, entries: Log, work: Work, performing: Performing
    ) -> None:
        self._topic = topic
        self._name = name
        self._log = entries
        self._work = work
        self._performing = performing
        named = {names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: name}
        self._spans = MessageSpans(names.DELIVER, str(topic), named)

    async def filled(
        self, consumer: int, deliveries: Sequence[Delivery]
    ) -> AsyncIterator[pb.ConsumeResponse]:
        """Deliveries with what they deliver, but for those that count no more."""
        performing = self._performing
        began_ns = time.time_ns()
        generation, cache = performing.generation, performing.cache
        fetched = await self._missing(deliveries)
        response, size_bytes = pb.Deliveries(), 0
        gone = []
        unsent = 0
        for delivery in deliveries:
            if generation != performing.generation:
                continue
            known = performing.machine.consumers.get(consumer)
            if known is None or delivery.delivery not in known.flights:
                unsent += delivery.unacked.bit_count()
                continue
            entry = cache.take(delivery.position) or fetched.get(delivery.position)
            if entry is None:
                unsent += delivery.unacked.bit_count()
                gone.append(Item(delivery.delivery))
                continue
            added = entry.ByteSize()
            if response.deliveries and size_bytes + added > RESPONSE_BYTES_MAX:
                yield pb.ConsumeResponse(deliveries=response)
                response, size_bytes = pb.Deliveries(), 0
            _fill(response.deliveries.add(), delivery, entry)
            if self._spans.is_on and TRACEPARENT in entry.metadata.properties:
                self._note(delivery, entry, began_ns)
            size_bytes += added
        if response.deliveries:
            yield pb.ConsumeResponse(deliveries=response)
        if generation != performing.generation:
            return
        machine, now_ms = performing.machine, performing.now_ms
        if gone:
            log.error("entries are gone from the log", subscription=self._name, count=len(gone))
            effects, _, _ = machine.acknowledge(consumer, gone, now_ms())
            performing.apply(effects)
        if unsent:  # the consumer counts what it receives
            performing.apply(machine.permit(consumer, unsent, now_ms()))

    def _note(self, delivery: Delivery, entry: ledger_pb2.StoredEntry, began_ns: int) -> None:
        """A message that carries a trace is on its way to a consumer."""
        about: dict[str, str | int] = {
            names.MESSAGING_MESSAGE_ID: str(MessageId(*delivery.position)),
            names.PRODUCER_NAME: entry.metadata.producer_name,
            names.SEQUENCE_ID: entry.metadata.sequence_id,
            names.ATTEMPTS: delivery.attempts,
        }
        self._spans.note(entry.metadata.properties, began_ns, about)

    async def _missing(
        self, deliveries: Sequence[Delivery]
    ) -> dict[Position, ledger_pb2.StoredEntry]:
        """The entries that are not kept; without those that the log does not have."""
        cache = self._performing.cache
        missing = sorted(each.position for each in deliveries if each.position not in cache)
        if not missing:
            return {}
        found = await self._work.repeated(lambda: self._log.fetch(self._topic, missing))
        return {position_of(each): each for each in found}


def _fill(wire: pb.Delivery, delivery: Delivery, entry: ledger_pb2.StoredEntry) -> None:
    wire.delivery = delivery.delivery
    wire.position.CopyFrom(entry.position)
    wire.metadata.CopyFrom(entry.metadata)
    wire.payload = entry.payload
    wire.append_time = entry.append_time
    wire.attempts = delivery.attempts
    if entry.aborts:
        wire.aborts = entry.aborts
    if entry.metadata.HasField("num_messages_in_batch"):
        messages = entry.metadata.num_messages_in_batch
        if delivery.unacked != (1 << messages) - 1:
            wire.acknowledged.extend(
                index for index in range(messages) if not delivery.unacked >> index & 1
            )
    if delivery.gap is not None:
        wire.gap.position.ledger_id, wire.gap.position.entry_id = delivery.gap.position
        wire.gap.attempts = delivery.gap.attempts
