"""The filter service over gRPC: chains and batches on a stream, refusals, drain and restart."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.services.filter import servicer as limits
from seqgate.services.filter.core.chain import FILTERS_MAX
from seqgate.services.filter.core.cost import (
    COST_MAX,
    SUBSCRIPTION_BYTES_MAX,
    SUBSCRIPTION_PROPERTIES_MAX,
)
from seqgate.services.filter.core.program import EXPRESSION_BYTES_MAX
from seqgate.services.filter.service import CHAIN_COST_MAX
from seqgate.times import duration
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import Services, channel_to, serving
from tests.integration.test_bad_input import BAD_PRODUCERS, BAD_TOPICS, GARBAGE, GOOD_PRODUCERS
from tests.support.raw_channel import raw
from tests.support.waiting import eventually

INVALID = StatusCode.INVALID_ARGUMENT
ACCEPT, REJECT, RESCHEDULE = (
    pb.FILTER_VERDICT_ACCEPT,
    pb.FILTER_VERDICT_REJECT,
    pb.FILTER_VERDICT_RESCHEDULE,
)
SERVICE = pb.DESCRIPTOR.services_by_name["FilterService"]

IN_EU = "properties.region == 'eu'"
DEAR = "key.matches('^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$')"
"""Within the cost limit of one chain, alone."""


def of(region: str | None, **fields: Any) -> EntryMetadata:
    properties = {} if region is None else {"region": region}
    return EntryMetadata(properties=properties, **fields)


def chain_of(*expressions: str, **changes: Any) -> pb.Chain:
    filters = [
        pb.Filter(name=f"f{index}", version=index + 1, expression=each)
        for index, each in enumerate(expressions)
    ]
    return pb.Chain(**{"filters": filters, **changes})


class Stream:
    def __init__(self, stub: Any) -> None:
        self.call = stub.Evaluate()
        self._number = 0

    async def ask(self, **request: Any) -> pb.EvaluateResponse:
        """The answer to a request."""
        self._number += 1
        await self.call.write(pb.EvaluateRequest(request_id=self._number, **request))
        answer: pb.EvaluateResponse = await self.call.read()
        assert answer.request_id == self._number
        return answer

    async def set_chain(self, *expressions: str, number: int = 0, **changes: Any) -> pb.ChainSet:
        chain = chain_of(*expressions, **changes)
        answer = await self.ask(set_chain=pb.SetChain(chain_id=number, chain=chain))
        assert answer.HasField("chain_set"), answer
        return answer.chain_set

    async def judge(
        self, *metadata: EntryMetadata, which: Sequence[int] = (), number: int = 0
    ) -> list[pb.FilterOutcome]:
        """The verdict on each entry."""
        batch = pb.Batch(chain_id=number, metadata=metadata, which=which)
        verdicts = (await self.ask(batch=batch)).verdicts
        assert set(verdicts.which) == set(range(len(verdicts.outcomes)))
        said = [each.SerializeToString() for each in verdicts.outcomes]
        assert len(set(said)) == len(said)
        return [verdicts.outcomes[each] for each in verdicts.which]

    async def verdicts(self, *metadata: EntryMetadata, number: int = 0) -> list[int]:
        return [each.verdict for each in await self.judge(*metadata, number=number)]

    async def refuses(self, reason: str, **request: Any) -> dict[str, str]:
        """The request is refused in order; details of the refusal."""
        answer = await self.ask(**request)
        return check(answer.error, INVALID, reason)


@asynccontextmanager
async def streaming(stub: Any) -> AsyncIterator[Stream]:
    stream = Stream(stub)
    try:
        yield stream
        await stream.call.done_writing()
        assert await stream.call.read() is aio.EOF
        assert await stream.call.code() is StatusCode.OK
    finally:
        stream.call.cancel()


@pytest.fixture
async def stream(services: Services) -> AsyncIterator[Stream]:
    async with streaming(services.filter) as stream:
        yield stream


# ---- evaluating


async def test_entries_are_judged_in_order(stream: Stream) -> None:
    chain_set = await stream.set_chain(IN_EU)
    assert chain_set.reads == pb.Reads(variables=["properties"], properties=["region"])
    assert 0 < chain_set.cost <= COST_MAX
    assert await stream.verdicts(of("eu"), of("us"), of("eu")) == [ACCEPT, REJECT, ACCEPT]
    assert await stream.judge() == []


async def test_a_chain_names_the_deciding_filter(stream: Stream) -> None:
    later = "properties.region == 'us' ? duration('1.5s') : duration('0s')"
    await stream.set_chain("has(properties.region)", later, "int(properties.region) > 0", topic="")
    assert await stream.judge(of(None), of("us"), of("7"), of("x")) == [
        pb.FilterOutcome(verdict=REJECT, filter=0),
        pb.FilterOutcome(verdict=RESCHEDULE, filter=1, delay=duration(1_500)),
        pb.FilterOutcome(verdict=ACCEPT),
        pb.FilterOutcome(
            filter=2,
            failure=pb.Failure(
                reason=pb.FAILURE_REASON_EVALUATION_FAILED, message="cannot convert string to int"
            ),
        ),
    ]


async def test_a_chain_without_filters_accepts(stream: Stream) -> None:
    chain_set = await stream.set_chain()
    assert chain_set == pb.ChainSet(reads=pb.Reads())
    assert await stream.judge(of("eu")) == [pb.FilterOutcome(verdict=ACCEPT)]


async def test_an_absent_property_gives_no_verdict(stream: Stream) -> None:
    await stream.set_chain(IN_EU)
    absent, empty, batch = await stream.judge(of(None), of(""), of(None, num_messages_in_batch=3))
    assert absent.failure.reason == pb.FAILURE_REASON_PROPERTY_ABSENT
    assert '"region"' in absent.failure.message
    assert not absent.HasField("verdict")
    assert (empty.verdict, batch.verdict) == (REJECT, ACCEPT)


async def test_shared_metadata_is_sent_once(stream: Stream) -> None:
    await stream.set_chain(IN_EU)
    outcomes = await stream.judge(of("eu"), of("us"), which=[1, 0, 0, 1, 1])
    assert [each.verdict for each in outcomes] == [REJECT, ACCEPT, ACCEPT, REJECT, REJECT]


async def test_a_stream_has_many_chains(stream: Stream) -> None:
    await stream.set_chain(IN_EU, number=0)
    await stream.set_chain("properties.region == 'us'", number=limits.CHAINS_MAX - 1)
    assert await stream.verdicts(of("eu"), number=0) == [ACCEPT]
    assert await stream.verdicts(of("eu"), number=limits.CHAINS_MAX - 1) == [REJECT]
    await stream.set_chain("true", number=0)
    assert await stream.verdicts(of("us"), number=0) == [ACCEPT]


async def test_topic_and_subscription_belong_to_the_chain(stream: Stream) -> None:
    mine = "topic == 'public/default/t' && properties.region == subscription.region"
    for number, region in enumerate(("eu", "us")):
        await stream.set_chain(
            mine, number=number, topic="public/default/t", subscription={"region": region}
        )
    assert await stream.verdicts(of("eu"), of("us"), number=0) == [ACCEPT, REJECT]
    assert await stream.verdicts(of("eu"), of("us"), number=1) == [REJECT, ACCEPT]


async def test_verdicts_are_deterministic_across_streams(services: Services) -> None:
    entries = [of(region, sequence_id=n) for n in range(50) for region in ("eu", "us", None)]
    found = []
    for _ in range(3):
        async with streaming(services.filter) as stream:
            await stream.set_chain(IN_EU, "sequence_id % 7 != 3")
            found.append(await stream.judge(*entries))
            backwards = await stream.judge(*reversed(entries))
            found.append(backwards[::-1])
    assert all(each == found[0] for each in found)


async def test_the_largest_batches_are_judged(stream: Stream) -> None:
    await stream.set_chain("sequence_id % 2 == 0")
    entries = [EntryMetadata(sequence_id=number) for number in range(limits.ENTRIES_MAX)]
    assert await stream.verdicts(*entries) == [ACCEPT, REJECT] * (limits.ENTRIES_MAX // 2)
    outcomes = await stream.judge(entries[0], which=[0] * limits.ENTRIES_MAX)
    assert len(outcomes) == limits.ENTRIES_MAX


async def test_streams_take_turns(services: Services) -> None:
    """A long batch does not block other streams."""
    async with streaming(services.filter) as busy, streaming(services.filter) as other:
        await busy.set_chain(DEAR)
        await other.set_chain(IN_EU)
        keys = [f"{number}-{'ab' * 1_000}" for number in range(3_000)]
        batch = pb.Batch(metadata=[EntryMetadata(partition_key=key) for key in keys])
        asking = asyncio.create_task(busy.ask(batch=batch))
        answered = 0
        while not asking.done():
            assert await other.verdicts(of("eu")) == [ACCEPT]
            answered += 1
        assert len((await asking).verdicts.which) == len(keys)
        assert answered > 3


# ---- refusals on the stream


async def test_a_refused_request_changes_neither_stream_nor_chains(
    stream: Stream,
) -> None:
    await stream.set_chain(IN_EU)
    details = await stream.refuses(
        "INVALID_EXPRESSION", set_chain=pb.SetChain(chain=chain_of("true", "key ==\n 1"))
    )
    assert details == {
        "filter": "f1",
        "version": "2",
        "line": "1",
        "column": "5",
        "offset": "4",
    }
    assert await stream.verdicts(of("eu"), of("us")) == [ACCEPT, REJECT]


async def test_an_empty_request_is_refused(stream: Stream) -> None:
    await stream.refuses("INVALID_BATCH")


async def test_invalid_chain_ids_are_refused(stream: Stream) -> None:
    for number in (limits.CHAINS_MAX, 2**32 - 1):
        await stream.refuses("INVALID_CHAIN", set_chain=pb.SetChain(chain_id=number))
    for number in (0, 7, 2**32 - 1):
        await stream.refuses("INVALID_CHAIN", batch=pb.Batch(chain_id=number))


async def test_the_entries_of_a_batch_are_bounded(stream: Stream) -> None:
    await stream.set_chain("true")
    most = limits.ENTRIES_MAX
    assert len(await stream.judge(*[EntryMetadata()] * most)) == most
    assert await stream.refuses(
        "INVALID_BATCH", batch=pb.Batch(metadata=[EntryMetadata()] * (most + 1))
    ) == {"count": str(most + 1)}
    await stream.refuses(
        "INVALID_BATCH", batch=pb.Batch(metadata=[EntryMetadata()], which=[0] * (most + 1))
    )


async def test_the_size_of_a_batch_is_bounded(stream: Stream) -> None:
    await stream.set_chain("true")
    batch = pb.Batch(metadata=[EntryMetadata(partition_key="")])
    room = limits.BATCH_BYTES_MAX - batch.ByteSize() - 10
    batch.metadata[0].partition_key = "x" * room
    batch.metadata[0].partition_key += "x" * (limits.BATCH_BYTES_MAX - batch.ByteSize())
    assert batch.ByteSize() == limits.BATCH_BYTES_MAX
    assert len((await stream.ask(batch=batch)).verdicts.which) == 1
    batch.metadata[0].partition_key += "x"
    await stream.refuses("INVALID_BATCH", batch=batch)


async def test_references_to_missing_metadata_are_refused(stream: Stream) -> None:
    await stream.set_chain("true")
    await stream.refuses("INVALID_BATCH", batch=pb.Batch(metadata=[of("eu")], which=[0, 1]))
    await stream.refuses("INVALID_BATCH", batch=pb.Batch(which=[0]))


async def test_the_filters_of_a_chain_are_bounded(stream: Stream) -> None:
    await stream.set_chain(*["true"] * FILTERS_MAX)
    chain = chain_of(*["true"] * (FILTERS_MAX + 1))
    await stream.refuses("INVALID_CHAIN", set_chain=pb.SetChain(chain=chain))


async def test_the_cost_of_a_chain_is_bounded(stream: Stream) -> None:
    cost = (await stream.set_chain(DEAR)).cost
    assert cost < COST_MAX
    fitting = CHAIN_COST_MAX // cost
    assert 0 < fitting < FILTERS_MAX
    await stream.set_chain(*[DEAR] * fitting)
    chain = chain_of(*[DEAR] * (fitting + 1))
    await stream.refuses("INVALID_CHAIN", set_chain=pb.SetChain(chain=chain))


async def test_filters_have_unique_names(stream: Stream) -> None:
    def named(*names: str) -> pb.SetChain:
        filters = [pb.Filter(name=name, expression="true") for name in names]
        return pb.SetChain(chain=pb.Chain(filters=filters))

    for name in BAD_PRODUCERS:
        await stream.refuses("INVALID_CHAIN", set_chain=named(name))
    for name in GOOD_PRODUCERS:
        assert (await stream.ask(set_chain=named(name))).HasField("chain_set")
    details = await stream.refuses("INVALID_CHAIN", set_chain=named("a", "b", "a"))
    assert details == {"filter": "a"}


async def test_the_properties_of_a_subscription_are_bounded(stream: Stream) -> None:
    most = {f"p{number:04}": "" for number in range(SUBSCRIPTION_PROPERTIES_MAX)}
    await stream.set_chain("true", subscription=most)
    largest = {"p": "é" * ((SUBSCRIPTION_BYTES_MAX - 2) // 2), "q": ""}
    await stream.set_chain("true", subscription=largest)
    for wrong in (most | {"more": ""}, largest | {"r": ""}):
        chain = chain_of("true", subscription=wrong)
        await stream.refuses("INVALID_CHAIN", set_chain=pb.SetChain(chain=chain))


async def test_a_chain_requires_a_valid_topic(stream: Stream) -> None:
    for topic in BAD_TOPICS:
        if topic:
            chain = chain_of("true", topic=topic)
            await stream.refuses("INVALID_TOPIC_NAME", set_chain=pb.SetChain(chain=chain))


async def test_the_memory_of_a_streams_chains_is_bounded(stream: Stream) -> None:
    """Large expressions in many chains: at the limit further chains are refused, and the others
    work."""
    fitting = 0
    while True:
        chain = chain_of(*[" && ".join(["sequence_id >= 0"] * 150)] * FILTERS_MAX)
        request = pb.SetChain(chain_id=fitting, chain=chain)
        answer = await stream.ask(set_chain=request)
        if answer.HasField("error"):
            check(answer.error, INVALID, "INVALID_CHAIN")
            break
        fitting += 1
        assert fitting < limits.CHAINS_MAX
    assert fitting > 3
    assert await stream.verdicts(of("eu"), number=0) == [ACCEPT]
    # A chain that replaces another one takes its memory, too.
    await stream.set_chain("true", number=0)


async def test_a_malformed_request_ends_its_stream(services: Services) -> None:
    async with raw(channel_to(services.stack.address("filter"))) as channel:
        call = channel.stream_stream(f"/{SERVICE.full_name}/Evaluate")()
        await call.write(GARBAGE[0])
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        check(status_of_call(caught.value), INVALID, "MALFORMED_REQUEST")


# ---- compiling


async def test_a_valid_expression_is_described(services: Services) -> None:
    text = "has(properties.a) && properties.b == subscription.c && key != '' && sequence_id > 1"
    answer = await services.filter.Compile(pb.CompileRequest(expression=text))
    compiled = answer.compiled
    assert compiled.type == pb.TYPE_BOOL
    assert compiled.reads == pb.Reads(
        variables=["key", "properties", "sequence_id", "subscription"],
        properties=["a", "b"],
        subscription=["c"],
    )
    assert compiled.cost > 0
    assert compiled.iterations == 0


async def test_an_expression_may_read_everything(services: Services) -> None:
    text = "properties.exists(k, subscription.all(s, k != s)) ? duration('1s') : duration('0s')"
    answer = await services.filter.Compile(pb.CompileRequest(expression=text))
    assert answer.faults.faults[0].message.startswith("macros may visit")
    text = "size(subscription) > 1 || properties.exists(k, k == 'a')"
    compiled = (await services.filter.Compile(pb.CompileRequest(expression=text))).compiled
    assert compiled.reads.all_properties
    assert compiled.reads.all_subscription
    assert compiled.iterations == 128


async def test_the_faults_of_an_expression_have_positions(services: Services) -> None:
    answer = await services.filter.Compile(pb.CompileRequest(expression="é ||\n  nothing"))
    assert (answer.faults.faults[0].offset, answer.faults.faults[0].line) == (0, 1)
    answer = await services.filter.Compile(pb.CompileRequest(expression="'é' == a ||\n  bb"))
    assert [(each.offset, each.line, each.column) for each in answer.faults.faults] == [
        (7, 1, 8),
        (14, 2, 3),
    ]
    too_long = "x" * (EXPRESSION_BYTES_MAX + 1)
    answer = await services.filter.Compile(pb.CompileRequest(expression=too_long))
    assert answer.faults.faults[0].message.endswith("bytes long (limit 4,096)")


# ---- explaining


async def test_an_entry_is_explained(services: Services) -> None:
    text = "has(properties.region) && properties.region == subscription.region"
    answer = await services.filter.Explain(
        pb.ExplainRequest(
            expression=text, metadata=of("eu"), topic="a/b/c", subscription={"region": "us"}
        )
    )
    assert answer.outcome == pb.FilterOutcome(verdict=REJECT, filter=0)
    shown = [(each.depth, text[each.start : each.end], each.value) for each in answer.steps]
    assert shown == [
        (0, text, "false"),
        (1, "has(properties.region)", "true"),
        (2, "properties", '{"region": "eu"}'),
        (1, "properties.region == subscription.region", "false"),
        (2, "properties.region", '"eu"'),
        (3, "properties", '{"region": "eu"}'),
        (2, "subscription.region", '"us"'),
        (3, "subscription", '{"region": "us"}'),
    ]
    assert {each.type for each in answer.steps} == {"bool", "string", "map<string, string>"}


async def test_a_failure_is_explained(services: Services) -> None:
    request = pb.ExplainRequest(expression=IN_EU, metadata=of(None))
    answer = await services.filter.Explain(request)
    assert answer.outcome.failure.reason == pb.FAILURE_REASON_PROPERTY_ABSENT
    assert [each.failed for each in answer.steps] == [True, True, False]


@pytest.mark.parametrize(
    "metadata", [of(None, num_messages_in_batch=2), of("x" * 40_000)], ids=["batch", "too large"]
)
async def test_an_explanation_has_no_steps_by_default(
    services: Services, metadata: EntryMetadata
) -> None:
    request = pb.ExplainRequest(expression=IN_EU, metadata=metadata)
    assert not (await services.filter.Explain(request)).steps


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expression": "nothing"}, "INVALID_EXPRESSION"),
        ({"expression": ""}, "INVALID_EXPRESSION"),
        ({"topic": "a b"}, "INVALID_TOPIC_NAME"),
        ({"subscription": {"a": "x" * SUBSCRIPTION_BYTES_MAX}}, "INVALID_CHAIN"),
    ],
)
async def test_an_invalid_explanation_request_is_refused(
    services: Services, changes: dict[str, Any], reason: str
) -> None:
    with refused(INVALID, reason):
        await services.filter.Explain(pb.ExplainRequest(**{"expression": "true", **changes}))


@pytest.mark.parametrize("method", ["Compile", "Explain"])
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_malformed_requests_are_refused(
    services: Services, method: str, garbage: bytes
) -> None:
    async with raw(channel_to(services.stack.address("filter"))) as channel:
        ask = channel.unary_unary(f"/{SERVICE.full_name}/{method}")
        with refused(INVALID, "MALFORMED_REQUEST"):
            await ask(garbage)


# ---- drain and restart


async def test_a_draining_service_answers_received_requests(stoppable: Services) -> None:
    stream = Stream(stoppable.filter)
    await stream.set_chain(IN_EU)
    ending = asyncio.create_task(stoppable.stack.terminate("filter"))
    answer = await stream.call.read()
    assert answer.HasField("draining")
    assert await stream.call.read() is aio.EOF
    assert await stream.call.code() is StatusCode.OK
    assert await ending == 0
    await stoppable.stack.run("filter")
    await serving(stoppable.stack.address("filter"))
    async with streaming(stoppable.filter) as again:
        await again.refuses("INVALID_CHAIN", batch=pb.Batch())  # a restarted service has no chains
        await again.set_chain(IN_EU)
        assert await again.verdicts(of("eu")) == [ACCEPT]


async def test_a_killed_service_loses_nothing(stoppable: Services) -> None:
    stream = Stream(stoppable.filter)
    await stream.set_chain(IN_EU)
    before = await stream.judge(of("eu"), of("us"), of(None))
    await stoppable.stack.kill("filter")
    assert await stream.call.code() is StatusCode.UNAVAILABLE
    await stoppable.stack.run("filter")

    async def answers() -> bool:
        try:
            async with streaming(stoppable.filter) as again:
                await again.set_chain(IN_EU)
                return await again.judge(of("eu"), of("us"), of(None)) == before
        except aio.AioRpcError:
            return False

    await eventually(answers, "it says the same as before")
