"""What the dedup service needs from outside: a store for the state of topics, and policies.

tests/conformance judges every adapter by the same suite. Redis Cluster and Sentinel fit behind it
because each call concerns one topic only.
"""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from seqgate.types import Position, TopicName
from services.dedup.core.policy import EffectivePolicy
from services.dedup.core.topic import (
    Applied,
    Behind,
    Changed,
    Confirmation,
    Counts,
    Full,
    Judged,
    ProducerClaims,
    Tracked,
    Withdrawal,
    Writer,
)
from services.errors import DomainError, Kind


class StateUnavailable(DomainError):
    """The store did not answer in time; whether it did what it was asked is not known."""

    kind = Kind.UNAVAILABLE
    reason = "STATE_UNAVAILABLE"


class Summary(NamedTuple):
    """A topic's state without its producers."""

    incarnation: int
    epoch: int
    confirmed: Position | None
    revision: int
    remaining: int
    producers: int
    counts: Counts


class Page(NamedTuple):
    """Some of a topic's producers; an empty token ends the listing."""

    producers: list[tuple[str, Tracked]]
    next_token: str


class StateStore(Protocol):
    """The state of topics. Each method is one atomic step for one topic, and computes what the
    method of the same name of core.topic.TopicState computes.

    Raises:
        Fenced: from admit, confirm and rollback, when the writer was replaced.
        StateUnavailable: from every method; the outcome is not known.
    """

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
        *,
        now_ms: int,
        max_producers: int,
    ) -> Judged | Behind | Changed | Full: ...

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind: ...

    async def rollback(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        withdrawals: Sequence[Withdrawal],
    ) -> Applied | Behind: ...

    async def keep(self, topic: TopicName, producers: Sequence[str], now_ms: int) -> None: ...

    async def producer(self, topic: TopicName, name: str) -> Tracked | None:
        """What is remembered of one producer."""
        ...

    async def producers(self, topic: TopicName, *, size: int, token: str) -> Page:
        """About `size` producers, in no particular order; one that changes meanwhile may come
        twice. Raises InvalidPage for a token that no page gave."""
        ...

    async def summary(self, topic: TopicName) -> Summary | None:
        """The topic's state, or None if there is none."""
        ...

    async def forget_producers(
        self,
        topic: TopicName,
        *,
        purge: Sequence[tuple[str, int]],
        evict: Sequence[tuple[str, int]],
    ) -> int:
        """Drop producers that were not active since, and count them by cause. Returns how many
        were dropped."""
        ...

    async def forget_topic(self, topic: TopicName, incarnation: int | None) -> None:
        """Drop a topic's state unless it is of a newer incarnation; None: whatever it is."""
        ...

    def topics(self) -> AsyncIterator[TopicName]:
        """Every topic that has state; one that appears or vanishes meanwhile may be missed."""
        ...

    async def now_ms(self) -> int:
        """The store's own clock: one for all replicas."""
        ...

    async def check(self) -> None:
        """Return if the store answers."""
        ...


class PolicySource(Protocol):
    """Where policies come from. What it answers may change from one call to the next."""

    def effective(self, topic: TopicName) -> EffectivePolicy:
        """The policy in effect for a topic now."""
        ...

    @property
    def error(self) -> str:
        """Why the newest policies are not in use; empty: they are."""
        ...
