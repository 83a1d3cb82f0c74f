"""Verdicts a second.

  a Python function over dicts          the same decision, without a language
    engine                              the expression, evaluated again and again
  the service, over its stream          beside a stream that accepts everything

Few property sets: decisions are remembered. All distinct: each batch is for a new chain, so that
nothing was seen before.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from grpc import aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.services.filter.adapters.cel import CelEngine
from tools.bench.bench import Bench
from tools.bench.figures import Measurement, rate
from tools.bench.rounds import BenchError, Call, Round, in_turn

BATCH: Final = 1_000  # entries in a batch
FEW: Final = 10  # property sets, where there are few
WINDOW: Final = 4  # batches that are under way at a time
VOLLEY: Final = 20  # batches of a call
EXPRESSION: Final = "properties.origin == 'JFK' && properties.carrier != 'UA'"


class Kind(NamedTuple):
    """Kinds of entries; `is_shared`: metadata is sent once for all entries that share it."""

    name: str
    are_distinct: bool = False
    is_shared: bool = False

    @property
    def topics(self) -> Iterator[str]:
        if self.are_distinct:
            return (f"bench/filter/t{number}" for number in itertools.count())
        return itertools.repeat("bench/filter/t")

    @property
    def metadata(self) -> list[EntryMetadata]:
        if self.is_shared:
            return [EntryMetadata(properties=_properties(number)) for number in range(FEW)]
        return [
            EntryMetadata(
                producer_name="bench",
                sequence_id=number,
                publish_time=1_700_000_000_000 + number,
                properties=_properties(number if self.are_distinct else number % FEW),
                partition_key=f"N{number:05}",
                payload_crc32c=number,
            )
            for number in range(BATCH)
        ]


FEW_SETS: Final = Kind(f"{FEW} property sets")
FEW_SHARED: Final = Kind(f"{FEW_SETS.name}, shared metadata", is_shared=True)
DISTINCT: Final = Kind("all distinct", are_distinct=True)


async def filtering(bench: Bench) -> list[Measurement]:
    found = await _alone(bench)
    for kind in (FEW_SETS, FEW_SHARED, DISTINCT):
        async with (
            aio.insecure_channel(bench.stack.address("filter")) as service,
            aio.insecure_channel(bench.null.address) as null,
        ):
            bare, stream = f"bare stream, {kind.name}", f"stream, {kind.name}"
            volleys = {
                bare: _volley(kind, null, with_chains=False),
                stream: _volley(kind, service, with_chains=True),
            }
            pids = {bare: bench.pids("null"), stream: bench.pids("filter")}
            found += _beside(await in_turn(volleys, bench.seconds, pids), BATCH * VOLLEY)
    return found


def _beside(rounds: Mapping[str, list[Round]], each: int) -> list[Measurement]:
    """The rate of the least work, and that of all the work beside it."""
    (least, those), (name, these) = rounds.items()
    limit = rate(least, "verdicts", those, each=each)
    return [limit, rate(name, "verdicts", these, limit, each=each, paired=True)]


# ---- in this process


async def _alone(bench: Bench) -> list[Measurement]:
    program = CelEngine().compile(EXPRESSION)
    entries = [_properties(number) for number in range(BATCH)]
    values = [{"properties": each} for each in entries]

    async def by_function() -> None:
        verdicts = [each["origin"] == "JFK" and each["carrier"] != "UA" for each in entries]
        assert len(verdicts) == BATCH

    async def by_engine() -> None:
        for each in values:
            program.evaluate(each)

    calls = {"Python function": by_function, "engine": by_engine}
    return _beside(await in_turn(calls, bench.seconds), BATCH)


# ---- over the stream


def _volley(kind: Kind, channel: aio.Channel, *, with_chains: bool) -> Call:
    """A call that has VOLLEY batches judged, WINDOW at a time, over a stream that ends with its
    channel."""
    stub = FilterServiceStub(channel)
    stream = stub.Evaluate()
    requests = _requests(kind, with_chains=with_chains)

    async def send() -> None:
        for each in next(requests):
            await stream.write(each)

    async def receive() -> None:
        answer = await stream.read()
        while isinstance(answer, pb.EvaluateResponse) and answer.HasField("chain_set"):
            answer = await stream.read()
        if not isinstance(answer, pb.EvaluateResponse) or len(answer.verdicts.which) != BATCH:
            raise BenchError(f"not judged: {answer}")

    async def volley() -> None:
        for number in range(VOLLEY + WINDOW):
            if number >= WINDOW:
                await receive()
            if number < VOLLEY:
                await send()

    return volley


def _requests(kind: Kind, *, with_chains: bool) -> Iterator[list[pb.EvaluateRequest]]:
    """A batch, again and again, after its chain where that is a new one."""
    filters = [pb.Filter(name="bench", expression=EXPRESSION)]
    metadata = kind.metadata
    which = [number % len(metadata) for number in range(BATCH)] if kind.is_shared else []
    batch = pb.EvaluateRequest(batch=pb.Batch(metadata=metadata, which=which))
    last = None
    for topic in kind.topics:
        chain = pb.SetChain(chain=pb.Chain(filters=filters, topic=topic))
        is_new = with_chains and topic != last
        yield [*([pb.EvaluateRequest(set_chain=chain)] if is_new else []), batch]
        last = topic


def _properties(number: int) -> dict[str, str]:
    return {"origin": "JFK" if number % 3 else f"A{number:03}", "carrier": f"C{number:03}"}
