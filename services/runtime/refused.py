"""What a peer says when it refuses: the other end of services/runtime/status.py."""

from collections.abc import Awaitable, Mapping
from typing import Any

from google.rpc import error_details_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status


class Refused(Exception):
    """A call that failed.

    Attributes:
        reason: why the peer refused; empty when no service of ours gave a reason.
        message: one sentence for people.
        details: of the refusal.
    """

    def __init__(
        self, reason: str, message: str, code: StatusCode, details: Mapping[str, str]
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.code = code
        self.details = details


async def answer(call: Awaitable[Any]) -> Any:
    """What the peer answers.

    Raises:
        Refused: it does not.
    """
    try:
        return await call
    except aio.AioRpcError as error:
        raise refused(error) from error


def refused(error: aio.AioRpcError) -> Refused:
    """What a call that failed says."""
    message = error.details() or error.code().name
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # it contradicts the call's own code: not one of ours
        status = None
    info = error_details_pb2.ErrorInfo()
    for detail in () if status is None else status.details:
        if detail.Unpack(info):
            return Refused(info.reason, message, error.code(), dict(info.metadata))
    return Refused("", message, error.code(), {})
