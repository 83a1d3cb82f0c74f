"""Invariants of deliveries, and of consumers' requests and their answers."""

from collections.abc import Iterable
from typing import Final

from seqgate.client import Dropped, DropReason, Incomplete
from seqgate.types import Position
from tests.simulation.system.checkers.terms import Terms, key_of
from tests.simulation.system.seen import Place, Seen, Sent, Subscription, Token

CLOCK_STEP_S: Final = 0.002
"""The tolerance of delivery times: sender and dispatcher round to milliseconds."""

FINAL: Final = (DropReason.ABORTED, DropReason.RESTARTED, DropReason.DUPLICATE)
"""Reasons for which the client acknowledges chunks, whatever `incomplete` says."""

COME_AGAIN: Final = (DropReason.EVICTED, DropReason.EXPIRED)
"""Reasons for which the client gives chunks back without a failure."""


class Deliveries:
    """Checks deliveries and acknowledgements as clients see them."""

    def __init__(self, seen: Seen, terms: Terms) -> None:
        self._seen = seen
        self._terms = terms

    def asks(self, topic: str, name: str, places: Iterable[Place], token: Token) -> None:
        """A consumer requests the acknowledgement of messages, with a delivery's token."""
        asked = self._seen.subscription(topic, name).asked
        for place in places:
            asked.setdefault(place, set()).add(token)

    def asks_through(self, topic: str, name: str, place: Place, token: Token) -> None:
        """An exclusive consumer requests a cumulative acknowledgement."""
        self._seen.subscription(topic, name).through.setdefault(place, set()).add(token)

    def not_asked(self, topic: str, name: str, places: Iterable[Place], token: Token) -> None:
        """The delivery was stale, so nothing was requested; without faults only, because a lost
        connection leaves that unknown."""
        if not self._terms.is_exact:
            return
        subscription = self._seen.subscription(topic, name)
        for place in places:
            for known in (subscription.asked, subscription.through):
                tokens = known.get(place, set())
                tokens.discard(token)
                if not tokens:
                    known.pop(place, None)

    def refuses(self, topic: str, name: str, places: Iterable[Place]) -> None:
        """A consumer refuses messages."""
        refused = self._seen.subscription(topic, name).refused
        for position in {position for position, _ in places}:
            refused[position] += 1

    def dropped(self, topic: str, name: str, dropped: Dropped, incomplete: Incomplete) -> None:
        """A consumer's client dropped chunks, some of which it acknowledges."""
        subscription = self._seen.subscription(topic, name)
        self._seen.counts[f"dropped {dropped.reason.name}"] += 1
        self._seen.note(f"dropped {name} {dropped.positions}: {dropped.reason.name}")
        if dropped.reason is DropReason.HEADLESS:
            self._check_headless(subscription, dropped)
        if dropped.reason is DropReason.CORRUPT:
            self._seen.violate("INVENTED", f"{topic} {name} {dropped}")
        if dropped.reason in FINAL or incomplete is Incomplete.ACKNOWLEDGE:
            subscription.dropped.update(dropped.positions)
        elif dropped.reason in COME_AGAIN:
            subscription.kept_back.update(dropped.positions)
        else:
            for position in dropped.positions:
                subscription.refused[position] += 1

    def _check_headless(self, subscription: Subscription, dropped: Dropped) -> None:
        """A message that starts before the subscription must be passed, not delivered."""
        log, start = self._seen.log(subscription.topic), subscription.start
        chunks = log.attempts.get((dropped.producer, dropped.uuid))
        if chunks and start is not None and chunks[0] <= start:
            self._seen.violate(
                "HEADLESS",
                f"{subscription.topic} {subscription.name} starts after {start}, but got "
                f"{dropped.positions} of a message at {chunks[0]}",
            )

    def done(self, topic: str, name: str, place: Place, token: Token, asked_s: float) -> None:
        """An acknowledgement that a consumer requested at `asked_s` was confirmed as durable."""
        self._seen.counts["acknowledgements"] += 1
        self._seen.note(f"done {name} {place} {token}")
        subscription = self._seen.subscription(topic, name)
        if place[0] not in self._seen.log(topic).at or token < subscription.floor:
            return
        if subscription.undone_s.get(place[0], -1.0) >= asked_s:
            return
        if not self._is_acknowledged(subscription, place):
            self._seen.violate("NOT_DURABLE", f"{topic} {name} {place}")
        subscription.done[place] = token

    def _is_acknowledged(self, subscription: Subscription, place: Place) -> bool:
        """True if the cursor has a message."""
        position, index = place
        back = subscription.returns.get(position)
        if back is not None:
            return bool(back.acknowledged >> index & 1)
        return (
            position in subscription.acknowledged
            or bool(subscription.parts.get(position, 0) >> index & 1)
            or self._seen.log(subscription.topic).is_trimmed(position)
        )

    def delivered(
        self, topic: str, name: str, consumer: str, token: Token, place: Place, number: int,
        attempts: int,
    ) -> None:  # fmt: skip
        """A consumer received a message."""
        seen = self._seen
        subscription = seen.subscription(topic, name)
        seen.counts["deliveries"] += 1
        seen.note(f"delivered {name} {consumer} {place} {token} {number} {attempts}")
        what = f"{topic} {name} {place} by {token} to {consumer}"
        if number not in seen.sent:
            seen.violate("INVENTED", what)
            return
        if place[0] not in subscription.returns:  # a replay does not wait
            self._check_time(seen.sent[number], what)
        if token < subscription.floor:
            return
        before = subscription.done.get(place)
        if before is not None and token > before:
            seen.violate("RESURRECTED", f"{what}: acknowledged by {before}")
        self._check_order(subscription, place, token, seen.sent[number], what)

    def _check_time(self, sent: Sent, what: str) -> None:
        """No delayed message arrives early."""
        if sent.delay_s and self._terms.clocks_agree:
            assert sent.asked_s is not None
            early_s = sent.asked_s + sent.delay_s - self._seen.now_s()
            if early_s > CLOCK_STEP_S:
                self._seen.violate("EARLY", f"{what}: early by {early_s:.3f} s")

    def _first_of(self, subscription: Subscription, place: Place) -> Position:
        """Where a message begins: a large one before its place."""
        log = self._seen.log(subscription.topic)
        entry = log.at.get(place[0])
        if entry is None or entry.chunk is None:
            return place[0]
        return min(log.attempts[entry.producer, entry.chunk.uuid])

    def _check_order(
        self, subscription: Subscription, place: Place, token: Token, sent: Sent, what: str
    ) -> None:
        """First deliveries of a key follow the log, and none happens while the key is held.
        (Delayed messages may be overtaken, unless they hold their keys.)"""
        if not subscription.is_ordered or (sent.delay_s and not subscription.delays_hold):
            return
        key = key_of(self._seen, subscription, sent.number, place)
        held = subscription.held.get(key)
        if held is not None and held[0] < self._first_of(subscription, place) and token >= held[1]:
            self._seen.violate("HELD", f"{what}: its key has been held since {held}")
        last = subscription.first_of_key.get(key)
        if place in subscription.delivered:
            return
        subscription.delivered.add(place)
        if (
            last is not None
            and place < last[0]
            and last[1] < token
            and not self._was_let_in(subscription, sent, last[2])
        ):
            self._seen.violate("OVERTAKEN", f"{what}: after {last} of the same key")
        if last is None or place > last[0]:
            subscription.first_of_key[key] = (place, token, self._seen.now_s())

    def _was_let_in(self, subscription: Subscription, sent: Sent, since_s: float) -> bool:
        """True if filters that apply from the first unacknowledged entry replaced, since then,
        filters that may have rejected a message. They judge a rejection that is not durable yet
        again, after its successors were delivered."""
        may_be_rejected = False
        for each in subscription.filters:
            is_since = each.answered_s is None or each.answered_s >= since_s
            if may_be_rejected and each.from_start and is_since:
                return True
            may_be_rejected |= sent.tag in each.rejected
        return False
