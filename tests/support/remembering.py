"""Deduplication as it is, in this process: for tests of ledgers that share a store, and a state."""

import asyncio
from collections.abc import Callable, Sequence

from seqgate.types import Position, TopicName
from services.dedup.core import topic as core
from services.dedup.core.retention import forgettable
from services.dedup.core.sequence import Claim, Marks
from services.errors import Fenced
from services.ledger.core.entry import Unit
from services.ledger.core.writer import Confirmation, Logged, Verdict
from services.ledger.ports import Applied, Behind, Changed, Disabled, Judged, WriterName


class RememberingDeduplicator:
    """See services.ledger.ports.Deduplicator. What it remembers is services.dedup.core's state."""

    def __init__(self) -> None:
        self.states: dict[TopicName, core.TopicState] = {}
        self.enabled = True
        self.before: Callable[[str], asyncio.Future[None] | None] = lambda _: None
        """Called with the name of each call; what it returns is awaited first."""
        self.now_ms = 0
        self.keep_within_s: float | None = None
        self.kept: list[tuple[TopicName, list[str]]] = []

    def marks(self, topic: TopicName) -> dict[str, Marks]:
        """How far each producer has come."""
        return {name: each.marks for name, each in self.states[topic].producers.items()}

    def evict(self, topic: TopicName, producer: str) -> None:
        """Forget a producer, as policy does."""
        del self.states[topic].producers[producer]

    def purge(self, topic: TopicName, inactive_for_ms: int) -> list[str]:
        """Forget who was inactive for longer; their names."""
        state = self.states[topic]
        before = set(state.producers)
        gone, _ = forgettable(
            state.producers.items(),
            inactive_before_ms=self.now_ms - inactive_for_ms,
            keep_at_most=1_000,
        )
        state.forget(gone)
        return sorted(before - set(state.producers))

    async def admit(
        self,
        topic: TopicName,
        writer: WriterName,
        confirmation: Confirmation | None,
        units: Sequence[Unit],
    ) -> Judged | Behind | Changed | Disabled:
        await self._called("admit")
        if not self.enabled:
            self.states.pop(topic, None)
            return Disabled()
        columns: dict[str, list[int]] = {}
        for index, unit in enumerate(units):
            columns.setdefault(unit.producer, []).append(index)
        claims = [
            core.ProducerClaims(
                name,
                tuple(Claim(units[i].lowest, units[i].highest, units[i].chunk) for i in indexes),
            )
            for name, indexes in columns.items()
        ]
        state = self._entered(topic, writer)
        outcome = state.admit(
            _writer(writer),
            _confirmation(confirmation),
            claims,
            now_ms=self.now_ms,
            max_producers=1_000,
        )
        match outcome:
            case core.Behind(confirmed):
                return Behind(confirmed)
            case core.Changed():
                return Changed()
            case core.Judged(revision, answers, _):
                verdicts: list[Verdict] = [Verdict.NEW] * len(units)
                persisted, aborts = [-1] * len(units), {}
                for indexes, answer in zip(columns.values(), answers, strict=True):
                    for place, index in enumerate(indexes):
                        verdicts[index] = Verdict[answer.verdicts[place].name]
                        persisted[index] = answer.decided
                        if place in answer.aborts:
                            aborts[index] = answer.aborts[place]
                return Judged(revision, verdicts, persisted, aborts)
        raise AssertionError(outcome)

    async def confirm(
        self, topic: TopicName, writer: WriterName, confirmation: Confirmation
    ) -> Applied | Behind | Disabled:
        await self._called("confirm")
        if not self.enabled:
            return Disabled()
        given = _confirmation(confirmation)
        assert given is not None
        return _applied(self._entered(topic, writer).confirm(_writer(writer), given))

    async def rollback(
        self, topic: TopicName, writer: WriterName, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        await self._called("rollback")
        if not self.enabled:
            return Disabled()
        state = self._entered(topic, writer)
        return _applied(state.rollback(_writer(writer), _confirmation(confirmation), []))

    async def keep(
        self, topic: TopicName, producers: Sequence[str], *, only_due: bool = False
    ) -> float | None:
        await self._called("keep")
        self.kept.append((topic, list(producers)))
        if topic in self.states:
            self.states[topic].keep(producers, self.now_ms)
        return self.keep_within_s

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        await self._called("forget_topic")
        state = self.states.get(topic)
        if state is not None and state.incarnation <= incarnation:
            del self.states[topic]

    async def snapshot(self, topic: TopicName) -> Position | None:
        await self._called("snapshot")
        return None

    async def check(self) -> None:
        return None

    async def _called(self, name: str) -> None:
        wait = self.before(name)
        if wait is not None:
            await wait

    def _entered(self, topic: TopicName, writer: WriterName) -> core.TopicState:
        try:
            state = core.TopicState.entered_by(self.states.get(topic), _writer(writer))
        except Fenced as error:
            raise Fenced(error.message) from None
        self.states[topic] = state
        return state


def _writer(writer: WriterName) -> core.Writer:
    return core.Writer(writer.incarnation, writer.epoch, writer.position, writer.revision)


def _applied(outcome: core.Applied | core.Behind) -> Applied | Behind:
    if isinstance(outcome, core.Behind):
        return Behind(outcome.confirmed)
    return Applied(outcome.revision)


def _confirmation(given: Confirmation | None) -> core.Confirmation | None:
    if given is None:
        return None
    columns: dict[str, list[Logged]] = {}
    for logged in given.entries:
        if logged.producer is not None:
            columns.setdefault(logged.producer, []).append(logged)
    producers = tuple(
        core.ProducerEntries(
            name,
            tuple(each.highest for each in entries),
            max(each.append_ms for each in entries),
            {i: each.chunk for i, each in enumerate(entries) if each.chunk is not None},
        )
        for name, entries in columns.items()
    )
    return core.Confirmation(
        given.after, given.through, producers, given.entry_count, given.remaining
    )
