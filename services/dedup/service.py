"""The dedup service without its wire: policies applied to the state store.

servicer.py translates requests to these calls; the rules are in core; the store is behind a port.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar

import structlog

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dedup.core.explain import Explanation, explain
from seqgate.services.dedup.core.policy import EffectivePolicy, OnConflict, OnFull
from seqgate.services.dedup.core.retention import Jumps, forgettable
from seqgate.services.dedup.core.topic import Full, Persisted, Tracked
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.dedup.ports import Outdated, PolicySource, ProducerPage, StateStore, Summary
from seqgate.services.dedup.snapshots import Snapshots, Standing, Taken
from seqgate.services.deduplication import (
    DISABLED,
    Applied,
    Behind,
    Changed,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    TooManyProducers,
    Withdrawal,
    Writer,
)
from seqgate.services.errors import DomainError, Kind
from seqgate.types import Position, TopicName

log = structlog.get_logger()

EVICTION_ROUNDS_MAX: Final = 3
"""How often one Admit makes room before it gives up: other calls may take the room first."""

EVICTION_SLACK: Final = 100
"""An eviction also makes room for one in this many of the limit, so that a full topic is not
scanned for each new producer."""

SCAN_PAGE: Final = 1_000
"""The number of producers read at a time in the scan of a topic."""

KEEPS_PER_TIMEOUT: Final = 3
"""How often connected producers are reported as alive within an inactivity timeout: one report may
be lost, and another one late."""


class ProducerNotFound(DomainError):
    """The topic's deduplication state has no such producer."""

    kind = Kind.NOT_FOUND
    reason = "PRODUCER_NOT_FOUND"


Outcome = TypeVar("Outcome", bound=Judged | Applied | Behind | Changed)


class TopicStatus(NamedTuple):
    """A topic's policy and state, and the error of its last snapshot, if it failed. `snapshot` is
    the newest one in the cursor service; `snapshot_unknown`: the cursor service did not say."""

    policy: EffectivePolicy
    policy_error: str
    summary: Summary | None
    snapshot_error: str
    snapshot: Standing | None = None
    snapshot_unknown: bool = False

    @property
    def unsaved(self) -> int:
        """The number of entries confirmed since the snapshot, of those since the state was
        created."""
        if self.summary is None:
            return 0
        if self.snapshot is None:
            return self.summary.counts.confirmed_entries
        confirmed = self.summary.confirmed
        covers_all = confirmed is None or confirmed <= self.snapshot.position
        return 0 if covers_all else self.summary.unsaved


class LoadOutcome(NamedTuple):
    """Whether a state was loaded, the confirmed position of the current state (None: there is
    none), and the number of producers that did not fit."""

    loaded: bool
    confirmed: Position | None
    left_out: int


class Deduplication:
    """Deduplication of all topics. Keeps no topic's state between calls."""

    def __init__(
        self,
        store: StateStore,
        policies: PolicySource,
        snapshots: Snapshots,
        metrics: DedupMetrics | None = None,
        steady_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._store = store
        self._policies = policies
        self._snapshots = snapshots
        self._metrics = metrics or DedupMetrics()
        self._steady_ms = steady_ms
        self._jumps = Jumps()

    async def admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
    ) -> Judged | Behind | Changed | Disabled:
        """Judge claims. If the topic is full, evict producers if policy allows.

        Raises:
            TooManyProducers: the topic is full, and policy does not evict, or too few producers can
                be evicted.
            Fenced, StateUnavailable: see the store.
        """
        known = self._policies.known(topic)
        if known is not None and known.policy.enabled.value:
            outcome = await self._admit(topic, writer, confirmation, claims, *known)
            if not isinstance(outcome, Outdated):
                return outcome
        policy = await self._policies.effective(topic)
        if not policy.enabled.value:
            return self._disabled("admit")
        outcome = await self._admit(topic, writer, confirmation, claims, policy, None)
        assert not isinstance(outcome, Outdated), "no token was compared"
        return outcome

    async def _admit(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        claims: Sequence[ProducerClaims],
        policy: EffectivePolicy,
        token: str | None,
    ) -> Judged | Behind | Changed | Outdated:
        """Judge claims under a policy: see KnownPolicy."""
        limit = policy.max_producers.value
        for _ in range(EVICTION_ROUNDS_MAX):
            now_ms = await self._store.now_ms()
            with self._called("admit"):
                outcome = await self._store.admit(
                    topic,
                    writer,
                    confirmation,
                    claims,
                    now_ms=now_ms,
                    max_producers=limit,
                    policies=token,
                )
            if isinstance(outcome, Outdated):
                return outcome
            self._metrics.called("admit", outcome)
            if not isinstance(outcome, Full):
                if isinstance(outcome, Judged):
                    self._metrics.judged(topic, outcome)
                    if policy.on_conflict.value is OnConflict.REFUSE:
                        outcome = outcome._replace(refuses_conflicts=True)
                return await self._followed_up(topic, writer, confirmation, policy, outcome)
            if policy.on_full.value is OnFull.REFUSE or outcome.wanted > limit:
                break
            names = [each.producer for each in claims]
            await self._make_room(topic, names, now_ms, limit=limit, wanted=outcome.wanted)
        raise TooManyProducers(
            f"the topic tracks its limit of {limit:,} producers", max_producers=limit
        )

    async def confirm(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation
    ) -> Applied | Behind | Disabled:
        policy = await self._policies.effective(topic)
        if not policy.enabled.value:
            return self._disabled("confirm")
        with self._called("confirm"):
            outcome = await self._store.confirm(topic, writer, confirmation)
        self._metrics.called("confirm", outcome)
        return await self._followed_up(topic, writer, confirmation, policy, outcome)

    async def rollback(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        withdrawals: Sequence[Withdrawal],
    ) -> Applied | Behind | Disabled:
        policy = await self._policies.effective(topic)
        if not policy.enabled.value:
            return self._disabled("rollback")
        with self._called("rollback"):
            outcome = await self._store.rollback(topic, writer, confirmation, withdrawals)
        self._metrics.called("rollback", outcome)
        return await self._followed_up(topic, writer, confirmation, policy, outcome)

    async def keep(
        self, topic: TopicName, producers: Sequence[str], *, only_due: bool = False
    ) -> int:
        """Report producers as alive. Returns the seconds until the next report is due; 0: none is
        needed. With `only_due`, producers active within half of that time are left unchanged."""
        policy = await self._policies.effective(topic)
        timeout_minutes = policy.producer_inactivity_timeout_minutes.value
        within_s = timeout_minutes * 60 // KEEPS_PER_TIMEOUT if policy.enabled.value else 0
        slack_ms = within_s * 500 if only_due else 0
        await self._store.keep(topic, producers, await self._store.now_ms(), slack_ms)
        return within_s

    async def producer(self, topic: TopicName, name: str) -> Tracked:
        tracked = None
        if (await self._policies.effective(topic)).enabled.value:
            tracked = await self._store.producer(topic, name)
        if tracked is None:
            raise ProducerNotFound(
                "unknown producer: it stored nothing, or was forgotten", producer_name=name
            )
        return tracked

    async def producers(self, topic: TopicName, *, size: int, token: str) -> ProducerPage:
        return await self._store.producers(topic, size=size, token=token)

    async def status(self, topic: TopicName) -> TopicStatus:
        policy = await self._policies.effective(topic)
        summary = await self._store.summary(topic)
        snapshot, unknown = None, False
        try:
            snapshot = await self._snapshots.standing(topic, summary)
        except CursorsUnavailable:
            unknown = True
        error = self._snapshots.error(topic)
        return TopicStatus(policy, self._policies.error, summary, error, snapshot, unknown)

    async def forget_topic(self, topic: TopicName, incarnation: int, *, deleted: bool) -> None:
        """Drop a topic's state and snapshot and, with `deleted`, its policy, unless they belong to
        a newer incarnation."""
        summary = await self._store.summary(topic)
        await self._store.forget_topic(topic, incarnation)
        await self._snapshots.forget(topic, incarnation)
        if deleted and (summary is None or summary.incarnation <= incarnation):
            await self._policies.forget(topic)

    async def snapshot(self, topic: TopicName, *, let_go: bool) -> Taken | None:
        return await self._snapshots.take(topic, let_go=let_go)

    async def load(
        self,
        topic: TopicName,
        incarnation: int,
        through: Position,
        producers: Sequence[Persisted],
        *,
        replacing: bool,
    ) -> LoadOutcome:
        """Load a state in place of one that was lost.

        Raises:
            Fenced: the topic has a newer incarnation.
        """
        policy = await self._policies.effective(topic)
        if not policy.enabled.value:
            return LoadOutcome(loaded=False, confirmed=None, left_out=0)
        kept = sorted(producers, key=lambda each: (-each.active_ms, each.producer))
        kept = kept[: policy.max_producers.value]
        outcome = await self._store.load(
            topic, incarnation, through, kept, replacing=replacing, taken_ms=None
        )
        left_out = len(producers) - len(kept) if outcome.loaded else 0
        self._metrics.loads["loaded" if outcome.loaded else "kept"] += 1
        if outcome.loaded:
            log.info("state loaded", topic=str(topic), through=str(through), producers=len(kept))
            self._snapshots.soon(topic)
        return LoadOutcome(outcome.loaded, outcome.confirmed, left_out)

    async def explain(
        self, topic: TopicName, producer: str, sequence_id: int
    ) -> tuple[Explanation, Tracked | None, TopicStatus]:
        status = await self.status(topic)
        tracked = await self._store.producer(topic, producer)
        explanation = explain(
            status.policy,
            None if tracked is None else tracked.marks,
            sequence_id,
            known_topic=status.summary is not None,
            snapshot=None if status.snapshot is None else status.snapshot.position,
        )
        return explanation, tracked, status

    async def purge_forever(self, interval_s: float) -> None:
        """Periodically forget inactive producers, and state of topics that stopped
        deduplicating."""
        while True:
            try:
                with self._metrics.unforeseen("purge"):
                    now_ms = await self._store.now_ms()
                    if self._jumps.look(now_ms, self._steady_ms()):
                        await self.purge(now_ms)
            except DomainError as error:
                log.warning("purge failed", reason=error.reason, error=str(error))
            await asyncio.sleep(interval_s)

    async def purge(self, now_ms: int) -> None:
        """Forget what each topic's policy demands. A store clock set forward does not age
        producers. A topic whose policy is unavailable does not block the others."""
        async for topic in self._store.topics():
            try:
                with self._metrics.unforeseen("purge", topic):
                    await self._purge(topic, now_ms)
            except CursorsUnavailable as error:
                log.warning("topic not purged", topic=str(topic), error=error.message)

    async def _purge(self, topic: TopicName, now_ms: int) -> None:
        policy = await self._policies.effective(topic)
        if not policy.enabled.value:
            # The cursor first: a leftover cursor would limit trims of the log forever.
            await self._snapshots.forget(topic, None)
            await self._store.forget_topic(topic, None)
            return
        timeout_ms = policy.producer_inactivity_timeout_minutes.value * 60_000
        inactive_before_ms = 0
        if timeout_ms:
            allowance_ms = self._jumps.allowance_ms(timeout_ms, self._steady_ms())
            inactive_before_ms = now_ms - timeout_ms - allowance_ms
        dropped = await self._forget(topic, inactive_before_ms, policy.max_producers.value)
        if dropped:
            log.info("producers forgotten", topic=str(topic), count=dropped)
            self._snapshots.soon(topic)

    async def _followed_up(
        self,
        topic: TopicName,
        writer: Writer,
        confirmation: Confirmation | None,
        policy: EffectivePolicy,
        outcome: Outcome,
    ) -> Outcome | Behind:
        """The outcome of a call, after its consequences: if the state is behind, the snapshot is
        loaded; if entries were confirmed, a snapshot is taken if due."""
        if isinstance(outcome, Behind):
            confirmed = await self._snapshots.restore(topic, writer, outcome.confirmed)
            return Behind(confirmed)
        if isinstance(outcome, (Judged, Applied)) and confirmation and not confirmation.remaining:
            self._snapshots.confirmed(topic, policy, outcome.unsaved)
        return outcome

    def _disabled(self, operation: str) -> Disabled:
        self._metrics.called(operation, DISABLED)
        return DISABLED

    @contextmanager
    def _called(self, operation: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        except DomainError:
            self._metrics.called(operation, "failed")
            raise
        finally:
            self._metrics.store_duration(time.monotonic() - began_s, operation)

    async def _make_room(
        self, topic: TopicName, claiming: Sequence[str], now_ms: int, *, limit: int, wanted: int
    ) -> None:
        # The claiming producers must not be the ones evicted.
        await self._store.keep(topic, claiming, now_ms)
        evicted = await self._forget(topic, 0, max(0, limit - wanted - limit // EVICTION_SLACK))
        log.warning("producers evicted to make room", topic=str(topic), count=evicted)

    async def _forget(self, topic: TopicName, inactive_before_ms: int, keep_at_most: int) -> int:
        purge, evict = forgettable(
            await self._everyone(topic),
            inactive_before_ms=inactive_before_ms,
            keep_at_most=keep_at_most,
        )
        dropped = 0
        for i in range(0, max(len(purge), len(evict)), SCAN_PAGE):
            some, others = purge[i : i + SCAN_PAGE], evict[i : i + SCAN_PAGE]
            gone = await self._store.forget_producers(topic, purge=some, evict=others)
            dropped += gone
            # Only the sum of both kinds is known; some producers may have become active meanwhile.
            inactive = min(gone, len(some))
            self._metrics.forgotten["inactive"] += inactive
            self._metrics.forgotten["evicted"] += gone - inactive
        return dropped

    async def _everyone(self, topic: TopicName) -> list[tuple[str, Tracked]]:
        everyone: dict[str, Tracked] = {}
        token = ""
        while True:
            page = await self._store.producers(topic, size=SCAN_PAGE, token=token)
            everyone.update(page.producers)
            token = page.next_token
            if not token:
                return list(everyone.items())
