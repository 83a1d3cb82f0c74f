"""What consumers are told as soon as what they acknowledged is durable, and the spans that last
until then."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from google.rpc import status_pb2
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.telemetry import spans
from services.dispatcher.core.effects import Delivery, Outcome
from services.errors import DomainError


class Stream(Protocol):
    """The way to a consumer."""

    def put(self, *items: Delivery | pb.ConsumeResponse) -> None:
        """Send these, after all that were put before."""
        ...

    def finish(self, error: Exception | None = None, *, at_once: bool = True) -> None:
        """Nothing more is to come: at once with an error, else after what was put."""
        ...


class _Waiting(NamedTuple):
    """An answer, and the number of the Persist that it waits for; without a response: a farewell,
    which ends the stream, with an error or in good order. The span is of what is answered."""

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
    """See the module."""

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
        """Answer a consumer, or, without a response, let it go, when everything is durable up to
        the Persist of this number; 0: it is. The span, of what is answered, ends with that."""
        waiting = _Waiting(number, stream, response, error, span)
        if number:
            self._waiting.append(waiting)
            if span.is_recording():
                self._followed.setdefault(number, []).append(span.get_span_context())
        else:
            waiting.give()

    def followed(self, number: int) -> list[SpanContext]:
        """The contexts of those spans that wait for the Persist of this number, so far."""
        return self._followed.get(number, [])

    def durable(self, number: int) -> None:
        """Everything is durable up to the Persist of this number."""
        for each in [each for each in self._followed if each <= number]:
            del self._followed[each]
        while self._waiting and self._waiting[0].number <= number:
            self._waiting.popleft().give()

    def give_all(self) -> None:
        """Everything is durable."""
        self._followed.clear()
        while self._waiting:
            self._waiting.popleft().give()

    def stop(self, error: DomainError) -> None:
        """Nothing becomes durable here any more."""
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
    """The answer to a request: what became of each of its items, or why it is refused."""
    answer = pb.Settled(request_id=request_id, error=error)
    if any(outcome is not Outcome.DONE for outcome in outcomes):
        answer.outcomes.extend(_OUTCOMES[outcome] for outcome in outcomes)
    return pb.ConsumeResponse(settled=answer)


_OUTCOMES: Final = {
    Outcome.DONE: pb.OUTCOME_DONE,
    Outcome.STALE: pb.OUTCOME_STALE,
    Outcome.INVALID: pb.OUTCOME_INVALID,
}
