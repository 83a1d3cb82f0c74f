"""What is kept of a cursor.

Small things, which change together, are the head. What is acknowledged beyond the mark-delete
position may be a million holes; it is kept in pages, and a step of the core touches few of them:

    mark-delete        page 0                    page 1
    --------|  ..#.##..#..#....###..#.#   #.#.#.#.#.#.#.#.#.  ...      # acknowledged

A store hands out both for one step, and makes what the step changed durable, all of it or nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from seqgate.types import Position, TopicName

RESERVED: Final = "#seqgate.internal."
"""How the names of properties begin that are Seqgate's own: they outlast clearing, and are nothing
to Pulsar."""

PAGE_ENTRIES: Final = 65_536
"""How many entries of one ledger a page covers."""


LEASE_MAX_MS: Final = 3_600_000
"""How long a lease may be asked for at most, in milliseconds."""


class Lease(NamedTuple):
    """The exclusive right to move the cursor, until `expires_ms` by the store's clock.
    `duration_ms` is the time that was left when the lease was last granted, at most LEASE_MAX_MS;
    0: it was released, and is over by every clock."""

    owner: str
    epoch: int
    expires_ms: int
    duration_ms: int = LEASE_MAX_MS

    def bounded(self, now_ms: int) -> "Lease":
        """The lease, by a clock that may not be the one by which it was granted: another process's,
        or this machine's before it was set back. It never lasts for longer than its duration from
        now on."""
        return self._replace(expires_ms=min(self.expires_ms, now_ms + self.duration_ms))

    @property
    def is_released(self) -> bool:
        """Whether its owner, or a reset of the cursor, ended it."""
        return self.duration_ms == 0

    def lasts(self, now_ms: int) -> bool:
        """Whether it is not over."""
        return self.bounded(now_ms).expires_ms > now_ms


class Batch(NamedTuple):
    """A batch that is acknowledged in part; bit i of `acknowledged` is message i. `is_guess`: how
    many messages it really has is not known; all that are not acknowledged are among `size`."""

    size: int
    acknowledged: int
    is_guess: bool = False

    @property
    def waiting(self) -> int:
        """The messages that are not acknowledged, as bits."""
        return ~self.acknowledged & (1 << self.size) - 1

    def sized(self, size: int) -> "Batch | None":
        """The batch, by how many messages it really has; None: that cannot be."""
        if not self.is_guess:
            return self if size == self.size else None
        if self.waiting.bit_length() > size:
            return None
        return Batch(size, ~self.waiting & (1 << size) - 1)


@dataclass(slots=True)
class Head:
    """A cursor without its holes. `revision` moves with each change but those of the lease and of
    what is acknowledged beyond the mark-delete position; `acknowledged` and `partial` count entries
    and batches there."""

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


class Holes(Protocol):
    """What is acknowledged beyond the mark-delete position of one cursor, and what is known of the
    entries there. Synchronous: it belongs to one step."""

    def page(self, ledger_id: int, number: int) -> int:
        """A page: bit i is set when entry number * PAGE_ENTRIES + i is acknowledged; 0: none is."""
        ...

    def put_page(self, ledger_id: int, number: int, bits: int) -> None:
        """Keep a page; 0 removes it."""
        ...

    def pages(self, after: Position | None) -> Iterator[tuple[int, int, int]]:
        """The pages that may hold something after a position, in order: ledger, number, bits."""
        ...

    def batch(self, position: Position) -> Batch | None:
        """A batch that is acknowledged in part."""
        ...

    def put_batch(self, position: Position, batch: Batch | None) -> None:
        """Keep one; None removes it."""
        ...

    def batches(self, after: Position | None) -> Iterator[tuple[Position, Batch]]:
        """The batches after a position, in order."""
        ...

    def attempts(self, position: Position) -> int:
        """How often an entry was delivered, as far as it was counted."""
        ...

    def put_attempts(self, position: Position, count: int) -> None:
        """Keep a count; 0 removes it."""
        ...

    def attempted(self, after: Position | None) -> Iterator[tuple[Position, int]]:
        """The entries after a position that have a count, in order."""
        ...

    def drop_run(self, first: Position, last_entry: int) -> int:
        """Remove the batches and the counts of attempts of a run of entries of one ledger. Returns
        how many batches were removed."""
        ...

    def next_after(self, last: Position) -> Position | None:
        """The entry after the last one of its ledger, in a later ledger; None: not known."""
        ...

    def put_succession(self, last: Position, following: Position) -> None:
        """Note that nothing lies between two positions of different ledgers. Known to all cursors
        of the topic."""
        ...

    def spent_epoch(self) -> int:
        """The highest epoch that a cursor of the topic had which was deleted, at least: what comes
        in its place goes on from there; 0: there was none."""
        ...

    def drop_through(self, position: Position | None) -> int:
        """Remove every page that ends at or before a position, and batches and counts of attempts
        up to it; None: everything of the cursor. Returns how many batches were removed. What a page
        that the position divides holds up to it is the core's to clear."""
        ...
