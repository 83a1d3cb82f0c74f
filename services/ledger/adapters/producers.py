"""The rows of producers: where the entries of each are, and what its trimmed ones come to."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from seqgate.services.deduplication import Mark
from seqgate.services.ledger.adapters.block import Block, decode_block
from seqgate.services.ledger.adapters.rows import ENTRIES_ALONE
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.find import Finder, clusters
from seqgate.services.ledger.core.marks import is_cut, last_mark
from seqgate.services.ledger.ports import EntryCorrupt
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position

CLUSTERS_MAX: Final = 16
"""The most index queries for ids that are far apart. Each scans the producer's rows from its id on;
a block without any of the ids is never decoded."""

FIND_BLOCKS: Final = 16
FIND_FACTOR: Final = 4
"""The number of candidate blocks that a look-up reads first, newest first, in addition to one per
id; each further step reads this many times more."""

TRIMMED_OF: Final = "SELECT highest FROM producer_trimmed WHERE topic = ? AND producer = ?"
UNFINISHED: Final = "SELECT DISTINCT producer FROM producer_block WHERE topic = ? AND unfinished"
_BLOCKS_OF: Final = f"""SELECT lowest, highest, unfinished, {ENTRIES_ALONE}
    FROM producer_block JOIN block ON block.id = block
    WHERE producer_block.topic = ? AND producer = ? AND """
_NEWEST_OF: Final = _BLOCKS_OF + "block > 0 ORDER BY block DESC"
_BEFORE_OF: Final = (
    _BLOCKS_OF
    + """block <= (SELECT id FROM block WHERE topic = ? AND ledger_id = ? AND last_entry >= ?
        ORDER BY last_entry LIMIT 1) ORDER BY block DESC"""
)
OLDEST_OF: Final = _BLOCKS_OF + "block >= ? ORDER BY block"
_HOLDING: Final = """SELECT block, lowest, highest FROM producer_block
    WHERE topic = ? AND producer = ? AND highest >= ? AND lowest <= ?"""


class Range(NamedTuple):
    """One producer's lowest and highest id, and the message left unfinished, if any."""

    lowest: int = SEQUENCE_ID_MAX
    highest: int = -1
    unfinished: Chunk | None = None


def producer_ranges(entries: Sequence[Entry]) -> dict[str, Range]:
    ranges: dict[str, Range] = {}
    for entry in entries:
        if not entry.marker:
            lowest, highest, unfinished = ranges.get(entry.producer, Range())
            chunk = entry.chunk
            if chunk is None:
                unfinished = None
            elif not chunk.is_last:
                unfinished = chunk
            elif unfinished is not None and unfinished.layout == chunk.layout:
                unfinished = None
            ids = Range(min(lowest, entry.lowest), max(highest, entry.highest), unfinished)
            ranges[entry.producer] = ids
    return ranges


def trimmed_mark(db: Transaction, topic_id: int, producer: str) -> Mark:
    """A producer's mark after its trimmed entries."""
    rows = db.rows(TRIMMED_OF, topic_id, producer)
    return Mark(rows[0][0]) if rows else Mark()


def newest_first(
    db: Transaction, topic_id: int, producer: str, first: Position | None
) -> Iterator[StoredEntry]:
    """A producer's entries, newest first, back to the start of the log."""
    for row in db.scan(_NEWEST_OF, topic_id, producer):
        for stored in reversed(stored_of(producer, row)):
            if first is not None and stored.position >= first:
                yield stored


def newest_before(
    db: Transaction, topic_id: int, producer: str, position: Position
) -> Iterator[Entry]:
    """A producer's entries before a position, newest first, back to the oldest block."""
    for row in db.scan(_BEFORE_OF, topic_id, producer, topic_id, *position):
        for stored in reversed(stored_of(producer, row)):
            if stored.position < position:
                yield stored.entry


def stored_of(producer: str, row: Any) -> list[StoredEntry]:
    """A producer's entries in a block. A damaged block is represented by its index row: the highest
    id, and whether its message may be incomplete."""
    lowest, highest, unfinished, *columns = row
    block = Block(*columns)
    try:
        stored = decode_block(block)
    except EntryCorrupt:
        entry = indexed(producer, lowest, highest, unfinished)
        return [StoredEntry(Position(block.ledger_id, block.last_entry), 0, entry, 0)]
    return [each for each in stored if each.entry.producer == producer and not each.entry.marker]


def indexed(producer: str, lowest: int, highest: int, unfinished: int) -> Entry:
    """The stand-in for a producer's entries in an unreadable block."""
    chunk = Chunk("", 0, 2, 2) if unfinished else None
    return Entry(
        producer, lowest, highest, None, (), marker=False, metadata=b"", payload=b"", chunk=chunk
    )


def cuts(db: Transaction, topic_id: int, producer: str, first: Position, before: Position) -> bool:
    """Whether a trim removes entries of a producer's last message that could still be completed."""
    stored = newest_first(db, topic_id, producer, first)
    mark = last_mark(trimmed_mark(db, topic_id, producer), (each.entry for each in stored))
    again = newest_first(db, topic_id, producer, first)
    return is_cut(mark, ((each.position, each.entry) for each in again), before)


def trimmed_producers(
    db: Transaction, topic_id: int, after: str, limit: int, skip: int = 0
) -> list[tuple[str, int]]:
    rows = db.rows(
        """SELECT producer, highest FROM producer_trimmed WHERE topic = ? AND producer > ?
            ORDER BY producer LIMIT ? OFFSET ?""",
        topic_id,
        after,
        limit,
        skip,
    )
    return [(producer, highest) for producer, highest in rows]


def finder_of(
    db: Transaction,
    topic_id: int,
    first: Position | None,
    producer: str,
    sequence_ids: Sequence[int],
    uuid: str,
) -> Finder:
    """Look up a producer's ids in candidate blocks. Most ids are in one block; if they are in
    many, the newest blocks are read first, then earlier ones until all ids are found."""
    wanted = sorted(set(sequence_ids))
    blocks: set[int] = set()
    for lowest, highest in clusters(wanted, CLUSTERS_MAX):
        rows = db.scan(_HOLDING, topic_id, producer, lowest, highest)
        for block, block_lowest, block_highest in rows:
            if _is_in(wanted, block_lowest, block_highest):
                blocks.add(block)
    in_order = sorted(blocks)  # blocks of a topic are numbered in append order
    count = len(wanted) + FIND_BLOCKS
    while True:
        finder = Finder(producer, sequence_ids, uuid)
        for block_id in in_order[-count:]:
            ((*columns,),) = db.rows(f"SELECT {ENTRIES_ALONE} FROM block WHERE id = ?", block_id)
            for stored in decode_block(Block(*columns)):
                if first is not None and stored.position >= first:
                    finder.show(stored)
        if finder.done or count >= len(in_order):
            return finder
        count *= FIND_FACTOR


def _is_in(wanted: Sequence[int], lowest: int, highest: int) -> bool:
    return bisect_left(wanted, lowest) < bisect_right(wanted, highest)
