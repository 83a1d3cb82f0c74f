"""Responses that wait until acknowledgements are durable, and the spans that last until then."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from google.rpc import status_pb2
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.core.effects import Delivery, Outcome
from seqgate.services.errors import DomainError
from seqgate.telemetry import spans


class Stream(Protocol):
    """A consumer's stream."""

    def put(self, response: pb.ConsumeResponse) -> None:
        """Queue a message, after everything queued before."""
        ...

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Queue deliveries, after everything queued before."""
        ...

    def finish(self, error: Exception | None = None, *, at_once: bool = True) -> None:
        """End the stream: at once with an error, else after the queued messages."""
        ...


class _Waiting(NamedTuple):
    """A response, and the number of the Persist that it waits for; without a response, the end of
    the stream, with an error or without. The span covers the request."""

    number: int
    stream: Stream
    response: pb.ConsumeResponse | None
    error: DomainError | None
    span: Span

    def give(self) -> None:
        if self.response is not None:
            self.stream.put(self.response)
        else:
            self.stream.finish(self.error, at_once=False)
        self.span.end()


class Answers:
    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._followed: dict[int, list[SpanContext]] = {}

    def give(
        self,
        stream: Stream,
        response: pb.ConsumeResponse | None,
        number: int,
        error: DomainError | None = None,
        span: Span = INVALID_SPAN,
    ) -> None:
        """Send a response, or end the stream if there is none, once everything up to this Persist
        is durable; 0: now. The request's span ends then."""
        waiting = _Waiting(number, stream, response, error, span)
        if number:
            self._waiting.append(waiting)
            if span.is_recording():
                self._followed.setdefault(number, []).append(span.get_span_context())
        else:
            waiting.give()

    def followed(self, number: int) -> list[SpanContext]:
        """The contexts of the spans that wait for this Persist so far."""
        return self._followed.get(number, [])

    def durable(self, number: int) -> None:
        """Send the responses that wait for this Persist or one before it: it is durable."""
        for each in [each for each in self._followed if each <= number]:
            del self._followed[each]
        while self._waiting and self._waiting[0].number <= number:
            self._waiting.popleft().give()

    def give_all(self) -> None:
        """Send all waiting responses: everything is durable."""
        self._followed.clear()
        while self._waiting:
            self._waiting.popleft().give()

    def stop(self, error: DomainError) -> None:
        """End the streams that wait: nothing becomes durable anymore."""
        for waiting in self._waiting:
            waiting.stream.finish(error)
            spans.fail(waiting.span, error.reason, error.message)
            waiting.span.end()


def settled_response(
    request_id: int,
    outcomes: Sequence[Outcome] = (),
    *,
    error: status_pb2.Status | None = None,
) -> pb.ConsumeResponse:
    """The response to a request: the outcome of each item, or the refusal."""
    answer = pb.Settled(request_id=request_id, error=error)
    if any(outcome is not Outcome.DONE for outcome in outcomes):
        answer.outcomes.extend(_OUTCOMES[outcome] for outcome in outcomes)
    return pb.ConsumeResponse(settled=answer)


_OUTCOMES: Final = {
    Outcome.DONE: pb.SETTLE_OUTCOME_DONE,
    Outcome.STALE: pb.SETTLE_OUTCOME_STALE,
    Outcome.INVALID: pb.SETTLE_OUTCOME_INVALID,
}
