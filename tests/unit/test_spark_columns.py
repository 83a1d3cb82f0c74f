"""Reading columns: what the ledger sends becomes Arrow's, whatever happens to the stream."""

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

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.errors import DataLossError, UnavailableError
from seqgate.spark._columns import (
    COLUMNS,
    Range,
    Run,
    connected,
    read_blocks,
    record_batch,
    runs_of,
)
from seqgate.types import Position
from services.dedup.core.fold import Partial
from services.dedup.core.sequence import Marks
from services.ledger.core.entry import Entry
from tests.spark.logs import APPENDED_MS, Log, make_log
from tools.rebuild.folding import ProducerFold, partials

TOPIC = "public/default/columns"


def columns(log: Log) -> list[pb.EntryColumns]:
    """A log's blocks on the wire."""
    blocks = []
    append_ms = APPENDED_MS
    for ledger_id, of_ledger in enumerate(log.ledgers, start=1):
        entry_id = 0
        for entries in of_ledger:
            block = _columns(entries)
            block.ledger_id, block.first_entry_id = ledger_id, entry_id
            block.append_time = append_ms
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
def test_every_column_says_what_the_log_does(seed: int, entries: int) -> None:
    log = make_log(Random(seed), 5, 20, careless=True)
    schema = pa.schema(list(COLUMNS.items()))
    runs = runs_of(TOPIC, iter([columns(log)]), entries)
    table = pa.Table.from_batches([record_batch(run, schema) for run in runs], schema)
    assert list(zip(*table.to_pydict().values(), strict=True)) == rows_of(log)


@given(st.integers(0, 10_000), st.lists(st.integers(0, 12), max_size=3), st.integers(1, 200))
def test_folding_columns_in_parts_is_every_entry_advanced(
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
    """A ledger whose streams end, or say that they will, after every block."""

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
            yield pb.ReadColumnsResponse(draining=pb.Draining())
        else:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


@contextmanager
def serving(ledger: Fragile) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        pb_grpc.add_LedgerServiceServicer_to_server(ledger, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_stream_that_breaks_goes_on_after_the_last_entry(seed: int) -> None:
    log = make_log(Random(seed), 3, 6)
    blocks = columns(log)
    ledger = Fragile(blocks)
    *_, (last, _, _) = log.stored
    with serving(ledger) as address, connected(address) as stub:
        groups = list(read_blocks(stub, Range(TOPIC, None, last, 0), timeout_s=20))
    assert [block for group in groups for block in group] == blocks
    assert ledger.streams == len(blocks)


def test_what_lies_before_damage_comes_first(seed: int) -> None:
    blocks = columns(make_log(Random(seed), 3, 6))
    with serving(Fragile(blocks, damaged=3)) as address, connected(address) as stub:
        wanted = Range(TOPIC, None, Position(9, 0), 0)
        runs: list[Run] = []
        with pytest.raises(DataLossError) as failure:
            runs.extend(runs_of(TOPIC, read_blocks(stub, wanted, timeout_s=20)))
    assert failure.value.details["topic"] == TOPIC
    assert sum(run.count for run in runs) == sum(block.count for block in blocks[:3])


def test_a_ledger_that_stays_away_is_given_up() -> None:
    with connected("127.0.0.1:1") as stub, pytest.raises(UnavailableError):
        list(read_blocks(stub, Range(TOPIC, None, Position(1, 0), 0), timeout_s=0.05))
