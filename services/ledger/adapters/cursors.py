"""The cursor service, over the wire, or none at all.

No call is retried here. After a lost answer nobody knows whether a call did what it was asked; each
may be made again.
"""

from collections.abc import AsyncIterator
from typing import Final, NoReturn

import structlog

from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.cursor.v1 import cursor_pb2_grpc as pb_grpc
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.types import Position, TopicName
from services.ledger.ports import CursorsUnavailable
from services.runtime.status import CallFailed, answer

log = structlog.get_logger()

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when the cursor service does not answer."""

PAGE_SIZE: Final = 1_000
"""How many cursors a page holds."""

NOT_FOUND: Final = "CURSOR_NOT_FOUND"

EXPECTED: Final = frozenset(
    {"", "STORE_UNAVAILABLE", "STORE_FULL", "SERVICE_BUSY", "DRAINING", NOT_OWNER}
)
"""Why the cursor service does nothing now; for any other reason, somebody has to look."""


class GrpcCursors:
    """See services.ledger.ports.Cursors."""

    def __init__(self, channel: FollowingChannel) -> None:
        self._stub = pb_grpc.CursorServiceStub(channel)

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        try:
            return {each.name: _mark_delete(each) async for each in self._cursors(topic)}
        except CallFailed as failed:
            _give_up(failed)

    async def delete_all(self, topic: TopicName) -> None:
        """One by one: when one cannot be removed, the others after it are not, either."""
        try:
            for name in [each.name async for each in self._cursors(topic)]:
                await self._delete(topic, name)
        except CallFailed as failed:
            _give_up(failed)

    async def _cursors(self, topic: TopicName) -> AsyncIterator[pb.Cursor]:
        request = pb.ListCursorsRequest(topic=str(topic), page_size=PAGE_SIZE)
        while True:
            page = await answer(self._stub.ListCursors(request))
            for cursor in page.cursors:
                yield cursor
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def _delete(self, topic: TopicName, name: str) -> None:
        try:
            await answer(
                self._stub.DeleteCursor(pb.DeleteCursorRequest(topic=str(topic), name=name))
            )
        except CallFailed as failed:
            if failed.reason != NOT_FOUND:
                raise


class NoCursors:
    """An installation without a cursor service: there is no cursor."""

    async def mark_deletes(self, topic: TopicName) -> dict[str, Position | None]:
        del topic
        return {}

    async def delete_all(self, topic: TopicName) -> None:
        del topic


def _mark_delete(cursor: pb.Cursor) -> Position | None:
    if not cursor.HasField("mark_delete"):
        return None
    return Position(cursor.mark_delete.ledger_id, cursor.mark_delete.entry_id)


def _give_up(failed: CallFailed) -> NoReturn:
    reason = failed.reason
    log.debug("cursors do not answer", reason=reason, error=failed.message)
    if reason not in EXPECTED:
        log.error("the cursor service refused", reason=reason, detail=failed.message)
    raise CursorsUnavailable(
        "the cursor service does not answer",
        retry_after_s=RETRY_AFTER_S,
        **({"because": reason} if reason else {}),
    ) from failed
