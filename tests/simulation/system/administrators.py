"""Administrators, who act while applications run. Each act is drawn from the history's features."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2 as cursor_pb
from seqgate.api.dedup.v1 import dedup_pb2 as dedup_pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as dispatcher_pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as ledger_pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.client._channel import open_channel
from seqgate.owners import FollowingChannel
from seqgate.times import duration
from seqgate.types import Position
from tests.simulation.system.services import target
from tests.simulation.system.workload import KEYS, LONG_KEY, TAGS, Subscribed
from tests.support.stubs import cursor_stub, dedup_stub

if TYPE_CHECKING:
    from tests.simulation.system.world import World

NO_TIME, A_SECOND = duration(0), duration(1_000)
MINUTES: Final = {minutes: duration(minutes * 60_000) for minutes in (0, 1, 360)}

ACTS: Final = 8
"""The approximate number of acts in a history."""

AGAIN_S: Final = 1.0
"""The pause before a retry, in virtual seconds."""

RELEASE_S: Final = 1.0
"""The interval of releases of held keys after faults stop, in virtual seconds: each message of a
key may hold it again."""

CALL_TIMEOUT_S: Final = 5.0
"""The deadline of a call."""

PRODUCERS_MAX: Final = 100
"""A limit of tracked producers that refuses none."""

REPEATED: Final = 4
"""How often a request of a redrive is sent until its outcome is known."""

LOOK_S: Final = 0.1
"""The interval of checks for another party's progress."""

HELD_S: Final = 8.0
"""How long keys stay held after faults stop, in virtual seconds."""

SURE_S: Final = 15.0
"""How long after deduplication is switched on an entry admitted before may still be appended."""

POLICIES: Final = ("PARK", "ACCEPT", "REJECT")
"""A failed filter's effects on a message."""

EXPRESSIONS: Final[Mapping[str, frozenset[str]]] = {
    "true": frozenset(),
    "properties['tag'] == 'red'": frozenset({"green"}),
    "properties['tag'] != 'red'": frozenset({"red"}),
    "false": frozenset(TAGS),
    "int(properties['tag']) == 1": frozenset(),  # fails, of every message
}
"""Filters, and the tags that they reject."""


@dataclass
class Administrator:
    """Acts on a world, from its own process."""

    world: "World"
    rng: Random
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_filters: set[tuple[str, str]] = field(default_factory=set)
    _sure: asyncio.Task[None] | None = None

    async def go_on(self) -> None:
        """Act until faults stop; then undo changes that block progress."""
        acts = self._acts()
        rest_s = self.world.swarm.seconds / self.world.swarm.more.get("acts", ACTS)
        if self.world.swarm.has("idle producers"):
            await self._try(self._forget_soon)
        if self.world.swarm.more.get("filter_first"):
            await self._try(self._filter)
        while acts and not self.world.is_quiet:
            await asyncio.sleep(self.rng.random() * 2 * rest_s)
            if not self.world.is_quiet:
                await self._try(self.rng.choice(acts))
        await self.world.until_quiet()
        await self._take_back_policies()
        async with asyncio.TaskGroup() as tasks:
            for topic, name in sorted(self.has_filters):
                tasks.create_task(self._mend_filters(topic, name))
            tasks.create_task(self._release_keys())

    async def _release_keys(self) -> None:
        """Release held keys again and again: dead-lettering is on by default."""
        if self.world.subscribeds:
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
            ("producers start over", self._start_over),
            ("imported cursors", self._import),
            ("silent streams", self._say_nothing),
            ("properties", self._set_properties),
            ("redrives", self._redrive),
        ):
            if swarm.has(feature):
                acts.append(act)
        acts += [self._redrive] * swarm.more.get("redrives", 0)
        return acts + [self._amend] * swarm.more.get("amends", 0)

    async def _take_back_policies(self) -> None:
        while self._is_starting_over():
            await asyncio.sleep(AGAIN_S)
        for topic, policy in sorted(self.policies.items()):
            if policy:

                async def restore(services: "Services", topic: str = topic) -> None:
                    await self._set_policy(
                        services, topic, enabled=True, max_producers=PRODUCERS_MAX
                    )

                while not await self._try(restore):
                    await asyncio.sleep(AGAIN_S)

    async def _mend_filters(self, topic: str, name: str) -> None:
        """Mend a subscription's filters. Nothing waits for this, since the subscription's topic may
        never be made. A change without a start applies to entries that filters failed on; they may
        fail on more, so it is repeated."""
        from_start = not self.world.swarm.has("filters are mended")

        async def mend(services: "Services") -> None:
            await self._set_filters(services, topic, name, "true", from_start=from_start)

        async def mend_again(services: "Services") -> None:
            request = dispatcher_pb.ReportRequest(topic=topic, subscription=name)
            report = await services.dispatcher.Report(request, timeout=CALL_TIMEOUT_S)
            if report.filter_failed_entries:
                await mend(services)

        while not await self._try(mend):
            await asyncio.sleep(AGAIN_S)
        while not from_start and not self.world.is_over:
            await asyncio.sleep(RELEASE_S)
            await self._try(mend_again)

    # ---- deduplication

    async def _switch(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        if not self._is_starting_over():
            await self._set_policy(services, topic, enabled=self.rng.random() < 0.5)

    async def _start_over(self, services: "Services") -> None:
        """Have a producer continue from a lower id, which is allowed while deduplication is off."""
        those = [each for each in self.world.publishings if each.has_ids and not each.is_done]
        if not those or self._is_starting_over():
            return
        application = self.rng.choice(those)
        await self._set_policy(services, application.topic, enabled=False)
        application.starts_over = stored = asyncio.Event()
        while not stored.is_set() and self._is_starting_over():
            await asyncio.sleep(LOOK_S)
        await self._set_policy(services, application.topic, enabled=True)

    def _is_starting_over(self) -> bool:
        """True while a producer is to continue from a lower id and none of those is stored yet."""
        for each in self.world.publishings:
            if each.starts_over is not None and not each.is_done:
                return True
            if each.over_when_stored is not None:
                return True
        return False

    async def _forget_soon(self, services: "Services") -> None:
        for topic in self.world.topics:
            await self._set_policy(services, topic, producer_inactivity_timeout=MINUTES[1])

    async def _evict(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        producers_max = self.rng.choice([1, 2, PRODUCERS_MAX])
        if producers_max != PRODUCERS_MAX:
            self.world.checker.terms.refusing.add(topic)
        full = self.rng.choice(
            [dedup_pb.FULL_TOPIC_ACTION_EVICT, dedup_pb.FULL_TOPIC_ACTION_REFUSE]
        )
        await self._set_policy(
            services,
            topic,
            max_producers=producers_max,
            on_full=full,
            producer_inactivity_timeout=self.rng.choice(list(MINUTES.values()))
            if not self.world.swarm.has("idle producers")
            else MINUTES[1],
        )

    async def _snapshot(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        if self.rng.random() < 0.5:
            await self._set_policy(
                services,
                topic,
                snapshot_entries=self.rng.choice([1, 3]),
                snapshot_interval=self.rng.choice([NO_TIME, A_SECOND]),
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
            if self._sure is not None:
                self._sure.cancel()
        policy.update(values)
        request = dedup_pb.SetPolicyRequest(topic=topic, values=dedup_pb.PolicyValues(**policy))
        self.world.seen.note(f"set policy of {topic}: {sorted(policy)}")
        self._count("policies set")
        await services.dedup.SetPolicy(request, timeout=CALL_TIMEOUT_S)
        if not switches:
            return
        if policy["enabled"]:
            self._sure = asyncio.create_task(self._become_sure(topic))
        else:
            dedup.changed(topic, on=False)

    async def _become_sure(self, topic: str) -> None:
        """Report deduplication as on, once entries admitted before must have been appended."""
        await asyncio.sleep(SURE_S)
        self.world.checker.dedup.changed(topic, on=True)

    # ---- the log

    async def _trim(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        entries = self.world.seen.log(topic).entries
        if not entries:
            return
        end = entries[-1].position
        after = Position(end.ledger_id, end.entry_id + 1)
        before = self.rng.choice([*(each.position for each in entries[-10:]), after])
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
        start = common_pb2.Start(earliest=common_pb2.Earliest())
        at: Position | None = None
        if entries and self.rng.random() < 0.6:
            at = self.rng.choice(entries).position
            start = common_pb2.Start(at=_wire(at))
        self._count("resets")
        move = self.world.checker.administration.moves(of.topic, of.name, at)
        self.world.seen.note(f"reset {of.topic} {of.name} to {start}".replace("\n", " "))
        await services.dispatcher.ResetSubscription(
            dispatcher_pb.ResetSubscriptionRequest(
                topic=of.topic, subscription=of.name, start=start
            ),
            timeout=CALL_TIMEOUT_S,
        )
        move.answered_s = self.world.seen.now_s()

    async def _delete(self, services: "Services") -> None:
        of_subscription = self.rng.random() < 0.7 or "deletes_topics" in self.world.swarm.more
        if self.world.subscribeds and of_subscription:
            await self._delete_subscription(services, self.rng.choice(self.world.subscribeds))
            return
        topic = self.rng.choice(self.world.topics)
        self.world.seen.note(f"delete {topic}, please")
        await services.ledger.DeleteTopic(
            ledger_pb.DeleteTopicRequest(topic=topic, force=True), timeout=CALL_TIMEOUT_S
        )

    async def _delete_subscription(self, services: "Services", of: Subscribed) -> None:
        self._count("subscriptions deleted")
        await services.dispatcher.DeleteSubscription(
            dispatcher_pb.DeleteSubscriptionRequest(
                topic=of.topic, subscription=of.name, force=True
            ),
            timeout=CALL_TIMEOUT_S,
        )

    async def _import(self, services: "Services") -> None:
        """Replace a subscription's cursor with one beyond the end of the log."""
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        entries = self.world.seen.log(of.topic).entries
        last = entries[-1].position if entries else Position(1, 0)
        beyond = Position(last.ledger_id, last.entry_id + self.rng.choice([1, 5, 50]))
        try:
            await self._delete_subscription(services, of)
        except aio.AioRpcError as error:
            if error.code() is not StatusCode.NOT_FOUND:
                raise
        self._count("cursors imported")
        self.world.seen.note(f"import {of.name} at {beyond}")
        self.world.checker.administration.imported(of.topic, of.name, beyond)
        await services.cursor.CreateCursor(
            cursor_pb.CreateCursorRequest(
                topic=of.topic, cursor=of.name, mark_delete=_wire(beyond)
            ),
            timeout=CALL_TIMEOUT_S,
        )

    async def _release(self, services: "Services") -> None:
        """Release every key that is held or whose messages go to the dead letter topic."""
        for of in self.world.subscribeds:
            known = self.world.seen.subscription(of.topic, of.name)
            if not known.remembers_keys:  # no key is held
                continue
            known.held.clear()
            known.holds = False
            await self._release_explained(services, of)
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

    async def _release_explained(self, services: "Services", of: Subscribed) -> None:
        """Ask why a message waits. A key that is reported as held must be releasable."""
        known = self.world.seen.subscription(of.topic, of.name)
        waiting = next(iter(known.waiting), None)
        if waiting is None:
            return
        names: dict[str, Any] = {"topic": of.topic, "subscription": of.name}
        asked = dispatcher_pb.ExplainRequest(**names, position=_wire(waiting))
        answer = await services.dispatcher.Explain(asked, timeout=CALL_TIMEOUT_S)
        if all(each.reason != dispatcher_pb.REASON_HELD for each in answer.reasons):
            return
        self._count("held keys released as explained")
        request = dispatcher_pb.ReleaseKeyRequest(**names, key=answer.key)
        try:
            await services.dispatcher.ReleaseKey(request, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            if error.code() is not StatusCode.NOT_FOUND:
                raise
            self.world.seen.violate(
                "EXPLAINED", f"{of.name}: {answer.key!r} is reported as held, but {error.details()}"
            )

    async def _filter(self, services: "Services") -> None:
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        expression = self.world.swarm.one_of("expressions", self.rng, sorted(EXPRESSIONS))
        await self._set_filters(
            services, of.topic, of.name, expression, from_start=self.rng.random() < 0.5
        )

    async def _set_properties(self, services: "Services") -> None:
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        self._count("properties set")
        self.world.seen.note(f"set properties of {of.name}")
        request = dispatcher_pb.UpdateSubscriptionPropertiesRequest(
            topic=of.topic,
            subscription=of.name,
            put={"owner": str(self.rng.randrange(100))},
        )
        await services.dispatcher.UpdateSubscriptionProperties(request, timeout=CALL_TIMEOUT_S)

    async def _set_filters(
        self, services: "Services", topic: str, name: str, expression: str, *, from_start: bool
    ) -> None:
        policy = dispatcher_pb.FailurePolicy.Value(
            f"FAILURE_POLICY_{self.world.swarm.one_of('policies', self.rng, POLICIES)}"
        )
        rejected = set(EXPRESSIONS[expression])
        if policy == dispatcher_pb.FAILURE_POLICY_REJECT:
            rejected = set(TAGS)  # the filter service may be unavailable
        asked = self.world.checker.administration.filters(
            topic, name, rejected, from_start=from_start
        )
        if expression != "true":
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
        asked.answered_s = self.world.seen.now_s()

    # ---- redrives

    async def _redrive(self, services: "Services") -> None:
        """Redrive letters by name or of many, replay a stretch, or stop what runs. A request whose
        outcome is unknown is repeated."""
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        names: dict[str, Any] = {"topic": of.topic, "subscription": of.name}
        draw, request_id = self.rng.random(), f"r{self.world.seen.counts['redrives']}"
        self._count("redrives")
        if draw < 0.1:
            await self._stop_redrive(services, names)
        elif draw < 0.4:
            await self._redrive_named(services, names | {"request_id": request_id})
        else:
            request = dispatcher_pb.StartRedriveRequest(
                **names,
                request_id=request_id,
                letters_per_second=self.rng.choice([0, 0, 1, 3, 100]),
                selection=self._selection(of, of_topic=draw > 0.75),
            )
            await self._again(services.dispatcher.StartRedrive, request)

    def _selection(self, of: Subscribed, *, of_topic: bool) -> dispatcher_pb.RedriveSelection:
        selection = dispatcher_pb.RedriveSelection()
        if self.rng.random() < 0.3:
            selection.key = self.rng.choice(KEYS).encode()
        if self.rng.random() < 0.3:
            selection.expression = self.rng.choice(sorted(EXPRESSIONS))
        if of_topic:
            entries = self.world.seen.log(of.topic).entries
            ends = [common_pb2.Start(earliest=common_pb2.Earliest())]
            if entries and self.rng.random() < 0.7:
                some = sorted(self.rng.choice(entries).position for _ in range(2))
                ends = [common_pb2.Start(at=_wire(each)) for each in some]
            selection.stretch.start.CopyFrom(ends[0])
            if len(ends) > 1:
                selection.stretch.end.CopyFrom(ends[1])
        return selection

    async def _redrive_named(self, services: "Services", fields: dict[str, Any]) -> None:
        letters = [each.position for each in await self._some_letters(services, fields)]
        if letters:
            redrive = dispatcher_pb.RedriveDeadLettersRequest(
                **fields, positions=letters[: self.rng.randint(1, 3)]
            )
            await self._again(services.dispatcher.RedriveDeadLetters, redrive)

    async def _some_letters(self, services: "Services", fields: dict[str, Any]) -> list[Any]:
        listing = {each: fields[each] for each in ("topic", "subscription")}
        request = dispatcher_pb.ListDeadLettersRequest(**listing)
        page = await services.dispatcher.ListDeadLetters(request, timeout=CALL_TIMEOUT_S)
        return [each for each in page.letters if self.rng.random() < 0.5]

    async def _amend(self, services: "Services") -> None:
        """Mend a letter, or discard some. A request whose outcome is unknown is repeated."""
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        names: dict[str, Any] = {"topic": of.topic, "subscription": of.name}
        names["request_id"] = f"a{self.world.seen.counts['amends']}"
        self._count("amends")
        amendable = dispatcher_pb.DEAD_LETTER_STATE_DEAD, dispatcher_pb.DEAD_LETTER_STATE_MENDING
        found = await self._some_letters(services, names)
        letters = [each.position for each in found if each.state in amendable]
        if not letters:
            return
        if self.rng.random() < 0.6:
            mend = dispatcher_pb.MendDeadLetterRequest(
                **names, position=letters[0], put={"mended": names["request_id"]}
            )
            await self._again(services.dispatcher.MendDeadLetter, mend)
        else:
            discard = dispatcher_pb.DiscardDeadLettersRequest(
                **names, positions=letters[: self.rng.randint(1, 2)], reason="given up"
            )
            await self._again(services.dispatcher.DiscardDeadLetters, discard)

    async def _stop_redrive(self, services: "Services", names: dict[str, Any]) -> None:
        request = dispatcher_pb.ListRedrivesRequest(**names)
        found = await services.dispatcher.ListRedrives(request, timeout=CALL_TIMEOUT_S)
        if found.redrives:
            number = self.rng.choice(found.redrives).number
            stop = dispatcher_pb.StopRedriveRequest(**names, number=number)
            await services.dispatcher.StopRedrive(stop, timeout=CALL_TIMEOUT_S)

    async def _again(self, call: Callable[..., Awaitable[Any]], request: Any) -> None:
        """Send a request until its outcome is known, a few times."""
        for left in reversed(range(REPEATED)):
            try:
                await call(request, timeout=CALL_TIMEOUT_S)
                if self.rng.random() < 0.8:
                    return
            except aio.AioRpcError as error:
                unknown = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)
                if error.code() not in unknown or not left:
                    raise
                await asyncio.sleep(AGAIN_S)

    # ---- queries

    async def _report(self, services: "Services") -> None:
        if not self.world.subscribeds:
            return
        of = self.rng.choice(self.world.subscribeds)
        report = await services.dispatcher.Report(
            dispatcher_pb.ReportRequest(topic=of.topic, subscription=of.name),
            timeout=CALL_TIMEOUT_S,
        )
        self._count("reports")
        self.world.checker.administration.reported(of.topic, of.name, report)

    async def _explain(self, services: "Services") -> None:
        topic = self.rng.choice(self.world.topics)
        entries = self.world.seen.log(topic).entries
        subscriptions = [each for each in self.world.subscribeds if each.topic == topic]
        if not entries or not subscriptions:
            return
        of = self.rng.choice(subscriptions)
        entry = self.rng.choice(entries)
        self._count("explains")
        asked_s = self.world.seen.now_s()
        answer = await services.dispatcher.Explain(
            dispatcher_pb.ExplainRequest(
                topic=topic, subscription=of.name, position=_wire(entry.position)
            ),
            timeout=CALL_TIMEOUT_S,
        )
        said = [dispatcher_pb.Reason.Name(each.reason) for each in answer.reasons]
        self.world.checker.administration.explained(topic, of.name, entry.position, said, asked_s)

    async def _say_nothing(self, services: "Services") -> None:
        """Open a stream and send nothing: the service must end it."""
        service = self.rng.choice(["ledger", "dispatcher"])
        self._count("silent streams")
        self.world.seen.note(f"a stream to {service} says nothing")
        async with open_channel(target(service, self.world.swarm.instances[service])) as channel:
            call: Any = (
                ledger_pb2_grpc.LedgerServiceStub(channel).Publish()
                if service == "ledger"
                else dispatcher_pb2_grpc.DispatcherServiceStub(channel).Consume()
            )
            self.world.silent_streams.append(self.world.loop.process)
            try:
                await call.read()
            except aio.AioRpcError as error:
                self.world.seen.note(f"a silent stream ends: {error.code().name}")
            finally:
                self.world.silent_streams.remove(self.world.loop.process)

    def _count(self, what: str) -> None:
        self.world.seen.counts[what] += 1


class Services:
    """Stubs of all services, for administrators."""

    def __init__(self, world: "World") -> None:
        instances = world.swarm.instances

        def channel(service: str) -> FollowingChannel:
            return FollowingChannel(target(service, instances[service]), open_channel)

        self._channels = {
            name: channel(name) for name in ("ledger", "dedup", "cursor", "dispatcher")
        }
        channels: Mapping[str, Any] = self._channels
        self.ledger: Any = ledger_pb2_grpc.LedgerServiceStub(channels["ledger"])
        self.dedup: Any = dedup_stub(channels["dedup"])
        self.cursor: Any = cursor_stub(channels["cursor"])
        self.dispatcher: Any = dispatcher_pb2_grpc.DispatcherServiceStub(channels["dispatcher"])

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()


async def explain_stuck(world: "World") -> None:
    """Record the dispatcher's reports and explanations of stuck subscriptions."""
    services = Services(world)
    for of in world.subscribeds:
        known = world.seen.subscription(of.topic, of.name)
        waiting = next(iter(known.waiting), None) or next(iter(known.returns), None)
        if waiting is None and not known.is_redriving:
            continue
        world.seen.note(f"{of}".replace("\n", " "))
        name: dict[str, Any] = {"topic": of.topic, "subscription": of.name}
        asked: list[tuple[Any, Any]] = [
            (services.dispatcher.Report, dispatcher_pb.ReportRequest(**name)),
            (services.dispatcher.ListRedrives, dispatcher_pb.ListRedrivesRequest(**name)),
        ]
        if waiting is not None:
            why = dispatcher_pb.ExplainRequest(**name, position=_wire(waiting))
            asked.append((services.dispatcher.Explain, why))
        for call, request in asked:
            try:
                answer = await call(request, timeout=CALL_TIMEOUT_S)
            except aio.AioRpcError as error:
                answer = f"{error.code()} {error.details()}"
            world.seen.note(f"{of.name}: {answer}".replace("\n", " "))
    await services.close()


def _wire(position: Any) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
