"""What the machine, Redis and gRPC allow, without any service of ours."""

import os
from functools import partial
from typing import Any, Final

from grpc import aio
from grpc_health.v1 import health_pb2

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.runtime.channels import health_check
from tools.bench.bench import Bench
from tools.bench.figures import Measurement, latency, rate
from tools.bench.rounds import Call, in_turn
from tools.bench.writer import CLAIMS, admit_through

BLOCK_BYTES: Final = (1_000, 20_000, 100_000, 1_000_000)  # the sizes that are written at a time
RING_BYTES: Final = 16 * 1024 * 1024
"""How large the file is that is written over and over: as SQLite's write-ahead log, which it copies
to the database when it has become so large."""

REDIS_TIMEOUT_S: Final = 5.0


def fdatasync(size_bytes: int) -> str:
    """The name of the limit for blocks of about this size."""
    nearest = min(BLOCK_BYTES, key=lambda each: abs(each - size_bytes))
    return f"write and fdatasync {nearest // 1000:,} kB"


PING: Final = "Redis PING"
TRIVIAL_SCRIPT: Final = "Redis script that returns 1"
UNARY: Final = "gRPC unary ping-pong"
STREAM: Final = "gRPC stream ping-pong"


def admit_script(claims: int) -> str:
    return f"Redis admit script, {CLAIMS[claims]}"


async def disk(bench: Bench) -> list[Measurement]:
    """How often a block can be made durable, one after the other."""
    path = bench.folder / "ring"
    with path.open("wb", buffering=0) as ring:
        # Written once, so that no later write has to allocate: SQLite's log is used again, too.
        ring.write(bytes(RING_BYTES))
        os.fsync(ring.fileno())

        async def write(block: bytes) -> None:
            if ring.tell() + len(block) > RING_BYTES:
                ring.seek(0)
            ring.write(block)
            os.fdatasync(ring.fileno())

        calls = {fdatasync(each): partial(write, os.urandom(each)) for each in BLOCK_BYTES}
        rounds = await in_turn(calls, bench.seconds)
    path.unlink()
    return [rate(name, "calls", each) for name, each in rounds.items()]


async def redis(bench: Bench) -> list[Measurement]:
    """How often Redis answers on one connection, one call at a time."""
    url = bench.stack.redis_url
    async with connect_redis(url, timeout_s=REDIS_TIMEOUT_S, connections_max=1) as connection:
        client: Any = connection  # its types mix text and bytes
        calls: dict[str, Call] = {
            PING: client.ping,
            TRIVIAL_SCRIPT: client.register_script("return 1"),
        }
        store = RedisStateStore(connection)
        for claims in CLAIMS:
            call = await admit_through(store, f"bench/raw/admit-{claims}", claims)
            calls[admit_script(claims)] = call
        rounds = await in_turn(calls, bench.seconds)
    return [rate(name, "calls", each) for name, each in rounds.items()]


async def grpc(bench: Bench) -> list[Measurement]:
    """How often gRPC goes there and back, one call at a time: a health check of the ledger service,
    and a small publication that a ledger acknowledges without storing it."""
    async with (
        aio.insecure_channel(bench.stack.address("ledger")) as ledger,
        aio.insecure_channel(bench.null.address) as null_ledger,
    ):
        health = health_check(ledger)

        async def check() -> None:
            await health(health_pb2.HealthCheckRequest())

        stub = pb_grpc.LedgerServiceStub(null_ledger)
        stream = stub.Publish()
        await stream.write(pb.PublishRequest(open=pb.Open(topic="bench/null/ping-pong")))
        await stream.read()
        entry = pb.Entry(metadata=entry_pb2.EntryMetadata(producer_name="p", sequence_id=0))
        publications = pb.Publications(publications=[pb.Publication(request_id=1, entries=[entry])])
        request = pb.PublishRequest(publications=publications)

        async def publish() -> None:
            await stream.write(request)
            await stream.read()

        rounds = await in_turn({UNARY: check, STREAM: publish}, bench.seconds)
        stream.cancel()
    return [
        figure
        for name, each in rounds.items()
        for figure in (rate(name, "calls", each), latency(name, 0.5, each))
    ]
