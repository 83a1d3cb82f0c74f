"""Peers: what others do to the same end, and Seqgate beside it, in rounds that take turns.

SET key NX EX    deduplication by hand, on the services' own Redis. Beside it are claims of the
                 dedup service, which also survive that Redis loses its data, that the caller
                 dies before it has stored anything, and a resend after the keys expired.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, Final

from grpc import aio

from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from tools.bench.bench import Bench
from tools.bench.figures import MEDIAN, Measurement
from tools.bench.parts import CLAIMS, DEDUP_TIMEOUT_S, REDIS_TIMEOUT_S, groups
from tools.bench.rounds import Call, Case, Repeated, check

PIPELINED: Final = {1: "one at a time", 1_000: "1,000 at a time"}  # claims, and keys
DATABASE: Final = 1  # of keys: the dedup service has the other one
REMEMBERED_S: Final = 120  # as long as JetStream does, by default


async def peers(bench: Bench) -> list[Measurement]:
    return await _deduplicators(bench)


async def _deduplicators(bench: Bench) -> list[Measurement]:
    url = f"redis://{bench.stack.address('redis')}/{DATABASE}"
    async with (
        connect_redis(url, timeout_s=REDIS_TIMEOUT_S, connections_max=1) as redis,
        aio.insecure_channel(bench.address("dedup")) as channel,
    ):
        line = GrpcDeduplicator(channel, timeout_s=DEDUP_TIMEOUT_S)
        numbers = count()
        cases: list[Case] = []
        for claims, text in PIPELINED.items():
            name = f"Redis: SET NX EX, {text}"
            admit = await groups(f"bench/peers/admit-{claims}", claims, line.rollback, line.admit)
            how: dict[str, Any] = {"units": {"claims": claims}}
            how["shares"] = [MEDIAN] if claims == 1 else []
            cases += [
                Repeated(name, _set(redis, numbers, claims), pids=bench.pids("redis"), **how),
                Repeated(
                    f"Seqgate: {CLAIMS[claims]} on a stream",
                    admit,
                    limits=[name],
                    pids=bench.pids("dedup", "redis"),
                    **how,
                ),
            ]
        found = await bench.measure(cases, paired=True)
        await redis.flushdb()
        return found


def _set(redis: Any, numbers: Iterator[int], keys: int) -> Call:
    """A call that sets so many new keys, without a wait between them."""

    def set_key(client: Any) -> Any:
        return client.set(f"bench/peers:producer:{next(numbers)}", "", nx=True, ex=REMEMBERED_S)

    async def set_one() -> None:
        check(await set_key(redis), expected=True)

    async def set_all() -> None:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(keys):
            set_key(pipeline)
        check(await pipeline.execute(), [True] * keys)

    return set_one if keys == 1 else set_all
