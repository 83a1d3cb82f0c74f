"""The dedup service's ports: a store for the state of topics, the cursor service, and policies.

tests/conformance runs the same suite over every adapter. Redis Cluster and Sentinel can implement
the store because each call concerns one topic only.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

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
    """Redis did not answer in time. The outcome of the request is unknown."""

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
        return self.counts.confirmed_entries - self.saved.entries


class ProducerPage(NamedTuple):
    """A page of a topic's producers; an empty token ends the listing."""

    producers: list[tuple[str, Tracked]]
    next_token: str


class Outdated(NamedTuple):
    """Nothing was done: the policies' token is another than the caller's, or lost."""


OUTDATED: Final = Outdated()


class StateStore(Protocol):
    """The state of topics. Each method is one atomic step on one topic, with the result of the
    same method of core.topic.TopicState.

    Raises:
        Fenced: from admit, confirm and rollback: the writer was replaced; from load: the topic has
            a newer incarnation.
        StateUnavailable: from every method; the outcome is unknown.
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
        policies: str | None = None,
    ) -> Judged | Behind | Changed | Full | Outdated:
        """Judge claims. `policies` is the policies' token that the caller knows; None: it is not
        compared."""
        ...

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
        """The state of a producer; None: it is not tracked."""
        ...

    async def producers(self, topic: TopicName, *, size: int, token: str) -> ProducerPage:
        """About `size` producers, unordered. A producer that changes meanwhile may be listed twice.
        Raises InvalidPage for an invalid token."""
        ...

    async def summary(self, topic: TopicName) -> Summary | None:
        """The topic's state without its producers; None: it has no state."""
        ...

    async def freeze(self, topic: TopicName) -> Frozen | None:
        """The content of a snapshot, as of one moment; None: the topic has no state."""
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
        """Drop producers that were not active after the given times, and count them by cause.
        Returns the number dropped."""
        ...

    async def forget_topic(self, topic: TopicName, incarnation: int | None) -> None:
        """Drop a topic's state unless it has a newer incarnation; None: in any case."""
        ...

    def topics(self) -> AsyncIterator[TopicName]:
        """All topics with state; one created or dropped meanwhile may be missed."""
        ...

    async def policy_token(self) -> str:
        """The token by which replicas detect changed policies; created if missing. No token is used
        twice."""
        ...

    async def set_policy_token(self, token: str) -> None:
        """Replace the token by one never used before."""
        ...

    async def now_ms(self) -> int:
        """The time of the store's clock, which all replicas share."""
        ...

    async def check(self) -> None:
        """Return if the store answers; raise otherwise."""
        ...


class Cursors(Protocol):
    """The cursor service, as deduplication uses it.

    Raises:
        CursorsUnavailable: from every method; the outcome is unknown.
    """

    @property
    def configured(self) -> bool:
        """Whether a cursor service is configured. Without one, no cursor exists."""
        ...

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        """A cursor; None: it does not exist. Unless `whole`, without its mark-delete properties."""
        ...

    async def create(
        self, topic: TopicName, name: str, mark_delete: Position | None = None
    ) -> Cursor:
        """Create a cursor at a position (None: the earliest) unless it exists. Returns the cursor,
        without the properties of its mark-delete position."""
        ...

    async def mark_delete(
        self,
        topic: TopicName,
        name: str,
        position: Position,
        properties: Mapping[str, str],
        *,
        revision: int,
    ) -> None:
        """Move a cursor and attach properties to its position, atomically.

        Raises:
            CursorConflict: the cursor has another revision, is past the position, or was deleted.
        """
        ...

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        """Set one of the cursor's own properties, and create the cursor if necessary; None removes
        the property."""
        ...

    async def delete(self, topic: TopicName, name: str) -> None: ...


class GivenPolicies(Protocol):
    """Policies from an operator's file, which may change at any time."""

    @property
    def policies(self) -> Policies: ...

    @property
    def error(self) -> str:
        """The reason that the newest file was rejected; empty: it is in use."""
        ...


class KnownPolicy(NamedTuple):
    """The policy in effect as long as the state store has this token; None: in any case."""

    policy: EffectivePolicy
    token: str | None


class PolicySource(Protocol):
    """The policies in effect, which may change between two calls."""

    def known(self, topic: TopicName) -> KnownPolicy | None:
        """The policy that was last in effect for a topic, without asking; None: unknown."""
        ...

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        """The policy in effect for a topic now, on every replica.

        Raises:
            CursorsUnavailable, StateUnavailable: the policy cannot be determined.
        """
        ...

    async def forget(self, topic: TopicName) -> None: ...

    @property
    def error(self) -> str:
        """The reason that the newest policy file was rejected; empty: it is in use."""
        ...
