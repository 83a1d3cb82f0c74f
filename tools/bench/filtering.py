"""Verdicts a second.

a Python function over dicts          the same decision, without a language
engine                                the expression, evaluated again and again
the service, over its stream          beside a stream that accepts everything
"""

import itertools
from typing import Final, NamedTuple

from grpc import aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.services.filter.adapters.cel import CelEngine
from tools.bench.bench import Bench
from tools.bench.figures import Measurement
from tools.bench.rounds import BenchError, Call, Repeated

BATCH: Final = 1_000  # entries in a batch
FEW: Final = 10  # property sets, where there are few
WINDOW: Final = 4  # batches that are under way at a time
VOLLEY: Final = 20  # batches of a call
EXPRESSION: Final = "properties.origin == 'JFK' && properties.carrier != 'UA'"


class Kind(NamedTuple):
    """Kinds of entries.

    Attributes:
        are_distinct: each batch is for a new chain, so that nothing was seen before; else decisions
            are remembered.
        is_shared: metadata is sent once for all entries that share it.
    """

    name: str
    are_distinct: bool = False
    is_shared: bool = False

    @property
    def batch(self) -> pb.Batch:
        if self.is_shared:
            shared = [EntryMetadata(properties=_properties(number)) for number in range(FEW)]
            return pb.Batch(metadata=shared, which=[number % FEW for number in range(BATCH)])
        return pb.Batch(
            metadata=[
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
        )


KINDS: Final = (
    Kind(f"{FEW} property sets"),
    Kind(f"{FEW} property sets, shared metadata", is_shared=True),
    Kind("all distinct", are_distinct=True),
)


async def filtering(bench: Bench) -> list[Measurement]:
    found = await _alone(bench)
    for kind in KINDS:
        async with (
            aio.insecure_channel(bench.address("filter")) as service,
            aio.insecure_channel(bench.address("null")) as null,
        ):
            bare = Repeated(
                f"bare stream, {kind.name}",
                _volley(kind, null, with_chains=False),
                units={"verdicts": BATCH * VOLLEY},
                pids=bench.pids("null"),
            )
            judged = Repeated(
                f"stream, {kind.name}",
                _volley(kind, service, with_chains=True),
                units=bare.units,
                limits=[bare.name],
                pids=bench.pids("filter"),
            )
            found += await bench.measure([bare, judged], paired=True)
    return found


async def _alone(bench: Bench) -> list[Measurement]:
    """In this process."""
    program = CelEngine().compile(EXPRESSION)
    entries = [_properties(number) for number in range(BATCH)]
    values = [{"properties": each} for each in entries]

    async def by_function() -> None:
        verdicts = [each["origin"] == "JFK" and each["carrier"] != "UA" for each in entries]
        assert len(verdicts) == BATCH

    async def by_engine() -> None:
        for each in values:
            program.evaluate(each)

    units = {"verdicts": BATCH}
    least = Repeated("Python function", by_function, units=units)
    engine = Repeated("engine", by_engine, units=units, limits=[least.name])
    return await bench.measure([least, engine], paired=True)


def _volley(kind: Kind, channel: aio.Channel, *, with_chains: bool) -> Call:
    """A call that has VOLLEY batches judged, WINDOW at a time, over a stream that ends with its
    channel."""
    stream = FilterServiceStub(channel).Evaluate()
    batch = pb.EvaluateRequest(batch=kind.batch)
    filters = [pb.Filter(name="bench", expression=EXPRESSION)]
    numbers = itertools.count()

    async def send() -> None:
        number = next(numbers)
        if with_chains and (kind.are_distinct or number == 0):
            chain = pb.Chain(filters=filters, topic=f"bench/filter/t{number}")
            await stream.write(pb.EvaluateRequest(set_chain=pb.SetChain(chain=chain)))
        await stream.write(batch)

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


def _properties(number: int) -> dict[str, str]:
    return {"origin": "JFK" if number % 3 else f"A{number:03}", "carrier": f"C{number:03}"}
