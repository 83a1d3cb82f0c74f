"""The rows of topics and blocks: reading a log."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from seqgate.services.errors import Fenced
from seqgate.services.ledger.adapters.block import Block, decode_block, to_columns
from seqgate.services.ledger.core.columns import Columns, clip
from seqgate.services.ledger.core.entry import StoredEntry
from seqgate.services.ledger.ports import EntryCorrupt, LogState, TopicNotFound
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position, TopicName

LOG: Final = """name, incarnation, ledger_id, created_ms, first_ledger, first_entry, tail_ledger,
    tail_entry, entries, messages, size_bytes"""
NEXT_LEDGER: Final = """SELECT ledger_id, first_entry FROM block
    WHERE topic = ? AND ledger_id > ? ORDER BY ledger_id, last_entry LIMIT 1"""
LEDGER_END: Final = """SELECT last_entry FROM block
    WHERE topic = ? AND ledger_id = ? ORDER BY last_entry DESC LIMIT 1"""
_BLOCK: Final = """ledger_id, first_entry, last_entry, append_ms, entries_crc, metadata_crc,
    payloads_crc, entries, """
_WITH_PAYLOADS: Final = _BLOCK + "metadata, payloads"
WITH_METADATA: Final = _BLOCK + "metadata, NULL"
ENTRIES_ALONE: Final = _BLOCK + "NULL, NULL"
_BLOCK_AT: Final = """SELECT {} FROM block WHERE id = (
        SELECT id FROM block WHERE topic = ?1 AND ledger_id = ?2 AND last_entry >= ?3
        ORDER BY last_entry LIMIT 1
    ) AND first_entry <= ?3"""
_RUN_FROM: Final = """SELECT ledger_id, first_entry, last_entry, append_ms FROM block
    WHERE topic = ? AND (ledger_id, last_entry) >= (?, ?) ORDER BY ledger_id, last_entry LIMIT 1"""
_LAST_APPEND: Final = """SELECT append_ms FROM block
    WHERE topic = ? ORDER BY ledger_id DESC, last_entry DESC LIMIT 1"""
_CLOCK: Final = "SELECT append_ms FROM topic_clock WHERE topic = ?"


def row_of(db: Transaction, topic: TopicName) -> tuple[int, LogState] | None:
    rows = db.rows(f"SELECT id, {LOG} FROM topic WHERE name = ?{db.for_update}", str(topic))
    if not rows:
        return None
    topic_id, *log = rows[0]
    return topic_id, log_state(log)


def existing(
    db: Transaction, topic: TopicName, ledger_id: int | None = None
) -> tuple[int, LogState]:
    """A topic's row, if it has the given ledger_id; None: any."""
    row = row_of(db, topic)
    if row is None:
        raise TopicNotFound("topic not found", topic=topic)
    _, state = row
    if ledger_id not in (None, state.ledger_id):
        raise Fenced("another writer owns the topic", epoch=state.ledger_id)
    return row


def log_state(row: Sequence[object]) -> LogState:
    name, incarnation, ledger_id, created_ms, *positions, entries, messages, size_bytes = row
    first_ledger, first_entry, tail_ledger, tail_entry = positions
    assert isinstance(name, str)
    return LogState(
        TopicName.parse(name),
        _integer(incarnation),
        _integer(ledger_id),
        _integer(created_ms),
        _position(first_ledger, first_entry),
        _position(tail_ledger, tail_entry),
        _integer(entries),
        _integer(messages),
        _integer(size_bytes),
    )


def _position(ledger_id: object, entry_id: object) -> Position | None:
    return None if ledger_id is None else Position(_integer(ledger_id), _integer(entry_id))


def _integer(value: object) -> int:
    assert isinstance(value, int)
    return value


def page_of(
    db: Transaction,
    topic_id: int,
    state: LogState,
    after: Position | None,
    entries_max: int,
    bytes_max: int,
    *,
    payloads: bool,
) -> list[StoredEntry]:
    if state.first is None:
        return []
    found: list[StoredEntry] = []
    size_bytes = 0
    try:
        for stored in _entries(db, topic_id, after, state.first, payloads=payloads):
            size_bytes += len(stored.entry.metadata) + (stored.payload_bytes if payloads else 0)
            if found and (len(found) >= entries_max or size_bytes > bytes_max):
                break
            found.append(stored)
    except EntryCorrupt:
        if not found:  # first return the entries before the damage
            raise
    return found


def _entries(
    db: Transaction,
    topic_id: int,
    after: Position | None,
    first: Position,
    *,
    payloads: bool,
) -> Iterator[StoredEntry]:
    """Entries after `after` and not before `first`, in order."""
    start = start_after(after, first)
    for block in _blocks(db, topic_id, start, _WITH_PAYLOADS if payloads else WITH_METADATA):
        for stored in decode_block(block):
            if stored.position > start:
                yield stored


def entries_at(
    db: Transaction, topic_id: int, positions: Sequence[Position], *, payloads: bool
) -> Iterator[StoredEntry]:
    columns = _WITH_PAYLOADS if payloads else WITH_METADATA
    index = 0
    while index < len(positions):
        ledger_id, entry_id = positions[index]
        rows = db.rows(_BLOCK_AT.format(columns), topic_id, ledger_id, entry_id)
        if not rows:
            index += 1
            continue
        block = Block._make(rows[0])
        entries = decode_block(block)
        end = bisect_right(positions, (ledger_id, block.last_entry), index)
        for _, entry_id in positions[index:end]:
            yield entries[entry_id - block.first_entry]
        index = end


def runs_after(
    db: Transaction, topic_id: int, start: Position, through: Position, *, metadata: bool
) -> Iterator[Columns]:
    if start >= through:
        return
    for block in _blocks(db, topic_id, start, WITH_METADATA if metadata else ENTRIES_ALONE):
        if Position(block.ledger_id, block.first_entry) > through:
            return
        yield clip(
            to_columns(block),
            start.entry_id + 1 if block.ledger_id == start.ledger_id else block.first_entry,
            through.entry_id if block.ledger_id == through.ledger_id else block.last_entry,
        )


def start_after(after: Position | None, first: Position) -> Position:
    """The position to read after: `after`, but not before the start of the log."""
    return first._replace(entry_id=first.entry_id - 1) if after is None or after < first else after


def _blocks(db: Transaction, topic_id: int, start: Position, columns: str) -> Iterator[Block]:
    rows = db.scan(
        f"""SELECT {columns} FROM block WHERE topic = ? AND (ledger_id, last_entry) > (?, ?)
            ORDER BY ledger_id, last_entry""",
        topic_id,
        *start,
    )
    return map(Block._make, rows)


def last_append_ms(db: Transaction, topic_id: int) -> int:
    rows = db.rows(_LAST_APPEND, topic_id) or db.rows(_CLOCK, topic_id)
    return int(rows[0][0]) if rows else 0


class _Run(NamedTuple):
    """A block without its blobs."""

    ledger_id: int
    first_entry: int
    last_entry: int
    append_ms: int


def _run_from(db: Transaction, topic_id: int, ledger_id: int, entry_id: int) -> _Run:
    """The block with the first entry at or after a position, which must exist."""
    (row,) = db.rows(_RUN_FROM, topic_id, ledger_id, entry_id)
    return _Run._make(row)


def first_since(
    db: Transaction, topic_id: int, first: Position, tail: Position, append_ms: int
) -> Position | None:
    """See LedgerStore.find_time. A binary search over ledgers, then over the entries of one.
    Invariant: `before` was appended before `append_ms`; the entries from `ledger_id`, or from
    `high`, on were not."""
    before = _run_from(db, topic_id, *first)
    if _run_from(db, topic_id, *tail).append_ms < append_ms:
        return None
    if before.append_ms >= append_ms:
        return first

    ledger_id = tail.ledger_id + 1  # empty; and the tail was not appended before
    while ledger_id - before.ledger_id > 1:
        middle = (before.ledger_id + ledger_id) // 2
        run = _run_from(db, topic_id, middle, 0)
        if run.append_ms < append_ms:
            before = run
        else:
            ledger_id = middle

    ((end,),) = db.rows(LEDGER_END, topic_id, before.ledger_id)
    low, high = before.last_entry, end + 1
    while high - low > 1:
        run = _run_from(db, topic_id, before.ledger_id, (low + high) // 2)
        if run.append_ms < append_ms:
            low = run.last_entry
        else:
            high = run.first_entry
    if high <= end:
        return Position(before.ledger_id, high)
    run = _run_from(db, topic_id, ledger_id, 0)
    return Position(run.ledger_id, run.first_entry)


def first_from(db: Transaction, topic_id: int, position: Position) -> Position | None:
    rows = db.rows(
        """SELECT ledger_id, first_entry FROM block
            WHERE topic = ? AND (ledger_id, last_entry) >= (?, ?)
            ORDER BY ledger_id, last_entry LIMIT 1""",
        topic_id,
        *position,
    )
    return max(Position(*rows[0]), position) if rows else None
