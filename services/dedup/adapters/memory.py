"""A state store in memory, lost when the process ends. For tests, and the reference for the Redis
adapter: it only calls the pure functions."""

import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from seqgate.services.dedup.core.topic import (
    Frozen,
    Full,
    Loaded,
    Persisted,
    Saved,
    TopicState,
    Tracked,
)
from seqgate.services.dedup.ports import OUTDATED, Outdated, ProducerPage, Summary
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Judged,
    ProducerClaims,
    Withdrawal,
    Writer,
)
from seqgate.services.errors import InvalidPage
from seqgate.types import Position, TopicName


class MemoryStateStore:
    """See seqgate.services.dedup.ports.StateStore."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.states: dict[TopicName, TopicState] = {}
        self._now_ms = now_ms
        self._policy_token = secrets.token_hex(16)

    def _enter(self, topic: TopicName, writer: Writer) -> TopicState:
        state = TopicState.entered_by(self.states.get(topic), writer)
        self.states[topic] = state
        return state

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
        *,
        now_ms: int,
        max_producers: int,
        policies: str | None = None,
    ) -> Judged | Behind | Changed | Full | Outdated:
        if policies not in (None, self._policy_token):
            return OUTDATED
        state = self._enter(topic, writer)
        return state.admit(writer, confirmation, claims, now_ms=now_ms, max_producers=max_producers)

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind:
        return self._enter(topic, writer).confirm(writer, confirmation)

    async def rollback(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        withdrawals: Sequence[Withdrawal],
    ) -> Applied | Behind:
        return self._enter(topic, writer).rollback(writer, confirmation, withdrawals)

    async def keep(
        self, topic: TopicName, producers: Sequence[str], now_ms: int, slack_ms: int = 0
    ) -> None:
        if (state := self.states.get(topic)) is not None:
            state.keep(producers, now_ms, slack_ms)

    async def producer(self, topic: TopicName, name: str) -> Tracked | None:
        state = self.states.get(topic)
        return None if state is None else state.producers.get(name)

    async def producers(self, topic: TopicName, *, size: int, token: str) -> ProducerPage:
        state = self.states.get(topic)
        listed = [] if state is None else list(state.producers.items())
        if not re.fullmatch("[0-9]{0,20}", token):
            raise InvalidPage("invalid page_token", field="page_token")
        first = int(token or "0")
        more = first + size < len(listed)
        return ProducerPage(listed[first : first + size], str(first + size) if more else "")

    async def summary(self, topic: TopicName) -> Summary | None:
        if (state := self.states.get(topic)) is None:
            return None
        return Summary(
            state.incarnation,
            state.epoch,
            state.confirmed,
            state.revision,
            state.remaining,
            len(state.producers),
            replace(state.counts),
            state.saved,
        )

    async def freeze(self, topic: TopicName) -> Frozen | None:
        state = self.states.get(topic)
        return None if state is None else state.frozen()

    async def record_snapshot(self, topic: TopicName, incarnation: int, saved: Saved) -> None:
        if (state := self.states.get(topic)) is not None:
            state.record_snapshot(incarnation, saved)

    async def load(
        self,
        topic: TopicName,
        incarnation: int,
        through: Position,
        producers: Sequence[Persisted],
        *,
        replacing: bool,
        taken_ms: int | None,
    ) -> Loaded:
        state, loaded = TopicState.loaded_by(
            self.states.get(topic),
            incarnation,
            through,
            producers,
            replacing=replacing,
            taken_ms=taken_ms,
        )
        self.states[topic] = state
        assert state.confirmed is not None
        return Loaded(loaded, state.confirmed)

    async def forget_producers(
        self,
        topic: TopicName,
        *,
        purge: Sequence[tuple[str, int]],
        evict: Sequence[tuple[str, int]],
    ) -> int:
        if (state := self.states.get(topic)) is None:
            return 0
        purged, evicted = state.forget(purge), state.forget(evict)
        state.counts.purged += purged
        state.counts.evicted += evicted
        return purged + evicted

    async def forget_topic(self, topic: TopicName, incarnation: int | None) -> None:
        state = self.states.get(topic)
        if state is not None and (incarnation is None or state.incarnation <= incarnation):
            del self.states[topic]

    async def topics(self) -> AsyncIterator[TopicName]:
        for topic in list(self.states):
            yield topic

    async def policy_token(self) -> str:
        return self._policy_token

    async def set_policy_token(self, token: str) -> None:
        self._policy_token = token

    async def now_ms(self) -> int:
        return self._now_ms()

    async def check(self) -> None:
        return None
