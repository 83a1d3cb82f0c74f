"""Parts alone: what the machine, Redis and gRPC allow, and beside it store, dedup and filter."""

import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from grpc import aio
from grpc_health.v1 import health_pb2

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.filter.v1 import filter_pb2 as filter_pb
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.api.internal.dedup.v1.writer_pb2_grpc import DedupWriterServiceStub
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.services import deduplication as dedup
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.ports import LedgerStore
from seqgate.services.runtime import deduplication as wire
from seqgate.services.runtime.channels import health_check
from seqgate.types import Position, TopicName
from tools.bench.bench import Bench
from tools.bench.figures import MEDIAN, Measurement
from tools.bench.logs import LEDGER_ID, METADATA, entry
from tools.bench.rounds import BenchError, Call, Repeated, check

BLOCK_BYTES: Final = (1_000, 20_000, 100_000, 1_000_000)  # the sizes that are written at a time
RING_BYTES: Final = 16 * 1024 * 1024  # of the file written over and over: as SQLite's log at most
COMMITS: Final = tuple((count, size) for size in (100, 1_000) for count in (1, 100, 1_000))

BATCH: Final = 1_000  # entries in a batch that is judged
WINDOW: Final = 4  # batches that are under way at a time
VOLLEY: Final = 20  # batches of a call
EXPRESSION: Final = "properties.origin == 'JFK' && properties.carrier != 'UA'"
FEW: Final = 10  # property sets, where there are few
SHARED: Final = f"{FEW} property sets, shared metadata"  # sent once for all entries that share it
DISTINCT: Final = "all distinct"  # each batch is for a new chain, so that nothing was seen before

CLAIMS: Final = {1: "1 claim", 100: "100 claims", 1_000: "1,000 claims"}  # in a call
PRODUCER: Final = "p"
PRODUCERS_MAX: Final = 10_000
REDIS_TIMEOUT_S: Final = 5.0
DEDUP_TIMEOUT_S: Final = 30.0

UNARY: Final = "gRPC unary ping-pong"
STREAM: Final = "gRPC stream ping-pong"


def fdatasync(size_bytes: int) -> str:
    """The name of the limit for blocks of about this size."""
    nearest = min(BLOCK_BYTES, key=lambda each: abs(each - size_bytes))
    return f"write and fdatasync {nearest // 1000:,} kB"


def admit_script(claims: int) -> str:
    return f"Redis admit script, {CLAIMS[claims]}"


# ---- limits


async def disk(bench: Bench) -> list[Measurement]:
    """How often a block can be made durable, one after the other."""
    path = bench.stack.folder / "ring"
    with path.open("wb", buffering=0) as ring:
        # Written once, so that no later write has to allocate: SQLite's log is used again, too.
        ring.write(bytes(RING_BYTES))
        os.fsync(ring.fileno())

        async def write(block: bytes) -> None:
            if ring.tell() + len(block) > RING_BYTES:
                ring.seek(0)
            ring.write(block)
            os.fdatasync(ring.fileno())

        blocks = map(os.urandom, BLOCK_BYTES)
        cases = [Repeated(fdatasync(len(block)), partial(write, block)) for block in blocks]
        return await bench.measure(cases)


async def redis(bench: Bench) -> list[Measurement]:
    """How often Redis answers on one connection, one call at a time."""
    async with connect_redis(
        bench.stack.redis_url, timeout_s=REDIS_TIMEOUT_S, connections_max=1
    ) as connection:
        client: Any = connection  # its types mix text and bytes
        store = RedisStateStore(connection)

        async def align(name: TopicName, writer: dedup.Writer, confirmation: None) -> object:
            return await store.rollback(name, writer, confirmation, [])

        async def admit(*group: Any) -> object:
            now_ms = time.time_ns() // 1_000_000
            return await store.admit(*group, now_ms=now_ms, max_producers=PRODUCERS_MAX)

        cases = [
            Repeated("Redis PING", client.ping),
            Repeated("Redis script that returns 1", client.register_script("return 1")),
        ]
        for claims in CLAIMS:
            call = await groups(f"bench/raw/admit-{claims}", claims, align, admit)
            cases.append(Repeated(admit_script(claims), call))
        return await bench.measure(cases)


async def grpc(bench: Bench) -> list[Measurement]:
    """How often gRPC goes there and back, one call at a time: a health check of the ledger service,
    and a small publication that a ledger acknowledges without storing it."""
    async with (
        aio.insecure_channel(bench.address("ledger")) as ledger,
        aio.insecure_channel(bench.address("null")) as null_ledger,
    ):
        ask = partial(health_check(ledger), health_pb2.HealthCheckRequest())
        stream = pb_grpc.LedgerServiceStub(null_ledger).Publish()
        await stream.write(pb.PublishRequest(open=pb.Open(topic="bench/null/ping-pong")))
        await stream.read()
        entry = pb.Entry(metadata=entry_pb2.EntryMetadata(producer_name="p", sequence_id=0))
        publications = pb.Publications(publications=[pb.Publication(request_id=1, entries=[entry])])
        request = pb.PublishRequest(publications=publications)

        async def publish() -> None:
            await stream.write(request)
            await stream.read()

        calls: dict[str, Call] = {UNARY: ask, STREAM: publish}
        cases = [Repeated(name, call, shares=[MEDIAN]) for name, call in calls.items()]
        return await bench.measure(cases)


# ---- the ledger's store


async def commits(
    bench: Bench, shapes: Sequence[tuple[int, int]] = COMMITS, seconds: float | None = None
) -> list[Measurement]:
    """Commits of so many entries with payloads of so many bytes, beside a write and fdatasync of as
    many bytes."""
    async with open_sqlite_store(bench.stack.folder / "store.db") as store:
        cases = [await _commit(bench, store, *shape) for shape in shapes]
        return await bench.measure(cases, seconds=seconds)


async def _commit(bench: Bench, store: LedgerStore, count: int, payload_bytes: int) -> Repeated:
    topic = TopicName.parse(f"bench/store/{count}x{payload_bytes}")
    block_bytes = count * (payload_bytes + len(METADATA))
    share = min(1.0, BLOCK_BYTES[-1] / block_bytes)  # more is written in several blocks
    noun = "entry" if count == 1 else "entries"
    return Repeated(
        f"store append, {count:,} {noun} of {payload_bytes:,} B a commit",
        await appender(store, topic, count, payload_bytes),
        units={"entries": count},
        limits=[bench.limit(fdatasync(block_bytes), each=share)],
        payload_bytes=payload_bytes,
        in_bytes=True,
    )


async def appender(store: LedgerStore, topic: TopicName, count: int, payload_bytes: int) -> Call:
    """A call that appends so many entries to a new topic, one call after the other."""
    log = await store.take(topic, create=True)
    tail, stored = log.tail, 0
    payload = os.urandom(payload_bytes)
    entries = [entry("p", number, payload) for number in range(count)]

    async def append() -> None:
        nonlocal tail, stored
        await store.append(topic, log.ledger_id, tail, entries, time.time_ns() // 1_000_000)
        stored += count
        tail = Position(log.ledger_id, stored - 1)

    return append


# ---- the dedup service


async def claims_by(bench: Bench, *, name: str) -> list[Measurement]:
    """Claims a second, by the unary call Admit or over an Exchange stream."""
    ping_pong = UNARY if name == "Admit" else STREAM
    async with aio.insecure_channel(bench.address("dedup")) as channel:
        stub = DedupWriterServiceStub(channel)
        line = GrpcDeduplicator(channel, timeout_s=DEDUP_TIMEOUT_S)

        async def admit(*group: Any) -> object:
            return wire.read_admit_response(await stub.Admit(wire.admit_request(*group)))

        cases = []
        for claims, noun in CLAIMS.items():
            topic = f"bench/{name.lower()}/admit-{claims}"
            way = admit if ping_pong == UNARY else line.admit
            call = await groups(topic, claims, line.rollback, way)
            units = {"calls": 1} if claims == 1 else {"calls": 1, "claims": claims}
            limit = bench.series(f"{ping_pong} + admit script", ping_pong, admit_script(claims))
            shares = (MEDIAN, 0.99)
            cases.append(
                Repeated(f"{name}, {noun}", call, units=units, shares=shares, limits=[limit])
            )
        return await bench.measure(cases)


async def groups(
    topic: str,
    claims: int,
    align: Callable[[TopicName, dedup.Writer, None], Awaitable[object]],
    admit: Callable[..., Awaitable[object]],
) -> Call:
    """A call that admits the next group of an aligned writer's claims, and confirms the group
    before it, as the ledger does. Each needs the revision in the answer before it.

    The log exists only as numbers: one producer numbers its messages from 0 and each is an entry,
    so that sequence ids and entry ids are the same.
    """
    name = TopicName.parse(topic)
    aligned = await align(name, dedup.Writer(1, LEDGER_ID, None), None)
    if not isinstance(aligned, dedup.Applied):
        raise BenchError(f"an alignment was answered with {aligned}")
    revision, stored = aligned.revision, range(0)

    async def call() -> None:
        nonlocal revision, stored
        before, tail = _last_of(stored.start), _last_of(stored.stop)
        confirmation = None
        if tail is not None:
            entries = dedup.ProducerEntries(PRODUCER, tuple(stored), time.time_ns() // 1_000_000)
            confirmation = dedup.Confirmation(before, tail, (entries,), len(stored))
        group = range(stored.stop, stored.stop + claims)
        wanted = [dedup.ProducerClaims(PRODUCER, tuple(map(dedup.Claim, group, group)))]
        answer = await admit(name, dedup.Writer(1, LEDGER_ID, tail, revision), confirmation, wanted)
        if (
            not isinstance(answer, dedup.Judged)
            or answer.producers[0].verdicts[-1] is not dedup.Verdict.NEW
        ):
            raise BenchError(f"an Admit was answered with {answer}")
        revision, stored = answer.revision, group

    return call


def _last_of(entries: int) -> Position | None:
    """The last position of a log with this many entries."""
    return Position(LEDGER_ID, entries - 1) if entries else None


# ---- the filter service


async def filtering(bench: Bench) -> list[Measurement]:
    """Verdicts a second, beside a stream that accepts everything."""
    found = await _alone(bench)
    units = {"verdicts": BATCH * VOLLEY}
    for kind in (f"{FEW} property sets", SHARED, DISTINCT):
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
    """Verdicts in this process: of the expression, beside the same decision without a language."""
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
    batch = filter_pb.EvaluateRequest(batch=_batch(kind))
    filters = [filter_pb.Filter(name="bench", expression=EXPRESSION)]
    numbers = itertools.count()

    async def send() -> None:
        number = next(numbers)
        if chains and (kind == DISTINCT or number == 0):
            chain = filter_pb.Chain(filters=filters, topic=f"bench/filter/t{number}")
            await stream.write(filter_pb.EvaluateRequest(set_chain=filter_pb.SetChain(chain=chain)))
        await stream.write(batch)

    async def receive() -> None:
        answer = await stream.read()
        while isinstance(answer, filter_pb.EvaluateResponse) and answer.HasField("chain_set"):
            answer = await stream.read()
        if not isinstance(answer, filter_pb.EvaluateResponse):
            raise BenchError(f"not judged: {answer}")
        check(len(answer.verdicts.which), BATCH)

    async def volley() -> None:
        for number in range(VOLLEY + WINDOW):
            if number >= WINDOW:
                await receive()
            if number < VOLLEY:
                await send()

    return volley


def _batch(kind: str) -> filter_pb.Batch:
    if kind == SHARED:
        shared = [entry_pb2.EntryMetadata(properties=_properties(number)) for number in range(FEW)]
        return filter_pb.Batch(metadata=shared, which=[number % FEW for number in range(BATCH)])
    batch = filter_pb.Batch()
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
