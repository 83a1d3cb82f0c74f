"""What consumers are told as soon as what they acknowledged is durable."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from google.rpc import status_pb2

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
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
    which ends the stream, with an error or in good order."""

    number: int
    stream: Stream
    response: pb.ConsumeResponse | None
    error: DomainError | None

    def give(self) -> None:
        if self.response is not None:
            self.stream.put(self.response)
        else:
            self.stream.finish(self.error, at_once=False)


class Answers:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()

    def give(
        self,
        stream: Stream,
        response: pb.ConsumeResponse | None,
        number: int,
        error: DomainError | None = None,
    ) -> None:
        """Answer a consumer, or, without a response, let it go, when everything is durable up to
        the Persist of this number; 0: it is."""
        waiting = _Waiting(number, stream, response, error)
        if number:
            self._waiting.append(waiting)
        else:
            waiting.give()

    def durable(self, number: int) -> None:
        """Everything is durable up to the Persist of this number."""
        while self._waiting and self._waiting[0].number <= number:
            self._waiting.popleft().give()

    def give_all(self) -> None:
        """Everything is durable."""
        while self._waiting:
            self._waiting.popleft().give()

    def stop(self, error: DomainError) -> None:
        """Nothing becomes durable here any more."""
        for waiting in self._waiting:
            waiting.stream.finish(error)


def settled(
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
