"""Reads a service's stream, and turns its end into an error of the service that was asked."""

from typing import Any

from grpc import StatusCode, aio

from seqgate.client._status import Asked, error_of_call
from seqgate.errors import SeqgateError, UnavailableError


async def read(call: Any, asked: Asked) -> Any:
    """The next response. Raises SeqgateError if the stream has ended."""
    response = await call.read()
    if response is aio.EOF:
        raise await ending(call, asked)
    return response


async def read_or_end(call: Any, asked: Asked) -> Any:
    """The next response; None if the stream ended with OK. Raises SeqgateError otherwise."""
    response = await call.read()
    if response is not aio.EOF:
        return response
    if await call.code() is StatusCode.OK:
        return None
    raise await ending(call, asked)


async def ending(call: Any, asked: Asked) -> SeqgateError:
    """The error of an ended stream; UnavailableError if its status is OK."""
    code, details = await call.code(), await call.details()
    if code is StatusCode.OK:
        return UnavailableError("the service ended the stream")
    trailing = await call.trailing_metadata()
    failed = aio.AioRpcError(code, aio.Metadata(), trailing, details=details)
    return error_of_call(failed, asked)
