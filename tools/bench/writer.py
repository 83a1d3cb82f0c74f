"""A writer, as deduplication sees it: its log exists only as numbers.

One producer numbers its messages from 0 and each is an entry, so that sequence ids and entry ids
are the same. Each call claims the next group and confirms the group before it, as the ledger does,
and has to wait for the call before it: it needs that answer's revision.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.entry.v1 import entry_pb2
from seqgate.services.dedup.ports import StateStore
from seqgate.services.deduplication import (
    Applied,
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerEntries,
    Verdict,
    Writer,
)
from seqgate.types import Position, TopicName
from tools.bench.figures import BenchError

CLAIMS: Final = (1, 100, 1_000)  # claims in a call
PRODUCER: Final = "p"
LEDGER_ID: Final = 1
PRODUCERS_MAX: Final = 10_000

Call = Callable[[], Awaitable[object]]


def claims_text(claims: int) -> str:
    """A number of claims, to be read."""
    return "1 claim" if claims == 1 else f"{claims:,} claims"


@dataclass(slots=True)
class Log:
    """How far the writer is: `stored` is the last group, `revision` the state's."""

    group: int
    stored: range = range(0)
    revision: int = 0

    @property
    def next(self) -> range:
        """What is claimed now."""
        return range(self.stored.stop, self.stored.stop + self.group)

    @property
    def tail(self) -> Position | None:
        """Where the log ends."""
        return _last(self.stored.stop)

    @property
    def before(self) -> Position | None:
        """Where the last group began."""
        return _last(self.stored.start)

    def store(self, revision: int, *, new: bool, answer: object) -> None:
        """The claimed group was let through, and is in the log now."""
        if not new:
            raise BenchError(f"an Admit was answered with {answer}")
        self.stored = self.next
        self.revision = revision


def _last(stop: int) -> Position | None:
    return Position(LEDGER_ID, stop - 1) if stop else None


async def admit_through(store: StateStore, topic: str, group: int) -> Call:
    """The call, straight through the adapter, without a service."""
    name = TopicName.parse(topic)
    log = Log(group)
    aligned = await store.rollback(name, Writer(1, LEDGER_ID, None), None, [])
    if not isinstance(aligned, Applied):
        raise BenchError(f"a rollback was answered with {aligned}")
    log.revision = aligned.revision

    async def call() -> None:
        now_ms = time.time_ns() // 1_000_000
        confirmation = None
        if log.tail is not None:
            entries = ProducerEntries(PRODUCER, tuple(log.stored), now_ms)
            confirmation = Confirmation(log.before, log.tail, (entries,), len(log.stored))
        writer = Writer(1, LEDGER_ID, log.tail, log.revision)
        claims = ProducerClaims(PRODUCER, tuple(map(Claim, log.next, log.next)))
        judged = await store.admit(
            name, writer, confirmation, [claims], now_ms=now_ms, max_producers=PRODUCERS_MAX
        )
        assert isinstance(judged, Judged), judged
        new = judged.producers[0].verdicts[-1] is Verdict.NEW
        log.store(judged.revision, new=new, answer=judged)

    return call


async def admit_unary(stub: Any, topic: str, group: int) -> Call:
    """The call, as Admit."""
    log = Log(group)
    log.revision = (await stub.Rollback(_rollback(topic))).rolled_back.revision

    async def call() -> None:
        _take(log, await stub.Admit(_admit(topic, log)))

    return call


async def admit_streamed(stub: Any, topic: str, group: int) -> Call:
    """The call, over an Exchange stream."""
    log = Log(group)
    stream = stub.Exchange()
    await stream.write(pb.ExchangeRequest(request_id=1, rollback=_rollback(topic)))
    log.revision = (await stream.read()).rollback.rolled_back.revision

    async def call() -> None:
        await stream.write(pb.ExchangeRequest(request_id=2, admit=_admit(topic, log)))
        _take(log, (await stream.read()).admit)

    return call


def _rollback(topic: str) -> pb.RollbackRequest:
    return pb.RollbackRequest(topic=topic, writer=pb.Writer(incarnation=1, epoch=LEDGER_ID))


def _admit(topic: str, log: Log) -> pb.AdmitRequest:
    writer = pb.Writer(
        incarnation=1, epoch=LEDGER_ID, position=_to_wire(log.tail), revision=log.revision
    )
    claims = pb.Claims(producer_name=PRODUCER, sequence_ids=log.next, highest_sequence_ids=log.next)
    request = pb.AdmitRequest(topic=topic, writer=writer, claims=[claims])
    if log.tail is not None:
        entries = pb.ProducerEntries(
            producer_name=PRODUCER,
            highest_sequence_ids=log.stored,
            last_append_time=time.time_ns() // 1_000_000,
        )
        request.confirmation.CopyFrom(
            pb.Confirmation(
                after=_to_wire(log.before),
                through=_to_wire(log.tail),
                producers=[entries],
                entry_count=len(log.stored),
            )
        )
    return request


def _to_wire(position: Position | None) -> entry_pb2.Position | None:
    return None if position is None else entry_pb2.Position(**position._asdict())


def _take(log: Log, response: pb.AdmitResponse) -> None:
    producers = response.verdicts.producers
    new = bool(producers) and producers[0].verdicts[-1] == pb.VERDICT_NEW
    log.store(response.verdicts.revision, new=new, answer=response)
