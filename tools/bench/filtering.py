"""Verdicts a second.

  a Python function over dicts          the same decision, without a language
    engine                              the expression, evaluated again and again
      judging                           keys, memory and packing, in this process
        over the stream                 the service; beside a stream that accepts everything

Few property sets: whose decisions are remembered. All distinct: nothing was seen before, since each
batch is for a chain that is new. What is compared is measured in turn, and compared turn by turn.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from grpc import aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from services.filter.adapters.cel import CelEngine
from services.filter.core.judging import Judging
from services.filter.core.memo import Memo
from services.filter.metadata import reader_of
from services.filter.service import Filters, chain_of
from tools.bench.bench import Bench
from tools.bench.load import Meter
from tools.bench.measurement import BenchError, Measured, Measurement, rate
from tools.bench.rounds import ROUNDS, Round, one_round
from tools.bench.workload import Outcome

BATCH: Final = 1_000
"""Entries in a batch."""

FEW: Final = 10
"""Property sets, where there are few."""

WINDOW: Final = 4
"""Batches that are under way at a time."""

EXPRESSION: Final = "properties.origin == 'JFK' && properties.carrier != 'UA'"

DECISIONS: Final = 200_000
DECISION_BYTES: Final = 128 * 1024 * 1024
"""What is remembered, as the service does."""


class Kind(NamedTuple):
    """What entries there are."""

    name: str
    are_distinct: bool
    is_shared: bool
    """Metadata is sent once for all entries that share it."""


FEW_SETS: Final = Kind(f"{FEW} property sets", are_distinct=False, is_shared=False)
FEW_SHARED: Final = Kind(f"{FEW_SETS.name}, shared metadata", are_distinct=False, is_shared=True)
DISTINCT: Final = Kind("all distinct", are_distinct=True, is_shared=False)
KINDS: Final = (FEW_SETS, FEW_SHARED, DISTINCT)


async def filtering(bench: Bench) -> list[Measurement]:
    """Everything, from the plain function to the stream."""
    found = await _alone(bench)
    async with (
        aio.insecure_channel(bench.stack.address("filter")) as service,
        aio.insecure_channel(bench.null_ledger.address) as null,
    ):
        for kind in KINDS:
            bare = _Stream(kind, null, "null", bench.null_ledger.pid)
            stream = _Stream(kind, service, "filter", bench.pid("filter"))
            try:
                found += await _compared(bench, bare, stream)
            finally:
                bare.close()
                stream.close()
    return found


# ---- in this process


async def _alone(bench: Bench) -> list[Measurement]:
    program = CelEngine().compile(EXPRESSION)
    entries = [dict(_properties(number)) for number in range(BATCH)]
    values = [{"properties": each} for each in entries]

    async def by_function() -> None:
        verdicts = [each["origin"] == "JFK" and each["carrier"] != "UA" for each in entries]
        assert len(verdicts) == BATCH

    async def by_engine() -> None:
        for each in values:
            program.evaluate(each)

    calls = [by_function, by_engine, _judging(FEW_SETS), _judging(DISTINCT)]
    for call in calls:
        await call()
    turns = [[await one_round(call, bench.seconds) for call in calls] for _ in range(ROUNDS)]
    plain, engine, few, distinct = zip(*turns, strict=True)
    function, language = Measured("Python function", plain), Measured("engine", engine)

    def measured(name: str, rounds: Sequence[Round], beside: Measured | None) -> Measurement:
        return rate(name, "verdicts", rounds, each=BATCH, beside=beside)

    return [
        measured(function.name, plain, None),
        measured(language.name, engine, function),
        measured(f"judging, {FEW_SETS.name}", few, function),
        measured(f"judging, {DISTINCT.name}", distinct, language),
    ]


def _judging(kind: Kind) -> Callable[[], Any]:
    memo = Memo(DECISIONS, DECISION_BYTES)
    filters = Filters(
        CelEngine(), memo, programs_max=1, program_bytes_max=DECISION_BYTES, chain_bytes_max=2**20
    )
    program = filters.program(EXPRESSION)
    metadata = pb.Batch(metadata=_metadata(kind)).metadata
    topics = _topics(kind)

    async def judge() -> None:
        chain = chain_of([program], next(topics), {})
        judging = Judging(chain, reader_of(chain), memo, metadata)
        while judging.go_on(DECISION_BYTES):
            pass

    return judge


# ---- over the stream


async def _compared(bench: Bench, bare: "_Stream", stream: "_Stream") -> list[Measurement]:
    """The service, beside one that only answers."""
    for each in (bare, stream):
        await each.warm_up()
    turns = [
        (await bare.round(bench.seconds), await stream.round(bench.seconds)) for _ in range(ROUNDS)
    ]
    answered, judged = zip(*turns, strict=True)
    beside = Measured(f"bare stream, {bare.kind.name}", answered)
    name = f"stream, {stream.kind.name}"
    return [
        rate(beside.name, "verdicts", answered, each=BATCH, cpu=bare.cpu(answered)),
        rate(name, "verdicts", judged, each=BATCH, beside=beside, cpu=stream.cpu(judged)),
    ]


class _Stream:
    """A stream on which batches are judged, some at a time."""

    def __init__(self, kind: Kind, channel: aio.Channel, process: str, pid: int) -> None:
        stub = FilterServiceStub(channel)
        self.kind = kind
        self._call: Any = stub.Evaluate()
        self._requests = _requests(kind, with_chains=process != "null")
        self._meter = Meter({process: pid})

    async def warm_up(self) -> None:
        """What only the first batch pays."""
        await self._send()
        await self._receive()

    async def round(self, seconds: float) -> Round:
        """Batches for so long."""
        for _ in range(WINDOW):
            await self._send()
        with self._meter:
            found = await one_round(self._go_on, seconds)
        for _ in range(WINDOW):
            await self._receive()
        return found

    def cpu(self, rounds: Sequence[Round]) -> dict[str, float]:
        """Who computed how much of a core meanwhile, in percent."""
        return Outcome(list(rounds), self._meter.computed_s).cpu

    def close(self) -> None:
        """Cut it."""
        self._call.cancel()

    async def _go_on(self) -> None:
        await self._send()
        await self._receive()

    async def _send(self) -> None:
        for each in next(self._requests):
            await self._call.write(each)

    async def _receive(self) -> None:
        """The answer to a batch."""
        while (answer := await self._call.read()).HasField("chain_set"):
            pass
        if len(answer.verdicts.which) != BATCH:
            raise BenchError(f"not judged: {answer}")


def _requests(kind: Kind, *, with_chains: bool) -> Any:
    """A batch, again and again; with the chain before it that it is for, where that is new."""
    filters = [pb.Filter(name="bench", expression=EXPRESSION)]
    metadata = _metadata(kind)
    which = [number % len(metadata) for number in range(BATCH)] if kind.is_shared else []
    batch = pb.EvaluateRequest(batch=pb.Batch(metadata=metadata, which=which))
    last = None
    for topic in _topics(kind):
        if with_chains and topic != last:
            chain = pb.Chain(filters=filters, topic=topic)
            yield [pb.EvaluateRequest(set_chain=pb.SetChain(chain=chain)), batch]
        else:
            yield [batch]
        last = topic


def _topics(kind: Kind) -> Any:
    """For which topic each batch is."""
    if kind.are_distinct:
        return (f"bench/filter/t{number}" for number in itertools.count())
    return itertools.repeat("bench/filter/t")


def _metadata(kind: Kind) -> list[EntryMetadata]:
    if kind.is_shared:
        return [EntryMetadata(properties=_properties(number)) for number in range(FEW)]
    return [
        EntryMetadata(
            producer_name="bench",
            sequence_id=number,
            publish_time=1_700_000_000_000 + number,
            properties=_properties(number if kind.are_distinct else number % FEW),
            partition_key=f"N{number:05}",
            payload_crc32c=number,
        )
        for number in range(BATCH)
    ]


def _properties(number: int) -> dict[str, str]:
    return {"origin": "JFK" if number % 3 else f"A{number:03}", "carrier": f"C{number:03}"}
