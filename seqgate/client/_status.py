"""Turns refusals of services into the exceptions of `seqgate.errors`."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import grpc
from google.rpc import status_pb2
from grpc import StatusCode

from seqgate.errors import (
    BY_REASON,
    AuthenticationError,
    DataLossError,
    FencedError,
    InternalError,
    InUseError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PermissionDeniedError,
    SeqgateError,
    UnavailableError,
    WrongServiceError,
)
from seqgate.status import Refusal, decode, decode_call

_BY_CODE: dict[StatusCode, type[SeqgateError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    StatusCode.OUT_OF_RANGE: InvalidRequestError,
    StatusCode.NOT_FOUND: NotFoundError,
    StatusCode.FAILED_PRECONDITION: InUseError,
    StatusCode.ABORTED: FencedError,
    StatusCode.RESOURCE_EXHAUSTED: LimitExceededError,
    StatusCode.UNAVAILABLE: UnavailableError,
    StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    StatusCode.CANCELLED: UnavailableError,
    StatusCode.DATA_LOSS: DataLossError,
    StatusCode.UNAUTHENTICATED: AuthenticationError,
    StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    # Without a reason these two come from gRPC or a proxy whose connection broke. Our services'
    # failures have the reason INTERNAL.
    StatusCode.INTERNAL: UnavailableError,
    StatusCode.UNKNOWN: UnavailableError,
}


_CAUSES: Final[Mapping[str, str]] = {
    "Connection refused": "connection refused: nothing listens there",
    "http1.x server": "the server there does not speak gRPC: it is a web server",
    "Failed parsing HTTP/2": "the server there does not speak gRPC, or requires TLS",
    "before receiving SETTINGS": "the server there accepts connections, and is silent",
    "Ssl handshake failed": "the TLS handshake failed: check the certificates, and that it is TLS",
    "DNS resolution failed": "the name of the host has no address",
    "Deadline Exceeded": "no answer in time",
}
"""What parts of gRPC's messages mean; the first that matches counts."""


class Asked(NamedTuple):
    """A service that is called, and its address."""

    name: str
    address: str


def error_of(refusal: Refusal) -> SeqgateError:
    kind = BY_REASON.get(refusal.reason) or _BY_CODE.get(refusal.code, InternalError)
    return kind(
        refusal.message,
        reason=refusal.reason,
        details=dict(refusal.details),
        retry_after_s=refusal.retry_after_s,
    )


def error_of_status(status: status_pb2.Status) -> SeqgateError:
    """The exception for one request that a stream refuses."""
    return error_of(decode(status))


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes: their frames refer to calls, and keep gRPC's
    channels."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


def error_of_call(error: grpc.RpcError, asked: Asked | None = None) -> SeqgateError:
    """The exception for a failed call of the service that was `asked`."""
    refusal = decode_call(error)
    if refusal.code is StatusCode.UNIMPLEMENTED and not refusal.reason:
        return _wrong_service(asked)
    return error_of(refusal)


def _wrong_service(asked: Asked | None) -> WrongServiceError:
    if asked is None:
        return WrongServiceError("the server is another service, or an older version")
    name, address = asked
    return WrongServiceError(
        f"the server at {address} is not the {name} service, or an older version of it: check the "
        "address",
        details={"service": name, "address": address},
    )


def cause_of(error: BaseException) -> str:
    """Why a call failed without an answer: gRPC's words, after plain ones if the cause is known."""
    said = " ".join(str(error).split())
    known = next((words for part, words in _CAUSES.items() if part in said), None)
    return said if known is None else f"{known} ({said})"
