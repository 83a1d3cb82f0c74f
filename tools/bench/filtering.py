"""Verdicts a second.

a Python function over dicts          the same decision, without a language
engine                                the expression, evaluated again and again
the service, over its stream          beside a stream that accepts everything
"""

import itertools
from typing import Final

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


SHARED: Final = f"{FEW} property sets, shared metadata"  # sent once for all entries that share it
DISTINCT: Final = "all distinct"  # each batch is for a new chain, so that nothing was seen before
KINDS: Final = (f"{FEW} property sets", SHARED, DISTINCT)


async def filtering(bench: Bench) -> list[Measurement]:
    found = await _alone(bench)
    units = {"verdicts": BATCH * VOLLEY}
    for kind in KINDS:
        async with (
            aio.insecure_channel(bench.address("filter")) as service,
            aio.insecure_channel(bench.address("null")) as null,
        ):
            bare, stream = f"bare stream, {kind}", f"stream, {kind}"
            every, judged = _volley(kind, null, chains=False), _volley(kind, service, chains=True)
            cases = [
                Repeated(bare, every, units=units, pids=bench.pids("null")),
                Repeated(stream, judged, units=units, limits=[bare], pids=bench.pids("filter")),
            ]
            found += await bench.measure(cases, paired=True)
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


def _volley(kind: str, channel: aio.Channel, *, chains: bool) -> Call:
    """A call that has VOLLEY batches judged, WINDOW at a time, over a stream that ends with its
    channel."""
    stream = FilterServiceStub(channel).Evaluate()
    batch = pb.EvaluateRequest(batch=_batch(kind))
    filters = [pb.Filter(name="bench", expression=EXPRESSION)]
    numbers = itertools.count()

    async def send() -> None:
        number = next(numbers)
        if chains and (kind == DISTINCT or number == 0):
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


def _batch(kind: str) -> pb.Batch:
    if kind == SHARED:
        shared = [EntryMetadata(properties=_properties(number)) for number in range(FEW)]
        return pb.Batch(metadata=shared, which=[number % FEW for number in range(BATCH)])
    batch = pb.Batch()
    for number in range(BATCH):
        batch.metadata.add(
            producer_name="bench",
            sequence_id=number,
            publish_time=1_700_000_000_000 + number,
            properties=_properties(number if kind == DISTINCT else number % FEW),
            partition_key=f"N{number:05}",
            payload_crc32c=number,
        )
    return batch


def _properties(number: int) -> dict[str, str]:
    return {"origin": "JFK" if number % 3 else f"A{number:03}", "carrier": f"C{number:03}"}
