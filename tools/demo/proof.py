"""Is every message in the log, once, in order, unaltered, and where its receipt says?

`recover` brings back what Redis has lost. `prove` collects the evidence: the log as a reader gets
it and entry by entry, the producers' receipts, and the deduplication state. Two machines hold it
against the data set: MessageProof judges messages; ChunkProof judges the attempts to publish large
messages. Nothing is believed that a service or a producer says about itself.
"""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Final

from grpc import aio

from seqgate.api.dedup.v1 import dedup_pb2, dedup_pb2_grpc
from seqgate.api.ledger.v1 import ledger_pb2, ledger_pb2_grpc
from seqgate.client import Dropped, DropReason, Message, connect
from seqgate.dev.stack import Stack
from seqgate.owners import FollowingChannel
from seqgate.types import Position
from tools.demo.dataset import Original, Originals
from tools.demo.publisher import TOPIC, Progress
from tools.demo.relay import Crashes, Stalled
from tools.demo.report import Screen
from tools.stack.worker import in_worker

EXAMPLES_MAX: Final = 3  # examples of each broken promise that are kept
PRODUCERS_MAX: Final = 1_000  # far more than there are

REBUILT: Final = ("topics", "producers", "entries", "seconds")
AUDITED: Final = ("topics", "producers", "entries", "messages", "findings")
"""The fields of the jobs' summaries that are reported."""

Fields = dict[str, Any]


async def prove(
    stack: Stack,
    folder: Path,
    carriers: Originals,
    airports: Originals,
    crashes: Crashes,
    screen: Screen,
) -> tuple["Findings", "Findings"]:
    """Collect all evidence, and judge the flights and the large messages. `folder` has the
    producers' journals."""
    flights, weather = list(chain(*carriers.values())), list(chain(*airports.values()))
    of_flights, of_weather, of_chunks = MessageProof(flights), MessageProof(weather), ChunkProof()
    step = screen.step("proving", len(flights) + len(weather))
    seen = 0
    async with (
        connect(stack.target("ledger")) as client,
        client.reader(TOPIC, follow=False, on_dropped=of_chunks.see_dropped) as reader,
    ):
        async for message in reader:
            if message.producer_name in airports:
                of_weather.see_message(message)
                of_chunks.see_message(message)
            else:
                of_flights.see_message(message)
            seen += 1
            if seen % 1_000 == 0:
                step(seen)
    step(seen)
    async with FollowingChannel(stack.target("ledger"), aio.insecure_channel) as channel:
        request = ledger_pb2.ReadRequest(topic=TOPIC, metadata_only=True)
        request.start.earliest.SetInParent()
        async for response in ledger_pb2_grpc.LedgerServiceStub(channel).Read(request):
            for stored in response.entries.entries:
                of_chunks.see_entry(stored)
    persisted = await marks(stack)
    for proof, producers in ((of_flights, carriers), (of_weather, airports)):
        for name in producers:
            for receipt in Progress(folder, name).read().receipts:
                proof.see_receipt(name, *receipt)
            proof.see_mark(name, persisted.get(name))
    messages = of_weather.findings()
    return of_flights.findings(), of_chunks.findings(messages, len(weather), crashes)


async def batches_cut(stack: Stack) -> int:
    """How many batches overlapped what was stored, since Redis last lost its state."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        request = dedup_pb2.GetTopicStatusRequest(topic=TOPIC)
        return int((await stub.GetTopicStatus(request, timeout=10)).counts.partial_claims)


async def marks(stack: Stack) -> dict[str, int | None]:
    """The last id of each producer that deduplication knows to be stored."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        request = dedup_pb2.ListProducersRequest(topic=TOPIC, page_size=PRODUCERS_MAX)
        producers = (await stub.ListProducers(request, timeout=10)).producers
    return {
        each.name: each.persisted_sequence_id if each.HasField("persisted_sequence_id") else None
        for each in producers
    }


async def recover(stack: Stack) -> tuple[Fields, Fields]:
    """Have Spark jobs rebuild the lost state, from snapshots and the log after them; compare it
    with the whole log; and audit the log. They share a process and a session.

    Returns:
        The rebuild's figures: `differences` counts producers that then differ from the log, and
        `failed` topics that were not rebuilt. And the audit's figures.

    Raises:
        ChildFailed: a job did not run to its end.
    """
    addresses = map(stack.address, ("ledger", "dedup", "cursor"))
    found: tuple[Fields, Fields] = await in_worker(__name__, *addresses)
    return found


def run(ledger: str, dedup: str, cursor: str) -> tuple[Fields, Fields]:
    # The demo itself has no Spark.
    from seqgate.jobs.audit.__main__ import main as audit
    from seqgate.jobs.rebuild.__main__ import main as rebuild
    from seqgate.spark import local_session

    log = ["--json", "--ledger", ledger]
    everything = [*log, "--dedup", dedup, "--cursor", cursor]
    spark = local_session("seqgate demo")
    rebuilt = _lines("rebuild", lambda: rebuild(everything, spark))
    compared = _lines("compare", lambda: rebuild([*everything, "--dry-run", "--diff", "*"], spark))
    started = time.monotonic()
    audited = _lines("audit", lambda: audit(log, spark))
    seconds = round(time.monotonic() - started, 1)
    topics = [line for line in compared if line["kind"] == "topic"]
    failed = [line for line in rebuilt if line["kind"] == "topic" and line["outcome"] != "loaded"]
    failed += [line for line in topics if line["outcome"] not in ("equal", "different")]
    differences = sum(line["differing"] for line in topics)
    return (
        _summary(rebuilt, REBUILT) | {"differences": differences, "failed": len(failed)},
        _summary(audited, AUDITED) | {"seconds": seconds},
    )


def _lines(name: str, job: Callable[[], int]) -> list[Fields]:
    """The JSON lines that a job prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        status = job()
    if status not in (0, 1):  # 1: it found differences or violations
        raise SystemExit(f"{name} ended with {status}: {printed.getvalue()}")
    return list(map(json.loads, printed.getvalue().splitlines()))


def _summary(lines: list[Fields], names: tuple[str, ...]) -> Fields:
    summary = next(line for line in lines if line["kind"] == "summary")
    return {name: summary[name] for name in names}


class Findings:
    """Broken promises, counted, with examples."""

    def __init__(self, *promises: str) -> None:
        self.counts = dict.fromkeys(promises, 0)  # and how much was looked at
        self.examples: dict[str, list[str]] = {}
        self.broken = 0

    def note(self, promise: str, example: str) -> None:
        self.counts[promise] += 1
        self.broken += 1
        examples = self.examples.setdefault(promise, [])
        if len(examples) < EXAMPLES_MAX:
            examples.append(example)


class MessageProof:
    """Takes messages in the log's order, then receipts and marks; `findings` judges them."""

    def __init__(self, originals: Iterable[Original]) -> None:
        self._expected = {(each.producer, each.sequence_id): each for each in originals}
        self._where: dict[tuple[str, int], str] = {}
        self._last: dict[str, int] = {}
        self._receipts = 0
        self._findings = Findings(
            *("stored_twice", "lost", "out_of_order", "altered", "unknown"),
            *("receipts_wrong", "marks_wrong"),
        )

    def see_message(self, message: Message) -> None:
        identity = (message.producer_name, message.sequence_id)
        where = str(message.id)
        original = self._expected.get(identity)
        if original is None:
            self._findings.note("unknown", f"{identity} at {where}")
            return
        if identity in self._where:
            self._findings.note("stored_twice", f"{identity} at {self._where[identity]}, {where}")
            return
        self._where[identity] = where
        if message.sequence_id <= self._last.get(message.producer_name, -1):
            self._findings.note("out_of_order", f"{identity} at {where}")
        self._last[message.producer_name] = message.sequence_id
        given = (message.payload, message.key, message.properties)
        if given != (original.payload, original.key, original.properties):
            self._findings.note("altered", f"{identity} at {where}")

    def see_receipt(self, producer: str, sequence_id: int, message_id: str) -> None:
        self._receipts += 1
        where = self._where.get((producer, sequence_id))
        if where != message_id:
            example = f"({producer}, {sequence_id}): {message_id}, is at {where}"
            self._findings.note("receipts_wrong", example)

    def see_mark(self, producer: str, persisted: int | None) -> None:
        if persisted != self._last.get(producer):
            self._findings.note("marks_wrong", f"{producer}: {persisted}")

    def findings(self) -> Findings:
        for identity in self._expected.keys() - self._where.keys():
            self._findings.note("lost", str(identity))
        self._findings.counts |= {"stored": len(self._where), "receipts": self._receipts}
        return self._findings


@dataclass(slots=True)
class _Attempt:
    """An attempt to publish a message, by its producer's name and its uuid. `reported`: a reader
    reported that it dropped the chunks."""

    name: tuple[str, str]
    num_chunks: int = 0
    chunk_ids: list[int] = field(default_factory=list)
    aborted: bool = False
    reported: bool = False

    @property
    def complete(self) -> bool:
        return len(self.chunk_ids) == self.num_chunks


class ChunkProof:
    """Did crashes interrupt large messages, and did any reader get the chunks that they left?

    An interrupted attempt leaves its first chunks in the log; it is aborted there, and none of them
    may reach a reader.
    """

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, str], _Attempt] = {}
        self._attempt_at: dict[Position, _Attempt] = {}
        self._read: list[Position] = []

    def see_entry(self, stored: ledger_pb2.StoredEntry) -> None:
        metadata = stored.metadata
        if stored.aborts:
            self._attempt(metadata.producer_name, stored.aborts).aborted = True
        if metadata.num_chunks_from_msg > 1:
            attempt = self._attempt(metadata.producer_name, metadata.uuid)
            attempt.chunk_ids.append(metadata.chunk_id)
            attempt.num_chunks = metadata.num_chunks_from_msg
            position = Position(stored.position.ledger_id, stored.position.entry_id)
            self._attempt_at[position] = attempt

    def see_message(self, message: Message) -> None:
        self._read.append(message.id.position)

    def see_dropped(self, dropped: Dropped) -> None:
        if dropped.reason is DropReason.ABORTED:
            self._attempt(dropped.producer, dropped.uuid).reported = True

    def findings(self, messages: Findings, sent: int, crashes: Crashes) -> Findings:
        """Judge what was seen, with the findings about the messages themselves. `sent` is how many
        there should be."""
        found = Findings("orphan_chunks_delivered", "large_messages_wrong")
        found.broken = found.counts["large_messages_wrong"] = messages.broken
        found.examples |= messages.examples
        if len(self._read) != sent:
            found.note("large_messages_wrong", f"{len(self._read)} were read, {sent} sent")
        for position in self._read:
            attempt = self._attempt_at.get(position)
            if attempt is not None and (attempt.aborted or not attempt.complete):
                found.note("orphan_chunks_delivered", f"{attempt.name} at {position}")
        attempts = self._attempts.values()
        for attempt in attempts:
            in_order = attempt.chunk_ids == list(range(len(attempt.chunk_ids)))
            if attempt.chunk_ids and (attempt.aborted == attempt.complete or not in_order):
                found.note("large_messages_wrong", str(attempt))
            if attempt.aborted != attempt.reported:
                found.note("large_messages_wrong", f"{attempt.name} aborted, or reported to be")
        found.counts |= {
            "large_messages_sent": sent,
            "large_messages_read": len(self._read),
            "large_messages_chunks": len(self._attempt_at),
            "large_message_crashes": sum(any(map(self._was_hit, each)) for each in crashes),
            "large_message_attempts_aborted": sum(each.aborted for each in attempts),
        }
        return found

    def _attempt(self, producer: str, uuid: str) -> _Attempt:
        name = (producer, uuid)
        return self._attempts.setdefault(name, _Attempt(name))

    def _was_hit(self, stalled: Stalled) -> bool:
        """Whether the log agrees that the attempt was begun, and not complete."""
        attempt = self._attempt(stalled.producer, stalled.uuid)
        return 1 <= stalled.chunks <= len(attempt.chunk_ids) and (
            stalled.chunks < attempt.num_chunks
        )
