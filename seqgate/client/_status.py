"""Turns refusals of services into the exceptions of `seqgate.errors`."""

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


def error_of_call(error: grpc.RpcError) -> SeqgateError:
    return error_of(decode_call(error))
