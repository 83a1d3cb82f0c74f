"""The translation between refusals and gRPC statuses: our own, and those of peers.

A `DomainError` that escapes a handler becomes a status with its reason and details. Any other
exception becomes INTERNAL, without its text. A peer's status becomes `CallFailed`, which an adapter
translates into the errors of its port.
"""

from collections.abc import Awaitable
from typing import Final, TypeVar

from google.rpc import status_pb2
from grpc import StatusCode, aio

from seqgate.services.errors import DomainError, Kind
from seqgate.status import Refusal, decode_call, encode

T = TypeVar("T")

_CODES: Final = {
    Kind.INVALID: StatusCode.INVALID_ARGUMENT,
    Kind.NOT_FOUND: StatusCode.NOT_FOUND,
    Kind.IN_USE: StatusCode.FAILED_PRECONDITION,
    Kind.FENCED: StatusCode.ABORTED,
    Kind.EXHAUSTED: StatusCode.RESOURCE_EXHAUSTED,
    Kind.UNAVAILABLE: StatusCode.UNAVAILABLE,
    Kind.DATA_LOSS: StatusCode.DATA_LOSS,
    Kind.UNKNOWN_CALLER: StatusCode.UNAUTHENTICATED,
    Kind.DENIED: StatusCode.PERMISSION_DENIED,
}

INTERNAL: Final = encode(Refusal(StatusCode.INTERNAL, "internal error", "INTERNAL"))
"""The status of an unexpected exception. The reason distinguishes it from the INTERNAL that gRPC
itself returns for a broken connection."""


def status_of(error: DomainError) -> status_pb2.Status:
    return encode(
        Refusal(
            _CODES[error.kind],
            error.message,
            error.reason,
            {name: _text(value) for name, value in error.details.items()},
            error.retry_after_s,
            error.field,
        )
    )


def code_name(kind: Kind) -> str:
    return _CODES[kind].name


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class CallFailed(Exception):
    """A call to a peer failed.

    Attributes:
        reason: the peer's reason; empty unless one of our services refused the call.
        message: one sentence for people.
        details: the details of the refusal.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.code = refusal.code
        self.reason = refusal.reason
        self.message = refusal.message
        self.details = refusal.details


def call_failed(error: aio.AioRpcError) -> CallFailed:
    return CallFailed(decode_call(error))


async def answer(call: Awaitable[T]) -> T:
    """The peer's answer. Raises CallFailed."""
    try:
        return await call
    except aio.AioRpcError as error:
        raise call_failed(error) from error
