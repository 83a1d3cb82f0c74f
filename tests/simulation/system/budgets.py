"""Checks the memory and concurrency of services against their limits.

Each limit is checked where it is kept: byte budgets, rooms of data in transit, calls and streams,
producers' windows, caches, entries waiting in a subscription. The last message, or a lone caller,
may exceed a limit by as much as the largest entry.
"""

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

from seqgate.services.dispatcher.core import delivering, lags, lane, settling, verdicts
from seqgate.services.dispatcher.service import Dispatcher
from seqgate.services.dispatcher.shell import sending, work
from seqgate.services.dispatcher.shell import session as sessions
from seqgate.services.filter.core.room import ChainRoom
from seqgate.services.ledger import live as ledger_live
from seqgate.services.ledger.service import Ledger
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.load import Load
from seqgate.services.runtime.room import Room, Share
from tests.simulation.system.seen import Seen

HOLDERS: Final = (Budget, ChainRoom, Dispatcher, Ledger, Load, Room, Share)
"""The classes whose objects are checked."""

PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""The most that a lone reader takes of a room, in bytes."""

REQUEST_BYTES_MAX: Final = 64 * 1024
"""The largest request of a history without entries, in bytes."""

CHAIN_BYTES_MAX: Final = 8 * 1024
"""The largest filter chain of a history, admitted alone beyond the limit, in bytes."""


class Budgets:
    """The limits of all services of a history."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._owned: WeakSet[Budget] = WeakSet()
        self._shares: dict[Room, WeakSet[Share]] = {}
        self._looks: dict[type, Callable[[str, Any], None]] = {
            Budget: self._budget,
            ChainRoom: self._chain_room,
            Dispatcher: self._dispatcher,
            Ledger: self._ledger,
            Load: self._load,
            Room: self._room,
        }

    def look(self, where: str, holder: Any) -> None:
        """Check one object of a process."""
        self._looks[type(holder)](where, holder)

    def _check(self, where: str, what: str, has: int, most: int) -> None:
        if has > most:
            self._seen.violate("BUDGET", f"{where}: {what}: {has:,} (limit {most:,})")

    def _largest(self) -> int:
        return max((log.entry_bytes_max for log in self._seen.logs.values()), default=0)

    def _budget(self, where: str, budget: Budget) -> None:
        if budget in self._owned:
            return
        most = budget.bytes_max + max(self._largest(), REQUEST_BYTES_MAX)
        self._check(where, "bytes of a budget", budget.used, most)

    def _chain_room(self, where: str, room: ChainRoom) -> None:
        most = max(room.bytes_max, CHAIN_BYTES_MAX)
        self._check(where, "bytes of chains", room.used, most)

    def note(self, holder: Any) -> bool:
        """Register a new object. Returns True if `look` should check it."""
        if isinstance(holder, Share):
            self._shares.setdefault(holder._room, WeakSet()).add(holder)
        return not isinstance(holder, Share)

    def _room(self, where: str, room: Room) -> None:
        sizes = sorted(each.size_bytes for each in self._shares.get(room, ()))
        if sum(sizes[:-1]):
            most = room.bytes_max + self._largest() * len(sizes)
            self._check(where, "bytes in transit", room.used_bytes, most)
        if sizes:  # a lone share is admitted beyond the limit
            most = max(PAGE_BYTES_MAX, room.bytes_max) + self._largest()
            self._check(where, "bytes in transit of one share", sizes[-1], most)

    def _load(self, where: str, load: Load) -> None:
        self._check(where, "calls", load.calls, load._calls._most)
        self._check(where, "streams", load.streams, load._streams._most)

    def _ledger(self, where: str, ledger: Ledger) -> None:
        self._owned.add(ledger.unanswered)
        if ledger.unanswered.used > ledger.unanswered.bytes_max:
            holding = [
                session._size_bytes
                for topic in ledger._live.values()
                for session in topic._sessions.values()
                if session._size_bytes
            ]
            if len(holding) > 1:  # a lone request is admitted beyond the limit
                self._check(
                    where,
                    "unanswered bytes of all producers",
                    ledger.unanswered.used,
                    ledger.unanswered.bytes_max,
                )
        for topic in ledger._live.values():
            for session in topic._sessions.values():
                window = session._window
                alone = len(session._unanswered) <= 1
                if not alone:
                    self._check(where, "messages of a window", session._messages, window.messages)
                    self._check(where, "bytes of a window", session._size_bytes, window.size_bytes)
                unread = window.messages + ledger_live.UNREAD_RECEIPTS_MAX
                self._check(where, "unread receipts", len(session._receipts), unread + 1)

    def _dispatcher(self, where: str, dispatcher: Dispatcher) -> None:
        for live in dispatcher._live.values():
            machine, config = live.machine, live._config
            self._check(where, "bytes of a cache", live.cache_bytes, live.cache_bytes_max)
            kept = len(machine.parking.delays)
            self._check(where, "delayed messages", kept, live.options.delayed_max)
            unsettled = sum(1 for _ in machine.settling.unsettled)
            in_flight = sum(len(each.flights) for each in machine.consumers.values())
            page = config.read_entries_max + lags.SCAN_ENTRIES
            # New filters may reject every waiting entry at once.
            queues = len(machine.consumers) + 1
            parked = (live.options.consumer_parked_max + lane.BEYOND_ROOM_MAX) * queues
            waiting = verdicts.UNJUDGED_MAX + page + parked
            most = settling.UNSETTLED_MAX + in_flight + page + waiting
            self._check(where, "unsettled entries", unsettled, most)
            most = delivering.KEPT_BACK_MAX + 1
            self._check(where, "chunks kept back", machine.parking.kept_back, most)
            self._check(where, "waiting changes", live.changes, work.WAITING_CHANGES_MAX)
            share_bytes = config.stream_bytes_max + sending.RESPONSE_BYTES_MAX + self._largest()
            for each in live.sessions.values():
                taken = each._share.size_bytes
                self._check(where, "bytes in transit to a consumer", taken, share_bytes)
                most = sessions.OUTBOX_ITEMS_MAX + each._permitted()
                self._check(where, "items of an outbox", len(each._outbox), most)
