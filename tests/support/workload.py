"""A publishing application as a separate process, which dies at a given point.

    python -m tests.support.workload LEDGER TOPIC NAME FOLDER UNTIL CHUNK BATCH

publishes the messages before number UNTIL, CHUNK at a time, in batches of at most BATCH (1: no
batching). After each CHUNK it records its progress, like an application that reads an input; when
restarted it continues from there, and resends later messages.

A journal in FOLDER records requests before they are sent, and receipts. The points of an Order (see
crash_points) are:

    opened      the producer is connected
    written     a request was sent, and the application has seen no receipt
    receipt     a receipt has arrived, and the application has not seen that one
    told        the application has seen all receipts of a CHUNK
    noted       it has recorded its progress
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from grpc import StatusCode, aio

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Batching, connect
from seqgate.client import _producer as producer_module
from seqgate.client._outbox import Outbox, Resolved
from seqgate.dev.stack import Stack
from seqgate.message_id import MessageId
from tests.support.checkers import (
    Acknowledgement,
    Content,
    History,
    Identity,
    Marks,
    Stored,
    log_anomalies,
    report,
    state_anomalies,
)
from tests.support.crash_points import ORDER, Points
from tests.support.publisher import Publisher, single
from tests.support.stubs import dedup_stub
from tests.support.waiting import eventually

POINTS: Final = ("opened", "written", "receipt", "told", "noted")

FIRST_ID: Final = 2**53 - 10
"""The first id; a double cannot distinguish the ids soon after it."""


BOOK_STEP: Final = 2**40
"""The distance of a Book's ids; a double cannot distinguish some of them."""


def message(name: str, number: int) -> tuple[Identity, Content]:
    """The message with a number, always the same. Ids have gaps."""
    sequence_id = FIRST_ID + 2 * number + number // 7
    return Identity(name, sequence_id), Content(f"{name} {number}".encode(), f"key-{number % 5}")


@dataclass
class Journal:
    """The record of one application over all its runs."""

    folder: Path

    @property
    def next(self) -> int:
        """The number of the next run's first message."""
        file = self.folder / "next"
        return int(file.read_text()) if file.exists() else 0

    def note_next(self, number: int) -> None:
        scratch = self.folder / "next.new"
        scratch.write_text(str(number))
        scratch.replace(self.folder / "next")

    def note(self, *line: object) -> None:
        # One system call, so that a written line survives the process.
        file = os.open(self.folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (json.dumps(line) + "\n").encode())
        os.close(file)

    def history(self, name: str) -> History:
        """The history for the checkers."""
        history = History()
        for line in (self.folder / "journal").read_text().splitlines():
            what, number, *told = json.loads(line)
            identity, content = message(name, number)
            if what == "sent":
                history.send(identity, content)
            else:
                where, duplicate = told
                told_id = MessageId.parse(where)
                history.acknowledged.append(Acknowledgement(identity, told_id, duplicate))
        return history


async def read_log(ledger: str, topic: str) -> list[Stored]:
    """All messages of a topic, for the checkers."""
    async with connect(ledger) as client:
        return [
            Stored(
                each.id,
                Identity(each.producer_name, each.sequence_id),
                Content(each.payload, each.key),
            )
            async for each in client.reader(topic, follow=False)
        ]


async def judge(ledger: str, dedup: str, topic: str, history: History) -> list[Stored]:
    """Check a topic's log against the history, and the dedup state against the log. Returns the
    log.

    Raises:
        AssertionError: an anomaly was found.
    """
    log = await read_log(ledger, topic)
    anomalies = log_anomalies(history, log)
    assert not anomalies, report(anomalies)
    async with aio.insecure_channel(dedup) as channel:
        stub: Any = dedup_stub(channel)
        request = dedup_pb2.ListProducersRequest(topic=topic, page_size=10_000)

        async def agrees() -> bool:
            try:
                listed = (await stub.ListProducers(request)).producers
            except aio.AioRpcError as error:
                if error.code() is not StatusCode.UNAVAILABLE:
                    raise
                return False  # a pooled connection to a Redis that died meanwhile, for one
            state = {each.name: _marks(each) for each in listed}
            return not state_anomalies(log, state)

        await eventually(agrees, "deduplication knows the log, and nothing else")
    return log


def _marks(producer: dedup_pb2.Producer) -> Marks:
    fields: tuple[Literal["persisted_sequence_id", "pushed_sequence_id"], ...] = (
        "persisted_sequence_id",
        "pushed_sequence_id",
    )
    return Marks(*(getattr(producer, each) if producer.HasField(each) else None for each in fields))


class Book:
    """Messages sent under the producer name p over streams driven by hand, and their receipts."""

    def __init__(self, stack: Stack, topic: str) -> None:
        self.topic = topic
        self._stack = stack
        self.history = History()

    def publications(self, numbers: Iterable[int], *, again: int = 0) -> list[pb.Publication]:
        """The messages with these numbers; `again` is added to their request ids."""
        made = []
        for number in numbers:
            identity = Identity("p", number * BOOK_STEP)
            content = Content(f"message {number}".encode())
            self.history.send(identity, content)
            made.append(single(again + number + 1, identity.sequence_id, content.payload))
        return made

    def note(self, publications: Iterable[pb.Publication], receipts: dict[int, pb.Receipt]) -> None:
        """Record the receipts that arrived, which must be successes."""
        for publication in publications:
            receipt = receipts.get(publication.request_id)
            if receipt is None:
                continue
            success = (pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE)
            assert receipt.status in success, receipt
            where = MessageId(receipt.position.ledger_id, receipt.position.entry_id)
            duplicate = receipt.status == pb.RECEIPT_STATUS_DUPLICATE
            identity = Identity("p", publication.entries[0].metadata.sequence_id)
            self.history.acknowledged.append(Acknowledgement(identity, where, duplicate))

    async def publish(
        self, publisher: Publisher, numbers: Iterable[int], *, again: int = 0
    ) -> None:
        """Publish, and wait for all receipts."""
        publications = self.publications(numbers, again=again)
        await publisher.send(*publications)
        receipts = {
            each.request_id: await publisher.receipt(each.request_id) for each in publications
        }
        self.note(publications, receipts)

    async def log(self) -> list[Stored]:
        return await read_log(self._stack.address("ledger"), self.topic)

    async def judge(self) -> list[Stored]:
        address = self._stack.address
        return await judge(address("ledger"), address("dedup"), self.topic, self.history)


def _point_outbox(points: Points) -> None:
    class PointedOutbox(Outbox):
        answered = False

        def to_send(self, bytes_max: int) -> pb.Publications | None:
            if self.outstanding and not self.answered:
                points.reach("written")
            return super().to_send(bytes_max)

        def receive(self, receipt: pb.Receipt) -> list[Resolved]:
            if not self.answered:
                points.reach("written")  # the receipt came before the next look
            self.answered = True
            points.reach("receipt")
            return super().receive(receipt)

    producer_module.Outbox = PointedOutbox  # type: ignore[attr-defined]


async def run(
    ledger: str, topic: str, name: str, folder: Path, until: int, chunk: int, batch: int
) -> None:
    """Publish the messages before a number."""
    points = Points(Path(os.environ[ORDER]))
    _point_outbox(points)
    journal = Journal(folder)
    batching = Batching(messages_max=batch) if batch > 1 else None
    async with (
        connect(ledger) as client,
        client.producer(
            topic, name=name, takeover=True, batching=batching, send_timeout_s=None
        ) as producer,
    ):
        points.reach("opened")
        while (first := journal.next) < until:
            numbers = range(first, min(first + chunk, until))
            sends: list[asyncio.Future[Any]] = []
            for number in numbers:
                identity, content = message(name, number)
                journal.note("sent", number)
                sends.append(
                    producer.send_nowait(
                        content.payload, key=content.key, sequence_id=identity.sequence_id
                    )
                )
            for number, receipt in zip(numbers, await asyncio.gather(*sends), strict=True):
                journal.note("told", number, str(receipt.message_id), receipt.duplicate)
            points.reach("told")
            journal.note_next(numbers.stop)
            points.reach("noted")


def main() -> int:
    ledger, topic, name, folder, *numbers = sys.argv[1:]
    until, chunk, batch = map(int, numbers)
    asyncio.run(run(ledger, topic, name, Path(folder), until, chunk, batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
