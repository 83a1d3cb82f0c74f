"""Defects of the dispatcher: its machine and its shell."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

from seqgate.services.dispatcher.core.delivering import Delivering
from seqgate.services.dispatcher.core.effects import Entry
from seqgate.services.dispatcher.core.lags import SCAN_ENTRIES
from seqgate.services.dispatcher.core.lane import Consumer, Lane
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.cursor import resuming
from seqgate.services.dispatcher.shell.performing import Performing
from seqgate.services.dispatcher.shell.sending import Sending, _Page
from seqgate.services.dispatcher.shell.work import Work
from seqgate.types import Position
from tests.simulation.defects import defect

EVERYTHING_BYTES: Final = 1024**4
"""Above the size of any log."""


@defect("A8", "a timer that is due during a change is dropped")
def drop_due_timers(patch: Any) -> None:
    patch.setattr(Performing, "_changed", lambda _: None)


@defect("B6-subscription", "an unexpected error in one subscription affects all")
def let_surprises_out(patch: Any) -> None:
    patch.setattr(Work, "contained", nullcontext)


@defect("A9", "an acknowledgement of an entry not stored yet counts once it is stored")
def believe_the_cursor(patch: Any) -> None:
    patch.setattr(resuming, "is_beyond", lambda *_: False)


@defect("B2", "rejected entries are remembered without limit while nothing becomes durable")
def read_on(patch: Any) -> None:
    patch.setattr(Settling, "is_full", False)


@defect("A16", "the rest of a large message is delivered without a permit")
def deliver_without_a_permit(patch: Any) -> None:
    def target(self: Delivering, lane: Lane, owner: Consumer) -> Consumer:
        if lane.rare is None or lane.holder is None:
            return owner
        holder = self._flights.consumers.get(lane.holder, owner)
        return holder if lane.is_amid_message(holder) else owner

    patch.setattr(Delivering, "_target", target)


@defect("F2", "a delivery contains messages that are acknowledged, but not durably yet")
def deliver_what_is_not_durable(patch: Any) -> None:
    def left(self: Settling, position: Position, messages: int) -> int:
        return self.partial.get(position, (1 << messages) - 1)

    patch.setattr(Settling, "left", left)


@defect("F11", "a page that ends at the end of the log covers entries read meanwhile")
def end_scans_early(patch: Any) -> None:
    def reached(self: Subscription, entries: Sequence[Entry]) -> Position | None:
        is_short = len(entries) < SCAN_ENTRIES
        return self.read_position if is_short else entries[-1].position

    patch.setattr(Subscription, "_reached", reached)


@defect("A1", "an entry that leaves the cache while deliveries are being sent counts as gone")
def decide_once(patch: Any) -> None:
    fetch = Sending._fetch

    async def fetched(self: Sending, page: _Page) -> None:
        cache = self._performing.cache
        kept = {each.position for each in page.pending if each.position in cache}
        await fetch(self, page)
        page.gone |= {each for each in kept if each not in cache and each not in page.fetched}

    patch.setattr(Sending, "_fetch", fetched)


@defect("B1", "everything to be sent to a consumer is fetched at once")
def fetch_everything(patch: Any) -> None:
    async def room_for(self: Sending, page: _Page) -> int:
        page.share.add(EVERYTHING_BYTES)
        return EVERYTHING_BYTES

    def wanted(self: Sending, page: _Page, room_bytes: int) -> list[Position]:
        cache = self._performing.cache
        return sorted({each.position for each in page.pending if each.position not in cache})

    patch.setattr(Sending, "_room_for", room_for)
    patch.setattr(Sending, "_wanted", wanted)
