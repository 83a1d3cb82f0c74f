"""The dedup service alone: claims a second, through Admit and over an Exchange stream."""

from typing import Any, Final

from grpc import aio

from seqgate.api.internal.dedup.v1.writer_pb2_grpc import DedupWriterServiceStub
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from seqgate.services.runtime import deduplication as wire
from tools.bench import limits
from tools.bench.bench import Bench
from tools.bench.figures import Measurement, latency, rate
from tools.bench.rounds import rounds_of
from tools.bench.writer import CLAIMS, Admit, groups

TIMEOUT_S: Final = 30.0


async def unary(bench: Bench) -> list[Measurement]:
    async with aio.insecure_channel(bench.stack.address("dedup")) as channel:
        stub = DedupWriterServiceStub(channel)

        async def admit(*group: Any) -> object:
            return wire.read_admit_response(await stub.Admit(wire.admit_request(*group)))

        return await _measure(bench, "Admit", limits.UNARY, admit, channel)


async def exchange(bench: Bench) -> list[Measurement]:
    async with aio.insecure_channel(bench.stack.address("dedup")) as channel:
        admit = GrpcDeduplicator(channel, timeout_s=TIMEOUT_S).admit
        return await _measure(bench, "Exchange", limits.STREAM, admit, channel)


async def _measure(
    bench: Bench, name: str, ping_pong: str, admit: Admit, channel: aio.Channel
) -> list[Measurement]:
    found = []
    align = GrpcDeduplicator(channel, timeout_s=TIMEOUT_S).rollback
    for claims, noun in CLAIMS.items():
        call = await groups(f"bench/{name.lower()}/admit-{claims}", claims, align, admit)
        rounds = await rounds_of(call, bench.seconds)
        title = f"{name}, {noun}"
        script = limits.admit_script(claims)
        limit = bench.series(f"{ping_pong} + admit script", ping_pong, script)
        found.append(rate(title, "calls", rounds, limit))
        if claims > 1:
            many = limit._replace(value=limit.value * claims)
            found.append(rate(title, "claims", rounds, many, each=claims))
        found.append(latency(title, 0.5, rounds, limit.floor))
        found.append(latency(title, 0.99, rounds))
    return found
