"""Invariants of what administrators request and read, and of dispatchers' insides."""

from collections.abc import Iterable, Sequence
from typing import Any

from seqgate.types import Position
from tests.simulation.system.checkers.terms import Terms
from tests.simulation.system.seen import Appended, FilterSet, Move, Seen


class Administration:
    """Checks administrators' answers, and consumers at dispatchers."""

    def __init__(self, seen: Seen, terms: Terms) -> None:
        self._seen = seen
        self._terms = terms

    def moves(self, topic: str, name: str, start: Position | None) -> Move:
        """A move of a subscription was requested, to `start`, or the start of the log if None."""
        move = Move(self._seen.now_s(), start)
        self._seen.subscription(topic, name).moves.append(move)
        return move

    def imported(self, topic: str, name: str, beyond: Position) -> None:
        """A cursor beyond the end of the log is being imported. Entries stored until an instance
        takes it count as acknowledged; then it is moved back."""
        move = Move(self._seen.now_s(), beyond, is_import=True)
        self._seen.subscription(topic, name).moves.append(move)

    def filters(
        self, topic: str, name: str, rejected: Iterable[str], *, from_start: bool = False
    ) -> FilterSet:
        """Filters of a subscription were requested."""
        asked = FilterSet(self._seen.now_s(), frozenset(rejected), from_start)
        self._seen.subscription(topic, name).filters.append(asked)
        return asked

    def explained(
        self, topic: str, name: str, position: Position, said: Sequence[str], asked_s: float
    ) -> None:
        """The dispatcher explained why an entry is not delivered; it was asked at `asked_s`."""
        subscription, log = self._seen.subscription(topic, name), self._seen.log(topic)
        self._seen.note(f"explained {topic} {name} {position}: {', '.join(said)}")
        what = f"{topic} {name} {position}: {', '.join(said)}"
        is_gone = position not in log.at or log.is_trimmed(position)
        is_moved = not subscription.is_made or any(
            each.answered_s is None or each.answered_s >= asked_s for each in subscription.moves
        )
        if "REASON_NO_ENTRY" in said and not is_gone:
            self._seen.violate("EXPLAINED", f"{what}, but the entry exists")
        has_letter = position in subscription.lettered_before or any(
            lettered == position for lettered, _ in subscription.lettered
        )
        if "REASON_DEAD_LETTERED" in said and not (is_moved or has_letter):
            self._seen.violate("EXPLAINED", f"{what}, but there is no letter")
        if "REASON_ACKNOWLEDGED" in said and not (is_gone or is_moved):
            if position not in subscription.acknowledged:
                self._seen.violate("EXPLAINED", f"{what}, but the cursor does not have it")
                return
            if position in subscription.returns:
                return  # it comes back since
            token = self._terms.next_delivery(topic, name, subscription.epoch)
            if token is not None:
                for index in range(len(log.at[position].ids)):
                    subscription.done.setdefault((position, index), token)

    def reported(self, topic: str, name: str, report: Any) -> None:
        """The dispatcher reported a subscription's state."""
        for each in report.consumers:
            self.permits(topic, name, each.name, each.permits)

    def permits(self, topic: str, name: str, consumer: str, permits: int) -> None:
        """Check a consumer's permits. They may be negative: the last delivery may be a batch with
        fewer permits than messages."""
        least = 1 - self._seen.log(topic).messages_max
        if permits < least:
            self._seen.violate("OVERDRAWN", f"{topic} {name} {consumer}: {permits} permits")

    def look(self, live: Any) -> None:
        """Check what a subscription has in flight at a dispatcher."""
        topic, name = str(live.topic), live.name
        owners: dict[object, int] = {}
        log = self._seen.log(topic)
        for consumer in live.machine.consumers.values():
            self.permits(topic, name, consumer.name, consumer.permits)
            if not live.machine.options.orders_keys:
                continue
            for flight in consumer.flights.values():
                entry = log.at.get(flight.position)
                if entry is None or not entry.numbers:
                    continue
                key = self._key_in(live, entry)
                if owners.setdefault(key, consumer.id) != consumer.id:
                    self._seen.violate(
                        "SHARED_KEY", f"{topic} {name}: {key!r} is in flight at two consumers"
                    )

    def _key_in(self, live: Any, entry: Appended) -> object:
        sent = self._seen.sent[entry.numbers[0]]
        if live.machine.options.kind.name == "EXCLUSIVE":
            return ""
        return entry.position if sent.key is None or not sent.is_keyed else sent.key
