"""The process that acts as the clients: python -m tools.bench.load

Takes a Job as JSON on standard input, and writes the outcomes as JSON to standard output. Every
workload is bounded in time and in messages.
"""

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Final, NamedTuple

from seqgate.client import Batching, Chunking, Client, Producer, Receipt, connect
from seqgate.telemetry import tracing
from tools.bench.machine import busy_s, cpu_s
from tools.bench.measurement import BenchError
from tools.bench.rounds import CALLS_MAX, Round
from tools.bench.workload import CLIENT, OTHERS, Job, Outcome, Workload, outcomes_to_json

PENDING_MAX: Final = 10_000
"""How many entries a producer has pending: the client's own default."""

PENDING_BYTES_MAX: Final = 20 * 1024 * 1024
"""How many bytes they have at most: what the service lets be unanswered, and a burst."""

BURST_MESSAGES: Final = 100
BURST_BYTES: Final = 4 * 1024 * 1024
"""After how many messages a producer looks at what has come back, and after how many bytes; after
one in any case."""

RESEND_MESSAGES: Final = 20_000
"""How many messages there are to be sent again."""

READ_MESSAGES: Final = 20_000
READ_BYTES: Final = 20 * 1024 * 1024
"""How many messages there are to be read at most, and about how many bytes."""

BATCHING: Final = Batching(messages_max=1_000, bytes_max=1024 * 1024, delay_s=0.01)
"""Batches are full: a producer that sends all it can waits for no clock."""


async def run(job: Job) -> dict[str, Outcome]:
    """Everything, round by round."""
    rounds: dict[str, list[Round]] = {each.name: [] for each in job.workloads}
    computed: dict[str, dict[str, float]] = {each.name: {} for each in job.workloads}
    for workload in job.workloads:
        await _prepare(workload, job.seconds)
    for number in range(job.rounds):
        # To and fro, so that none always has the same neighbours.
        for workload in job.workloads if number % 2 == 0 else reversed(job.workloads):
            meter = Meter({name: job.pids[name] for name in workload.processes})
            rounds[workload.name].append(await _round(workload, job.seconds, meter))
            for name, seconds in meter.computed_s.items():
                so_far = computed[workload.name].get(name, 0.0)
                computed[workload.name][name] = so_far + seconds
    return {name: Outcome(rounds[name], computed[name]) for name in rounds}


class Meter:
    """How long something took, and how much the processes computed meanwhile."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.elapsed_s = 0.0
        self.computed_s: dict[str, float] = {}

    def __enter__(self) -> None:
        self._before = self._now()
        self._began = time.perf_counter()

    def __exit__(self, *rest: object) -> None:
        self.elapsed_s += time.perf_counter() - self._began
        for name, seconds in self._now().items():
            spent_s = seconds - self._before[name]
            self.computed_s[name] = self.computed_s.get(name, 0.0) + spent_s

    def _now(self) -> dict[str, float]:
        ours = {CLIENT: time.process_time()}
        ours |= {name: cpu_s(pid) for name, pid in self._pids.items()}
        return ours | {OTHERS: busy_s() - sum(ours.values())}


async def _prepare(workload: Workload, seconds: float) -> None:
    """Store what is to be sent again, or read."""
    if workload.kind not in ("resend", "read"):
        return
    async with connect(workload.address) as client, _producer(client, workload) as producer:
        if workload.kind == "resend":
            await _pump(producer, workload, until=float("inf"), count_max=RESEND_MESSAGES)
        else:
            until = time.perf_counter() + seconds
            count_max = min(READ_MESSAGES, READ_BYTES // workload.payload_bytes)
            await _pump(producer, workload, until=until, count_max=count_max)


async def _round(workload: Workload, seconds: float, meter: Meter) -> Round:
    async with connect(workload.address) as client:
        match workload.kind:
            case "publish":
                return await _publish(client, workload, seconds, meter)
            case "resend":
                return await _resend(client, workload, seconds, meter)
            case "one at a time":
                return await _one_at_a_time(client, workload, seconds, meter)
            case "read":
                return await _read(client, workload, seconds, meter)


async def _publish(client: Client, workload: Workload, seconds: float, meter: Meter) -> Round:
    producers = [_producer(client, workload) for _ in range(workload.producers)]
    for producer in producers:
        await producer.open()
        await _pump(producer, workload, until=0, count_max=1)  # a burst, to warm up
    with meter:
        until = time.perf_counter() + seconds
        counts = await asyncio.gather(
            *(_pump(each, workload, until=until, count_max=CALLS_MAX) for each in producers)
        )
    for producer in producers:
        await producer.close()
    return Round(sum(counts), meter.elapsed_s, [])


async def _resend(client: Client, workload: Workload, seconds: float, meter: Meter) -> Round:
    """A producer that starts again and sends everything again, as often as there is time."""
    count = 0
    while meter.elapsed_s < seconds and count < CALLS_MAX:
        async with _producer(client, workload) as producer:
            with meter:
                until = time.perf_counter() + seconds - meter.elapsed_s
                count += await _pump(
                    producer, workload, until=until, count_max=RESEND_MESSAGES, duplicate=True
                )
    return Round(count, meter.elapsed_s, [])


async def _one_at_a_time(client: Client, workload: Workload, seconds: float, meter: Meter) -> Round:
    payload = _payload(workload)
    latencies_s: list[float] = []
    async with _producer(client, workload) as producer:
        await producer.send(payload)
        with meter:
            now = time.perf_counter()
            until = now + seconds
            while now < until and len(latencies_s) < CALLS_MAX:
                await producer.send(payload)
                ended = time.perf_counter()
                latencies_s.append(ended - now)
                now = ended
    return Round(len(latencies_s), meter.elapsed_s, latencies_s)


async def _read(client: Client, workload: Workload, seconds: float, meter: Meter) -> Round:
    """The whole topic, as often as there is time."""
    count = 0
    with meter:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until and count < CALLS_MAX:
            async with client.reader(workload.topic, follow=False) as reader:
                async for message in reader:
                    if len(message.payload) != workload.payload_bytes:
                        raise BenchError("a message is not what was published")
                    count += 1
    return Round(count, meter.elapsed_s, [])


def _producer(client: Client, workload: Workload) -> Producer:
    return client.producer(
        workload.topic,
        name="resender" if workload.kind == "resend" else None,
        batching=BATCHING if workload.batched else None,
        chunking=Chunking(workload.chunk_bytes) if workload.chunk_bytes else None,
        max_pending_messages=PENDING_MAX,
    )


async def _pump(
    producer: Producer,
    workload: Workload,
    *,
    until: float,
    count_max: int,
    duplicate: bool = False,
) -> int:
    """Send as much as may be pending, until it is time or enough; return when all of it is stored:
    as new, or each as the duplicate of an earlier one."""
    payload = _payload(workload)
    pace = _Pace.of(workload)
    explicit = workload.kind == "resend"
    waiting: deque[asyncio.Future[Receipt]] = deque()
    count = 0
    for first in _bursts(pace.messages, until, count_max):
        for sequence_id in range(first, first + pace.messages):
            waiting.append(
                producer.send_nowait(payload, sequence_id=sequence_id if explicit else None)
            )
        count += pace.messages
        await asyncio.sleep(0)
        while producer.pending_messages + pace.entries > pace.pending_max:
            _check(await waiting.popleft(), duplicate=duplicate)
        while waiting and waiting[0].done():
            _check(waiting.popleft().result(), duplicate=duplicate)
    for each in waiting:
        _check(await each, duplicate=duplicate)
    return count


class _Pace(NamedTuple):
    """How many messages make a burst, how many entries that is, and how many entries may be
    pending."""

    messages: int
    entries: int
    pending_max: int

    @classmethod
    def of(cls, workload: Workload) -> "_Pace":
        """As few as messages of this size need."""
        messages = max(1, min(BURST_MESSAGES, BURST_BYTES // workload.payload_bytes))
        entry_bytes = workload.chunk_bytes or workload.payload_bytes
        entries = messages * -(-workload.payload_bytes // entry_bytes)
        return cls(messages, entries, min(PENDING_MAX, PENDING_BYTES_MAX // entry_bytes))


def _payload(workload: Workload) -> bytes:
    """Bytes that do not compress. Zeros would be one page of memory, and never leave the cache."""
    return Random(0).randbytes(workload.payload_bytes)


def _bursts(messages: int, until: float, count_max: int) -> Iterator[int]:
    """Where each burst begins; there is always a first."""
    for first in itertools.count(0, messages):
        yield first
        if first + messages >= count_max or time.perf_counter() >= until:
            return


def _check(receipt: Receipt, *, duplicate: bool) -> None:
    if receipt.duplicate != duplicate:
        raise BenchError(f"a message came back as {receipt}")


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    with tracing("bench"):
        outcomes = asyncio.run(run(job))
    print(outcomes_to_json(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
