"""Reading columns: the ledger's columns become Arrow's, despite failures of the stream."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from random import Random

import grpc
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.errors import DataLossError, MessagesTrimmedError, UnavailableError
from seqgate.jobs.rebuild.folding import ProducerFold, partials
from seqgate.services.dedup.core.fold import Partial
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.ledger.core.entry import Entry
from seqgate.spark._columns import (
    COLUMNS,
    Range,
    Run,
    connected,
    read_blocks,
    record_batch,
    runs_of,
    to_position,
)
from seqgate.spark._options import Share
from seqgate.spark._partitions import Bounds, check_not_trimmed, just_after, just_before
from seqgate.spark._source import SeqgateDataSource
from seqgate.types import Position
from tests.spark.logs import APPENDED_MS, Log, make_log

TOPIC = "public/default/columns"


def columns(log: Log) -> list[pb.EntryColumns]:
    """The blocks of a log, as sent on the wire."""
    blocks = []
    append_ms = APPENDED_MS
    for ledger_id, of_ledger in enumerate(log.ledgers, start=1):
        entry_id = 0
        for entries in of_ledger:
            block = _columns(entries)
            block.ledger_id, block.first_entry_id = ledger_id, entry_id
            block.append_time.FromMilliseconds(append_ms)
            blocks.append(block)
            entry_id += len(entries)
            append_ms += 1
    return blocks


def _columns(entries: Sequence[Entry]) -> pb.EntryColumns:
    names = sorted({entry.producer for entry in entries})
    block = pb.EntryColumns(count=len(entries), producers=names)
    block.producer = np.array([names.index(each.producer) for each in entries], "<u4").tobytes()
    block.sequence_id = np.array([each.lowest for each in entries], "<i8").tobytes()
    highest = np.array([each.highest for each in entries], "<i8").tobytes()
    block.highest_sequence_id = b"" if highest == block.sequence_id else highest
    if any(each.messages for each in entries):
        messages = np.array([each.messages or 0 for each in entries], "<u4")
        block.num_messages = messages.tobytes()
    sizes = [len(each.payload) for each in entries]
    block.payload_bytes = np.array(sizes, "<u4").tobytes()
    for index, entry in enumerate(entries):
        if entry.marker:
            block.markers.append(index)
        if entry.chunk is not None:
            uuid, chunk_id, num_chunks, total_bytes = entry.chunk
            block.chunks[index].uuid = uuid
            block.chunks[index].chunk_id = chunk_id
            block.chunks[index].num_chunks = num_chunks
            block.chunks[index].total_bytes = total_bytes
        if entry.aborts:
            block.aborts[index] = entry.aborts
    return block


def rows_of(log: Log) -> list[tuple[object, ...]]:
    return [
        (
            *(TOPIC, *position, append_ms, entry.producer, entry.lowest, entry.highest),
            *(entry.messages, len(entry.payload), entry.marker),
            *(entry.chunk or (None,) * 4),
            entry.aborts or None,
        )
        for position, append_ms, entry in log.stored
    ]


@pytest.mark.parametrize("entries", [1, 50, 10_000])
def test_every_column_agrees_with_the_log(seed: int, entries: int) -> None:
    log = make_log(Random(seed), 5, 20, careless=True)
    schema = pa.schema(list(COLUMNS.items()))
    runs = runs_of(TOPIC, iter([columns(log)]), entries)
    table = pa.Table.from_batches([record_batch(run, schema) for run in runs], schema)
    assert list(zip(*table.to_pydict().values(), strict=True)) == rows_of(log)


@given(st.integers(0, 10_000), st.lists(st.integers(0, 12), max_size=3), st.integers(1, 200))
def test_folding_columns_in_parts_equals_folding_each_entry(
    seed: int, cuts: list[int], entries: int
) -> None:
    log = make_log(Random(seed), 3, 12, careless=seed % 2 == 0)
    blocks = columns(log)
    edges = [0, *sorted(cuts), len(blocks)]
    tables = []
    for part, (first, last) in enumerate(pairwise(edges)):
        fold = ProducerFold()
        for run in runs_of(TOPIC, iter([blocks[first:last]]), entries):
            fold.add(run)
        tables.append(fold.rows(TOPIC, part))
    parts: dict[str, list[Partial]] = {}
    for producer, each in partials(pa.Table.from_batches(tables)):
        parts.setdefault(producer, []).append(each)
    marks = {
        producer: reduce(lambda before, part: part.applied(before), of, Marks())
        for producer, of in parts.items()
    }
    assert marks == log.marks
    stored = [(entry, append_ms) for _, append_ms, entry in log.stored if not entry.marker]
    for producer, of in parts.items():
        mine = [append_ms for entry, append_ms in stored if entry.producer == producer]
        assert (sum(each.entries for each in of), of[-1].last_append_ms) == (len(mine), mine[-1])


class Fragile(pb_grpc.LedgerServiceServicer):
    """A ledger whose streams end, or announce their end, after every block."""

    def __init__(self, blocks: list[pb.EntryColumns], damaged: int = -1) -> None:
        self._blocks = blocks
        self._damaged = damaged
        self.streams = 0

    def ReadColumns(
        self, request: pb.ReadColumnsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadColumnsResponse]:
        self.streams += 1
        after = (request.after.ledger_id, request.after.entry_id)
        yield pb.ReadColumnsResponse(started=pb.Started())
        left = [
            (index, block)
            for index, block in enumerate(self._blocks)
            if not request.HasField("after") or (block.ledger_id, block.first_entry_id) > after
        ]
        for index, block in left[:1]:
            if index == self._damaged:
                context.abort(grpc.StatusCode.DATA_LOSS, "damaged")
            yield pb.ReadColumnsResponse(blocks=pb.EntryBlocks(blocks=[block]))
        if self.streams % 2:
            yield pb.ReadColumnsResponse(draining=common_pb2.Draining())
        else:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def fragile(blocks: list[pb.EntryColumns], damaged: int = -1) -> Fragile:
    return Fragile(blocks, damaged)  # type: ignore[abstract]  # a ledger that Spark reads


@contextmanager
def serving(ledger: Fragile) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        pb_grpc.add_LedgerServiceServicer_to_server(ledger, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_broken_stream_resumes_after_the_last_entry(seed: int) -> None:
    log = make_log(Random(seed), 3, 6)
    blocks = columns(log)
    ledger = fragile(blocks)
    *_, (last, _, _) = log.stored
    with serving(ledger) as address, connected(address) as stub:
        groups = list(read_blocks(stub, Range(TOPIC, None, last, 0), timeout_s=20))
    assert [block for group in groups for block in group] == blocks
    assert ledger.streams == len(blocks)


def test_entries_before_damage_are_returned_first(seed: int) -> None:
    blocks = columns(make_log(Random(seed), 3, 6))
    with serving(fragile(blocks, damaged=3)) as address, connected(address) as stub:
        wanted = Range(TOPIC, None, Position(9, 0), 0)
        runs: list[Run] = []
        with pytest.raises(DataLossError) as failure:
            runs.extend(runs_of(TOPIC, read_blocks(stub, wanted, timeout_s=20)))
    assert failure.value.details["topic"] == TOPIC
    assert sum(run.count for run in runs) == sum(block.count for block in blocks[:3])


def test_an_unreachable_ledger_is_given_up() -> None:
    with connected("127.0.0.1:1") as stub, pytest.raises(UnavailableError):
        list(read_blocks(stub, Range(TOPIC, None, Position(1, 0), 0), timeout_s=0.05))


# ---- trimmed entries


class Trimming(Fragile):
    """A ledger whose entries 0 to 4 of ledger 2 are trimmed; it drains during the first call."""

    def Read(
        self, request: pb.ReadRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadResponse]:
        self.streams += 1
        yield pb.ReadResponse(started=pb.Started())
        if self.streams == 1:
            yield pb.ReadResponse(draining=common_pb2.Draining())
            return
        last = min(Position(2, 4), Position(request.through.ledger_id, request.through.entry_id))
        if Position(request.start.at.ledger_id, request.start.at.entry_id) <= last:
            gone = pb.EntriesTrimmed(first=request.start.at, last=to_position(last))
            yield pb.ReadResponse(trimmed=gone)


def trimming() -> Trimming:
    return Trimming([])  # type: ignore[abstract]  # a ledger that Spark reads


def a_topic(first: Position | None, last: Position | None) -> pb.Topic:
    topic = pb.Topic(name=TOPIC)
    if first is not None:
        topic.first.CopyFrom(to_position(first))
    if last is not None:
        topic.last.CopyFrom(to_position(last))
    return topic


@pytest.mark.parametrize(
    ("start", "through", "first", "missed"),
    [
        (Position(2, 1), Position(9, 9), Position(2, 5), ("2:1", "2:4")),
        (Position(1, 0), Position(9, 9), None, ("1:0", "2:4")),
        (Position(2, 1), Position(2, 2), Position(2, 5), ("2:1", "2:2")),
        (Position(2, 1), Position(9, 9), Position(3, 0), ("2:1", "2:4")),
    ],
)
def test_a_start_in_trimmed_entries_is_reported(
    start: Position, through: Position, first: Position | None, missed: tuple[str, str]
) -> None:
    topics = [a_topic(first, Position(3, 1))]
    with (
        serving(trimming()) as address,
        connected(address) as stub,
        pytest.raises(MessagesTrimmedError) as caught,
    ):
        check_not_trimmed(stub, topics, Bounds(start, through), 20)
    details = caught.value.details
    assert (details["topic"], details["first"], details["last"]) == (TOPIC, *missed)


@pytest.mark.parametrize(
    ("bounds", "first", "last"),
    [
        (Bounds(), Position(2, 5), Position(3, 1)),  # from the beginning: the remaining entries
        (Bounds(Position(2, 5)), Position(2, 5), Position(3, 1)),
        (Bounds(Position(3, 2)), Position(2, 5), Position(3, 1)),
        (Bounds(Position(3, 2)), None, Position(3, 1)),
        (Bounds(Position(1, 0)), None, None),
        (Bounds(Position(1, 5), Position(1, 2)), Position(2, 5), Position(3, 1)),
    ],
)
def test_a_start_without_missing_entries_is_not_reported(
    bounds: Bounds, first: Position | None, last: Position | None
) -> None:
    ledger = trimming()
    with serving(ledger) as address, connected(address) as stub:
        check_not_trimmed(stub, [a_topic(first, last)], bounds, 20)
    assert not ledger.streams


def test_a_start_between_untrimmed_ledgers_misses_nothing() -> None:
    topics = [a_topic(Position(4, 0), Position(4, 1))]
    with serving(trimming()) as address, connected(address) as stub:
        check_not_trimmed(stub, topics, Bounds(Position(3, 0)), 20)


@pytest.mark.parametrize("option", ["fail", "skip"])
def test_entries_trimmed_between_plan_and_task_are_reported_as_missing(
    seed: int, option: str
) -> None:
    log = make_log(Random(seed), 3, 6)
    blocks = columns(log)
    *_, (last, _, _) = log.stored
    count = sum(1 for _ in log.stored)
    schema = from_arrow_schema(pa.schema([("entry_id", pa.int64())]))
    with serving(fragile(blocks)) as address:
        options = {"ledger": address, "topics": TOPIC, "rows": "entries", "trimmed": option}
        reader = SeqgateDataSource(options).reader(schema)

        def read(planned: int) -> int:
            share = Share((Range(TOPIC, None, last, planned),))
            return sum(batch.num_rows for batch in reader.read(share))

        assert read(count) == count
        if option == "skip":
            assert read(count + 1) == count
            return
        with pytest.raises(MessagesTrimmedError) as caught:
            read(count + 1)
    assert caught.value.details["last"] == "{}:{}".format(*last)


@given(st.builds(Position, st.integers(1, 9), st.integers(0, 9)))
def test_just_after_inverts_just_before(position: Position) -> None:
    assert just_after(just_before(position)) == position
    assert just_after(None) == Position(1, 0)
