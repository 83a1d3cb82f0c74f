"""How a cursor moves; state.py has its state.

Each method is one step: it refuses before it changes anything.

The mark-delete position absorbs acknowledged entries as soon as they are adjacent to it:

    ledger 1   0123456789          ledger 2   0123...
               ####.##.##                     #.#       # acknowledged
               ---|                           4 comes: mark-delete goes on to 6; 7 comes: to 9

It continues from 9 to 2:0 once a Succession states that no entry lies between them.

The first entry of a topic is 1:0. A cursor without a mark-delete position gets one when that entry
is acknowledged; or the entry that a Succession names as following BEFORE_FIRST, because earlier
ones are gone from the log.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, groupby, islice, zip_longest
from operator import itemgetter
from typing import Final, NamedTuple

from seqgate.services.cursor.core import pages
from seqgate.services.cursor.core.state import PAGE_ENTRIES, Attempted, Batch, Head, Holes, Lease
from seqgate.services.errors import DomainError, Fenced, Kind
from seqgate.types import Position

BEFORE_FIRST: Final = Position(0, 0)
"""Stands in a Succession for the end of nothing: no log has a ledger 0."""

FIRST: Final = Position(1, 0)
"""The first entry of a topic, unless it was trimmed."""

PROPERTIES_MAX: Final = 2_000
"""The most properties of a cursor's own."""

PROPERTIES_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of a cursor's own properties together, names and values, in UTF-8."""

ATTEMPTS_MAX: Final = 2**32 - 1
"""The largest count of an entry's deliveries; it stays there."""

NOTE_BYTES_MAX: Final = 1_000
"""The longest note about an entry's deliveries, in bytes."""

NOTES_BYTES_PAGE: Final = 1024 * 1024
"""The bytes of notes at which a page of delivery counts ends."""

_INTERNAL: Final = "#seqgate.internal."


class InvalidPosition(DomainError):
    """A position is out of range, lies after the log's end, or contradicts another one."""

    kind = Kind.INVALID
    reason = "INVALID_POSITION"


class InvalidProperty(DomainError):
    """A property is too long, or there are too many properties."""

    kind = Kind.INVALID
    reason = "INVALID_PROPERTY"


class AlreadyMarkDeleted(DomainError):
    """The cursor's mark-delete position is past the requested one."""

    kind = Kind.IN_USE
    reason = "ALREADY_MARK_DELETED"


class RevisionConflict(DomainError):
    """The cursor has changed: its revision is not the one in the request."""

    kind = Kind.FENCED
    reason = "REVISION_CONFLICT"


class LeaseHeld(DomainError):
    """Another owner holds the lease."""

    kind = Kind.IN_USE
    reason = "LEASE_HELD"


class Range(NamedTuple):
    """Consecutive entries of one ledger, from `first` through `last_entry`."""

    first: Position
    last_entry: int

    @property
    def last(self) -> Position:
        return Position(self.first.ledger_id, self.last_entry)


class BatchAck(NamedTuple):
    """The acknowledged messages of a batch. `is_guess`: see Batch."""

    position: Position
    size: int
    indexes: tuple[int, ...]
    is_guess: bool = False


class Succession(NamedTuple):
    """No entry lies between `last`, the end of its ledger, and `following`, of a later ledger; or,
    if `last` is BEFORE_FIRST, before `following`."""

    last: Position
    following: Position


class Caller(NamedTuple):
    """The caller's view of the cursor and the log: the epoch of its lease, the last entry of the
    log, the revision that it last saw, and the ends of ledgers. None: not compared."""

    epoch: int | None = None
    log_end: Position | None = None
    revision: int | None = None
    successions: tuple[Succession, ...] = ()


class Acknowledged(NamedTuple):
    """A page of ranges and batches acknowledged beyond the mark-delete position."""

    ranges: list[Range]
    batches: list[BatchAck]
    next_after: Position | None


class Attempts(NamedTuple):
    """A page of delivery counts by entry."""

    counts: list[Attempted]
    next_after: Position | None


class CursorState:
    """One cursor during one step. The methods change `head` and `holes` in place.

    Raises, from every method with a caller:
        Fenced: the caller's epoch is not that of the lease, or there is no lease.
        RevisionConflict: the cursor has another revision than the caller's.
        InvalidPosition: the caller's successions contradict each other or known ones, or a
            position is after the caller's end of the log.
    """

    def __init__(self, head: Head, holes: Holes) -> None:
        self.head = head
        self.holes = holes

    def mark_delete(
        self, position: Position, properties: Mapping[str, str], caller: Caller
    ) -> None:
        """Acknowledge everything up to a position, and replace the properties attached to it.

        Raises:
            AlreadyMarkDeleted: the cursor is past the position, at `mark_delete`.
        """
        head = self.head
        successions = self._checked(caller, [position])
        if head.mark_delete is not None and position < head.mark_delete:
            raise AlreadyMarkDeleted(
                "mark_delete is already past this position", mark_delete=head.mark_delete
            )

        self._note(successions)
        reached = self._absorbed(position)
        assert reached is not None
        self._move(reached)
        head.mark_delete_properties = dict(properties)
        head.revision += 1

    def acknowledge(
        self, ranges: Sequence[Range], batches: Sequence[BatchAck], caller: Caller
    ) -> None:
        """Acknowledge entries and messages of batches. The mark-delete position absorbs adjacent
        entries, and keeps its properties.

        Raises:
            InvalidPosition: a range or an index is invalid, or a batch has another size.
        """
        for first, last_entry in ranges:
            if last_entry < first.entry_id:
                raise InvalidPosition("a range ends before it begins", field="ranges", first=first)
        ends = chain((each.last for each in ranges), (each.position for each in batches))
        successions = self._checked(caller, ends)
        messages = self._messages(batches)

        self._note(successions)
        mark_delete, apart = self._take_in(ranges)
        self._put_entries(apart)
        for position, batch in messages.items():
            self._put_messages(position, batch)
        mark_delete = self._absorbed(mark_delete)
        if mark_delete is not None and mark_delete != self.head.mark_delete:
            self._move(mark_delete)
            self.head.revision += 1

    def reset(self, mark_delete: Position | None, caller: Caller) -> None:
        """Move anywhere, and forget the acknowledgements beyond. Unless the caller holds the lease,
        the lease ends and its holder is fenced: its view of the cursor is void."""
        self._checked(caller, [] if mark_delete is None else [mark_delete])

        self.holes.drop_through(None)
        head = self.head
        if caller.epoch is None and head.lease is not None:
            self._grant(head.lease._replace(epoch=self._next_epoch(), duration_ms=0))
        head.mark_delete, head.mark_delete_properties = mark_delete, {}
        head.acknowledged = head.partial = 0
        head.revision += 1

    def acknowledged(self, after: Position | None, limit: int) -> Acknowledged:
        """The ranges and batches acknowledged after a position, in order, at most `limit` together.
        The next page is after `next_after`; None: there is none."""
        assert limit > 0
        start = max(
            (each for each in (after, self.head.mark_delete) if each is not None), default=None
        )
        found = list(islice(merge(self._ranges(start), self._batches(start)), limit + 1))
        next_after = None
        if len(found) > limit:
            found.pop()
            end = found[-1]
            next_after = end.last if isinstance(end, Range) else end.position
        return Acknowledged(
            [each for each in found if isinstance(each, Range)],
            [each for each in found if isinstance(each, BatchAck)],
            next_after,
        )

    def record_attempts(
        self,
        positions: Iterable[Position],
        caller: Caller,
        at_least: Sequence[int] = (),
        notes: Sequence[bytes] = (),
    ) -> list[int]:
        """Count deliveries: one more each or, with `at_least`, up to the given counts. A note
        replaces the stored one unless the stored count is higher. Returns the counts; 0 for
        acknowledged entries.

        Raises:
            InvalidPosition: `at_least` or `notes` has another length than the positions, or a note
                is too long.
        """
        positions = list(positions)
        if at_least and len(at_least) != len(positions):
            raise InvalidPosition(
                "attempts must be empty or have one value for each position",
                field="attempts",
                positions=len(positions),
                attempts=len(at_least),
            )
        if notes and len(notes) != len(at_least):
            raise InvalidPosition(
                "notes must be empty or have one value for each of attempts",
                field="notes",
                notes=len(notes),
                attempts=len(at_least),
            )
        if any(len(each) > NOTE_BYTES_MAX for each in notes):
            raise InvalidPosition(
                f"a note is too long (limit {NOTE_BYTES_MAX:,} bytes)", field="notes"
            )
        self._checked(caller, positions)
        return [
            0 if self._is_acknowledged(position) else self._counted(position, least, note)
            for position, least, note in zip_longest(positions, at_least, notes)
        ]

    def attempts(self, after: Position | None, limit: int) -> Attempts:
        """The delivery counts of at most `limit` entries after a position, in order, with notes of
        about NOTES_BYTES_PAGE. The next page is after `next_after`; None: there is none."""
        assert limit > 0
        found, notes_bytes = list[Attempted](), 0
        for each in self.holes.attempted(after):
            if len(found) == limit or notes_bytes >= NOTES_BYTES_PAGE:
                return Attempts(found, found[-1].position)
            found.append(each)
            notes_bytes += len(each.note)
        return Attempts(found, None)

    def update_properties(
        self,
        put: Mapping[str, str],
        remove: Iterable[str],
        caller: Caller,
        *,
        clear: bool,
    ) -> None:
        """Change the cursor's own properties: clear, then remove, then put. Clearing keeps names
        that begin with "#seqgate.internal."; these must be removed by name.

        Raises:
            InvalidProperty: the properties would become too many or too large.
        """
        self._checked(caller, [])
        head = self.head
        kept = {
            name: value
            for name, value in head.properties.items()
            if not clear or name.startswith(_INTERNAL)
        }
        for name in remove:
            kept.pop(name, None)
        properties = kept | dict(put)
        if PROPERTIES_MAX < len(properties) > len(head.properties):
            raise InvalidProperty(
                f"too many properties (limit {PROPERTIES_MAX:,})",
                field="put",
                count=len(properties),
            )
        size_bytes = properties_bytes(properties)
        if PROPERTIES_BYTES_MAX < size_bytes > properties_bytes(head.properties):
            raise InvalidProperty(
                f"properties too large (limit {PROPERTIES_BYTES_MAX:,} bytes together)",
                field="put",
                bytes=size_bytes,
            )

        head.properties = properties
        head.revision += 1

    def acquire_lease(self, owner: str, now_ms: int, duration_ms: int) -> Lease:
        """Acquire the lease, the right to move the cursor. A recreated cursor continues the epochs
        of the deleted one.

        Raises:
            LeaseHeld: another `owner` holds it, for `remaining_ms` more.
        """
        lease = self.head.lease
        if lease is None or not lease.lasts(now_ms):
            granted = Lease(owner, self._next_epoch(), now_ms + duration_ms, duration_ms)
        elif lease.owner == owner:
            granted = _prolonged(lease, now_ms, duration_ms)
        else:
            raise LeaseHeld(
                "another owner holds the lease",
                owner=lease.owner,
                remaining_ms=lease.expires_ms - now_ms,
            )
        return self._grant(granted)

    def renew_lease(
        self, owner: str, epoch: int, now_ms: int, duration_ms: int, *, next_epoch: bool = False
    ) -> Lease:
        """Extend the lease; also an expired one, until another owner acquires it. A released lease
        stays over: a late renewal must not let its owner acquire the same epoch again.

        With `next_epoch` the holder moves to the next epoch, which fences its earlier calls that
        are still in flight. A retry gets the same epoch.

        Raises:
            Fenced: the lease was released, or has another epoch or owner.
        """
        lease = self.head.lease
        has_gone_on = lease is not None and lease[:2] == (owner, epoch + 1)
        if lease is None or not (next_epoch and has_gone_on):
            lease = self._lease(epoch)
            if lease.owner != owner:
                raise Fenced("another owner holds the lease", owner=lease.owner, epoch=lease.epoch)
            if next_epoch:
                lease = lease._replace(epoch=epoch + 1)
        if lease.is_released:
            raise Fenced("the lease was released", epoch=lease.epoch)
        return self._grant(_prolonged(lease, now_ms, duration_ms))

    def release_lease(self, epoch: int, now_ms: int) -> None:
        """End the lease, also by a clock that is behind. The next owner gets a new epoch, even if
        that is the same owner.

        Raises:
            Fenced: the lease has another epoch.
        """
        lease = self._lease(epoch)
        expires_ms = min(lease.expires_ms, now_ms)
        self._grant(lease._replace(expires_ms=expires_ms, duration_ms=0))

    def _grant(self, lease: Lease) -> Lease:
        """Set the lease; whoever watches it sees that it changed."""
        self.head.lease = lease
        self.head.lease_number += 1
        return lease

    def _next_epoch(self) -> int:
        """An epoch never used by this cursor or by a deleted one of its name. It leaves one out, or
        a holder that late requests its next epoch would be taken for the new holder."""
        lease = self.head.lease
        last = self.holes.spent_epoch() if lease is None else lease.epoch
        return last + 2 if last else 1

    # ---- checks

    def _checked(self, caller: Caller, positions: Iterable[Position]) -> dict[Position, Position]:
        """Compare the caller's view with the cursor. Returns the caller's new successions."""
        if caller.epoch is not None:
            self._lease(caller.epoch)
        if caller.revision is not None and caller.revision != self.head.revision:
            raise RevisionConflict(
                "cursor has changed: revision does not match",
                revision=self.head.revision,
                given=caller.revision,
            )
        for position in positions:
            if position.ledger_id < FIRST.ledger_id:
                raise InvalidPosition(
                    "ledger_id must be 1 or more", field="position", given=position
                )
            if caller.log_end is not None and position > caller.log_end:
                raise InvalidPosition(
                    "position is after log_end",
                    field="log_end",
                    given=position,
                    log_end=caller.log_end,
                )
        return self._news(caller.successions)

    def _lease(self, epoch: int) -> Lease:
        lease = self.head.lease
        if lease is None or lease.epoch != epoch:
            held = 0 if lease is None else lease.epoch
            raise Fenced("epoch does not match the lease", epoch=held, given=epoch)
        return lease

    def _news(self, successions: Iterable[Succession]) -> dict[Position, Position]:
        news: dict[Position, Position] = {}
        successions = list(successions)
        first = self._first(successions)
        for last, following in successions:
            known = news.get(last) or self.holes.next_after(last)
            if following.ledger_id <= last.ledger_id:
                raise InvalidPosition(
                    "next must be in a later ledger than last",
                    field="successions",
                    last=last,
                    next=following,
                )
            if last == BEFORE_FIRST:
                # A trimmed log begins later each time, so an earlier beginning is outdated.
                following = max(following, known or following)
            elif known is not None and known != following:
                following = _later(last, known, following, first)
            if following != known:
                news[last] = following
        return news

    def _first(self, successions: Iterable[Succession]) -> Position:
        """The first entry that is left in the log, as far as known."""
        told = [following for last, following in successions if last == BEFORE_FIRST]
        return max([self.holes.next_after(BEFORE_FIRST) or FIRST, *told])

    def _messages(self, acks: Iterable[BatchAck]) -> dict[Position, Batch]:
        """The messages to acknowledge in batches that are not yet acknowledged as a whole."""
        messages: dict[Position, Batch] = {}
        for position, size, indexes, is_guess in acks:
            if self._is_acknowledged(position):
                continue
            known = messages.get(position) or self.holes.batch(position)
            if known is not None and known.sized(size) is None:
                raise InvalidPosition(
                    "batch_size differs from the batch's known size",
                    field="batches",
                    position=position,
                    given=size,
                    size=known.size,
                )
            if not all(0 <= index < size for index in indexes):
                raise InvalidPosition(
                    "indexes must be below the batch's size",
                    field="batches",
                    position=position,
                    size=size,
                )
            bits = 0 if position not in messages else messages[position].acknowledged
            for index in indexes:
                bits |= 1 << index
            messages[position] = Batch(size, bits, is_guess)
        return messages

    # ---- queries

    def _is_acknowledged(self, position: Position) -> bool:
        mark_delete = self.head.mark_delete
        return (mark_delete is not None and position <= mark_delete) or self._is_set(position)

    def _is_set(self, position: Position) -> bool:
        number, bit = divmod(position.entry_id, PAGE_ENTRIES)
        return bool(self.holes.page(position.ledger_id, number) >> bit & 1)

    def _following(self, position: Position | None) -> Position | None:
        """The entry after the last one of its ledger, if this is known to be the last; after None,
        the first entry of the topic."""
        if position is None:
            return self.holes.next_after(BEFORE_FIRST) or FIRST
        return self.holes.next_after(position)

    def _absorbed(self, mark_delete: Position | None) -> Position | None:
        """The mark-delete position after it absorbed the acknowledged entries adjacent to it.
        Neighbours in the same ledger come first: a ledger with a next entry has not ended."""
        while True:
            if mark_delete is not None:
                mark_delete = self._run_end(mark_delete)
            following = self._following(mark_delete)
            if following is None or not self._is_set(following):
                return mark_delete
            mark_delete = following

    def _run_end(self, position: Position) -> Position:
        """The last of the acknowledged entries that directly follow a position in its ledger; the
        position itself if there are none."""
        ledger_id, entry_id = position
        while True:
            number, start = divmod(entry_id + 1, PAGE_ENTRIES)
            count = pages.ones_from(self.holes.page(ledger_id, number), start)
            entry_id += count
            if start + count < PAGE_ENTRIES:
                return Position(ledger_id, entry_id)

    def _ranges(self, after: Position | None) -> "Iterator[Range | BatchAck]":
        """The runs of acknowledged entries after a position, joined across pages."""
        held: Range | None = None
        for ledger_id, number, bits in self.holes.pages(after):
            base = number * PAGE_ENTRIES
            for start, end in pages.runs(bits & ~_up_to(after, ledger_id, number)):
                first = Position(ledger_id, base + start)
                if held is not None:
                    if start == 0 and held.last == (ledger_id, base - 1):
                        first = held.first
                    else:
                        yield held
                held = Range(first, base + end)
        if held is not None:
            yield held

    def _batches(self, after: Position | None) -> "Iterator[Range | BatchAck]":
        for position, batch in self.holes.batches(after):
            runs = pages.runs(batch.acknowledged)
            indexes = tuple(index for first, last in runs for index in range(first, last + 1))
            yield BatchAck(position, batch.size, indexes, batch.is_guess)

    # ---- changes

    def _note(self, news: Mapping[Position, Position]) -> None:
        for last, following in news.items():
            self.holes.put_succession(last, following)

    def _take_in(self, ranges: Iterable[Range]) -> tuple[Position | None, list[Range]]:
        """The mark-delete position after it absorbed the ranges adjacent to it, and the other
        ranges. Absorbed ranges need no pages, however long they are."""
        mark_delete = self.head.mark_delete
        runs = self._joined(ranges)
        for index, run in enumerate(runs):
            if not self._touches(mark_delete, run):
                return mark_delete, runs[index:]
            mark_delete = run.last
        return mark_delete, []

    def _touches(self, mark_delete: Position | None, run: Range) -> bool:
        if mark_delete is not None:
            neighbour = Position(mark_delete.ledger_id, mark_delete.entry_id + 1)
            if run.first == neighbour or self._is_set(neighbour):
                return run.first == neighbour
        following = self._following(mark_delete)
        return following is not None and run.first <= following <= run.last

    def _joined(self, ranges: Iterable[Range]) -> list[Range]:
        mark_delete = self.head.mark_delete
        runs: list[Range] = []
        for run in sorted(ranges):
            (ledger_id, first), last_entry = run
            if mark_delete is not None and run.first <= mark_delete:
                if (ledger_id, last_entry) <= mark_delete:
                    continue
                first = mark_delete.entry_id + 1
                run = Range(Position(ledger_id, first), last_entry)
            before = runs[-1] if runs else None
            if before and before.first.ledger_id == ledger_id and first <= before.last_entry + 1:
                runs[-1] = Range(before.first, max(before.last_entry, last_entry))
            else:
                runs.append(run)
        return runs

    def _counted(self, position: Position, at_least: int | None, note: bytes | None) -> int:
        known, noted = self.holes.attempts(position), self.holes.note(position)
        count = min(known + 1, ATTEMPTS_MAX) if at_least is None else max(known, at_least)
        if note is None or count != at_least:
            note = noted
        if (count, note) != (known, noted):
            self.holes.put_attempts(position, count, note)
        return count

    def _put_entries(self, runs: Sequence[Range]) -> None:
        for (ledger_id, number), parts in groupby(_pieces(runs), itemgetter(0)):
            before = self.holes.page(ledger_id, number)
            bits = before | pages.union([(start, end) for _, start, end in parts])
            if bits != before:
                self.holes.put_page(ledger_id, number, bits)
                self.head.acknowledged += bits.bit_count() - before.bit_count()
        for first, last_entry in runs:
            self.head.partial -= self.holes.drop_run(first, last_entry)

    def _put_messages(self, position: Position, batch: Batch) -> None:
        """Record messages of a batch as acknowledged; and the entry, if no others are left."""
        if self._is_set(position):
            return
        stored = self.holes.batch(position)
        before = None if stored is None else stored.sized(batch.size)
        bits = batch.acknowledged | (0 if before is None else before.acknowledged)
        after = Batch(batch.size, bits, batch.is_guess) if bits else None
        if bits.bit_count() == batch.size:
            self._put_entries([Range(position, position.entry_id)])
        elif after != stored:
            self.holes.put_batch(position, after)
            self.head.partial += (after is not None) - (stored is not None)

    def _move(self, mark_delete: Position) -> None:
        """Move the mark-delete position forward, and forget the acknowledgements that it covers."""
        head = self.head
        for ledger_id, number, bits in self.holes.pages(None) if head.acknowledged else ():
            covered = bits & _up_to(mark_delete, ledger_id, number)
            head.acknowledged -= covered.bit_count()
            if (ledger_id, (number + 1) * PAGE_ENTRIES - 1) > mark_delete:
                if covered:
                    self.holes.put_page(ledger_id, number, bits ^ covered)
                break
        head.partial -= self.holes.drop_through(mark_delete)
        head.mark_delete = mark_delete


def properties_bytes(properties: Mapping[str, str]) -> int:
    """The bytes of properties, names and values, in UTF-8."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())


def _later(last: Position, known: Position, following: Position, first: Position) -> Position:
    """The later of two known successors of an entry, which differ if the log was trimmed up to
    there between the two statements.

    Raises:
        InvalidPosition: it was not trimmed as far as known, so one of the two is wrong.
    """
    later = max(known, following)
    if later > first:
        raise InvalidPosition(
            "next differs from the known successor of last",
            field="successions",
            last=last,
            next=following,
            known=known,
        )
    return later


def _up_to(position: Position | None, ledger_id: int, number: int) -> int:
    """The entries of a page up to a position, as bits."""
    if position is None or position.ledger_id < ledger_id:
        return 0
    count = position.entry_id + 1 - number * PAGE_ENTRIES
    if position.ledger_id > ledger_id or count > PAGE_ENTRIES:
        count = PAGE_ENTRIES
    return pages.first(max(count, 0))


def _pieces(runs: Iterable[Range]) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Split runs at the ends of pages: ledger and number of the page, first and last bit in it."""
    for (ledger_id, first), last in runs:
        for number in range(first // PAGE_ENTRIES, last // PAGE_ENTRIES + 1):
            base = number * PAGE_ENTRIES
            start, end = max(first - base, 0), min(last - base, PAGE_ENTRIES - 1)
            yield (ledger_id, number), start, end


def _prolonged(lease: Lease, now_ms: int, duration_ms: int) -> Lease:
    """Extend a lease to a duration from now; it never gets shorter."""
    expires_ms = max(lease.expires_ms, now_ms + duration_ms)
    return lease._replace(expires_ms=expires_ms, duration_ms=expires_ms - now_ms)
