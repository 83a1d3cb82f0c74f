"""What a reset of a subscription or a cursor skips: counted, and asked for first."""

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, NamedTuple

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._command import Run
from seqgate.cli._confirm import confirm
from seqgate.cli._declared import flag
from seqgate.cli._known import check_known
from seqgate.cli._wire import position
from seqgate.client._log import before, check_place, last_entry
from seqgate.client._subscribing import Place
from seqgate.errors import DataLossError, NotFoundError
from seqgate.types import SEQUENCE_ID_MAX, Position

DryRun = Annotated[
    bool,
    flag("Count what would be skipped, and what delivered again. Change nothing.", "--dry-run"),
]

_NOTHING = Position(0, -1)
_END = Position(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)


Get = cursor_pb2.GetCursorRequest | dispatcher_pb2.GetSubscriptionRequest


class Move(NamedTuple):
    """A move of a mark-delete position.

    Attributes:
        mark_delete, moves_to: the position now, and then; None: before the first entry.
        skipped_entries: the unacknowledged entries that it passes over, which nobody gets any more;
            None: not known, of a log that is not in the ledger service, or of a damaged cursor.
        repeated_entries: the acknowledged entries that are delivered again; None: not known.
    """

    mark_delete: Position | None
    moves_to: Position | None
    skipped_entries: int | None
    repeated_entries: int | None


async def move_to(
    run: Run, request: Get, topic: str, name: str, place: Place, *, own_log: bool = False
) -> Move:
    """What a move of the cursor or subscription that `request` gets does: as far as its
    acknowledgements are durable.

    Raises:
        InvalidRequestError: the place is beyond the end of the topic.
        NotFoundError: there is no such topic, cursor or subscription.
    """
    found = await _found(run, request, own_log=own_log)
    is_ours = not own_log and await _check(run, topic, place)
    then = await before(run.services, topic, place)
    now = position(found.mark_delete) if found and found.HasField("mark_delete") else None
    if found is None or not is_ours:
        return Move(now, then, None, None)
    old, new = now or _NOTHING, then or _NOTHING
    skipped = await _count(_stored(run, topic), old, new) if new > old else 0
    repeated = await _count(_stored(run, topic), new, old) if new < old else 0
    if found.acknowledged_entries:
        skipped -= await _count(_acknowledged(run, topic, name), old, new)
        repeated += await _count(_acknowledged(run, topic, name), max(old, new), _END)
    return Move(now, then, max(0, skipped), repeated)


async def confirm_move(topic: str, name: str, move: Move, *, yes: bool) -> None:
    """Ask before a move that skips entries. Raises as `confirm` does."""
    skipped = move.skipped_entries
    if skipped is None and (move.moves_to or _NOTHING) > (move.mark_delete or _NOTHING):
        what = "whatever is not acknowledged up to there"
    elif skipped:
        what = f"{skipped:,} unacknowledged {'entry' if skipped == 1 else 'entries'}"
    else:
        return
    await confirm(f"{name} of {topic} moves to after {move.moves_to}: it skips {what}.", yes=yes)


def tell_move(run: Run, names: Mapping[str, str], move: Move) -> None:
    """Show what a move would do."""
    shown = {
        each: value if each.endswith("_entries") else value and str(value)
        for each, value in move._asdict().items()
    }
    titles = ("Mark-delete position", "Moves to", "Entries skipped", "Entries delivered again")
    run.output.result({**names, **shown}, list(zip(titles, shown.values(), strict=True)))


async def _check(run: Run, topic: str, place: Place) -> bool:
    """Check a place. False: the ledger service does not have the topic, and nothing is checked."""
    try:
        last = await last_entry(run.services, topic)
    except NotFoundError:
        return False
    check_place(place, last, field="--to")
    return True


async def _found(run: Run, request: Get, *, own_log: bool) -> Any:
    """The cursor or subscription; None: its record is damaged, which a reset mends."""
    is_cursor = isinstance(request, cursor_pb2.GetCursorRequest)
    try:
        answer = await run.services.call(request)
    except DataLossError:
        return None
    except NotFoundError:
        if is_cursor and not own_log:
            await check_known(run, request.topic)
        raise
    return answer.cursor if is_cursor else answer.subscription


_Run = tuple[int, int, int]
"""Consecutive entries: their ledger, the first and the last of them."""


async def _stored(run: Run, topic: str) -> AsyncIterator[_Run]:
    async for each in run.services.pages(ledger_pb2.ListLedgersRequest(topic=topic)):
        yield each.ledger_id, each.first_entry_id, each.last_entry_id


async def _acknowledged(run: Run, topic: str, name: str) -> AsyncIterator[_Run]:
    """The entries acknowledged beyond the mark-delete position."""
    request = cursor_pb2.ListAcknowledgedRequest(topic=topic, cursor=name)
    while True:
        page = await run.services.call(request)
        for each in page.ranges:
            yield each.first.ledger_id, each.first.entry_id, each.last_entry_id
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _count(runs: AsyncIterator[_Run], low: Position, high: Position) -> int:
    """How many entries are after `low` and not after `high`."""
    count = 0
    async for ledger_id, first, last in runs:
        if low.ledger_id <= ledger_id <= high.ledger_id:
            begin = low.entry_id + 1 if ledger_id == low.ledger_id else first
            end = high.entry_id if ledger_id == high.ledger_id else last
            count += max(0, min(last, end) + 1 - max(first, begin))
    return count
