"""Verdicts of a subscription's filters, over filters in memory: caching, outages, and changes
during evaluation."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.adapters.predicates import MemoryFilters, Predicate
from seqgate.services.dispatcher.core.effects import ACCEPT, FILTER_FAILED, REJECT, UNJUDGED
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.filtering import active as limits
from seqgate.services.dispatcher.filtering import applied as outage_limits
from seqgate.services.dispatcher.filtering import shadow as shadow_limits
from seqgate.services.dispatcher.filtering import tallies as tally_limits
from seqgate.services.dispatcher.filtering.applied import Filtering
from seqgate.services.dispatcher.filtering.chains import (
    Chain,
    Chains,
    Policy,
    Stretch,
    from_properties,
)
from seqgate.services.dispatcher.ports import (
    Cursor,
    Filter,
    FiltersUnavailable,
    InvalidChain,
    Reads,
    Rules,
)
from seqgate.services.errors import DomainError
from seqgate.telemetry import inject, names, spans
from seqgate.types import Position, TopicName
from tests.support.recorded import Recorded, links
from tests.support.waiting import eventually

T = TypeVar("T")

TOPIC = TopicName.parse("test/filters/topic")
NAME = "s"
NOBODY = Acknowledged(None)


def by_region(metadata: EntryMetadata, _: Rules) -> int:
    if "region" not in metadata.properties:
        raise KeyError("region")
    region = metadata.properties["region"]
    return int(region) if region.isdigit() else ACCEPT if region == "eu" else REJECT


def by_subscription(metadata: EntryMetadata, rules: Rules) -> int:
    return ACCEPT if metadata.properties["region"] == dict(rules.properties)["region"] else REJECT


OF_REGION = Reads(frozenset({"properties"}), ("region",))
PREDICATES = {
    "eu": Predicate(OF_REGION, by_region),
    "mine": Predicate(
        Reads(frozenset({"properties", "subscription"}), ("region",), ("region",)), by_subscription
    ),
    "even": Predicate(
        Reads(frozenset({"sequence_id"})),
        lambda metadata, _: REJECT if metadata.sequence_id % 2 else ACCEPT,
    ),
    "none": Predicate(Reads(), lambda *_: REJECT),
}


def chain(*expressions: str, policy: Policy = Policy.PARK, version: int = 1) -> Chain:
    return Chain(tuple(Filter(each, version, each) for each in expressions), policy)


def applied(of: Chain) -> Chains:
    return Chains((Stretch(None, of),))


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def entry(number: int, region: str | None = None, messages: int = 1, **more: Any) -> StoredEntry:
    metadata = EntryMetadata(
        sequence_id=number, properties={} if region is None else {"region": region}, **more
    )
    if messages > 1:
        metadata.num_messages_in_batch = messages
    position = common_pb2.Position(ledger_id=1, entry_id=number)
    return StoredEntry(position=position, metadata=metadata)


def entries(*regions: str | None) -> list[StoredEntry]:
    return [entry(number, region) for number, region in enumerate(regions)]


class World:
    """Filtering over filters in memory."""

    def __init__(self) -> None:
        self.filters = MemoryFilters(PREDICATES)
        self.cursors = MemoryCursors()
        self.now_ms = 1_000
        self.tasks: list[asyncio.Task[None]] = []
        self.filtering = self.opened(self.cursors, 1)

    def opened(self, cursors: MemoryCursors, epoch: int) -> Filtering:
        tenure = Tenure(cursors, TOPIC, NAME, "me", epoch, 60_000)
        return Filtering(tenure, self.filters, lambda: self.now_ms, self.spawn)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.tasks.append(asyncio.create_task(work()))

    def use(self, of: Chain, properties: dict[str, str] | None = None) -> None:
        self.filtering.use(applied(of), properties or {})

    async def page(self, *some: StoredEntry) -> list[int]:
        return list(await self.filtering.page(some, NOBODY))

    async def finish(self) -> None:
        await asyncio.gather(*self.tasks)

    def counts(self, *, is_shadow: bool = False) -> dict[str, int]:
        """Entries by verdict, of all filters together."""
        for row in self.filtering.tallies.rows():
            if row.is_shadow is is_shadow and not row.name:
                said = {
                    "accepted": row.accepted,
                    "rejected": row.rejected,
                    "rescheduled": row.rescheduled,
                    **row.failed,
                }
                return {name: each.entries for name, each in said.items() if each.entries}
        return {}


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage_limits, "BACKOFF_FIRST_S", 0.001)
    monkeypatch.setattr(outage_limits, "BACKOFF_MAX_S", 0.001)


# ---- caching


async def test_entries_with_equal_reads_are_judged_once(
    world: World,
) -> None:
    world.use(chain("eu"))
    assert await world.page(*entries("eu", "us", "eu", "7")) == [ACCEPT, REJECT, ACCEPT, 7]
    assert world.filters.asked == 3
    assert await world.page(*entries("us", "eu")) == [REJECT, ACCEPT]
    assert world.filters.asked == 3
    assert world.counts() == {"accepted": 3, "rejected": 2, "rescheduled": 1}


async def test_rarely_recurring_entries_are_not_cached(world: World) -> None:
    world.use(chain("even"))
    for _ in range(2):
        assert await world.page(entry(0), entry(1)) == [ACCEPT, REJECT]
    assert world.filters.asked == 4


async def test_long_keys_are_not_cached_and_old_ones_are_evicted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VERDICTS_MAX", 4)
    monkeypatch.setattr(limits, "VERDICT_BYTES_MAX", 30)
    world.use(chain("eu"))
    await world.page(*entries("x" * 30))
    await world.page(*entries("x" * 30))
    assert world.filters.asked == 2
    await world.page(*entries("a", "b", "c", "d", "e"))
    await world.page(*entries("d", "e"))
    assert world.filters.asked == 7
    await world.page(*entries("a", "d"))
    assert world.filters.asked == 8


async def test_verdicts_are_cached_per_chain_and_properties(world: World) -> None:
    world.use(chain("mine"), {"region": "eu", "other": "x"})
    assert await world.page(*entries("eu", "us")) == [ACCEPT, REJECT]
    world.use(chain("mine"), {"region": "us"})
    assert await world.page(*entries("eu", "us")) == [REJECT, ACCEPT]
    world.use(chain("none"), {"region": "us"})
    assert await world.page(*entries("eu", "us")) == [REJECT, REJECT]
    world.filtering.use(Chains(), {})
    assert not world.filtering.is_on
    assert await world.page(*entries("eu")) == [ACCEPT]


async def test_each_entry_is_judged_by_the_chain_of_its_position(world: World) -> None:
    stretches = (Stretch(at(1), chain("eu")), Stretch(at(3), chain("none")))
    world.filtering.use(Chains(stretches), {})
    assert await world.page(*entries("us", "us", "eu", "eu")) == [ACCEPT, REJECT, ACCEPT, REJECT]
    assert world.counts() == {"accepted": 1, "rejected": 2}


async def test_markers_and_acknowledged_entries_are_not_judged(world: World) -> None:
    acknowledged = Acknowledged(at(0))
    acknowledged.add(at(2))
    world.use(chain("none"))
    some = [*entries("a", "b", "c", "d"), entry(4, "e", marker_type=1)]
    verdicts = await world.filtering.page(some, acknowledged)
    assert list(verdicts) == [ACCEPT, REJECT, ACCEPT, REJECT, ACCEPT]
    assert world.counts() == {"rejected": 2}
    assert list(await world.filtering.page([], acknowledged)) == []


async def test_messages_of_a_batch_are_counted(world: World) -> None:
    world.use(chain("eu"))
    await world.page(entry(0, "eu", messages=5), entry(1, "eu"))
    row = world.filtering.tallies.rows()[1]
    assert (row.name, row.accepted.entries, row.accepted.messages) == ("eu", 2, 6)


# ---- failures


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [(Policy.PARK, FILTER_FAILED), (Policy.ACCEPT, ACCEPT), (Policy.REJECT, REJECT)],
)
async def test_the_failure_policy_decides_on_failures(
    world: World, policy: Policy, verdict: int
) -> None:
    world.use(chain("none", policy=policy)._replace(filters=(Filter("f", 3, "eu"),)))
    assert await world.page(entry(0), entry(1, "eu")) == [verdict, ACCEPT]
    assert world.counts() == {"accepted": 1, "PROPERTY_ABSENT": 1}
    why = world.filtering.why(at(0))
    if policy is Policy.PARK:
        assert why is not None
        assert (why.filter, why.version, why.since_ms) == ("f", 3, 1_000)
        assert why.failure.reason == "PROPERTY_ABSENT"
    else:
        assert why is None


async def test_the_cause_of_a_parked_entry_is_kept_until_a_new_verdict(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage_limits, "FAILED_MAX", 2)
    world.use(chain("eu"))
    await world.page(*entries(None, None, None))
    assert [world.filtering.why(at(number)) is not None for number in range(3)] == [
        False,
        True,
        True,
    ]
    world.now_ms = 2_000
    await world.filtering.again([entry(1)])
    why = world.filtering.why(at(1))
    assert why is not None
    assert why.since_ms == 1_000
    await world.filtering.again([entry(1, "eu")])
    assert world.filtering.why(at(1)) is None
    world.use(chain("eu"))
    assert world.filtering.why(at(2)) is not None
    world.use(chain("eu", version=2))
    assert world.filtering.why(at(2)) is None


# ---- outages


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [(Policy.PARK, UNJUDGED), (Policy.ACCEPT, ACCEPT), (Policy.REJECT, REJECT)],
)
async def test_the_outage_policy_decides_on_uncached_entries(
    world: World, policy: Policy, verdict: int
) -> None:
    world.use(chain("eu", policy=policy))
    world.filters.available = False
    assert await world.page(*entries("eu")) == [verdict]
    outage = world.filtering.outage
    assert outage is not None
    assert outage.since_ms == 1_000
    world.filters.available = True
    await eventually(lambda: asyncio.get_running_loop().time() > world.filtering._ask_after_s)
    assert await world.page(*entries("eu")) == [ACCEPT]
    assert world.filtering.outage is None
    world.filters.available = False
    assert await world.page(*entries("eu", "us")) == [ACCEPT, verdict]
    assert world.counts()["UNAVAILABLE"] == 2


async def test_an_outage_ends_with_the_filters(world: World) -> None:
    world.use(chain("eu"))
    world.filters.available = False
    await world.page(*entries("eu"))
    assert world.filtering.outage is not None
    world.use(Chain())
    assert world.filtering.outage is None


async def test_a_request_that_outlives_the_filters_begins_no_outage(world: World) -> None:
    world.use(chain("eu"))
    world.filters.available = False
    world.filters.answers.clear()
    page = asyncio.create_task(world.page(*entries("eu")))
    await asyncio.sleep(0)
    world.use(Chain())
    world.filters.answers.set()
    assert await page == [ACCEPT]
    assert world.filtering.unanswered == 1
    assert world.filtering.outage is None


async def test_waiting_pages_are_judged_when_the_service_returns(world: World) -> None:
    world.use(chain("eu"))
    world.filters.available = False
    for count in range(1, 4):
        assert await world.filtering.again(entries("us", "eu")) == {}
        assert world.filtering.unanswered == count
    assert world.counts() == {}
    world.filters.available = True
    assert await world.filtering.again(entries("us", "eu")) == {at(0): REJECT, at(1): ACCEPT}
    assert world.counts() == {"accepted": 1, "rejected": 1}


async def test_cached_verdicts_need_no_service(world: World) -> None:
    world.use(chain("eu"))
    await world.page(*entries("eu"))
    world.filters.available = False
    assert await world.filtering.again(entries("us", "eu", "asia")) == {at(1): ACCEPT}
    assert await world.filtering.again([]) == {}


async def test_the_service_is_not_called_between_retries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage_limits, "BACKOFF_FIRST_S", 600.0)
    monkeypatch.setattr(outage_limits, "BACKOFF_MAX_S", 600.0)
    world.use(chain("eu"))
    world.filters.available = False
    for _ in range(5):
        assert await world.page(*entries("eu")) == [UNJUDGED]
    assert world.filtering.unanswered == 1


# ---- changes


async def test_a_page_is_judged_by_the_chain_when_it_enters(world: World) -> None:
    world.use(chain("eu"))
    world.filters.answers.clear()
    asked = asyncio.create_task(world.page(*entries("us", "eu")))
    await asyncio.sleep(0)
    world.use(chain("none"))
    world.filters.answers.set()
    assert await asked == [REJECT, REJECT]
    assert world.counts() == {"rejected": 2}


async def test_a_page_waits_for_a_change_that_is_being_made(world: World) -> None:
    world.use(chain("eu"))
    async with world.filtering.changing:
        asked = asyncio.create_task(world.page(*entries("eu")))
        await eventually(lambda: world.filters.asked == 1)
        assert not asked.done()
        world.use(chain("none"))
    assert await asked == [REJECT]


async def test_waiting_pages_are_woken_when_the_chains_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage_limits, "BACKOFF_FIRST_S", 600.0)
    monkeypatch.setattr(outage_limits, "BACKOFF_MAX_S", 600.0)
    world.use(chain("eu"))
    world.filters.available = False
    pausing = asyncio.create_task(world.filtering.again(entries("us")))
    await eventually(lambda: world.filtering.unanswered == 1)
    world.use(chain("eu", version=2))
    assert await pausing == {}

    world.filters.available = True
    world.filters.answers.clear()
    asking = asyncio.create_task(world.filtering.again(entries("us")))
    await asyncio.sleep(0)
    world.use(chain("none"))
    world.filters.answers.set()
    assert await asking == {}
    assert world.counts() == {}


class Changing(World):
    """A subscription whose filters change."""

    async def begin(self, cursors: MemoryCursors) -> None:
        self.cursors = cursors
        await cursors.create(TOPIC, NAME, None, {"mine": "1"})
        lease = await cursors.acquire(TOPIC, NAME, "me", 60_000)
        self.filtering = self.opened(cursors, lease.epoch)

    async def change(self, of: Chain, start: Position | None, *, is_shadow: bool = False) -> bool:
        async with self.filtering.changing:
            _, is_other = await self.filtering.change(
                Stretch(start, of),
                repeated,
                is_shadow=is_shadow,
                caller="here",
            )
            return is_other

    async def kept(self) -> Chains:
        """The chains that a new owner of the subscription finds."""
        return from_properties((await self.cursors.get(TOPIC, NAME)).properties)


async def repeated(do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None) -> T:
    while True:
        try:
            return await do()
        except CursorsUnavailable:
            continue


class LosingAnswers(MemoryCursors):
    """Makes each change, and loses the answer to the first one."""

    is_told = True

    async def set_properties(self, *arguments: Any, **named: Any) -> Cursor:
        changed = await super().set_properties(*arguments, **named)
        if self.is_told:
            self.is_told = False
            raise CursorsUnavailable("the answer is lost")
        return changed


async def test_a_change_with_a_lost_answer_is_made_and_recorded_once() -> None:
    world = Changing()
    await world.begin(LosingAnswers())
    assert await world.change(chain("eu"), at(2))
    kept = await world.kept()
    assert kept == world.filtering.chains
    assert (kept.applied, len(kept.changes)) == ((Stretch(at(2), chain("eu")),), 1)
    world.now_ms = 2_000
    # The caller without an answer asks again; by then the default start is later.
    assert not await world.change(chain("eu"), at(7))
    assert await world.kept() == kept == world.filtering.chains
    assert (await world.cursors.get(TOPIC, NAME)).own == {"mine": "1"}


async def test_a_version_has_one_expression_as_long_as_it_is_needed() -> None:
    world = Changing()
    await world.begin(MemoryCursors())
    await world.change(chain("eu"), None)
    before = await world.kept()
    other = Chain((Filter("eu", 1, "none"),))
    with pytest.raises(InvalidChain) as caught:
        await world.change(other, at(3))
    assert caught.value.details == {"filter": "eu", "version": 1}
    assert await world.kept() == before == world.filtering.chains
    await world.change(other, at(3), is_shadow=True)


async def test_a_shadow_chain_does_not_affect_the_applied_one() -> None:
    world = Changing()
    await world.begin(MemoryCursors())
    await world.change(chain("eu"), None)
    await world.page(*entries("eu", None))
    asked, why = world.filters.asked, world.filtering.why(at(1))
    assert not await world.change(chain("none"), None, is_shadow=True)
    assert world.filtering.why(at(1)) == why is not None
    await world.finish()
    await world.page(entry(2, "eu"), entry(3))
    await world.finish()
    assert world.filters.asked == asked + 1  # by the shadow
    assert not await world.change(chain(), None, is_shadow=True)
    await world.finish()


async def test_properties_that_no_filter_reads_change_nothing(world: World) -> None:
    chains = Chains((Stretch(None, chain("mine")), Stretch(at(50), chain("eu"))))
    world.filtering.use(chains, {"region": "eu"})
    await world.page(*entries("eu", "us"), entry(60, "eu"))
    asked = world.filters.asked
    assert not world.filtering.use(chains, {"region": "eu", "other": "x"})
    assert await world.page(*entries("eu", "us"), entry(60, "eu")) == [ACCEPT, REJECT, ACCEPT]
    assert world.filters.asked == asked
    world.filters.available = False
    await world.filtering.check_properties({"region": "eu", "other": "y"})
    with pytest.raises(FiltersUnavailable):
        await world.filtering.check_properties({"region": "us"})
    world.filters.available = True
    assert world.filtering.use(chains, {"region": "us", "other": "x"})
    assert await world.page(*entries("eu", "us"), entry(60, "eu")) == [REJECT, ACCEPT, ACCEPT]
    assert world.filters.asked == asked + 2  # the other chain's verdicts are cached


async def test_a_line_prepared_for_old_properties_is_not_used(world: World) -> None:
    world.use(chain("mine"), {"region": "eu"})
    world.filters.answers.clear()
    asked = asyncio.create_task(world.page(*entries("eu", "us")))
    await asyncio.sleep(0)
    world.use(chain("mine"), {"region": "us"})
    world.filters.answers.set()
    assert await asked == [REJECT, ACCEPT]
    assert await world.page(*entries("eu", "us")) == [REJECT, ACCEPT]


async def test_counts_of_an_old_chain_continue_beside_many_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_limits, "CHAINS_MAX", 2)
    world.use(chain("eu"))
    await world.page(*entries("eu"))
    for version in range(5):
        shadow = Stretch(None, chain("none", version=version))
        world.filtering.use(Chains((Stretch(None, chain("eu")),), shadow), {})
    await world.finish()
    await world.page(*entries("eu"))
    (row,) = (each for each in world.filtering.tallies.rows() if each.name == "eu")
    assert row.accepted.entries == 2


# ---- shadow


def beside(of: Chain, start: Position | None = None) -> Chains:
    return Chains((Stretch(None, chain("eu")),), Stretch(start, of))


async def test_a_shadow_chain_changes_nothing_and_is_counted(world: World) -> None:
    world.filtering.use(beside(chain("none"), at(1)), {})
    await world.finish()
    assert await world.page(*entries("eu", "eu", "us")) == [ACCEPT, ACCEPT, REJECT]
    await world.finish()
    assert world.counts() == {"accepted": 2, "rejected": 1}
    assert world.counts(is_shadow=True) == {"rejected": 2}


async def test_a_shadow_chain_delays_nothing(world: World) -> None:
    world.filtering.use(Chains(shadow=Stretch(None, chain("eu"))), {})
    assert world.filtering.is_on
    assert await world.page(*entries("eu")) == [ACCEPT]  # its inputs are not known yet
    await world.finish()
    world.filters.answers.clear()
    assert await world.page(*entries("eu", "us", "eu", None)) == [ACCEPT] * 4
    world.filters.answers.set()
    await world.finish()
    assert world.counts(is_shadow=True) == {
        "accepted": 2,
        "rejected": 1,
        "NOT_ASKED": 1,
        "PROPERTY_ABSENT": 1,
    }
    assert world.counts() == {}


async def test_a_slow_shadow_chain_skips_entries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_limits, "WAITING_MAX", 3)
    monkeypatch.setattr(shadow_limits, "WAITING_BYTES_MAX", 100)
    world.filtering.use(Chains(shadow=Stretch(None, chain("eu"))), {})
    await world.finish()
    world.filters.answers.clear()
    await world.page(*entries("a", "b", "a", "x" * 100, "eu", "c", "a"))
    world.filters.answers.set()
    await world.finish()
    assert world.counts(is_shadow=True) == {"accepted": 1, "rejected": 4, "NOT_ASKED": 2}
    world.filters.available = False
    await world.page(*entries("d", "a"))
    await world.finish()
    assert world.counts(is_shadow=True)["UNAVAILABLE"] == 1


# ---- trials


async def test_a_trial_is_not_counted(world: World) -> None:
    world.use(chain("eu"), {"region": "us"})
    trial = world.filtering.trial(chain("mine"))
    for _ in range(2):
        said = await trial.judge(entries("eu", "us"))
        assert [each.verdict for each in said] == [REJECT, ACCEPT]
    said = await world.filtering.trial(None).judge(entries("eu", "us", None))
    assert [each.verdict for each in said] == [ACCEPT, REJECT, FILTER_FAILED]
    assert world.filters.asked == 5
    assert world.counts() == {}
    await trial.close()


# ---- spans


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    recorded = Recorded(ALWAYS_ON)
    monkeypatch.setattr(spans, "_TRACER", recorded.tracer)
    return recorded


def followed(recorded: Recorded, some: list[StoredEntry]) -> list[StoredEntry]:
    """Give each entry a sampled trace."""
    for each in some:
        carrier: dict[str, str] = {}
        with recorded.tracer.start_as_current_span("message") as span:
            inject(span.get_span_context(), carrier)
        each.metadata.properties.update(carrier)
    return some


async def test_one_span_covers_all_traced_entries_of_a_call(
    recorded: Recorded,
) -> None:
    world = World()
    world.use(chain("eu"))
    await world.page(*entries("us"))
    some = followed(recorded, entries("us", "eu", "eu", "7", None))
    await world.page(*some, entry(5, "8"))
    evaluate = recorded.one(f"evaluate {TOPIC}")
    contexts = spans.followed(each.metadata.properties for each in some)
    assert evaluate.parent is not None
    assert evaluate.parent.span_id == contexts[1].span_id
    assert links(evaluate) == [(each.trace_id, each.span_id) for each in contexts[2:]]
    assert dict(evaluate.attributes or {}) == {
        names.MESSAGING_SYSTEM: "seqgate",
        names.MESSAGING_OPERATION_NAME: "evaluate",
        names.MESSAGING_DESTINATION_NAME: str(TOPIC),
        names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: NAME,
        names.ENTRIES: 5,
        f"{names.VERDICTS}accepted": 2,
        f"{names.VERDICTS}rescheduled": 2,
        f"{names.VERDICTS}failed": 1,
    }


async def test_cached_or_untraced_entries_have_no_span(recorded: Recorded) -> None:
    world = World()
    world.use(chain("eu"))
    await world.page(*entries("us", "eu"))
    await world.page(*followed(recorded, entries("us", "eu")))
    assert {span.name for span in recorded.spans} == {"message"}


async def test_a_span_records_a_missing_answer(recorded: Recorded) -> None:
    world = World()
    world.use(chain("eu"))
    await world.page(*entries("us"))
    world.filters.available = False
    await world.page(*followed(recorded, entries("eu")))
    evaluate = recorded.one(f"evaluate {TOPIC}")
    assert not evaluate.status.is_ok
    assert (evaluate.attributes or {})[names.ERROR_TYPE] == FiltersUnavailable.reason
