"""The dedup service alone: claims a second, through Admit and over an Exchange stream."""

from grpc import aio

from seqgate.api.dedup.v1.dedup_pb2_grpc import DedupServiceStub
from tools.bench import limits
from tools.bench.bench import Bench
from tools.bench.figures import Limit, Measurement, in_series, latency, rate, rounds_of
from tools.bench.writer import CLAIMS, admit_streamed, admit_unary, claims_text


async def unary(bench: Bench) -> list[Measurement]:
    """A call a group."""
    return await _measure(bench, "Admit")


async def exchange(bench: Bench) -> list[Measurement]:
    """A stream for all groups."""
    return await _measure(bench, "Exchange")


async def _measure(bench: Bench, name: str) -> list[Measurement]:
    wire, open_ = (
        (limits.UNARY, admit_unary) if name == "Admit" else (limits.STREAM, admit_streamed)
    )
    found = []
    async with aio.insecure_channel(bench.stack.address("dedup")) as channel:
        stub = DedupServiceStub(channel)
        for claims in CLAIMS:
            call = await open_(stub, f"bench/{name.lower()}/admit-{claims}", claims)
            rounds = await rounds_of(call, bench.seconds)
            title = f"{name}, {claims_text(claims)}"
            script = bench.limit(limits.admit_script(claims)).value
            calls = in_series(bench.limit(wire).value, script)
            limit = Limit(f"{wire} + admit script", calls)
            found.append(rate(title, "calls", rounds, limit))
            if claims > 1:
                many = limit._replace(value=calls * claims)
                found.append(rate(title, "claims", rounds, many, each=claims))
            found.append(latency(title, 0.5, rounds, limit.floor))
            found.append(latency(title, 0.99, rounds))
    return found
