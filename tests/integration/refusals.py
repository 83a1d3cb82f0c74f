"""Refusals, as a caller sees them."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status

CODES = {code.value[0]: code for code in grpc.StatusCode}

RETRYABLE = {StatusCode.UNAVAILABLE}
"""The codes whose refusals carry a retry delay."""


def check(status: status_pb2.Status, code: StatusCode, reason: str) -> dict[str, str]:
    """Check a status against the catalogue; returns its details."""
    assert CODES[status.code] is code, status
    assert status.message
    details = {each.TypeName(): each for each in status.details}
    info = error_details_pb2.ErrorInfo()
    assert details["google.rpc.ErrorInfo"].Unpack(info)
    assert (info.domain, info.reason) == ("seqgate", reason), status
    if code is StatusCode.INVALID_ARGUMENT and reason != "MALFORMED_REQUEST":  # it has no fields
        request = error_details_pb2.BadRequest()
        assert details["google.rpc.BadRequest"].Unpack(request), status
        (violation,) = request.field_violations
        assert violation.field
        assert violation.reason == reason
    if code in RETRYABLE:
        retry = error_details_pb2.RetryInfo()
        assert details["google.rpc.RetryInfo"].Unpack(retry), status
        assert retry.retry_delay.ToMicroseconds() > 0
    return dict(info.metadata)


def status_of_call(error: aio.AioRpcError) -> status_pb2.Status:
    """The whole status of a failed call."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, f"a bare {error.code()}: {error.details()}"
    return status


@contextmanager
def refused(code: StatusCode, reason: str) -> Iterator[dict[str, str]]:
    """Check that the call inside is refused with this code and reason. Yields the refusal's
    details, filled in afterwards."""
    details: dict[str, str] = {}
    with pytest.raises(aio.AioRpcError) as caught:
        yield details
    details.update(check(status_of_call(caught.value), code, reason))
