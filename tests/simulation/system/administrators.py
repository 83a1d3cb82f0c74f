"""What administrators do while applications run: each act is drawn from those that the history
has."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from grpc import StatusCode, aio

from seqgate.api.cursor.v1 import cursor_pb2_grpc
from seqgate.api.dedup.v1 import dedup_pb2 as dedup_pb
from seqgate.api.dedup.v1 import dedup_pb2_grpc
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as dispatcher_pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as ledger_pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.client._channel import open_channel
from seqgate.owners import FollowingChannel
from tests.simulation.system.checkers import HELD_S
from tests.simulation.system.services import target
from tests.simulation.system.workload import KEYS, LONG_KEY, TAGS

if TYPE_CHECKING:
    from tests.simulation.system.world import World

AGAIN_S: Final = 1.0
"""How long an administrator waits before it tries again, of virtual time."""

RELEASE_S: Final = 20.0
"""How often keys are let go when all is quiet, of virtual time."""

CALL_TIMEOUT_S: Final = 5.0
"""How long an administrator waits for an answer."""

PRODUCERS_MAX: Final = 100
"""As many producers as a topic tracks without any being refused."""

SURE_S: Final = 15.0
"""How long after deduplication was switched on what was let through before may still be
appended."""

EXPRESSIONS: Final[Mapping[str, frozenset[str]]] = {
    "true": frozenset(),
    "properties['tag'] == 'red'": frozenset({"green"}),
    "properties['tag'] != 'red'": frozenset({"red"}),
    "false": frozenset(TAGS),
    "int(properties['tag']) == 1": frozenset(),  # fails, of every message
}
"""Filters, and the tags of the messages that they reject."""


@dataclass
class Administrator:
    """Acts on a world, from a process of its own."""

    world: "World"
    rng: Random
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_filters: set[tuple[str, str]] = field(default_factory=set)
    has_trouble: bool = False

    async def go_on(self) -> None:
        """Do one thing after the other until all is quiet; then take back what is in the way."""
        acts = self._acts()
        rest_s = self.world.swarm.seconds / 8
        while acts and not self.world.is_quiet:
            await asyncio.sleep(self.rng.random() * 2 * rest_s)
            if not self.world.is_quiet:
                await self._try(self.rng.choice(acts))
        await self.world.until_quiet()
        await self._take_back()
        if self.world.swarm.has("dead letters"):
            await asyncio.sleep(HELD_S + AGAIN_S)
            while not self.world.is_over:
                await self._try(self._release)
                await asyncio.sleep(RELEASE_S)

    async def _try(self, act: Callable[["Services"], Awaitable[None]]) -> bool:
        services = Services(self.world)
        try:
            await act(services)
        except aio.AioRpcError as error:
            if error.code() is StatusCode.INTERNAL:
                self.world.seen.note(f"administrator: INTERNAL {error.details()}")
            self.world.seen.note(f"administrator: {error.code().name} {error.details()}")
            self.world.seen.counts["acts refused"] += 1
            return False
        finally:
            await services.close()
        return True

    def _acts(self) -> list[Callable[["Services"], Awaitable[None]]]:
        swarm = self.world.swarm
        acts: list[Callable[[Services], Awaitable[None]]] = [self._report]
        for feature, act in (
            ("policies", self._switch),
            ("evictions", self._evict),
            ("snapshots", self._snapshot),
            ("trims", self._trim),
            ("resets", self._reset),
            ("filters", self._filter),
            ("explains", self._explain),
            ("deletions", self._delete),
        ):
            if swarm.has(feature):
                acts.append(act)
        return acts

    async def _take_back(self) -> None:
        for topic, name in sorted(self.has_filters):

            async def mend(services: "Services", topic: str = topic, name: str = name) -> None:
                await self._set_filters(services, topic, name, "true", from_start=True)

            while not await self._try(mend):
                await asyncio.sleep(AGAIN_S)
        for topic, policy in sorted(self.policies.items()):
            if policy:

                async def restore(services: "Services", topic: str = topic) -> None:
                    await self._set_policy(
                        services, topic, enabled=True, max_producers=PRODUCERS_MAX
                    )

                while not await self._try(restore):
                    await asyncio.sleep(AGAIN_S)

    # ---- deduplication

    async def _switch(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        await self._set_policy(services, topic, enabled=self.rng.random() < 0.5)

    async def _evict(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        full = self.rng.choice(
            [dedup_pb.FULL_TOPIC_ACTION_EVICT, dedup_pb.FULL_TOPIC_ACTION_REFUSE]
        )
        await self._set_policy(
            services,
            topic,
            max_producers=self.rng.choice([1, 2, PRODUCERS_MAX]),
            on_full=full,
            producer_inactivity_timeout_minutes=self.rng.choice([0, 1, 360]),
        )

    async def _snapshot(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        if self.rng.random() < 0.5:
            await self._set_policy(
                services,
                topic,
                snapshot_entries=self.rng.choice([1, 3]),
                snapshot_interval_s=self.rng.choice([0, 1]),
            )
            return
        self._count("snapshots asked for")
        await services.dedup.TakeSnapshot(
            dedup_pb.TakeSnapshotRequest(topic=topic), timeout=CALL_TIMEOUT_S
        )

    async def _set_policy(self, services: "Services", topic: str, **values: Any) -> None:
        policy = self.policies.setdefault(topic, {})
        dedup = self.world.checker.dedup
        switches = "enabled" in values and values["enabled"] != policy.get("enabled", True)
        if switches:
            dedup.changing(topic)
        policy.update(values)
        request = dedup_pb.SetPolicyRequest(topic=topic, values=dedup_pb.PolicyValues(**policy))
        self.world.seen.note(f"set policy of {topic}: {policy}")
        self._count("policies set")
        await services.dedup.SetPolicy(request, timeout=CALL_TIMEOUT_S)
        if "enabled" not in policy:
            return
        if policy["enabled"]:
            await asyncio.sleep(SURE_S)
        dedup.changed(topic, on=policy["enabled"])

    # ---- the log

    async def _trim(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        entries = self.world.seen.log(topic).entries
        if not entries:
            return
        before = self.rng.choice(entries[-10:]).position
        self._count("trims asked for")
        await services.ledger.TrimTopic(
            ledger_pb.TrimTopicRequest(topic=topic, before=_wire(before)), timeout=CALL_TIMEOUT_S
        )

    # ---- subscriptions

    async def _reset(self, services: "Services") -> None:
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        entries = self.world.seen.log(of.topic).entries
        start = dispatcher_pb.Start(earliest=dispatcher_pb.Earliest())
        if entries and self.rng.random() < 0.6:
            start = dispatcher_pb.Start(at=_wire(self.rng.choice(entries).position))
        self._count("resets")
        known = self.world.seen.subscription(of.topic, of.name)
        move = self.world.checker.moved(known)
        self.world.seen.note(f"reset {of.topic} {of.name} to {start}".replace("\n", " "))
        await services.dispatcher.ResetSubscription(
            dispatcher_pb.ResetSubscriptionRequest(
                topic=of.topic, subscription=of.name, start=start
            ),
            timeout=CALL_TIMEOUT_S,
        )
        move.answered_s = self.world.seen.now_s()

    async def _delete(self, services: "Services") -> None:
        if self.world.subscribeds and self.rng.random() < 0.7:
            of = self.rng.choice(self.world.subscribeds)
            self._count("subscriptions deleted")
            self.world.checker.moved(self.world.seen.subscription(of.topic, of.name))
            await services.dispatcher.DeleteSubscription(
                dispatcher_pb.DeleteSubscriptionRequest(
                    topic=of.topic, subscription=of.name, force=True
                ),
                timeout=CALL_TIMEOUT_S,
            )
            return
        topic = self.rng.choice(self.world.topics)
        for of in self.world.subscribeds:
            if of.topic == topic:
                self.world.checker.moved(self.world.seen.subscription(of.topic, of.name))
        self.world.seen.note(f"delete {topic}, please")
        await services.ledger.DeleteTopic(
            ledger_pb.DeleteTopicRequest(topic=topic, force=True), timeout=CALL_TIMEOUT_S
        )

    async def _release(self, services: "Services") -> None:
        """Let go of all keys that are held, or whose messages go to the dead letter topic."""
        for of in self.world.subscribeds:
            known = self.world.seen.subscription(of.topic, of.name)
            known.held.clear()
            known.holds = False
            for key in (b"", *(each.encode() for each in (*KEYS, LONG_KEY))):
                try:
                    await services.dispatcher.ReleaseKey(
                        dispatcher_pb.ReleaseKeyRequest(
                            topic=of.topic, subscription=of.name, key=key
                        ),
                        timeout=CALL_TIMEOUT_S,
                    )
                except aio.AioRpcError as error:
                    if error.code() is not StatusCode.NOT_FOUND:
                        raise

    async def _filter(self, services: "Services") -> None:
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        expression = self.rng.choice(sorted(EXPRESSIONS))
        await self._set_filters(
            services, of.topic, of.name, expression, from_start=self.rng.random() < 0.5
        )

    async def _set_filters(
        self, services: "Services", topic: str, name: str, expression: str, *, from_start: bool
    ) -> None:
        known = self.world.seen.subscription(topic, name)
        policy = self.rng.choice(
            [
                dispatcher_pb.FAILURE_POLICY_PARK,
                dispatcher_pb.FAILURE_POLICY_ACCEPT,
                dispatcher_pb.FAILURE_POLICY_REJECT,
            ]
        )
        rejected = set(EXPRESSIONS[expression])
        if policy == dispatcher_pb.FAILURE_POLICY_REJECT:
            rejected = set(TAGS)  # the filter service may not answer
        known.rejected_tags |= rejected
        self.has_filters.add((topic, name))
        version = self.world.seen.counts["filters set"] + 1
        self._count("filters set")
        self.world.seen.note(f"filter {topic} {name} by {expression} {policy} {from_start}")
        request = dispatcher_pb.SetFiltersRequest(
            topic=topic,
            subscription=name,
            filters=[filter_pb2.Filter(name="f", version=version, expression=expression)],
            policy=policy,
        )
        if from_start:
            request.start.earliest.SetInParent()
        await services.dispatcher.SetFilters(request, timeout=CALL_TIMEOUT_S)

    # ---- who asks what goes on

    async def _report(self, services: "Services") -> None:
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        report = await services.dispatcher.Report(
            dispatcher_pb.ReportRequest(topic=of.topic, subscription=of.name),
            timeout=CALL_TIMEOUT_S,
        )
        self._count("reports")
        self.world.checker.reported(of.topic, of.name, report)

    async def _explain(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        entries = self.world.seen.log(topic).entries
        subscriptions = [each for each in self.world.subscribeds if each.topic == topic]
        if not entries or not subscriptions:
            return
        of = self.rng.choice(subscriptions)
        entry = self.rng.choice(entries)
        self._count("explains")
        await services.dispatcher.Explain(
            dispatcher_pb.ExplainRequest(
                topic=topic, subscription=of.name, position=_wire(entry.position)
            ),
            timeout=CALL_TIMEOUT_S,
        )

    def _count(self, what: str) -> None:
        self.world.seen.counts[what] += 1


class Services:
    """The services, as an administrator calls them."""

    def __init__(self, world: "World") -> None:
        instances = world.swarm.instances

        def channel(service: str) -> FollowingChannel:
            return FollowingChannel(target(service, instances[service]), open_channel)

        self._channels = {
            name: channel(name) for name in ("ledger", "dedup", "cursor", "dispatcher")
        }
        channels: Mapping[str, Any] = self._channels
        self.ledger: Any = ledger_pb2_grpc.LedgerServiceStub(channels["ledger"])
        self.dedup: Any = dedup_pb2_grpc.DedupServiceStub(channels["dedup"])
        self.cursor: Any = cursor_pb2_grpc.CursorServiceStub(channels["cursor"])
        self.dispatcher: Any = dispatcher_pb2_grpc.DispatcherServiceStub(channels["dispatcher"])

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()


async def explain_stuck(world: "World") -> None:
    """Note what the dispatcher says of subscriptions that stand still."""
    services = Services(world)
    for of in world.subscribeds:
        known = world.seen.subscription(of.topic, of.name)
        waiting = next(iter(known.waiting), None)
        if waiting is None:
            continue
        world.seen.note(f"{of}".replace("\n", " "))
        name = {"topic": of.topic, "subscription": of.name}
        asked = dispatcher_pb.ExplainRequest(**name, position=_wire(waiting))
        for call, request in (
            (services.dispatcher.Report, dispatcher_pb.ReportRequest(**name)),
            (services.dispatcher.Explain, asked),
        ):
            try:
                answer = await call(request, timeout=CALL_TIMEOUT_S)
            except aio.AioRpcError as error:
                answer = f"{error.code()} {error.details()}"
            world.seen.note(f"{of.name}: {answer}".replace("\n", " "))
    await services.close()


def _wire(position: Any) -> entry_pb2.Position:
    return entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
