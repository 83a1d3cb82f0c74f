"""Blocks: entries to blobs and back, and as columns."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.ledger.adapters.block import Block, decode_block, encode_block, to_columns
from seqgate.services.ledger.core.columns import Columns, clip, columns_of, parts
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.ports import EntryCorrupt
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position
from tests.support.columns import row_of, rows_of
from tests.support.entries import batch, chunk, marker, single

ids = st.one_of(st.integers(0, 9), st.integers(SEQUENCE_ID_MAX - 9, SEQUENCE_ID_MAX))
names = st.one_of(st.sampled_from(["p", "q", "生產者", "ü/ %"]), st.text(min_size=1, max_size=9))
chunks = st.builds(
    Chunk,
    uuid=names,
    chunk_id=st.integers(0, 2**31 - 2),
    num_chunks=st.integers(2, 2**31 - 1),
    total_bytes=st.integers(2, 2**31 - 1),
)
entries = st.builds(
    Entry,
    producer=names,
    lowest=ids,
    highest=ids,
    messages=st.none() | st.integers(1, 10_000),
    steps=st.just(()) | st.lists(ids, max_size=3).map(tuple),
    marker=st.booleans(),
    metadata=st.binary(max_size=20),
    payload=st.binary(max_size=20),
    chunk=st.none() | chunks,
    aborts=st.just("") | names,
)
plain = st.builds(single, ids, names, st.binary(max_size=20))
groups = st.one_of([st.lists(each, min_size=1, max_size=40) for each in (entries, plain)])


def replaced(block: Block, blob: str, value: bytes | None) -> Block:
    fields: dict[str, Any] = {blob: value}
    return block._replace(**fields)


MANY = [single(each, f"p{each}") for each in range(2_000)]
FULL = [single(0), batch([4, 6, 9], "q"), marker(1), chunk(7, "u", 0, 2, aborts="v"), single(8)]


def stored(group: list[Entry]) -> list[StoredEntry]:
    """The expected read of a group that begins at 3:7."""
    return [
        StoredEntry(Position(3, 7 + place), 5, each, len(each.payload))
        for place, each in enumerate(group)
    ]


def block_of(group: list[Entry]) -> Block:
    return encode_block(3, 7, 5, group)


def plainly(run: Columns) -> Columns:
    """A run with lists for sequences, for comparison."""
    return run._replace(
        producers=[*run.producers], markers=[*run.markers], metadata=[*run.metadata]
    )


@given(groups)
def test_entries_are_decoded_unchanged(group: list[Entry]) -> None:
    assert decode_block(block_of(group)) == stored(group)


@given(groups)
def test_skipped_metadata_and_payloads_are_empty(group: list[Entry]) -> None:
    block = block_of(group)
    lean = [
        each._replace(entry=each.entry._replace(payload=b"", metadata=b""))
        for each in stored(group)
    ]
    assert decode_block(block._replace(metadata=None, payloads=None)) == lean
    described = [
        each._replace(entry=each.entry._replace(metadata=entry.metadata))
        for each, entry in zip(lean, group, strict=True)
    ]
    assert decode_block(block._replace(payloads=None)) == described


@given(groups, st.booleans())
def test_a_blocks_columns_are_those_of_its_entries(group: list[Entry], metadata: bool) -> None:
    block = block_of(group)._replace(payloads=None)
    run = to_columns(block if metadata else block._replace(metadata=None))
    assert rows_of(run) == [row_of(each, metadata=metadata) for each in stored(group)]
    assert plainly(run) == plainly(columns_of(stored(group), metadata=metadata))


@given(groups, st.data())
def test_slicing_a_run_equals_the_run_of_the_slice(group: list[Entry], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(group) - 1))
    last = data.draw(st.integers(first, len(group) - 1))
    part = clip(to_columns(block_of(group)), 7 + first, 7 + last)
    expected = columns_of(stored(group)[first : last + 1], metadata=True)
    assert plainly(part) == plainly(expected)
    assert part.last == (3, 7 + last)


@given(groups, st.integers(1, 2_000))
def test_a_run_is_split_until_each_part_fits(group: list[Entry], bytes_max: int) -> None:
    some = list(parts(to_columns(block_of(group)), bytes_max))
    assert all(each.size == 1 or each.size_bytes <= bytes_max for each in some)
    assert [row for each in some for row in rows_of(each)] == [
        row_of(each, metadata=True) for each in stored(group)
    ]


def test_a_run_that_fits_is_one_part() -> None:
    run = to_columns(block_of(FULL))
    assert list(parts(run, run.size_bytes)) == [run]
    assert len(list(parts(run, run.size_bytes - 1))) == 2


def test_a_block_stores_each_producer_name_once() -> None:
    run = to_columns(block_of([*MANY, *MANY]))
    assert [*run.producers] == [each.producer for each in MANY]
    assert decode_block(block_of([*MANY, *MANY])) == stored([*MANY, *MANY])


@pytest.mark.parametrize("group", [FULL, FULL[3:4], MANY], ids=["some", "one", "many"])
@pytest.mark.parametrize("blob", ["entries", "metadata", "payloads"])
def test_damage_is_noticed_in_the_columns_read(group: list[Entry], blob: str) -> None:
    block = block_of(group)
    whole: bytes = getattr(block, blob)
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        broken = replaced(block, blob, damaged)
        for read in (decode_block, to_columns):
            with pytest.raises(EntryCorrupt) as refusal:
                read(broken)
            where = {"ledger_id": 3, "entry_id": 6 + len(group), "first_entry_id": 7}
            assert refusal.value.details == where
        if blob != "entries":
            unread = replaced(broken, blob, None)
            assert len(decode_block(unread)) == to_columns(unread).size == len(group)
