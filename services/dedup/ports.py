"""What the dedup service needs from outside: a store for the state of topics, and policies.

tests/conformance judges every adapter by the same suite. Redis Cluster and Sentinel fit behind it
because each call concerns one topic only.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from seqgate.services.cursors import Cursor
from seqgate.services.dedup.core.policy import EffectivePolicy, Policies
from seqgate.services.dedup.core.topic import (
    Counts,
    Frozen,
    Full,
    Loaded,
    Persisted,
    Saved,
    Tracked,
)
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
from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position, TopicName


class StateUnavailable(DomainError):
    """Redis did not answer in time. Whether the request took effect is unknown."""

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
    saved: Saved

    @property
    def unsaved(self) -> int:
        """How many entries were confirmed since the newest snapshot."""
        return self.counts.confirmed_entries - self.saved.entries


class ProducerPage(NamedTuple):
    """Some of a topic's producers; an empty token ends the listing."""

    producers: list[tuple[str, Tracked]]
    next_token: str


class StateStore(Protocol):
    """The state of topics. Each method is one atomic step for one topic, and computes what the
    method of the same name of core.topic.TopicState computes.

    Raises:
        Fenced: from admit, confirm and rollback, when the writer was replaced; from load, when the
            topic has a newer incarnation.
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

    async def keep(
        self, topic: TopicName, producers: Sequence[str], now_ms: int, slack_ms: int = 0
    ) -> None: ...

    async def producer(self, topic: TopicName, name: str) -> Tracked | None:
        """What is remembered of one producer."""
        ...

    async def producers(self, topic: TopicName, *, size: int, token: str) -> ProducerPage:
        """About `size` producers, in no particular order; one that changes meanwhile may come
        twice. Raises InvalidPage for a token that no page gave."""
        ...

    async def summary(self, topic: TopicName) -> Summary | None:
        """The topic's state, or None if there is none."""
        ...

    async def freeze(self, topic: TopicName) -> Frozen | None:
        """All that a snapshot keeps, as of one moment, or None if there is no state."""
        ...

    async def record_snapshot(self, topic: TopicName, incarnation: int, saved: Saved) -> None: ...

    async def load(
        self,
        topic: TopicName,
        incarnation: int,
        through: Position,
        producers: Sequence[Persisted],
        *,
        replacing: bool,
        taken_ms: int | None,
    ) -> Loaded: ...

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

    async def policy_token(self) -> str:
        """What all replicas compare to see that policies were set; made if there is none, never
        twice the same."""
        ...

    async def set_policy_token(self, token: str) -> None:
        """Put a token in place that never was."""
        ...

    async def now_ms(self) -> int:
        """The store's own clock: one for all replicas."""
        ...

    async def check(self) -> None:
        """Return if the store answers."""
        ...


class Cursors(Protocol):
    """The cursor service, as deduplication asks it.

    Raises:
        CursorsUnavailable: from every method; the outcome is not known.
    """

    @property
    def configured(self) -> bool:
        """Whether there is a cursor service at all; if not, there never was a cursor."""
        ...

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        """A cursor, or None if there is none; unless `whole`, without what is attached to its
        mark-delete position."""
        ...

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        """Make a cursor at a position unless it exists, None: at the earliest; what it is then, not
        whole."""
        ...

    async def mark_delete(
        self,
        topic: TopicName,
        name: str,
        position: Position,
        properties: Mapping[str, str],
        *,
        version: int,
    ) -> None:
        """Move a cursor, and attach properties to its position, all or nothing.

        Raises:
            CursorConflict: its version is another one, it is past the position, or it is gone.
        """
        ...

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        """Set one of the cursor's own properties, or remove it; a cursor that does not exist is
        made when there is something to set."""
        ...

    async def delete(self, topic: TopicName, name: str) -> None:
        """Remove a cursor, if there is one."""
        ...


class GivenPolicies(Protocol):
    """Policies that an operator gives, which may change at any time."""

    @property
    def policies(self) -> Policies:
        """Those in use."""
        ...

    @property
    def error(self) -> str:
        """Why the newest are not in use; empty: they are."""
        ...


class PolicySource(Protocol):
    """Where policies come from. What it answers may change from one call to the next."""

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        """The policy in effect for a topic now, on every replica.

        Raises:
            CursorsUnavailable, StateUnavailable: that cannot be told.
        """
        ...

    async def forget(self, topic: TopicName) -> None:
        """Drop what was set for a topic, which was deleted."""
        ...

    @property
    def error(self) -> str:
        """Why the newest policies are not in use; empty: they are."""
        ...
