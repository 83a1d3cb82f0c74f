"""The wire form of a refusal: one codec for services, clients, the command line and jobs.

A refusal is a google.rpc.Status. It carries ErrorInfo (a stable reason, the domain `seqgate`, and
details as metadata), RetryInfo if a retry helps, and BadRequest if one field of the request is at
fault. A call that failed without such a status has a code and a message, and no reason.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status

DOMAIN: Final = "seqgate"

_CODES: Final = {code.value[0]: code for code in StatusCode}


class Refusal(NamedTuple):
    """Why a call, or one request of a stream, failed.

    Attributes:
        code: UNKNOWN also stands for codes that gRPC does not have.
        message: one sentence for people.
        reason: stable, for programs; empty unless one of our services refused.
        details: what a program needs to react.
        retry_after_s: how long to wait before a retry; None: the service gave none.
        field: the request's field at fault.
    """

    code: StatusCode
    message: str
    reason: str = ""
    details: Mapping[str, str] = MappingProxyType({})
    retry_after_s: float | None = None
    field: str | None = None


def encode(refusal: Refusal) -> status_pb2.Status:
    """Encode a refusal that has a reason."""
    info = error_details_pb2.ErrorInfo(
        reason=refusal.reason, domain=DOMAIN, metadata=dict(refusal.details)
    )
    status = status_pb2.Status(
        code=refusal.code.value[0], message=refusal.message, details=[_packed(info)]
    )
    if refusal.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(int(refusal.retry_after_s * 1_000_000))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if refusal.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=refusal.field, description=refusal.message, reason=refusal.reason
        )
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    return status


def decode(status: status_pb2.Status) -> Refusal:
    """Decode a status. Details of unknown types are ignored."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    retry_after_s = None
    for detail in status.details:
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMicroseconds() / 1e6
        elif not detail.Unpack(info):
            detail.Unpack(bad)
    return Refusal(
        code_of(status),
        status.message,
        info.reason,
        dict(info.metadata),
        retry_after_s,
        bad.field_violations[0].field if bad.field_violations else None,
    )


def decode_call(error: grpc.RpcError) -> Refusal:
    """Decode the error of a failed call, for asyncio or for threads."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it is a Call, too
    except ValueError:  # the status contradicts the call's code: a proxy's, not ours
        status = None
    if status is not None:
        return decode(status)
    return Refusal(error.code(), error.details() or error.code().name)


def code_of(status: status_pb2.Status) -> StatusCode:
    """The code of a status, as a grpc.StatusCode."""
    return _CODES.get(status.code, StatusCode.UNKNOWN)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
