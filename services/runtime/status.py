"""The one place where a refusal becomes a gRPC status.

Every refusal carries google.rpc.ErrorInfo (a stable reason, the domain `seqgate`, and its details
as metadata), RetryInfo where a retry helps, and BadRequest where the request is wrong. Anything
else that escapes a handler is INTERNAL, and its text stays inside.
"""

from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from services.errors import DomainError, Kind

DOMAIN: Final = "seqgate"

_CODES: Final = {
    Kind.INVALID: code_pb2.INVALID_ARGUMENT,
    Kind.NOT_FOUND: code_pb2.NOT_FOUND,
    Kind.IN_USE: code_pb2.FAILED_PRECONDITION,
    Kind.FENCED: code_pb2.ABORTED,
    Kind.EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    Kind.UNAVAILABLE: code_pb2.UNAVAILABLE,
    Kind.DATA_LOSS: code_pb2.DATA_LOSS,
    Kind.UNKNOWN_CALLER: code_pb2.UNAUTHENTICATED,
    Kind.DENIED: code_pb2.PERMISSION_DENIED,
}


def status_of(error: DomainError) -> status_pb2.Status:
    """The status that says what the refusal says."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={name: _text(value) for name, value in error.details.items()},
    )
    status = status_pb2.Status(code=_CODES[error.kind], message=error.message, details=[_any(info)])
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(int(error.retry_after_s * 1_000_000))
        status.details.append(_any(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message, reason=error.reason
        )
        status.details.append(_any(error_details_pb2.BadRequest(field_violations=[violation])))
    return status


def code_name(kind: Kind) -> str:
    """The name of the gRPC code of refusals of a kind."""
    return str(code_pb2.Code.Name(_CODES[kind]))


def grpc_code(status: status_pb2.Status) -> grpc.StatusCode:
    """The status's code as grpc names it."""
    return _GRPC_CODES[status.code]


_GRPC_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def _any(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.RetryInfo
    | error_details_pb2.BadRequest,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _internal() -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN)
    return status_pb2.Status(code=code_pb2.INTERNAL, message="internal error", details=[_any(info)])


INTERNAL: Final = _internal()
"""A surprise. Its reason tells it from the INTERNAL that gRPC itself makes of a broken
connection."""
