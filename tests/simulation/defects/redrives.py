"""Defects of redrives, mends and discards that never were: mistakes that are easily made."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from seqgate.services.dispatcher.core.effects import Effect, Entry, Persist
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.services.dispatcher.letters.marks import Fate, Marks, Pages
from seqgate.services.dispatcher.letters.record import RedriveOutcome, RedriveRecord
from seqgate.services.dispatcher.letters.returns import Return, Returns
from seqgate.services.dispatcher.ports import Cursor
from seqgate.services.dispatcher.redrives.selecting import outcome_now
from seqgate.types import Position, TopicName
from tests.simulation.defects import defect


@defect("R1", "a redrive's record moves behind letters before their returns are durable")
def move_the_record_first(patch: Any) -> None:
    bring = Returns.bring

    async def brought(
        self: Returns,
        returns: Mapping[Position, Return],
        record: RedriveRecord,
        remove: Sequence[str] = (),
    ) -> None:
        await bring(self, {}, record, remove)
        await bring(self, returns, record)

    patch.setattr(Returns, "bring", brought)


@defect("R2", "the redeliveries of a redriven message continue those before it")
def count_earlier_lives(patch: Any) -> None:
    forget = Settling._forget

    def forgotten(self: Settling, position: Position) -> None:
        attempts = self.attempts.get(position)
        forget(self, position)
        if attempts is not None:
            self.attempts[position] = attempts

    patch.setattr(Settling, "_forget", forgotten)


@defect("R3", "a new owner forgets the messages that are on their way back")
def forget_returns(patch: Any) -> None:
    load = Returns.load

    async def loaded(self: Returns, cursor: Cursor, acknowledged: Acknowledged) -> None:
        await load(self, cursor, acknowledged)
        self.open = {}

    patch.setattr(Returns, "load", loaded)


@defect("R4", "a discarded letter can be redriven")
def redrive_discarded_letters(patch: Any) -> None:
    fate = Marks.fate

    def told(self: Marks, topic: TopicName, letter: Position) -> Fate | None:
        found = fate(self, topic, letter)
        return None if found is Fate.DISCARDED else found

    patch.setattr(Marks, "fate", told)


@defect("R5", "a new owner forgets that a mend has begun")
def forget_mends(patch: Any) -> None:
    load = Marks.load

    def loaded(self: Marks, properties: Mapping[str, str]) -> None:
        load(self, properties)
        self.mending = {}

    patch.setattr(Marks, "load", loaded)


@defect("R6", "a key that is held resumes before its redriven message is acknowledged")
def resume_early(patch: Any) -> None:
    redrive = Subscription.redrive

    def redriven(self: Subscription, entries: Collection[Entry], *rest: Any) -> list[Effect]:
        for entry in entries:
            if self.gaps.holds_behind(key := self.key_of(entry), entry.position):
                self.out.add(self.gaps.forget(key))
        return redrive(self, [*entries], *rest)

    patch.setattr(Subscription, "redrive", redriven)


@defect("R7", "a redriven letter is not marked as settled")
def mark_nothing(patch: Any) -> None:
    with_letters = Marks.with_letters

    def marked(self: Marks, letters: Any, fate: Fate = Fate.REDRIVEN, *rest: Any) -> Pages:
        return Pages() if fate is Fate.REDRIVEN else with_letters(self, letters, fate, *rest)

    patch.setattr(Marks, "with_letters", marked)


@defect("R8", "a redriven message that is acknowledged stays on its way back")
def keep_returns(patch: Any) -> None:
    async def persist(self: Returns, what: Persist, held: Callable[[Position], str | None]) -> None:
        """Make nothing durable."""

    patch.setattr(Returns, "_persist", persist)


@defect("R9", "a redrive of many takes letters that were settled since")
def judge_once(patch: Any) -> None:
    def judged(*given: Any) -> RedriveOutcome:
        outcome = outcome_now(*given)
        return RedriveOutcome.REDRIVEN if outcome is RedriveOutcome.SETTLED else outcome

    patch.setattr("seqgate.services.dispatcher.redrives.redriving.outcome_now", judged)


@defect("R10", "a key stays held after its redriven message is acknowledged, for the next owner")
def hold_for_ever(patch: Any) -> None:
    patch.setattr(Subscription, "held_behind", lambda *_: None)
