"""Finding a producer's messages in the log."""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice, pairwise
from typing import Final

from seqgate.services.ledger.core.entry import Entry, StoredEntry, places
from seqgate.services.ledger.core.receipt import Found, Unfinished
from seqgate.types import Chunk, Layout, Position


def clusters(ids: Sequence[int], count_max: int) -> list[tuple[int, int]]:
    """The ranges of at most `count_max` clusters of ids, split at the widest gaps.

    Args:
        ids: at least one, ascending, distinct.
    """
    gaps = ((later - earlier, place) for place, (earlier, later) in enumerate(pairwise(ids), 1))
    wide = nlargest(count_max - 1, (each for each in gaps if each[0] > 1))
    edges = [0, *sorted(place for _, place in wide), len(ids)]
    return [(ids[first], ids[end - 1]) for first, end in pairwise(edges)]


LOOK_BACK_ENTRIES: Final = 100
"""The most entries of a producer among which an aborted attempt is looked for. It is the last one
before the entry that aborts it."""


def last_of(uuid: str, newest_first: Iterable[Entry]) -> int | None:
    """The message's id of an attempt, from its producer's entries given newest first."""
    for entry in islice(newest_first, LOOK_BACK_ENTRIES):
        if entry.chunk is not None and entry.chunk.uuid == uuid:
            return entry.highest
    return None


def goes_on_after(position: Position, fate: object) -> bool:
    """Whether a large message with this fate has chunks on both sides of a position."""
    return isinstance(fate, Found) and min(fate.chunks, default=position) < position < fate.position


class Finder:
    """Looks for messages of one producer among entries added in log order.

    Of a message stored more than once (deduplication was off, or the producer started over), the
    copy completed last is found, as in deduplication's fold: a look-up is about the message sent
    last. With a uuid, only this attempt at a large message is looked for.

    Attributes:
        done: whether every message was found, and no earlier entry can change the result.
    """

    def __init__(self, producer: str, sequence_ids: Iterable[int], uuid: str = "") -> None:
        self._producer = producer
        self._uuid = uuid
        self._wanted = frozenset(sequence_ids)
        self._open: dict[int, dict[Layout, list[Position]]] = {}
        self._found: dict[int, Found] = {}
        self._is_headless = False

    @property
    def done(self) -> bool:
        return not self._is_headless and len(self._found) == len(self._wanted)

    def show(self, stored: StoredEntry) -> None:
        """Add the next entry."""
        entry = stored.entry
        if entry.producer != self._producer or entry.marker:
            return
        if self._uuid and (entry.chunk is None or entry.chunk.uuid != self._uuid):
            return
        if entry.chunk is not None:
            self._show_chunk(stored, entry.chunk)
            return
        for sequence_id, batch_index in places(entry):
            if sequence_id in self._wanted:
                self._found[sequence_id] = Found(stored.position, batch_index)

    def place(self, sequence_id: int) -> Found | Unfinished | None:
        if sequence_id in self._found:
            return self._found[sequence_id]
        attempts = self._open.get(sequence_id, {})
        places = {layout: tuple(chunks) for layout, chunks in attempts.items() if chunks}
        return Unfinished(places) if places else None

    def _show_chunk(self, stored: StoredEntry, chunk: Chunk) -> None:
        sequence_id = stored.entry.lowest
        if sequence_id not in self._wanted:
            return
        attempts = self._open.setdefault(sequence_id, {})
        if chunk.chunk_id == 0:
            attempts[chunk.layout] = []
        chunks = attempts.setdefault(chunk.layout, [])
        if len(chunks) != chunk.chunk_id:
            self._is_headless |= len(chunks) < chunk.chunk_id
            return
        chunks.append(stored.position)
        if chunk.is_last:
            self._found[sequence_id] = Found(stored.position, None, tuple(chunks), chunk.uuid)
