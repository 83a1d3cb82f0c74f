"""The contract of filters for the dispatcher, over the wire and in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2, filter_pb2_grpc
from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.dev.ports import free_ports
from seqgate.services.dispatcher.adapters import filters as limits
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.adapters.predicates import MemoryFilters, Predicate
from seqgate.services.dispatcher.core.effects import ACCEPT, FILTER_FAILED, REJECT
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.filtering.applied import Filtering
from seqgate.services.dispatcher.filtering.chains import Chain, Chains, Policy, Stretch
from seqgate.services.dispatcher.filtering.projection import Projection
from seqgate.services.dispatcher.ports import (
    Decision,
    Failure,
    Filter,
    Filters,
    FiltersUnavailable,
    InvalidChain,
    InvalidExpression,
    Line,
    Reads,
    Rules,
)
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.config import FilterConfig
from seqgate.services.filter.core import room
from seqgate.services.filter.core.memo import Memo
from seqgate.services.filter.service import Filters as FilterService
from seqgate.services.filter.servicer import FilterServicer
from seqgate.services.runtime.channels import peer_channel
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.server import grpc_server
from seqgate.types import TopicName

TOPIC = "test/filters/topic"

IN_EU = "properties.region == 'eu'"
WITH_REGION = "'region' in properties"
ANY = "properties.exists(name, properties[name] == 'x')"
LATER = "num_messages > 2 ? duration('1.5s') : duration('0s')"
MINE = "properties.region == subscription.region"
EVEN = "sequence_id % 2 == 0"
KEYED = "key != '' && producer == 'p' && publish_time_ms > 5"
HERE = f"topic == '{TOPIC}'"

Judge = Callable[[EntryMetadata, Rules], int]


def when(is_wanted: Callable[[EntryMetadata, Rules], bool]) -> Judge:
    return lambda metadata, rules: ACCEPT if is_wanted(metadata, rules) else REJECT


def lookup(properties: Mapping[str, str], name: str) -> str:
    if name not in properties:  # [name] would add an empty one
        raise KeyError(name)
    return properties[name]


def reads(*variables: str, **more: Any) -> Reads:
    return Reads(frozenset(variables), **more)


PREDICATES = {
    IN_EU: Predicate(
        reads("properties", properties=("region",)),
        when(lambda metadata, _: lookup(metadata.properties, "region") == "eu"),
    ),
    WITH_REGION: Predicate(
        reads("properties", properties=("region",)),
        when(lambda metadata, _: "region" in metadata.properties),
    ),
    ANY: Predicate(
        reads("properties", properties=None),
        when(lambda metadata, _: "x" in metadata.properties.values()),
    ),
    LATER: Predicate(
        reads("num_messages"),
        lambda metadata, _: 1_500 if metadata.num_messages_in_batch > 2 else ACCEPT,
    ),
    MINE: Predicate(
        reads("properties", "subscription", properties=("region",), subscription=("region",)),
        when(
            lambda metadata, rules: (
                lookup(metadata.properties, "region") == lookup(dict(rules.properties), "region")
            )
        ),
    ),
    EVEN: Predicate(reads("sequence_id"), when(lambda metadata, _: not metadata.sequence_id % 2)),
    KEYED: Predicate(
        reads("key", "producer", "publish_time_ms"),
        when(
            lambda metadata, _: (
                bool(metadata.partition_key)
                and metadata.producer_name == "p"
                and metadata.publish_time > 5
            )
        ),
    ),
    HERE: Predicate(reads("topic"), when(lambda _, rules: rules.topic == TOPIC)),
    "true": Predicate(reads(), when(lambda *_: True)),
    "false": Predicate(reads(), when(lambda *_: False)),
}


@asynccontextmanager
async def over(port: int, timeout_s: float = 10) -> AsyncIterator[GrpcFilters]:
    async with peer_channel(f"127.0.0.1:{port}", keepalive_s=5) as channel:
        yield GrpcFilters(channel, timeout_s=timeout_s)


@asynccontextmanager
async def serving(
    listen: str = "127.0.0.1:0", drain: Drain | None = None, *, chain_bytes_max: int | None = None
) -> AsyncIterator[int]:
    config = FilterConfig(listen=listen)
    service = FilterService(
        CelEngine(),
        Memo(config.decisions_max, config.decision_bytes_max),
        programs_max=config.programs_max,
        program_bytes_max=config.program_bytes_max,
        chain_bytes_max=chain_bytes_max or config.chain_bytes_max,
    )
    mine = drain or Drain()

    def register(server: aio.Server) -> None:
        filter_pb2_grpc.add_FilterServiceServicer_to_server(FilterServicer(service, mine), server)

    async with grpc_server(config, mine, register=register, services=[], checks={}) as port:
        yield port


@pytest_asyncio.fixture(params=["memory", "grpc"])
async def filters(request: pytest.FixtureRequest) -> AsyncIterator[Filters]:
    if request.param == "memory":
        yield MemoryFilters(PREDICATES)
        return
    async with serving() as port, over(port) as filters:
        yield filters


@pytest_asyncio.fixture
async def line(filters: Filters) -> AsyncIterator[Line]:
    line = filters.line()
    yield line
    await line.close()


def rules(*expressions: str, **properties: str) -> Rules:
    filters = tuple(Filter(f"f{i}", i + 1, each) for i, each in enumerate(expressions))
    return Rules(filters, TOPIC, tuple(sorted(properties.items())))


def of(region: str | None = None, **fields: Any) -> EntryMetadata:
    return EntryMetadata(properties={} if region is None else {"region": region}, **fields)


async def test_each_entry_gets_a_verdict_in_order(line: Line) -> None:
    said = await line.judge(rules(IN_EU), [of("eu"), of("us"), of("eu")])
    assert [each.verdict for each in said] == [ACCEPT, REJECT, ACCEPT]
    assert [each.failure for each in said] == [None] * 3
    assert await line.judge(rules(IN_EU), []) == []


async def test_the_first_filter_that_does_not_accept_decides(line: Line) -> None:
    batch = of("eu", num_messages_in_batch=3)
    said = await line.judge(rules(IN_EU, LATER, "false"), [of("us"), batch, of("eu")])
    assert said == [Decision(REJECT, 0), Decision(1_500, 1), Decision(REJECT, 2)]
    assert await line.judge(rules("true", "true"), [of()]) == [Decision(ACCEPT)]


async def test_an_absent_property_is_a_failure_with_its_position(line: Line) -> None:
    (said,) = await line.judge(rules("true", IN_EU), [of()])
    assert (said.verdict, said.filter) == (FILTER_FAILED, 1)
    assert said.failure is not None
    assert said.failure.reason == "PROPERTY_ABSENT"
    assert "region" in said.failure.message


async def test_a_batch_without_properties_fails_filters_that_read_them(line: Line) -> None:
    batch = of(num_messages_in_batch=2)
    assert await line.judge(rules(IN_EU), [batch]) == [Decision(ACCEPT)]
    other = EntryMetadata(properties={"other": "x"}, num_messages_in_batch=2)
    ((verdict, _, failure),) = await line.judge(rules(IN_EU), [other])
    assert verdict == FILTER_FAILED
    assert failure is not None


async def test_filters_read_the_topic_and_the_subscription(line: Line) -> None:
    entries = [of("eu"), of("us")]
    for region, expected in (("eu", [ACCEPT, REJECT]), ("us", [REJECT, ACCEPT])):
        said = await line.judge(rules(HERE, MINE, region=region), entries)
        assert [each.verdict for each in said] == expected
    (first, _) = await line.judge(rules(MINE), entries)
    assert first.failure is not None


@pytest.mark.parametrize("expression", PREDICATES)
async def test_the_reads_of_an_expression_are_its_inputs(line: Line, expression: str) -> None:
    found = await line.reads(rules(expression))
    assert found == PREDICATES[expression].reads


async def test_a_chain_reads_what_its_filters_read(line: Line) -> None:
    found = await line.reads(rules(IN_EU, EVEN, MINE))
    assert found == Reads(
        frozenset({"properties", "sequence_id", "subscription"}), ("region",), ("region",)
    )
    assert (await line.reads(rules(IN_EU, ANY))).properties is None


CASES = [
    EntryMetadata(
        producer_name=producer,
        sequence_id=sequence_id,
        publish_time=sequence_id * 3,
        partition_key=key,
        properties=properties,
        num_messages_in_batch=messages,
        uuid="never read",
    )
    for producer, sequence_id, key in (("p", 7, "k"), ("q", 8, ""), ("p", 0, "k"))
    for properties in ({}, {"region": "eu"}, {"region": ""}, {"other": "x"}, {"-": "x"})
    for messages in (None, 1, 3)
]


@pytest.mark.parametrize("expression", PREDICATES)
async def test_fields_outside_the_reads_do_not_affect_verdicts(line: Line, expression: str) -> None:
    """Entries with equal keys have equal verdicts and equal projections."""
    given = rules(expression, region="eu")
    projection = Projection(await line.reads(given))
    said = await line.judge(given, CASES)
    left = [projection.metadata_of(each) for each in CASES]
    assert await line.judge(given, left) == said
    by_key: dict[Any, set[Decision]] = {}
    for metadata, rest, each in zip(CASES, left, said, strict=True):
        by_key.setdefault(projection.key_of(metadata), set()).add(each)
        assert not rest.HasField("uuid")
        assert len(rest.SerializeToString()) <= len(metadata.SerializeToString()) + 8
    assert {len(each) for each in by_key.values()} == {1}
    assert projection.recurs == (expression not in (EVEN, KEYED))


async def test_an_invalid_filter_is_refused_by_name_and_the_line_continues(line: Line) -> None:
    assert await line.judge(rules(IN_EU), [of("eu")]) == [Decision(ACCEPT)]
    for ask in (line.reads, lambda given: line.judge(given, [of("eu")])):
        with pytest.raises(InvalidExpression) as caught:
            await ask(rules(IN_EU, "nonsense ==="))
        assert caught.value.details["filter"] == "f1"
        assert str(caught.value.details["version"]) == "2"
    with pytest.raises(InvalidChain):
        await line.reads(rules(*["true"] * 17))
    assert await line.judge(rules(IN_EU), [of("us")]) == [Decision(REJECT, 0)]


async def test_a_line_serves_many_chains(line: Line) -> None:
    many = [rules(*["true"] * n, MINE, region=region) for n in range(12) for region in ("eu", "us")]
    for _ in range(2):
        for each in many:
            (said,) = await line.judge(each, [of("eu")])
            place = len(each.filters) - 1
            is_mine = ("region", "eu") in each.properties
            assert said == (Decision(ACCEPT) if is_mine else Decision(REJECT, place))


async def test_any_number_of_entries_is_judged(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 200_000)
    entries = [of("eu" if i % 3 else "x" * (i % 1_000), sequence_id=i) for i in range(5_000)]
    said = await line.judge(rules(IN_EU), entries)
    assert [each.verdict for each in said] == [ACCEPT if i % 3 else REJECT for i in range(5_000)]


async def test_lines_do_not_block_one_another(filters: Filters) -> None:
    lines = [filters.line() for _ in range(20)]
    said = await asyncio.gather(*(each.judge(rules(IN_EU), [of("eu")]) for each in lines))
    assert said == [[Decision(ACCEPT)]] * 20
    several = (lines[0].judge(rules(IN_EU), [of(region)]) for region in ("eu", "us") * 10)
    assert await asyncio.gather(*several) == [[Decision(ACCEPT)], [Decision(REJECT, 0)]] * 10
    for each in lines:
        await each.close()


async def test_an_unresponsive_service_is_unavailable() -> None:
    (port,) = free_ports(1)
    memory = MemoryFilters(PREDICATES)
    memory.available = False
    async with over(port) as unreachable:
        for filters in (unreachable, memory):
            line = filters.line()
            for ask in (line.reads(rules("true")), line.judge(rules("true"), [of()])):
                with pytest.raises(FiltersUnavailable) as caught:
                    await ask
                assert caught.value.retry_after_s
            await line.close()


# ---- over the wire only


def outcome(**fields: Any) -> filter_pb2.FilterOutcome:
    return filter_pb2.FilterOutcome(**{"verdict": filter_pb2.FILTER_VERDICT_ACCEPT, **fields})


def verdicts(
    *outcomes: filter_pb2.FilterOutcome, which: Sequence[int]
) -> filter_pb2.EvaluateResponse:
    return filter_pb2.EvaluateResponse(verdicts=filter_pb2.Verdicts(outcomes=outcomes, which=which))


CHAIN_SET = filter_pb2.EvaluateResponse(chain_set=filter_pb2.ChainSet())

NONSENSE = {
    "too few": [CHAIN_SET, verdicts(outcome(), which=[0])],
    "too many": [CHAIN_SET, verdicts(outcome(), which=[0, 0, 0])],
    "none": [CHAIN_SET, verdicts(which=[])],
    "no such outcome": [CHAIN_SET, verdicts(outcome(), which=[0, 1])],
    "no such filter": [CHAIN_SET, verdicts(outcome(filter=1), which=[0, 0])],
    "another kind": [CHAIN_SET, CHAIN_SET],
    "another kind of chain": [verdicts(outcome(), which=[0, 0])],
    "nothing": [CHAIN_SET, filter_pb2.EvaluateResponse()],
    "another question's": [CHAIN_SET, verdicts(outcome(), which=[0, 0])],
}


class Scripted(filter_pb2_grpc.FilterServiceServicer):
    """Gives these answers on its first stream, and correct ones on the next."""

    def __init__(self, answers: Sequence[filter_pb2.EvaluateResponse], *, skew: int) -> None:
        self._answers = list(answers)
        self._skew = skew

    async def Evaluate(
        self, request_iterator: AsyncIterator[filter_pb2.EvaluateRequest], context: Any
    ) -> AsyncIterator[filter_pb2.EvaluateResponse]:
        script, self._answers = self._answers, []
        async for request in request_iterator:
            number = request.request_id
            if script:
                answer = script.pop(0)
                number += 0 if script else self._skew
            elif request.HasField("set_chain"):
                answer = CHAIN_SET
            else:
                answer = verdicts(outcome(), which=[0] * len(request.batch.metadata))
            yield filter_pb2.EvaluateResponse(
                request_id=number, **{name.name: value for name, value in answer.ListFields()}
            )


@asynccontextmanager
async def scripted(
    *answers: filter_pb2.EvaluateResponse, skew: int = 0
) -> AsyncIterator[GrpcFilters]:
    server = aio.server()
    servicer = Scripted(answers, skew=skew)  # type: ignore[abstract]  # Evaluate is all it serves
    filter_pb2_grpc.add_FilterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with over(port) as filters:
            yield filters
    finally:
        await server.stop(None)


@pytest.mark.parametrize("what", NONSENSE)
async def test_an_invalid_answer_makes_the_line_unavailable_until_the_next_call(
    what: str,
) -> None:
    async with scripted(*NONSENSE[what], skew=what == "another question's") as filters:
        line = filters.line()
        with pytest.raises(FiltersUnavailable) as caught:
            await line.judge(rules("true"), [of(), of()])
        assert caught.value.retry_after_s
        assert await line.judge(rules("true"), [of(), of()]) == [Decision(ACCEPT)] * 2
        await line.close()


async def test_an_unknown_verdict_of_a_newer_service_is_a_failure() -> None:
    failure = filter_pb2.Failure(message="it is Tuesday")
    failure.reason = 99  # type: ignore[assignment]
    unknown = filter_pb2.FilterOutcome(filter=0)
    unknown.verdict = 99  # type: ignore[assignment]
    answer = verdicts(filter_pb2.FilterOutcome(failure=failure, filter=0), unknown, which=[0, 1])
    async with scripted(CHAIN_SET, answer) as filters:
        line = filters.line()
        said, other = await line.judge(rules("true"), [of(), of()])
        assert said == Decision(FILTER_FAILED, 0, Failure("UNSPECIFIED", "it is Tuesday"))
        assert (other.verdict, other.filter) == (FILTER_FAILED, 0)
        assert other.failure is not None
        await line.close()


async def test_a_line_resumes_after_an_outage_of_the_service() -> None:
    async with serving() as port, over(port) as filters:
        line = filters.line()
        assert await line.judge(rules(IN_EU), [of("eu")]) == [Decision(ACCEPT)]
    async with over(port) as filters:
        line = filters.line()
        async with serving(f"127.0.0.1:{port}"):
            assert await line.judge(rules(IN_EU), [of("us")]) == [Decision(REJECT, 0)]
        with pytest.raises(FiltersUnavailable):
            await line.judge(rules(IN_EU), [of("eu")])
        async with serving(f"127.0.0.1:{port}"):
            while True:
                try:
                    assert await line.judge(rules(IN_EU), [of("eu")]) == [Decision(ACCEPT)]
                except FiltersUnavailable:
                    continue
                break
        await line.close()


async def test_a_draining_service_answers_received_requests_only() -> None:
    drain = Drain()
    async with serving(drain=drain) as port, over(port) as filters:
        line = filters.line()
        assert await line.judge(rules(IN_EU), [of("eu")]) == [Decision(ACCEPT)]
        drain.begin()

        async def ask_on() -> None:
            while True:
                assert await line.judge(rules(IN_EU), [of("eu")]) == [Decision(ACCEPT)]

        with pytest.raises(FiltersUnavailable):
            await ask_on()


async def test_a_late_answer_is_not_matched_to_a_later_request() -> None:
    async with serving() as port, over(port, timeout_s=0.01) as hasty, over(port) as patient:
        line, slow = hasty.line(), rules(ANY)
        entries = [
            EntryMetadata(properties={f"name{i}": str(n) for i in range(100)}) for n in range(2_000)
        ]
        with pytest.raises(FiltersUnavailable):
            await line.judge(slow, entries)
        other = patient.line()
        said = await other.judge(rules(IN_EU), [of("eu")] * 3)
        assert said == [Decision(ACCEPT)] * 3
        asked = asyncio.create_task(other.judge(slow, entries))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert await other.judge(rules(IN_EU), [of("us")]) == [Decision(REJECT, 0)]
        await line.close()
        await other.close()


async def test_a_chain_replaces_its_predecessor_when_both_exceed_the_budget() -> None:
    async with serving(chain_bytes_max=1) as port, over(port) as filters:
        line = filters.line()
        for expression, verdict in (("true", ACCEPT), ("false", REJECT), ("true", ACCEPT)):
            (said,) = await line.judge(rules(expression), [of()])
            assert said.verdict == verdict
        await line.close()


async def test_filters_are_checked_within_the_budget_of_one_chain() -> None:
    one, other = (Chain((Filter("f", 1, each),), Policy.PARK) for each in ("true", "false"))
    entry = StoredEntry(position=Position(ledger_id=1), metadata=of())
    async with serving(chain_bytes_max=1) as port, over(port) as filters:
        topic = TopicName.parse(TOPIC)
        tenure = Tenure(MemoryCursors(), topic, "s", "me", 1, 60_000)
        filtering = Filtering(tenure, filters, lambda: 0, lambda _: None)
        filtering.use(Chains((Stretch(None, one),)), {})
        assert list(await filtering.page([entry], Acknowledged(None))) == [ACCEPT]
        await filtering.check(other)
        await filtering.close()


async def test_lines_take_turns_when_their_chains_exceed_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "KEPT_S", 0.0)
    async with serving(chain_bytes_max=1) as port, over(port) as filters:
        wanted, unwanted = filters.line(), filters.line()
        for _ in range(3):
            assert await wanted.judge(rules("true"), [of()]) == [Decision(ACCEPT)]
            assert await unwanted.judge(rules("false"), [of()]) == [Decision(REJECT, 0)]
        await wanted.close()
        await unwanted.close()


async def test_a_line_is_refused_while_recent_chains_fill_the_budget() -> None:
    async with serving(chain_bytes_max=1) as port, over(port) as filters:
        first, second = filters.line(), filters.line()
        await first.reads(rules("true"))
        with pytest.raises(FiltersUnavailable) as caught:
            await second.reads(rules("false"))
        assert caught.value.details["because"] == "SERVICE_BUSY"
        await first.close()
        await second.close()
