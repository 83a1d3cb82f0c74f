"""From a gRPC status to a typed exception."""

from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status

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
    # Without a reason these two are what gRPC and proxies make of a connection that breaks at a bad
    # moment. A service of ours that is to blame says so.
    StatusCode.INTERNAL: UnavailableError,
    StatusCode.UNKNOWN: UnavailableError,
}
_CODES = {code.value[0]: code for code in StatusCode}


def error_of_status(status: status_pb2.Status) -> SeqgateError:
    """The exception that says what the status says."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        if detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToMicroseconds() / 1e6
        elif detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    fallback = _BY_CODE.get(_CODES.get(status.code, StatusCode.UNKNOWN), InternalError)
    kind = BY_REASON.get(info.reason, fallback)
    return kind(
        status.message,
        reason=info.reason,
        details=dict(info.metadata),
        retry_after_s=retry_after_s,
    )


def error_of_call(error: aio.AioRpcError) -> SeqgateError:
    """The exception that says how a call ended."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # the details do not match the status: not one of ours
        status = None
    if status is not None:
        return error_of_status(status)
    return _BY_CODE.get(error.code(), InternalError)(error.details() or error.code().name)
