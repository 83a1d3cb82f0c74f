"""Records in the cursor, durably, when the waits that must end began.

services/dispatcher/core/verdicts.py explains which waits, and why.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from seqgate.services.dispatcher.core.verdicts import WAITS, from_text, to_text
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.ports import Cursor
from seqgate.services.errors import DomainError
from seqgate.types import Position

log = structlog.get_logger()

KEEP_S: Final = 5.0
"""The interval between writes, in seconds."""


class Waiting:
    def __init__(self, tenure: Tenure, oldest: Callable[[], Mapping[Position, int]]) -> None:
        """`oldest` returns the waiting entries, and when each began to wait."""
        self._tenure = tenure
        self._oldest = oldest
        self._written: str | None = ""

    def load(self, cursor: Cursor) -> dict[Position, int]:
        """Read the durable waits from a cursor."""
        self._written = cursor.properties.get(WAITS, "")
        return from_text(self._written)

    async def keep(self) -> None:
        """Write changes periodically, until cancelled. A failed write is retried next time."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self.try_write()

    async def try_write(self) -> None:
        """Write the waits if they changed and the cursor can be written."""
        try:
            await self._write()
        except DomainError as error:
            log.warning(
                "recording waiting entries failed",
                topic=str(self._tenure.topic),
                subscription=self._tenure.name,
                reason=error.reason,
            )

    async def _write(self) -> None:
        text = to_text(self._oldest())
        if text == self._written:
            return
        put, remove = ({WAITS: text}, ()) if text else ({}, (WAITS,))
        self._written = None  # unknown if the write fails
        await self._tenure.set_properties(put, remove)
        self._written = text
