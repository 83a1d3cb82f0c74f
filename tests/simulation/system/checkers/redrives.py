"""Invariants of redrives and replays: each message comes back once by each number, is acknowledged
once more, and no more than that."""

import base64
import json
from collections.abc import Mapping

from seqgate.services.dispatcher.letters import graveyard, marks, returns
from seqgate.services.dispatcher.letters.record import RedriveOutcome, records_of
from seqgate.services.dispatcher.letters.returns import Return
from seqgate.types import Position, TopicName
from tests.simulation.system.checkers.cursors import Cursors
from tests.simulation.system.seen import Log, Seen, Subscription


class Redrives:
    """Checks returns at each change of a cursor's properties."""

    def __init__(self, seen: Seen, cursors: Cursors) -> None:
        self._seen = seen
        self._cursors = cursors
        cursors.redrives = self

    def changed(self, subscription: Subscription, properties: Mapping[str, str]) -> None:
        """A cursor was changed, and has these properties."""
        self._discarded(subscription, properties)
        before = subscription.returns
        now = {
            returns._position(name.removeprefix(returns._RETURN)): Return.from_text(text)
            for name, text in properties.items()
            if name.startswith(returns._RETURN)
        }
        if not (now or before or subscription.redrives):
            subscription.redrives = any("seqgate.redrive" in each for each in properties)
            if not subscription.redrives:
                return
        log = self._seen.log(subscription.topic)
        subscription.returns = now
        for position, back in before.items():
            after = now.get(position)
            if after is None or after[:3] != back[:3]:
                self._ended(subscription, log, position, back)
            elif back.acknowledged & ~after.acknowledged:
                self._violate("UNDONE", subscription, position, back)
        for position, back in now.items():
            earlier = before.get(position)
            if earlier is None or earlier[:3] != back[:3]:
                self._began(subscription, log, position, back)
                self._check_state(subscription, position, back, properties)
                self._check_whole(subscription, position, back, now)
        for number, record in records_of(properties).items():
            counted = record.counts.get(RedriveOutcome.REDRIVEN, 0)
            if counted != subscription.made[number]:
                self._seen.violate(
                    "MISCOUNTED",
                    f"{subscription.topic} {subscription.name} redrive {number}: {counted} of "
                    f"{subscription.made[number]}",
                )
        latest = json.loads(properties.get(returns._LATEST, "[]"))
        for number, request_id, letters in latest:
            if letters != subscription.made[number]:
                self._seen.violate(
                    "MISCOUNTED",
                    f"{subscription.topic} {subscription.name} redrive {number} {request_id}: "
                    f"{letters} of {subscription.made[number]}",
                )
        subscription.is_redriving = any(
            each.state.name == "RUNNING" for each in records_of(properties).values()
        )

    def _began(
        self, subscription: Subscription, log: Log, position: Position, back: Return
    ) -> None:
        """A message is on its way back: what was known of its acknowledgement counts no more."""
        self._seen.counts["redriven"] += 1
        self._seen.note(f"returns {subscription.name} {position}: {back}")
        source = (str(back.topic), back.letter)
        entry = self._seen.log(back.topic).at.get(back.letter)
        if entry is None or entry.chunk is None or entry.chunk.is_last:
            subscription.made[back.redrive] += 1
        if position not in subscription.acknowledged and not log.is_trimmed(position):
            self._violate("UNDONE", subscription, position, back)
        if source[0] == subscription.topic:
            source = (str(back.redrive), position)
            if back.letter != position:
                self._violate("INVENTED", subscription, position, back)
        else:
            self._check_letter(subscription, position, back)
        if source in subscription.redriven:
            self._violate("REDRIVEN_TWICE", subscription, position, back)
        subscription.redriven.add(source)
        lettered = {each for each in subscription.lettered if each[0] == position}
        subscription.lettered -= lettered
        subscription.lettered_before.update(each for each, _ in lettered)
        self._cursors.forget(subscription, {position})
        subscription.through_before[position] = {
            place: set(tokens) for place, tokens in subscription.through.items()
        }
        subscription.refused[position] = 0
        entry = log.at.get(position)
        if entry is not None:
            subscription.delivered.update((position, index) for index in range(len(entry.ids)))

    def _check_letter(self, subscription: Subscription, position: Position, back: Return) -> None:
        log = self._seen.log(back.topic)
        letter = log.at.get(back.letter)
        if letter is None:
            if not log.is_trimmed(back.letter):
                self._violate("INVENTED", subscription, position, back)
        elif letter.origin != (subscription.topic, subscription.name, position):
            self._violate("INVENTED", subscription, position, back)

    def _check_whole(
        self,
        subscription: Subscription,
        position: Position,
        back: Return,
        now: Mapping[Position, Return],
    ) -> None:
        """The chunks of a large message come back together."""
        source = self._seen.log(back.topic)
        entry = source.at.get(back.letter)
        if entry is None or entry.chunk is None:
            return
        together = {
            each.chunk.chunk_id
            for other in now.values()
            if (other.topic, other.redrive) == (back.topic, back.redrive)
            and (each := source.at.get(other.letter)) is not None
            and each.chunk is not None
            and (each.producer, each.chunk.uuid) == (entry.producer, entry.chunk.uuid)
        }
        if len(together) != entry.chunk.num_chunks:
            self._violate("TORN", subscription, position, back)

    def _check_state(
        self,
        subscription: Subscription,
        position: Position,
        back: Return,
        properties: Mapping[str, str],
    ) -> None:
        """A letter that is settled, or whose mend is not complete, does not come back."""
        letter = self._seen.log(back.topic).at.get(back.letter)
        if letter is None or str(back.topic) == subscription.topic:
            return
        if _has(properties, marks._SETTLED, back):
            self._violate("SETTLED", subscription, position, back)
        original = back if letter.mends is None else back._replace(letter=letter.mends)
        if marks.mending_name(original.topic, original.letter) in properties:
            self._violate("SETTLED", subscription, position, back)
        if letter.mends is not None and not _has(properties, marks._SETTLED, original):
            self._violate("SETTLED", subscription, position, back)

    def _discarded(self, subscription: Subscription, properties: Mapping[str, str]) -> None:
        """No key is held behind a message of which a letter is discarded. (After a replay it may
        have several.)"""
        if not any(name.startswith(marks._DISCARDED) for name in properties):
            return
        of = TopicName.parse(subscription.topic)
        topic = graveyard.default_topic(of, subscription.name)
        discarded = {
            each.origin.position
            for each in self._seen.log(topic).entries
            if each.origin is not None
            and _has(properties, marks._DISCARDED, Return(topic, each.position, 0, 1))
        }
        for key, (position, _) in list(subscription.held.items()):
            if position in discarded:
                self._seen.counts["discarded"] += 1
                del subscription.held[key]

    def _ended(
        self, subscription: Subscription, log: Log, position: Position, back: Return
    ) -> None:
        """A return was removed: its message is settled, or a reset delivers it again."""
        if position not in subscription.acknowledged:
            self._seen.note(f"returns no more {subscription.name} {position}")
            subscription.redriven.discard((str(back.topic), back.letter))
            return
        why = self._why(subscription, log, position, back)
        subscription.through_before.pop(position, None)
        self._seen.note(f"returned {subscription.name} {position}: {why}")
        self._seen.counts[f"redriven, then {why.partition(':')[0]}"] += 1
        if not why:
            self._violate("SKIPPED", subscription, position, back)
        if why != "asked":
            return
        token = self._cursors.from_now_on(subscription)
        for index in range(back.messages):
            subscription.done.setdefault((position, index), token)
        for key in [key for key, (at, _) in subscription.held.items() if at == position]:
            del subscription.held[key]

    def _why(self, subscription: Subscription, log: Log, position: Position, back: Return) -> str:
        """Why a returned message is settled; empty: for no reason."""
        before = subscription.through_before.get(position, {})
        through = max(
            (
                place
                for place, tokens in subscription.through.items()
                if tokens - before.get(place, set())
            ),
            default=None,
        )
        if all(
            back.acknowledged >> index & 1
            or (position, index) in subscription.asked
            or (through is not None and (position, index) <= through)
            for index in range(back.messages)
        ):
            return "asked"
        if any(position == lettered for lettered, _ in subscription.lettered):
            return "dead-lettered"
        letters = self._seen.log(back.topic)
        if log.is_trimmed(position) or letters.is_trimmed(back.letter):
            return "trimmed"
        if position in subscription.passed:
            return f"passed: {subscription.passed[position]}"
        return ""

    def _violate(
        self, kind: str, subscription: Subscription, position: Position, back: Return
    ) -> None:
        self._seen.violate(
            kind, f"{subscription.topic} {subscription.name} {position} comes back as {back}"
        )


def _has(properties: Mapping[str, str], kind: str, back: Return) -> bool:
    """Whether a cursor has the bit of a letter."""
    name, place = marks._place(kind, back.topic, back.letter, marks.PAGE_LETTERS)
    bits = int.from_bytes(base64.b64decode(properties.get(name, "")), "little")
    return bool(bits >> place & 1)
