"""The state of a cursor.

The head has the small values, which change together. The acknowledgements beyond the mark-delete
position may leave a million holes; they are stored in pages, of which a step touches few:

    mark-delete        page 0                    page 1
    --------|  ..#.##..#..#....###..#.#   #.#.#.#.#.#.#.#.#.  ...      # acknowledged

A store passes both to a step, and makes its changes durable atomically.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from seqgate.types import Position, TopicName

RESERVED: Final = "#seqgate.internal."
"""The prefix of Seqgate's own property names, kept when properties are cleared; Pulsar ignores
it."""

PAGE_ENTRIES: Final = 65_536
"""The number of entries of a ledger that a page covers."""


LEASE_MAX_MS: Final = 3_600_000
"""The longest duration of a lease, in milliseconds."""


class Attempted(NamedTuple):
    """An entry that was delivered so many times, and its caller's note about that; empty: none."""

    position: Position
    attempts: int
    note: bytes = b""


class Lease(NamedTuple):
    """The exclusive right to move the cursor, until `expires_ms` by the clock of the process that
    judges it; see sightings.py. `duration_ms` is the time that was left when the lease was last
    granted, at most LEASE_MAX_MS; 0: it was released, and is over by every clock."""

    owner: str
    epoch: int
    expires_ms: int
    duration_ms: int = LEASE_MAX_MS

    @property
    def is_released(self) -> bool:
        """Whether its owner, or a reset of the cursor, ended it."""
        return self.duration_ms == 0

    def lasts(self, now_ms: int) -> bool:
        return not self.is_released and self.expires_ms > now_ms


class Batch(NamedTuple):
    """A partly acknowledged batch; bit i of `acknowledged` is message i. `is_guess`: the real size
    is unknown, but `size` includes every unacknowledged message."""

    size: int
    acknowledged: int
    is_guess: bool = False

    @property
    def waiting(self) -> int:
        return ~self.acknowledged & (1 << self.size) - 1

    def sized(self, size: int) -> "Batch | None":
        """The batch with its real size; None: the size is impossible."""
        if not self.is_guess:
            return self if size == self.size else None
        if self.waiting.bit_length() > size:
            return None
        return Batch(size, ~self.waiting & (1 << size) - 1)


@dataclass(slots=True)
class Head:
    """A cursor without its holes. `revision` changes with all but the lease and what lies beyond
    the mark-delete position; `acknowledged` and `partial` count the entries and batches there;
    `lease_number` changes whenever the lease is granted, renewed or ended."""

    topic: TopicName
    name: str
    created_ms: int
    mark_delete: Position | None = None
    mark_delete_properties: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    revision: int = 0
    acknowledged: int = 0
    partial: int = 0
    lease: Lease | None = None
    lease_number: int = 0


class Holes(Protocol):
    """The acknowledgements of one cursor beyond its mark-delete position, and delivery counts
    there. Synchronous: it belongs to one step."""

    def page(self, ledger_id: int, number: int) -> int:
        """A page: bit i is set if entry number * PAGE_ENTRIES + i is acknowledged."""
        ...

    def put_page(self, ledger_id: int, number: int, bits: int) -> None:
        """Store a page; 0 removes it."""
        ...

    def pages(self, after: Position | None) -> Iterator[tuple[int, int, int]]:
        """The pages that may have entries after a position, in order: ledger, number, bits."""
        ...

    def batch(self, position: Position) -> Batch | None:
        """A partly acknowledged batch; None: none of its messages is recorded."""
        ...

    def put_batch(self, position: Position, batch: Batch | None) -> None:
        """Store a batch; None removes it."""
        ...

    def batches(self, after: Position | None) -> Iterator[tuple[Position, Batch]]:
        """The partly acknowledged batches after a position, in order."""
        ...

    def attempts(self, position: Position) -> int:
        """The number of counted deliveries of an entry."""
        ...

    def note(self, position: Position) -> bytes:
        """The note beside the count of an entry; empty: none."""
        ...

    def put_attempts(self, position: Position, count: int, note: bytes = b"") -> None:
        """Store a count and its note; 0 removes both."""
        ...

    def attempted(self, after: Position | None) -> Iterator[Attempted]:
        """The entries after a position that have a count, in order."""
        ...

    def drop_run(self, first: Position, last_entry: int) -> int:
        """Remove the batches and delivery counts of a run of entries of one ledger. Returns the
        number of removed batches."""
        ...

    def next_after(self, last: Position) -> Position | None:
        """The entry after the last one of a ledger, in a later ledger; None: unknown."""
        ...

    def put_succession(self, last: Position, following: Position) -> None:
        """Record, for all cursors of the topic, that no entry lies between two positions of
        different ledgers."""
        ...

    def spent_epoch(self) -> int:
        """A bound on the epochs of the topic's deleted cursors: none was higher. A new cursor
        continues from it; 0: none was deleted."""
        ...

    def drop_through(self, position: Position | None) -> int:
        """Remove every page that ends at or before a position, and the batches and delivery counts
        up to it; None: all of the cursor's. Returns the number of removed batches. In a page that
        contains the position, the core clears the entries up to it."""
        ...
