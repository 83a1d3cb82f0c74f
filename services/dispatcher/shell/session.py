"""A consumer's stream: its requests to the machine, and its outgoing messages."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from google.rpc import status_pb2
from opentelemetry.trace import INVALID_SPAN, Span

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.core.effects import Delivery, Options, Outcome, Revoke
from seqgate.services.dispatcher.core.selectors import Placement, SlotRange
from seqgate.services.dispatcher.core.subscription import Ack, Nack
from seqgate.services.dispatcher.errors import SlowConsumer, TooManyUnanswered
from seqgate.services.dispatcher.shell.answers import settled_response
from seqgate.services.dispatcher.shell.performing import Performing
from seqgate.services.dispatcher.shell.sending import RESPONSE_ENTRIES_MAX, Sending
from seqgate.telemetry import names
from seqgate.types import TopicName

OUTBOX_ITEMS_MAX: Final = 100_000
"""How many messages may wait for a slow consumer before it is disconnected. Deliveries are bounded
by its permits; this bounds the rest."""

OUTBOX_BYTES_MAX: Final = 8 * 1024 * 1024
"""How many bytes of messages other than deliveries may wait before it is disconnected."""

UNANSWERED_MAX: Final = 1_000
"""How many unanswered requests a consumer may have before it is disconnected."""


class Joining(NamedTuple):
    """The parameters of a subscribe request. `delivery_runs`: the consumer understands runs."""

    name: str
    options: Options
    placement: Placement
    dead_letter_topic: TopicName
    ranges: Sequence[SlotRange]
    weight: int
    ack_timeout_ms: int
    delivery_runs: bool = False


class Breaker(NamedTuple):
    """An open circuit breaker of a consumer."""

    pause_ms: int
    opened_ms: int


class Session:
    def __init__(
        self,
        consumer: int,
        joining: Joining,
        performing: Performing,
        sending: Sending,
        leave: Callable[["Session"], None],
    ) -> None:
        """`leave` is called when the consumer is disconnected for being slow."""
        self.consumer = consumer
        self.joining = joining
        self.connected_ms = performing.now_ms()
        self.breaker: Breaker | None = None
        """Its circuit breaker while that is open."""
        self._performing = performing
        self._sending = sending
        self._leave = leave
        self._share = sending.room.share(self._cut_off)
        self._outbox: deque[Sequence[Delivery] | pb.ConsumeResponse] = deque()
        self._outbox_items = 0
        self._outbox_bytes = 0
        self._news = asyncio.Event()
        self._failed = asyncio.Event()
        self._error: Exception | None = None
        self._over = False
        self._unanswered = 0

    @property
    def permits(self) -> int:
        """How many more messages the consumer accepts now."""
        known = self._performing.machine.consumers.get(self.consumer)
        return 0 if known is None else known.permits

    # ---- outgoing messages

    def put(self, response: pb.ConsumeResponse) -> None:
        self._queue(response, 1, response.ByteSize())

    def put_first(self, response: pb.ConsumeResponse) -> None:
        """Queue a message before everything that waits."""
        before = len(self._outbox)
        self.put(response)
        self._outbox.rotate(len(self._outbox) - before)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._queue(deliveries, len(deliveries), 0)

    def _queue(
        self, item: Sequence[Delivery] | pb.ConsumeResponse, count: int, size_bytes: int
    ) -> None:
        """`size_bytes` is 0 for deliveries, which permits bound."""
        if self._over:
            return
        self._outbox.append(item)
        self._outbox_items += count
        self._outbox_bytes += size_bytes
        self._news.set()
        is_long = self._outbox_items > OUTBOX_ITEMS_MAX + self._permitted()
        if is_long or self._outbox_bytes > OUTBOX_BYTES_MAX:
            self._cut_off()

    def _cut_off(self) -> None:
        """Disconnect a consumer that does not read."""
        error = SlowConsumer("the consumer does not read its stream", retry_after_s=0.5)
        self.finish(error)
        # Later: the machine's effects are being performed.
        asyncio.get_running_loop().call_soon(self._leave, self)

    def forget_deliveries(self) -> None:
        self._outbox = deque(each for each in self._outbox if isinstance(each, pb.ConsumeResponse))
        self._outbox_items = len(self._outbox)

    def finish(self, error: Exception | None = None, *, at_once: bool = True) -> None:
        """End the stream: with an error at once, unless `at_once` is false, else after the queued
        messages."""
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
        """The messages to send. Raises why the stream ends, unless `failure` reports it."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outbox:
                first = self._outbox[0]
                if isinstance(first, pb.ConsumeResponse):
                    self._outbox.popleft()
                    self._outbox_items -= 1
                    self._outbox_bytes -= first.ByteSize()
                    self._unanswered -= first.HasField("settled")
                    yield first
                    continue
                some = self._sending.filled(
                    self.consumer,
                    self._deliveries(),
                    self._share,
                    runs=self.joining.delivery_runs,
                )
                async with aclosing(some):
                    async for response in some:
                        yield response
            if self._over:
                if self._error is not None and not self._failed.is_set():
                    raise self._error
                return

    def _deliveries(self) -> list[Delivery]:
        """Take the deliveries up to the next other message, as many as one response holds."""
        some: list[Delivery] = []
        while self._outbox and (room := RESPONSE_ENTRIES_MAX - len(some)):
            first = self._outbox[0]
            if isinstance(first, pb.ConsumeResponse):
                break
            some += first[:room]
            if len(first) > room:
                self._outbox[0] = first[room:]
            else:
                self._outbox.popleft()
        self._outbox_items -= len(some)
        return some

    def _permitted(self) -> int:
        """How many deliveries may be queued."""
        known = self._performing.machine.consumers.get(self.consumer)
        return 0 if known is None else max(0, known.permits) + len(known.flights)

    # ---- requests; a span covers a request until its answer

    def take_breaker(self, pause_ms: int | None) -> None:
        """The consumer's circuit breaker changed; None: it is closed."""
        since = self._performing.now_ms() if self.breaker is None else self.breaker.opened_ms
        self.breaker = None if pause_ms is None else Breaker(pause_ms, since)

    def count_request(self) -> None:
        """Count a request that will be answered. Raises TooManyUnanswered at the limit."""
        if self._unanswered >= UNANSWERED_MAX:
            raise TooManyUnanswered(
                f"too many unanswered requests (limit {UNANSWERED_MAX:,})",
                unanswered_max=UNANSWERED_MAX,
            )
        self._unanswered += 1

    def permit(self, messages: int) -> None:
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            performing.apply(performing.machine.permit(self.consumer, messages, now_ms))

    def acknowledge(
        self, request_id: int, items: Iterable[Ack], whole: Iterable[int], span: Span = INVALID_SPAN
    ) -> None:
        """Acknowledge deliveries in part, and others as a whole."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcomes, number = performing.machine.acknowledge(
                self.consumer, items, now_ms, whole=whole
            )
            self._answer(request_id, outcomes, span, number)
            performing.apply(effects)

    def acknowledge_cumulative(self, request_id: int, item: Ack, span: Span = INVALID_SPAN) -> None:
        """Acknowledge a delivery and everything before it."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcome, number = performing.machine.acknowledge_cumulative(
                self.consumer, item, now_ms
            )
            self._answer(request_id, [outcome], span, number)
            performing.apply(effects)

    def negative_acknowledge(
        self, request_id: int, items: Iterable[Nack], span: Span = INVALID_SPAN
    ) -> None:
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            effects, outcomes = performing.machine.negative_acknowledge(
                self.consumer, items, now_ms
            )
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
        """Return deliveries unprocessed. Revocations are sent before the answer, and redeliveries
        after it: the consumer would return redeliveries that precede the answer, too."""
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
        """Restart the time-outs of deliveries."""
        with self._performing.contained():
            performing, now_ms = self._performing, self._performing.now_ms()
            outcomes = performing.machine.renew(self.consumer, deliveries, now_ms)
            self._answer(request_id, outcomes, span)

    def stale(self, request_id: int, count: int, span: Span = INVALID_SPAN) -> None:
        """Answer a request whose tokens are of another epoch."""
        self._answer(request_id, [Outcome.STALE] * count, span)

    def refused(self, request_id: int, status: status_pb2.Status) -> None:
        """Refuse a whole request."""
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
