"""Verdicts a second.

  a Python function over dicts          the same decision, without a language
    engine                              the expression, evaluated again and again
      judging                           keys, memory and packing, in this process
        over the stream                 the service; beside a stream that accepts everything

Few property sets: decisions are remembered. All distinct: each batch is for a new chain, so that
nothing was seen before.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from grpc import aio

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.core.judging import Judging
from seqgate.services.filter.core.memo import Memo
from seqgate.services.filter.metadata import reader_of
from seqgate.services.filter.service import Filters, chain_of
from tools.bench.bench import Bench
from tools.bench.figures import ROUNDS, BenchError, Measurement, Round, in_turn, one_round, rate
from tools.bench.worker import Meter

BATCH: Final = 1_000  # entries in a batch
FEW: Final = 10  # property sets, where there are few
WINDOW: Final = 4  # batches that are under way at a time
EXPRESSION: Final = "properties.origin == 'JFK' && properties.carrier != 'UA'"

DECISIONS: Final = 200_000
DECISION_BYTES: Final = 128 * 1024 * 1024  # both as in the service


class Kind(NamedTuple):
    """Kinds of entries; `is_shared`: metadata is sent once for all entries that share it."""

    name: str
    are_distinct: bool = False
    is_shared: bool = False

    @property
    def topics(self) -> Iterator[str]:
        """The topic of each batch."""
        if self.are_distinct:
            return (f"bench/filter/t{number}" for number in itertools.count())
        return itertools.repeat("bench/filter/t")

    @property
    def metadata(self) -> list[EntryMetadata]:
        """What a batch has."""
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
    """Everything, from the plain function to the stream."""
    found = await _alone(bench)
    for kind in (FEW_SETS, FEW_SHARED, DISTINCT):
        async with (
            aio.insecure_channel(bench.stack.address("filter")) as service,
            aio.insecure_channel(bench.null.address) as null,
        ):
            streams = (
                _Stream(kind, null, bench.pids("null"), with_chains=False),
                _Stream(kind, service, bench.pids("filter"), with_chains=True),
            )
            for each in streams:
                await each.go_on()  # what only the first batch pays
            turns = [[await each.round(bench.seconds) for each in streams] for _ in range(ROUNDS)]
        answered, judged = zip(*turns, strict=True)
        bare = rate(f"bare stream, {kind.name}", "verdicts", answered, each=BATCH)
        stream = f"stream, {kind.name}"
        found += [bare, rate(stream, "verdicts", judged, bare, each=BATCH, paired=True)]
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
    plain, language, few, distinct = await in_turn(calls, bench.seconds)

    def figure(name: str, rounds: Sequence[Round], *limit: Measurement) -> Measurement:
        return rate(name, "verdicts", rounds, *limit, each=BATCH, paired=bool(limit))

    function = figure("Python function", plain)
    engine = figure("engine", language, function)
    return [
        function,
        engine,
        figure(f"judging, {FEW_SETS.name}", few, function),
        figure(f"judging, {DISTINCT.name}", distinct, engine),
    ]


def _judging(kind: Kind) -> Callable[[], Any]:
    memo = Memo(DECISIONS, DECISION_BYTES)
    filters = Filters(
        CelEngine(), memo, programs_max=1, program_bytes_max=DECISION_BYTES, chain_bytes_max=2**20
    )
    program = filters.program(EXPRESSION)
    metadata = pb.Batch(metadata=kind.metadata).metadata
    topics = kind.topics

    async def judge() -> None:
        chain = chain_of([program], next(topics), {})
        judging = Judging(chain, reader_of(chain), memo, metadata)
        while judging.go_on(DECISION_BYTES):
            pass

    return judge


# ---- over the stream


class _Stream:
    """A stream on which batches are judged, some at a time. It ends with its channel."""

    def __init__(
        self, kind: Kind, channel: aio.Channel, pids: dict[str, int], *, with_chains: bool
    ) -> None:
        stub = FilterServiceStub(channel)
        self._call: Any = stub.Evaluate()
        self._requests = _requests(kind, with_chains=with_chains)
        self._pids = pids

    async def round(self, seconds: float) -> Round:
        """Batches for so many seconds."""
        meter = Meter(self._pids)
        for _ in range(WINDOW):
            await self._send()
        with meter:
            found = await one_round(self.go_on, seconds)
        for _ in range(WINDOW):
            await self._receive()
        return meter.round(found.calls)

    async def go_on(self) -> None:
        """A batch more, and the answer to the first one that is under way."""
        await self._send()
        await self._receive()

    async def _send(self) -> None:
        for each in next(self._requests):
            await self._call.write(each)

    async def _receive(self) -> None:
        while (answer := await self._call.read()).HasField("chain_set"):
            pass
        if len(answer.verdicts.which) != BATCH:
            raise BenchError(f"not judged: {answer}")


def _requests(kind: Kind, *, with_chains: bool) -> Iterator[list[pb.EvaluateRequest]]:
    """A batch, again and again, after its chain where that is a new one."""
    filters = [pb.Filter(name="bench", expression=EXPRESSION)]
    metadata = kind.metadata
    which = [number % len(metadata) for number in range(BATCH)] if kind.is_shared else []
    batch = pb.EvaluateRequest(batch=pb.Batch(metadata=metadata, which=which))
    last = None
    for topic in kind.topics:
        if with_chains and topic != last:
            chain = pb.Chain(filters=filters, topic=topic)
            yield [pb.EvaluateRequest(set_chain=pb.SetChain(chain=chain)), batch]
        else:
            yield [batch]
        last = topic


def _properties(number: int) -> dict[str, str]:
    return {"origin": "JFK" if number % 3 else f"A{number:03}", "carrier": f"C{number:03}"}
