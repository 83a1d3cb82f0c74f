"""Invariants of cursors: what they count as acknowledged, and who holds them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.dispatcher.core.effects import Because
from seqgate.services.dispatcher.letters import graveyard
from seqgate.types import Position, TopicName
from tests.simulation.system.checkers.terms import Terms
from tests.simulation.system.seen import Appended, Log, Move, Seen, Subscription, Token

if TYPE_CHECKING:
    from tests.simulation.system.checkers.redrives import Redrives

RANGES_MAX: Final = 1_000_000


class Cursors:
    """Checks cursors at each change of their store."""

    def __init__(self, seen: Seen, terms: Terms) -> None:
        self._seen = seen
        self._terms = terms
        self.redrives: Redrives | None = None

    def created(self, topic: TopicName, name: str, mark_delete: Position | None) -> None:
        """The store created a cursor."""
        if name.startswith("seqgate.") or topic.is_system:
            return
        before = self._seen.subscription(topic, name)
        if before.is_made and before.deletions:  # the deleter died before it could report
            self.deleted(topic, name)
        self._seen.note(f"cursor {topic} {name} made at {mark_delete}")
        subscription = self._seen.subscription(topic, name)
        subscription.is_made = True
        log = self._seen.log(topic)
        subscription.start = mark_delete
        subscription.acknowledged.clear()
        subscription.waiting = dict.fromkeys(each.position for each in log.entries)
        for position in list(subscription.waiting):
            if mark_delete is not None and position <= mark_delete:
                del subscription.waiting[position]
                subscription.acknowledged.add(position)

    def deleting(self, topic: TopicName, name: str) -> None:
        """The store is about to delete a cursor."""
        if (str(topic), name) in self._seen.subscriptions:
            self._seen.subscription(topic, name).deletions += 1

    def deleted(self, topic: TopicName, name: str) -> None:
        """The store deleted a cursor, at some time since `deleting`."""
        known = self._seen.subscriptions.get((str(topic), name))
        if known is not None and not known.deletions:
            return  # it was recreated since, which implied the deletion
        self._seen.note(f"cursor {topic} {name} is gone")
        before = self._seen.subscriptions.pop((str(topic), name), None)
        if before is not None:
            after = self._seen.subscriptions[str(topic), name] = before.made_again()
            after.waiting = dict.fromkeys(each.position for each in self._seen.log(topic).entries)

    def changed(self, topic: TopicName, name: str, state: CursorState) -> None:
        """The store changed a cursor to this state."""
        if name.startswith("seqgate.") or topic.is_system:
            return
        subscription = self._seen.subscription(topic, name)
        self._check_epoch(subscription, state)
        subscription.remembers_keys = any(
            each.startswith(graveyard._KEY) for each in state.head.properties
        )
        log = self._seen.log(topic)
        acknowledged = state.acknowledged(None, RANGES_MAX)
        mark = state.head.mark_delete
        now: set[Position] = set()
        for first, last_entry in acknowledged.ranges:
            now.update(
                Position(first.ledger_id, entry) for entry in range(first.entry_id, last_entry + 1)
            )
        parts = {
            each.position: sum(1 << index for index in each.indexes)
            for each in acknowledged.batches
        }

        def is_there(position: Position) -> bool:
            return (mark is not None and position <= mark) or position in now

        lost = [each for each in subscription.acknowledged if not is_there(each)]
        lost_parts = [
            (position, bits & ~parts.get(position, 0))
            for position, bits in subscription.parts.items()
            if bits & ~parts.get(position, 0) and not is_there(position)
        ]
        taken = [each for each in subscription.waiting if is_there(each)]
        skipped = []
        for position in taken:
            del subscription.waiting[position]
            subscription.acknowledged.add(position)
            why = self._reason(subscription, log, position)
            self._seen.note(f"acknowledged {subscription.name} {position}: {why}")
            if not why:
                skipped.append(position)
        subscription.parts = parts
        if subscription.start is not None and (mark is None or mark < subscription.start):
            subscription.start = mark  # an import beyond the log is moved back
        if lost or lost_parts:
            self._undone(subscription, log, lost, lost_parts)
        if skipped:
            self._skipped(subscription, log, skipped)
        if self.redrives is not None:
            self.redrives.changed(subscription, state.head.properties)

    def taken(self, topic: TopicName, name: str, epoch: int) -> None:
        """An instance took a subscription. Its deliveries carry the epoch from now on, which no
        other instance and no earlier run of this one may have used."""
        subscription = self._seen.subscription(topic, name)
        if epoch in subscription.taken_epochs:
            self._seen.violate("EPOCH", f"{topic} {name} is taken twice under epoch {epoch}")
        subscription.taken_epochs.add(epoch)

    def passed(
        self, topic: TopicName, name: str, positions: Sequence[Position], because: Because
    ) -> None:
        """The dispatcher reports entries as acknowledged without delivery."""
        subscription, log = self._seen.subscription(topic, name), self._seen.log(topic)
        for position in positions:
            self._seen.counts[f"passed {because.name}"] += 1
            self._seen.note(f"passed {topic} {name} {position}: {because.name}")
            subscription.passed[position] = because.name
            if not log.is_trimmed(position) and not self._may_be_passed(
                subscription, log, log.at[position], because
            ):
                self._seen.violate("SKIPPED", f"{topic} {name} {position}: {because.value}")

    def _check_epoch(self, subscription: Subscription, state: CursorState) -> None:
        lease = state.head.lease
        if lease is None:
            return
        if lease.epoch < subscription.epoch or lease.epoch <= subscription.spent_epoch:
            before = max(subscription.epoch, subscription.spent_epoch)
            self._seen.violate(
                "EPOCH", f"{subscription.topic} {subscription.name}: {lease.epoch} after {before}"
            )
        subscription.is_taken_now = lease.epoch > subscription.epoch
        for move in subscription.moves:
            if move.is_import and move.taken_s is None:
                move.taken_s = self._seen.now_s()
        subscription.epoch = lease.epoch

    def _undone(
        self,
        subscription: Subscription,
        log: Log,
        lost: Sequence[Position],
        parts: Sequence[tuple[Position, int]],
    ) -> None:
        """The cursor revoked acknowledgements of entries, or of messages in batches."""
        undone = {*lost, *(position for position, _ in parts)}
        first = min((each for each in undone if not log.is_trimmed(each)), default=None)
        subscription.acknowledged.difference_update(lost)
        self._forget(subscription, undone, set(lost))
        subscription.start = None
        subscription.waiting = dict.fromkeys(
            each.position for each in log.entries if each.position not in subscription.acknowledged
        )
        if first is not None and not any(
            each.is_open
            and (each.start is None or each.is_import or self._first_of(log, each.start) <= first)
            for each in subscription.moves
        ):
            self._seen.violate(
                "UNDONE", f"{subscription.topic} {subscription.name} {sorted(lost)} {parts}"
            )
        self._moved(subscription)

    def _forget(
        self, subscription: Subscription, positions: set[Position], lost: set[Position]
    ) -> None:
        """Forget why entries were acknowledged, in part or, those of `lost`, whole. A letter of the
        others is not finished, so a reset does not undo it."""
        self.forget(subscription, positions)
        first = min(positions)
        for place in [each for each in subscription.through if each[0] >= first]:
            del subscription.through[place]
        subscription.lettered = {each for each in subscription.lettered if each[0] not in lost}
        for key in [key for key, (at, _) in subscription.held.items() if at in lost]:
            del subscription.held[key]

    def forget(self, subscription: Subscription, positions: set[Position]) -> None:
        """Forget acknowledgements of entries that are delivered again."""
        now_s = self._seen.now_s()
        for position in positions:
            subscription.undone_s[position] = now_s
            subscription.passed.pop(position, None)
            subscription.dropped.discard(position)
        for places in (subscription.asked, subscription.done):
            for place in [each for each in places if each[0] in positions]:
                del places[place]

    def _skipped(self, subscription: Subscription, log: Log, skipped: list[Position]) -> None:
        """The cursor acknowledged entries without another cause than a move."""
        last = max(skipped)
        if any(
            each.is_open and each.start is not None and self._may_skip(each, log, last)
            for each in subscription.moves
        ):
            self._moved(subscription)
            return
        for position in skipped:
            self._seen.violate(
                "SKIPPED",
                f"{subscription.topic} {subscription.name} {position}: messages "
                f"{log.at[position].numbers}",
            )

    def _may_skip(self, move: Move, log: Log, last: Position) -> bool:
        """True if a move explains that everything up to an entry counts as acknowledged."""
        assert move.start is not None
        if not move.is_import:
            return last < move.start
        until_s = (
            self._seen.now_s() if move.taken_s is None else move.taken_s + self._terms.import_s
        )
        return last <= move.start and log.at[last].at_s <= until_s

    def _moved(self, subscription: Subscription) -> None:
        """The subscription continues elsewhere: earlier deliveries no longer count."""
        subscription.floor = self.from_now_on(subscription)
        subscription.first_of_key.clear()
        subscription.delivered = {
            (position, index)
            for position, back in subscription.returns.items()
            for index in range(back.messages)
        }
        self._seen.note(f"moved {subscription.name}, from delivery {subscription.floor} on")

    def from_now_on(self, subscription: Subscription) -> Token:
        """The lowest token of future deliveries."""
        epoch = subscription.epoch
        token = self._terms.next_delivery(subscription.topic, subscription.name, epoch)
        if token is not None:
            return token
        # An instance being started has delivered nothing yet; a dead one delivers nothing more.
        return (epoch if subscription.is_taken_now else epoch + 1, 0)

    def _reason(self, subscription: Subscription, log: Log, position: Position) -> str:
        """Why an entry may be acknowledged; empty if it may not."""
        entry = log.at[position]
        through = max(subscription.through, default=None)
        if all(
            (position, index) in subscription.asked
            or (through is not None and (position, index) <= through)
            for index in range(len(entry.ids))
        ):
            return "asked"
        if log.is_trimmed(position):
            return "trimmed"
        if any(position == lettered for lettered, _ in subscription.lettered):
            return "dead-lettered"
        if position in subscription.dropped:
            return "dropped"
        if log.is_beheaded(position):
            return "beheaded"
        if log.is_aborted(position):
            return "aborted"
        if position in subscription.passed:
            return f"passed: {subscription.passed[position]}"
        tags = {self._seen.sent[number].tag for number in entry.numbers}
        if tags and tags <= self._rejected(subscription, entry):
            return "rejected"
        return ""

    def _rejected(self, subscription: Subscription, entry: Appended) -> set[str]:
        """The tags that filters may have rejected since an entry was stored, by any filter that
        was not replaced before. Chunks share the verdict of the first one."""
        log = self._seen.log(subscription.topic)
        since_s = log.at[self._first_of(log, entry.position)].at_s
        rejected: set[str] = set()
        for each in reversed(subscription.filters):
            rejected |= each.rejected
            if each.answered_s is not None and each.answered_s <= since_s:
                break
        return rejected

    def _first_of(self, log: Log, position: Position) -> Position:
        """The position where an entry's message starts."""
        entry = log.at.get(position)
        if entry is None or entry.chunk is None:
            return position
        return log.attempts[entry.producer, entry.chunk.uuid][0]

    def _may_be_passed(
        self, subscription: Subscription, log: Log, entry: Appended, because: Because
    ) -> bool:
        match because:
            case Because.HEADLESS if entry.chunk is not None and entry.chunk.chunk_id:
                first = log.attempts[entry.producer, entry.chunk.uuid][0]
                is_there = log.at[first].chunk.chunk_id == 0  # type: ignore[union-attr]
                return (
                    not is_there
                    or log.is_trimmed(first)
                    or first in subscription.acknowledged
                    or (subscription.start is not None and first <= subscription.start)
                    or bool(self._reason(subscription, log, first))
                )
            case Because.CYCLE:
                return entry.generation >= graveyard.GENERATIONS_MAX
            case Because.LETTER_REFUSED:
                is_large = entry.payload_bytes > self._terms.payload_bytes_max
                is_refusing = subscription.dead_letter_topic in self._terms.refusing
                return is_large or is_refusing or self._terms.has_been_full
            case _:
                return False
