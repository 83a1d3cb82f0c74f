"""The real deduplication, in this process: for tests of ledgers that share a store and a state."""

import asyncio
from collections.abc import Callable, Sequence

from seqgate.services.dedup.core import topic as core
from seqgate.services.dedup.core.retention import forgettable
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    Writer,
)
from seqgate.services.errors import Fenced
from seqgate.types import Position, TopicName


class RememberingDeduplicator:
    """A ledger.ports.Deduplicator on dedup.core's state."""

    def __init__(self) -> None:
        self.states: dict[TopicName, core.TopicState] = {}
        self.enabled = True
        self.before: Callable[[str], asyncio.Future[None] | None] = lambda _: None
        """Called with the name of each call. A future it returns is awaited first."""
        self.confirmed: Callable[[], None] = lambda: None
        """Called when a confirmation was applied. An error that it raises is the reply."""
        self.now_ms = 0
        self.keep_within_s: float | None = None
        self.kept: list[tuple[TopicName, list[str]]] = []

    def marks(self, topic: TopicName) -> dict[str, Marks]:
        """The marks of each producer."""
        return {name: each.marks for name, each in self.states[topic].producers.items()}

    def evict(self, topic: TopicName, producer: str) -> None:
        """Forget a producer, as policy does."""
        del self.states[topic].producers[producer]

    def purge(self, topic: TopicName, inactive_for_ms: int) -> list[str]:
        """Forget producers that were inactive for longer, and return their names."""
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
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
    ) -> Judged | Behind | Changed | Disabled:
        await self._called("admit")
        if not self.enabled:
            self.states.pop(topic, None)
            return Disabled()
        outcome = self._entered(topic, writer).admit(
            writer, confirmation, claims, now_ms=self.now_ms, max_producers=1_000
        )
        assert not isinstance(outcome, core.Full)
        return outcome

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind | Disabled:
        await self._called("confirm")
        if not self.enabled:
            return Disabled()
        outcome = self._entered(topic, writer).confirm(writer, confirmation)
        self.confirmed()
        return outcome

    async def rollback(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        await self._called("rollback")
        if not self.enabled:
            return Disabled()
        return self._entered(topic, writer).rollback(writer, confirmation, [])

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

    def _entered(self, topic: TopicName, writer: Writer) -> core.TopicState:
        try:
            state = core.TopicState.entered_by(self.states.get(topic), writer)
        except Fenced as error:
            raise Fenced(error.message) from None
        self.states[topic] = state
        return state
