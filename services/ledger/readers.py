"""Read streams: their number, and the bytes of pages read but not yet sent.

take budget for the largest page ──▶ read ──▶ release the excess ──▶ sent ──▶ release the rest
"""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Final

from seqgate.services.errors import DomainError, Kind
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import METADATA_BYTES_MAX
from seqgate.services.runtime.cutting import until_cut
from seqgate.services.runtime.room import Room, Share

PAGE_ENTRIES_MAX: Final = 4_000
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""The most bytes of one read; one entry always fits. The store reads whole groups in any case."""

SMALL_PAGE_BYTES_MAX: Final = 1024 * 1024
"""PAGE_BYTES_MAX while half of the room is taken, so that more readers can be slow at once."""

ENTRY_BYTES: Final = 512
"""The approximate memory of an entry, besides its metadata and payload."""

RETRY_AFTER_S: Final = 1.0
"""RetryInfo for a reader that must reopen its stream."""


class TooManyStreams(DomainError):
    """Too many connected producers or read streams; the detail names the limit."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_STREAMS"


class SlowReader(DomainError):
    """A slow reader holds memory that other readers wait for."""

    kind = Kind.UNAVAILABLE
    reason = "SLOW_READER"


class Pages:
    """The pages of one stream that its reader has not received yet."""

    def __init__(self, room: Room, share: Share, largest_bytes: int) -> None:
        """`largest_bytes` is the size of the largest possible entry."""
        self._room = room
        self._share = share
        self._largest_bytes = largest_bytes

    async def begin(self) -> int:
        """Release the previous page, and wait for room for the next one. Returns the limit of its
        size in bytes; one entry always fits."""
        self._share.give_all()
        is_tight = 2 * self._room.used_bytes > self._room.bytes_max
        page_bytes = min(SMALL_PAGE_BYTES_MAX if is_tight else PAGE_BYTES_MAX, self._room.bytes_max)
        entries_bytes = PAGE_ENTRIES_MAX * ENTRY_BYTES
        await self._share.take(max(page_bytes, self._largest_bytes) + entries_bytes)
        return page_bytes

    def fit(self, size_bytes: int) -> None:
        """Adjust the reserved room to the size of the page that was read."""
        more_bytes = size_bytes - self._share.size_bytes
        if more_bytes > 0:
            self._share.add(more_bytes)
        else:
            self._share.give(-more_bytes)

    def sending(self) -> AbstractContextManager[None]:
        """Marks the time in which the reader is expected to receive some of the page."""
        return self._share.writing() if self._share.size_bytes else nullcontext()


class Readers:
    """All read streams of this process.

    Attributes:
        streams: the number of open streams.
        room: the budget for their pages.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self.streams = 0
        self.room = Room(config.read_bytes_max, slow_s=config.slow_reader_s)
        self._streams_max = config.read_streams_max
        self._largest_bytes = config.max_message_bytes + METADATA_BYTES_MAX

    def enter(self) -> None:
        """Count a stream, until `leave`.

        Raises:
            TooManyStreams: the limit is reached.
        """
        if self.streams >= self._streams_max:
            raise TooManyStreams(
                f"too many read streams (limit {self._streams_max:,})",
                retry_after_s=RETRY_AFTER_S,
                read_streams_max=self._streams_max,
            )
        self.streams += 1

    def leave(self) -> None:
        self.streams -= 1

    @asynccontextmanager
    async def pages(self) -> AsyncIterator[Pages]:
        """A stream's share of the budget, for as long as it reads.

        Raises:
            SlowReader: the reader receives nothing, and other streams wait for room.
        """
        error = SlowReader(
            "the reader is too slow, and others wait for its memory",
            retry_after_s=RETRY_AFTER_S,
        )
        async with until_cut() as cut:
            share = self.room.share(lambda: cut(error))
            try:
                yield Pages(self.room, share, self._largest_bytes)
            finally:
                share.give_all()
