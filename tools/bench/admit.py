"""The dedup service alone: claims a second, through Admit and over an Exchange stream."""

from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio

from seqgate.api.dedup.v1 import dedup_pb2_grpc as pb_grpc
from tools.bench import limits
from tools.bench.bench import Bench
from tools.bench.measurement import Limit, Measurement, latency, rate
from tools.bench.rounds import rounds_of
from tools.bench.statistics import in_series
from tools.bench.writer import CLAIMS, Call, admit_streamed, admit_unary, claims_text

Open = Callable[[Any, str, int], Awaitable[Call]]


async def unary(bench: Bench) -> list[Measurement]:
    """A call a group."""
    return await _measure(bench, "Admit", admit_unary, limits.UNARY)


async def exchange(bench: Bench) -> list[Measurement]:
    """A stream for all groups."""
    return await _measure(bench, "Exchange", admit_streamed, limits.STREAM)


async def _measure(bench: Bench, name: str, open_: Open, wire: str) -> list[Measurement]:
    found = []
    async with aio.insecure_channel(bench.stack.address("dedup")) as channel:
        stub = pb_grpc.DedupServiceStub(channel)
        for claims in CLAIMS:
            call = await open_(stub, f"bench/{name.lower()}/admit-{claims}", claims)
            rounds = await rounds_of(call, bench.seconds)
            title = f"{name}, {claims_text(claims)}"
            limit = _limit(bench, wire, claims)
            found.append(rate(title, "calls", rounds, limit=limit))
            if claims > 1:
                many = limit._replace(value=limit.value * claims)
                found.append(rate(title, "claims", rounds, each=claims, limit=many))
            floor = limit._replace(value=1000 / limit.value)
            found += [latency(title, 0.5, rounds, floor), latency(title, 0.99, rounds)]
    return found


def _limit(bench: Bench, wire: str, claims: int) -> Limit:
    """There and back, and the script, one after the other."""
    script = limits.admit_script(claims)
    value = in_series(bench.limit(wire).value, bench.limit(script).value)
    return Limit(f"{wire} + admit script", value)
