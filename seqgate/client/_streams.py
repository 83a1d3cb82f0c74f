"""Reads a service's stream, and turns its end into an error."""

from typing import Any

from grpc import StatusCode, aio

from seqgate.client._status import error_of_call
from seqgate.errors import SeqgateError, UnavailableError


async def read(call: Any) -> Any:
    """The next response. Raises SeqgateError if the stream has ended."""
    response = await call.read()
    if response is aio.EOF:
        raise await ending(call)
    return response


async def read_or_end(call: Any) -> Any:
    """The next response; None if the stream ended with OK. Raises SeqgateError otherwise."""
    response = await call.read()
    if response is not aio.EOF:
        return response
    if await call.code() is StatusCode.OK:
        return None
    raise await ending(call)


async def ending(call: Any) -> SeqgateError:
    """The error of an ended stream; UnavailableError if its status is OK."""
    code, details = await call.code(), await call.details()
    if code is StatusCode.OK:
        return UnavailableError("the service ended the stream")
    trailing = await call.trailing_metadata()
    return error_of_call(aio.AioRpcError(code, aio.Metadata(), trailing, details=details))
