"""A consumer's stream: what it asks of the subscription's machine, and what is on its way to it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from google.rpc import status_pb2
from opentelemetry.trace import INVALID_SPAN, Span

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.telemetry import names
from seqgate.types import TopicName
from services.dispatcher.core.effects import Delivery, Options, Outcome, Revoke
from services.dispatcher.core.selectors import Placement, SlotRange
from services.dispatcher.core.subscription import Ack, Nack
from services.dispatcher.errors import SlowConsumer, TooManyUnanswered
from services.dispatcher.shell.answers import settled_response
from services.dispatcher.shell.performing import Performing
from services.dispatcher.shell.sending import RESPONSE_ENTRIES_MAX, Sending

OUTBOX_ITEMS_MAX: Final = 100_000
"""How many messages wait for a consumer that does not read, before it is cut off. Deliveries are
bounded by its permits; this bounds the rest."""

OUTBOX_BYTES_MAX: Final = 8 * 1024 * 1024
"""How many bytes of other messages than deliveries wait for it, before it is cut off."""

UNANSWERED_MAX: Final = 1_000
"""How many requests of a consumer may be unanswered, before it is cut off."""


class Joining(NamedTuple):
    """How somebody subscribes."""

    name: str
    options: Options
    placement: Placement
    dead_letter_topic: TopicName
    ranges: Sequence[SlotRange]
    weight: int
    ack_timeout_ms: int


class Session:
    """See the module."""

    def __init__(
        self,
        consumer: int,
        joining: Joining,
        performing: Performing,
        sending: Sending,
        leave: Callable[["Session"], None],
    ) -> None:
        """`leave` is called when the consumer is cut off."""
        self.consumer = consumer
        self.joining = joining
        self.connected_ms = performing.now_ms()
        self._performing = performing
        self._sending = sending
        self._leave = leave
        self._share = sending.room.share(self._cut_off)
        self._outbox: deque[Delivery | pb.ConsumeResponse] = deque()
        self._outbox_bytes = 0
        self._news = asyncio.Event()
        self._failed = asyncio.Event()
        self._error: Exception | None = None
        self._over = False
        self._unanswered = 0

    @property
    def permits(self) -> int:
        """How many more messages it takes now."""
        known = self._performing.machine.consumers.get(self.consumer)
        return 0 if known is None else known.permits

    # ---- what it is sent

    def put(self, *items: Delivery | pb.ConsumeResponse) -> None:
        """Send these, after all that were put before."""
        if self._over:
            return
        self._outbox.extend(items)
        self._outbox_bytes += sum(map(_size_bytes, items))
        self._news.set()
        is_long = len(self._outbox) > OUTBOX_ITEMS_MAX + self._permitted()
        if is_long or self._outbox_bytes > OUTBOX_BYTES_MAX:
            self._cut_off()

    def _cut_off(self) -> None:
        """The consumer does not read."""
        error = SlowConsumer("the consumer does not read what it is sent", retry_after_s=0.5)
        self.finish(error)
        # Not at once: the machine's effects are being carried out.
        asyncio.get_running_loop().call_soon(self._leave, self)

    def forget_deliveries(self) -> None:
        """Deliveries that are not sent yet are not sent."""
        self._outbox = deque(each for each in self._outbox if not isinstance(each, Delivery))

    def finish(self, error: Exception | None = None, *, at_once: bool = True) -> None:
        """End the stream: at once with an error, else after what was put."""
        if self._over:
            return
        self._over = True
        self._error = error
        self._news.set()
        if error is not None and at_once:
            self._failed.set()

    async def failure(self) -> Exception:
        """Why the stream ends at once; waits until it does."""
        await self._failed.wait()
        assert self._error is not None
        return self._error

    async def responses(self) -> AsyncGenerator[pb.ConsumeResponse, None]:
        """What is sent.

        Raises:
            DomainError: why the stream ends.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outbox:
                first = self._outbox[0]
                if isinstance(first, Delivery):
                    some = self._sending.filled(self.consumer, self._deliveries(), self._share)
                    async with aclosing(some):
                        async for response in some:
                            yield response
                else:
                    self._outbox.popleft()
                    self._outbox_bytes -= _size_bytes(first)
                    self._unanswered -= first.HasField("settled")
                    yield first
            if self._over:
                if self._error is not None and not self._failed.is_set():
                    raise self._error
                return

    def _deliveries(self) -> list[Delivery]:
        some: list[Delivery] = []
        while self._outbox and len(some) < RESPONSE_ENTRIES_MAX:
            first = self._outbox[0]
            if not isinstance(first, Delivery):
                break
            some.append(first)
            self._outbox.popleft()
        return some

    def _permitted(self) -> int:
        """How many deliveries the consumer may have before it."""
        known = self._performing.machine.consumers.get(self.consumer)
        return 0 if known is None else max(0, known.permits) + len(known.flights)

    # ---- what it asks; the spans are of that, and end with the answer

    def count_request(self) -> None:
        """A request came that is answered.

        Raises:
            TooManyUnanswered: too many were not.
        """
        if self._unanswered >= UNANSWERED_MAX:
            raise TooManyUnanswered(
                "too many requests are unanswered", unanswered_max=UNANSWERED_MAX
            )
        self._unanswered += 1

    def permit(self, messages: int) -> None:
        """It takes more."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            performing.apply(performing.machine.permit(self.consumer, messages, now_ms))

    def acknowledge(self, request_id: int, items: Iterable[Ack], span: Span = INVALID_SPAN) -> None:
        """It is done with deliveries."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcomes, number = performing.machine.acknowledge(self.consumer, items, now_ms)
            self._answer(request_id, outcomes, span, number)
            performing.apply(effects)

    def acknowledge_through(self, request_id: int, item: Ack, span: Span = INVALID_SPAN) -> None:
        """It is done with a delivery and everything before it."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcome, number = performing.machine.acknowledge_through(
                self.consumer, item, now_ms
            )
            self._answer(request_id, [outcome], span, number)
            performing.apply(effects)

    def refuse(self, request_id: int, items: Iterable[Nack], span: Span = INVALID_SPAN) -> None:
        """It failed to process deliveries."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcomes = performing.machine.refuse(self.consumer, items, now_ms)
            performing.apply(effects)
            self._answer(request_id, outcomes, span)

    def give_back(
        self,
        request_id: int,
        deliveries: Iterable[int],
        span: Span = INVALID_SPAN,
        *,
        no_room: bool = False,
    ) -> None:
        """It returns deliveries unprocessed. It hears what is taken back with them before the
        answer, and gets what comes again after it: what comes before would go back as well."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcomes = performing.machine.give_back(
                self.consumer, deliveries, now_ms, no_room=no_room
            )
            taken_back = [each for each in effects if isinstance(each, Revoke)]
            performing.apply(taken_back)
            self._answer(request_id, outcomes, span)
            performing.apply(each for each in effects if not isinstance(each, Revoke))

    def renew(self, request_id: int, deliveries: Iterable[int], span: Span = INVALID_SPAN) -> None:
        """It needs more time."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            outcomes = performing.machine.renew(self.consumer, deliveries, now_ms)
            self._answer(request_id, outcomes, span)

    def stale(self, request_id: int, count: int, span: Span = INVALID_SPAN) -> None:
        """It uses tokens of another epoch."""
        self._answer(request_id, [Outcome.STALE] * count, span)

    def refused(self, request_id: int, status: status_pb2.Status) -> None:
        """A request as a whole is refused."""
        self.put(settled_response(request_id, error=status))

    def _answer(
        self, request_id: int, outcomes: Sequence[Outcome], span: Span, number: int = 0
    ) -> None:
        if span.is_recording():
            stale = sum(outcome is not Outcome.DONE for outcome in outcomes)
            span.set_attributes({names.ENTRIES: len(outcomes), names.STALE: stale})
        self._performing.answers.give(
            self, settled_response(request_id, outcomes), number, span=span
        )


def _size_bytes(item: Delivery | pb.ConsumeResponse) -> int:
    """What a message takes of the budget: deliveries are bounded by permits."""
    return 0 if isinstance(item, Delivery) else item.ByteSize()
