"""Read streams: their number, and the bytes of pages that were read and not sent yet.

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
"""The size of a read from the store; one entry always fits. The store reads whole groups for any
request."""

SMALL_PAGE_BYTES_MAX: Final = 1024 * 1024
"""How much is while half of the room is taken: more readers can be slow before others wait."""

ENTRY_BYTES: Final = 512
"""The approximate memory of an entry, besides its metadata and payload."""

RETRY_AFTER_S: Final = 1.0
"""RetryInfo for a reader that is to open its stream again."""


class TooManyStreams(DomainError):
    """Too many producers are connected, or too many streams read: the detail names the limit."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_STREAMS"


class SlowReader(DomainError):
    """A reader is too slow, and other readers wait for the memory that its pages take."""

    kind = Kind.UNAVAILABLE
    reason = "SLOW_READER"


class Pages:
    """The pages of one stream that its reader has not taken yet."""

    def __init__(self, room: Room, share: Share, largest_bytes: int) -> None:
        """`largest_bytes` is how large one entry may be."""
        self._room = room
        self._share = share
        self._largest_bytes = largest_bytes

    async def begin(self) -> int:
        """The page before is taken: wait for room for the next one. Returns how large that may be,
        in bytes; one entry always fits."""
        self._share.give_all()
        is_tight = 2 * self._room.used_bytes > self._room.bytes_max
        page_bytes = min(SMALL_PAGE_BYTES_MAX if is_tight else PAGE_BYTES_MAX, self._room.bytes_max)
        entries_bytes = PAGE_ENTRIES_MAX * ENTRY_BYTES
        await self._share.take(max(page_bytes, self._largest_bytes) + entries_bytes)
        return page_bytes

    def fit(self, size_bytes: int) -> None:
        """The page was read and is this large: give back, or take, the difference."""
        more_bytes = size_bytes - self._share.size_bytes
        if more_bytes > 0:
            self._share.add(more_bytes)
        else:
            self._share.give(-more_bytes)

    def sending(self) -> AbstractContextManager[None]:
        """Its reader is to take some of it meanwhile."""
        return self._share.writing() if self._share.size_bytes else nullcontext()


class Readers:
    """All read streams of this process.

    Attributes:
        streams: their number.
        room: the budget for their pages.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self.streams = 0
        self.room = Room(config.read_bytes_max, slow_s=config.slow_reader_s)
        self._streams_max = config.read_streams_max
        self._largest_bytes = config.max_message_bytes + METADATA_BYTES_MAX

    def enter(self) -> None:
        """Count a stream, until it leaves.

        Raises:
            TooManyStreams: the limit of streams is reached.
        """
        if self.streams >= self._streams_max:
            raise TooManyStreams(
                f"too many read streams (limit {self._streams_max:,})",
                retry_after_s=RETRY_AFTER_S,
                read_streams_max=self._streams_max,
            )
        self.streams += 1

    def leave(self) -> None:
        """A stream is over."""
        self.streams -= 1

    @asynccontextmanager
    async def pages(self) -> AsyncIterator[Pages]:
        """The share of a stream in the budget, while it reads.

        Raises:
            SlowReader: its reader takes nothing, and others wait.
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
