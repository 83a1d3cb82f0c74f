"""Where are a producer's messages?"""

from collections.abc import Iterable

from services.ledger.core.entry import StoredEntry, places
from services.ledger.core.receipt import Found, Unfinished


class Finder:
    """Looks for messages of one producer among entries that it is shown in the order of the log.

    A message that is there more than once (deduplication was off) is where it was first. Of a large
    message that is not complete, the attempt that came last counts.
    """

    def __init__(self, producer: str, sequence_ids: Iterable[int]) -> None:
        self._producer = producer
        self._wanted = set(sequence_ids)
        self._open: dict[tuple[int, str], Unfinished] = {}
        self._found: dict[int, Found] = {}

    @property
    def done(self) -> bool:
        """Whether every message was found."""
        return not self._wanted

    def show(self, stored: StoredEntry) -> None:
        """Here is the next entry."""
        entry = stored.entry
        if entry.producer != self._producer or entry.marker:
            return
        if entry.chunk is not None:
            self._show_chunk(stored)
            return
        for sequence_id, batch_index in places(entry):
            if sequence_id in self._wanted:
                self._wanted.discard(sequence_id)
                self._found[sequence_id] = Found(stored.position, batch_index)

    def place(self, sequence_id: int) -> Found | Unfinished | None:
        """What there is of a message, if anything."""
        if sequence_id in self._found:
            return self._found[sequence_id]
        attempts = [each for (of, _), each in self._open.items() if of == sequence_id]
        return attempts[-1] if attempts else None

    def _show_chunk(self, stored: StoredEntry) -> None:
        sequence_id, chunk = stored.entry.lowest, stored.entry.chunk
        if chunk is None or sequence_id not in self._wanted:
            return
        key = sequence_id, chunk.uuid
        before = self._open.get(key)
        if chunk.chunk_id == 0:
            self._open.pop(key, None)  # the attempt that came last is the last in the dictionary
            self._open[key] = Unfinished(chunk, (stored.position,))
        elif (
            before is not None
            and before.chunk.layout == chunk.layout
            and before.chunk.chunk_id + 1 == chunk.chunk_id
        ):
            self._open[key] = Unfinished(chunk, (*before.chunks, stored.position))
        if chunk.is_last and key in self._open and self._open[key].chunk == chunk:
            self._wanted.discard(sequence_id)
            positions = self._open[key].chunks
            self._found[sequence_id] = Found(stored.position, None, positions, chunk.uuid)
