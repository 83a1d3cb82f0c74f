"""A shadow chain: its verdicts are only counted, and no delivery waits for them.

Cached verdicts are counted at once; the filter service judges the rest in the background, on a line
of its own. If the service cannot keep up, entries are counted as NOT_ASKED.
"""

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Final

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.filtering.active import NOT_ASKED, ActiveChain
from seqgate.services.dispatcher.filtering.chains import Stretch
from seqgate.services.dispatcher.filtering.tallies import Names, Tallies, Tally
from seqgate.services.dispatcher.ports import Filters
from seqgate.services.errors import DomainError
from seqgate.types import TopicName

WAITING_MAX: Final = 10_000
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
"""The limits of the queue for the filter service: distinct entries, approximately, and bytes."""

Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]


class Shadow:
    def __init__(
        self,
        stretch: Stretch,
        properties: Mapping[str, str],
        topic: TopicName,
        filters: Filters,
        tallies: Tallies,
        spawn: Spawn,
    ) -> None:
        self.stretch = stretch
        self._properties = properties
        self._topic = topic
        self._spawn = spawn
        self._line = filters.line()
        self._active = ActiveChain(stretch.chain, tallies, is_shadow=True)
        self._not_asked = self._active.tally(None, NOT_ASKED)
        self._waiting: dict[Hashable, tuple[EntryMetadata, Tally]] = {}
        self._waiting_bytes = 0
        self._is_asking = False
        self._is_closed = False
        self._ask_later()

    def stays(self, stretch: Stretch | None, properties: Mapping[str, str]) -> bool:
        """Whether its verdicts hold for this chain and these properties of the subscription."""
        if stretch != self.stretch:
            return False
        return properties == self._properties or self._active.stays(properties)

    @property
    def names(self) -> Names:
        return self._active.names

    def count(self, entries: Sequence[StoredEntry]) -> None:
        """Count its verdicts on entries that were read."""
        active, stretch = self._active, self.stretch
        for each in entries:
            if not stretch.covers(position_of(each)):
                continue
            messages = each.metadata.num_messages_in_batch or 1
            if active.projection is None:
                self._not_asked.add(1, messages)
                continue
            key = active.projection.key_of(each.metadata)
            known = active.known.get(key)
            if known is not None:
                known.tally.add(1, messages)
            else:
                self._keep(key, each.metadata, messages)
        if self._waiting or active.projection is None:
            self._ask_later()

    async def close(self) -> None:
        """Send no more requests, and drop the queued entries without counting them."""
        self._is_closed = True
        self._waiting = {}
        await self._line.close()

    def _keep(self, key: Hashable, metadata: EntryMetadata, messages: int) -> None:
        """Queue an entry for the filter service, or count it as NOT_ASKED."""
        waiting = self._waiting.get(key)
        if waiting is None:
            assert self._active.projection is not None
            decisive = self._active.projection.metadata_of(metadata)
            size_bytes = decisive.ByteSize()
            is_full = self._waiting_bytes + size_bytes > WAITING_BYTES_MAX
            if is_full or len(self._waiting) >= WAITING_MAX:
                self._not_asked.add(1, messages)
                return
            self._waiting_bytes += size_bytes
            waiting = self._waiting[key] = decisive, Tally()
        waiting[1].add(1, messages)

    def _ask_later(self) -> None:
        if not self._is_asking:
            self._is_asking = True
            self._spawn(self._ask)

    async def _ask(self) -> None:
        """Judge the queued entries. Without an answer they are counted as unanswered, and the next
        page read triggers the next request."""
        active = self._active
        try:
            await active.prepare(self._line, self._topic, self._properties)
            while self._waiting:
                waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
                asked = {key: metadata for key, (metadata, _) in waiting.items()}
                try:
                    found = await active.ask(self._line, asked)
                except DomainError:
                    found = {}
                for key, (_, tally) in waiting.items():
                    if not self._is_closed:
                        known = found.get(key, active.unanswered)
                        known.tally.add(tally.entries, tally.messages)
        except DomainError:
            return
        finally:
            self._is_asking = False
