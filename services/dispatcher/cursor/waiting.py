"""Since when entries wait that must not wait for ever, in the cursor.

services/dispatcher/core/waits.py says which, and why."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from seqgate.types import Position, TopicName
from services.dispatcher.core.verdicts import WAITS, from_text, to_text
from services.dispatcher.cursor.tenure import Tenure
from services.dispatcher.ports import Cursor
from services.errors import DomainError

log = structlog.get_logger()

KEEP_S: Final = 5.0
"""How often it is looked whether others wait now, in seconds."""


class Waiting:
    """See the module."""

    def __init__(
        self,
        topic: TopicName,
        subscription: str,
        tenure: Tenure,
        oldest: Callable[[], Mapping[Position, int]],
    ) -> None:
        """`oldest` says who waits now, and since when."""
        self._topic = topic
        self._subscription = subscription
        self._tenure = tenure
        self._oldest = oldest
        self._written: str | None = ""

    def load(self, cursor: Cursor) -> dict[Position, int]:
        """What is durable."""
        self._written = cursor.properties.get(WAITS, "")
        return from_text(self._written)

    async def keep(self) -> None:
        """Make it durable, for as long as the task lives. What cannot be written now is later."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self.try_write()

    async def try_write(self) -> None:
        """Make it durable, if it changed and that is possible now."""
        try:
            await self._write()
        except DomainError as error:
            log.warning(
                "not written since when entries wait",
                topic=str(self._topic),
                subscription=self._subscription,
                reason=error.reason,
            )

    async def _write(self) -> None:
        text = to_text(self._oldest())
        if text == self._written:
            return
        put, remove = ({WAITS: text}, ()) if text else ({}, (WAITS,))
        self._written = None  # until it is known
        await self._tenure.set_properties(put, remove)
        self._written = text
