"""How a cursor moves; see state.py for what it is.

Each method is one step: it refuses before it changes anything.

What lies next to the mark-delete position is taken in as soon as it is acknowledged:

    ledger 1   0123456789          ledger 2   0123...
               ####.##.##                     #.#       # acknowledged
               ---|                           4 comes: mark-delete goes on to 6; 7 comes: to 9

It goes on from 9 to 2:0 when a Succession says that nothing lies between them.

The first entry of a topic is 1:0, and a cursor that has no mark-delete position gets one when that
is acknowledged; or when the entry is that a Succession names as following BEFORE_FIRST, because
what lay there is gone from the log.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, groupby, islice, zip_longest
from operator import itemgetter
from typing import Final, NamedTuple

from seqgate.services.cursor.core import pages
from seqgate.services.cursor.core.state import PAGE_ENTRIES, Batch, Head, Holes, Lease
from seqgate.services.errors import DomainError, Fenced, Kind
from seqgate.types import Position

BEFORE_FIRST: Final = Position(0, 0)
"""What stands in a Succession for the end of nothing: no log has a ledger 0."""

FIRST: Final = Position(1, 0)
"""The first entry of a topic, as long as it is there."""

PROPERTIES_MAX: Final = 2_000
"""How many properties of its own a cursor has at most."""

PROPERTIES_BYTES_MAX: Final = 4 * 1024 * 1024
"""How large they are together at most, names and values, in bytes of UTF-8."""

ATTEMPTS_MAX: Final = 2**32 - 1
"""Where the count of an entry's deliveries ends."""

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
    """A run of entries of one ledger, from `first` to `last_entry`."""

    first: Position
    last_entry: int

    @property
    def last(self) -> Position:
        """Its last entry."""
        return Position(self.first.ledger_id, self.last_entry)


class BatchAck(NamedTuple):
    """The messages of a batch that are acknowledged. `is_guess`: see Batch."""

    position: Position
    size: int
    indexes: tuple[int, ...]
    is_guess: bool = False


class Succession(NamedTuple):
    """Nothing lies between `last`, the end of its ledger, and `following`, of a later ledger; nor
    before `following`, when `last` is BEFORE_FIRST."""

    last: Position
    following: Position


class Caller(NamedTuple):
    """What a caller says of itself and of the log: the lease's epoch, the log's last entry, the
    revision that it knows, and where ledgers end. None: not compared."""

    epoch: int | None = None
    log_end: Position | None = None
    revision: int | None = None
    successions: tuple[Succession, ...] = ()


class Acknowledged(NamedTuple):
    """A page of what is acknowledged beyond the mark-delete position."""

    ranges: list[Range]
    batches: list[BatchAck]
    next_after: Position | None


class Attempts(NamedTuple):
    """A page of how often entries were delivered."""

    counts: list[tuple[Position, int]]
    next_after: Position | None


class CursorState:
    """One cursor in one step. The methods change `head` and `holes` in place.

    Raises, from every method that takes a caller:
        Fenced: its epoch is not the one of the lease: somebody else got a newer, or nobody got it.
        RevisionConflict: the cursor is not the revision that it knows.
        InvalidPosition: its successions contradict themselves or what is known, or a position lies
            after its log's end.
    """

    def __init__(self, head: Head, holes: Holes) -> None:
        self.head = head
        self.holes = holes

    def mark_delete(
        self, position: Position, properties: Mapping[str, str], caller: Caller
    ) -> None:
        """Acknowledge everything up to a position, and attach properties in place of what was.

        Raises:
            AlreadyMarkDeleted: the cursor is past the position; `mark_delete` says where it is.
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
        """Acknowledge entries and messages of batches; the mark-delete position takes in what has
        become its neighbour, and keeps its properties.

        Raises:
            InvalidPosition: a batch has not so many messages.
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
        """Go anywhere, and forget what was acknowledged beyond. Who holds the lease, and is not the
        caller, knows of none of that: its lease is over, and its calls are fenced."""
        self._checked(caller, [] if mark_delete is None else [mark_delete])

        self.holes.drop_through(None)
        head = self.head
        if caller.epoch is None and head.lease is not None:
            epoch = self._next_epoch()
            head.lease = head.lease._replace(epoch=epoch, duration_ms=0)
        head.mark_delete, head.mark_delete_properties = mark_delete, {}
        head.acknowledged = head.partial = 0
        head.revision += 1

    def acknowledged(self, after: Position | None, limit: int) -> Acknowledged:
        """What is acknowledged after a position, at most so many ranges and batches, in order.
        Asking again after `next_after` goes on where this ends; None: there is no more."""
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
        self, positions: Iterable[Position], caller: Caller, at_least: Sequence[int] = ()
    ) -> list[int]:
        """Count deliveries: each once more, or, when the caller says how often by now, up to that.
        Returns the count of each, 0 for what is acknowledged.

        Raises:
            InvalidPosition: the caller says it of more or fewer than there are positions.
        """
        positions = list(positions)
        if at_least and len(at_least) != len(positions):
            raise InvalidPosition(
                "attempts must be empty or have one value for each position",
                field="attempts",
                positions=len(positions),
                attempts=len(at_least),
            )
        self._checked(caller, positions)
        return [
            0 if self._is_acknowledged(position) else self._counted(position, least)
            for position, least in zip_longest(positions, at_least)
        ]

    def attempts(self, after: Position | None, limit: int) -> Attempts:
        """How often entries after a position were delivered, at most so many of them, in order.
        Asking again after `next_after` goes on where this ends; None: there is no more."""
        assert limit > 0
        found = list(islice(self.holes.attempted(after), limit + 1))
        next_after = None
        if len(found) > limit:
            found.pop()
            next_after, _ = found[-1]
        return Attempts(found, next_after)

    def update_properties(
        self,
        put: Mapping[str, str],
        remove: Iterable[str],
        caller: Caller,
        *,
        clear: bool,
    ) -> None:
        """Change the cursor's own properties: clear, then remove, then put. What begins with
        "#seqgate.internal." is cleared by its name only.

        Raises:
            InvalidProperty: they would become too many, or too large.
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
        """Become the one who may move the cursor. A clock that goes back gives no lease away; see
        Lease.bounded for how long it lasts then. The epoch goes on where an earlier cursor ended.

        Raises:
            LeaseHeld: by somebody else, `owner`, for another `remaining_ms`.
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
        self.head.lease = granted
        return granted

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
        self.head.lease = _prolonged(lease, now_ms, duration_ms)
        return self.head.lease

    def release_lease(self, epoch: int, now_ms: int) -> None:
        """End the lease, also by a clock that is behind. The next owner gets a new epoch, even if
        it is the same one.

        Raises:
            Fenced: the lease has another epoch.
        """
        lease = self._lease(epoch)
        expires_ms = min(lease.expires_ms, now_ms)
        self.head.lease = lease._replace(expires_ms=expires_ms, duration_ms=0)

    def _next_epoch(self) -> int:
        """One that nobody had, neither of this cursor nor of one that was deleted. The one between
        is left out: with it, whoever asks late to go on would be taken for this holder."""
        lease = self.head.lease
        last = self.holes.spent_epoch() if lease is None else lease.epoch
        return last + 2 if last else 1

    # Refusing.

    def _checked(self, caller: Caller, positions: Iterable[Position]) -> dict[Position, Position]:
        """Compare what a caller says with what is known; its successions that are news."""
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
            raise Fenced("epoch is not the lease's", epoch=held, given=epoch)
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
                # A log that is trimmed begins later each time; who says less knows less.
                following = max(following, known or following)
            elif known is not None and known != following:
                following = _later(last, known, following, first)
            if following != known:
                news[last] = following
        return news

    def _first(self, successions: Iterable[Succession]) -> Position:
        """The first entry that the log still has, as far as that is known."""
        told = [following for last, following in successions if last == BEFORE_FIRST]
        return max([self.holes.next_after(BEFORE_FIRST) or FIRST, *told])

    def _messages(self, acks: Iterable[BatchAck]) -> dict[Position, Batch]:
        """What is to be acknowledged of batches that are not acknowledged whole already."""
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

    # Reading.

    def _is_acknowledged(self, position: Position) -> bool:
        mark_delete = self.head.mark_delete
        return (mark_delete is not None and position <= mark_delete) or self._is_set(position)

    def _is_set(self, position: Position) -> bool:
        number, bit = divmod(position.entry_id, PAGE_ENTRIES)
        return bool(self.holes.page(position.ledger_id, number) >> bit & 1)

    def _following(self, position: Position | None) -> Position | None:
        """The entry after the last one of its ledger, if it is known to be that; after None, the
        topic's first."""
        if position is None:
            return self.holes.next_after(BEFORE_FIRST) or FIRST
        return self.holes.next_after(position)

    def _absorbed(self, mark_delete: Position | None) -> Position | None:
        """Where a mark-delete position comes to stand, past what is acknowledged next to it. What
        lies next to it in its ledger goes first: a ledger that goes on has not ended."""
        while True:
            if mark_delete is not None:
                mark_delete = self._run_end(mark_delete)
            following = self._following(mark_delete)
            if following is None or not self._is_set(following):
                return mark_delete
            mark_delete = following

    def _run_end(self, position: Position) -> Position:
        """The last of the acknowledged entries of one ledger that lie behind a position in a row;
        the position itself if there are none."""
        ledger_id, entry_id = position
        while True:
            number, start = divmod(entry_id + 1, PAGE_ENTRIES)
            count = pages.ones_from(self.holes.page(ledger_id, number), start)
            entry_id += count
            if start + count < PAGE_ENTRIES:
                return Position(ledger_id, entry_id)

    def _ranges(self, after: Position | None) -> "Iterator[Range | BatchAck]":
        """The runs of entries after a position that are acknowledged whole, across pages."""
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

    # Changing.

    def _note(self, news: Mapping[Position, Position]) -> None:
        for last, following in news.items():
            self.holes.put_succession(last, following)

    def _take_in(self, ranges: Iterable[Range]) -> tuple[Position | None, list[Range]]:
        """How far the mark-delete position comes by the runs that touch it, and the other runs.
        Runs that touch it need no pages, however long they are."""
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
        """Ranges in order, as long as they can be, without what the mark-delete position covers."""
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

    def _counted(self, position: Position, at_least: int | None) -> int:
        """Count a delivery of an entry that is not acknowledged; None: once more."""
        known = self.holes.attempts(position)
        count = min(known + 1, ATTEMPTS_MAX) if at_least is None else max(known, at_least)
        if count != known:
            self.holes.put_attempts(position, count)
        return count

    def _put_entries(self, runs: Sequence[Range]) -> None:
        """Note that entries beyond the mark-delete position are acknowledged whole."""
        for (ledger_id, number), parts in groupby(_pieces(runs), itemgetter(0)):
            before = self.holes.page(ledger_id, number)
            bits = before | pages.union([(start, end) for _, start, end in parts])
            if bits != before:
                self.holes.put_page(ledger_id, number, bits)
                self.head.acknowledged += bits.bit_count() - before.bit_count()
        for first, last_entry in runs:
            self.head.partial -= self.holes.drop_run(first, last_entry)

    def _put_messages(self, position: Position, batch: Batch) -> None:
        """Note that messages of a batch are acknowledged; of an entry, when these are all."""
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
        """Let the mark-delete position stand further on, and forget what it covers."""
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
    """How large properties are, names and values together, in bytes of UTF-8."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())


def _later(last: Position, known: Position, following: Position, first: Position) -> Position:
    """What follows an entry of which two things were said at two times: the later one, when the log
    was trimmed up to there meanwhile.

    Raises:
        InvalidPosition: it was not, as far as is known, and one of the two is wrong.
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
    """The entries of a page that do not lie after a position, as its bits."""
    if position is None or position.ledger_id < ledger_id:
        return 0
    count = position.entry_id + 1 - number * PAGE_ENTRIES
    if position.ledger_id > ledger_id or count > PAGE_ENTRIES:
        count = PAGE_ENTRIES
    return pages.first(max(count, 0))


def _pieces(runs: Iterable[Range]) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Runs cut where pages end: ledger and number of the page, first and last bit in it."""
    for (ledger_id, first), last in runs:
        for number in range(first // PAGE_ENTRIES, last // PAGE_ENTRIES + 1):
            base = number * PAGE_ENTRIES
            start, end = max(first - base, 0), min(last - base, PAGE_ENTRIES - 1)
            yield (ledger_id, number), start, end


def _prolonged(lease: Lease, now_ms: int, duration_ms: int) -> Lease:
    """It lasts for that long from now, or longer if it did."""
    expires_ms = max(lease.expires_ms, now_ms + duration_ms)
    return lease._replace(expires_ms=expires_ms, duration_ms=expires_ms - now_ms)
