"""Pulsar's records of a cursor, imported and exported.

The bytes are made here from the field numbers of Pulsar's MLDataFormats, without our proto.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seqgate.services.cursor.adapters.managed import export_managed_cursor, import_managed_cursor
from seqgate.services.cursor.core.cursor import BatchAck, Range, Succession
from seqgate.services.cursor.core.managed import Imported, InvalidManagedCursor
from seqgate.services.cursor.core.state import Head
from seqgate.services.errors import Kind
from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName

DATA = Path(__file__).parents[1] / "data" / "managed"


# ---- bytes by hand


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def place(ledger_id: int, entry_id: int) -> bytes:
    return number(1, ledger_id) + number(2, entry_id)


def run(lower: tuple[int, int], upper: tuple[int, int]) -> bytes:
    return text(1, place(*lower)) + text(2, place(*upper))


def words(*values: int, packed: bool = False) -> bytes:
    if packed:
        return text(2, b"".join(varint(value) for value in values))
    return b"".join(number(2, value) for value in values)


def batch(ledger_id: int, entry_id: int, *values: int) -> bytes:
    return text(1, place(ledger_id, entry_id)) + words(*values)


def long(name: str, value: int) -> bytes:
    return text(1, name) + number(2, value)


def string(name: str, value: str) -> bytes:
    return text(1, name) + text(2, value)


def closed(ledger_id: int, entry_id: int, *fields: bytes) -> bytes:
    """The record of a cleanly closed cursor."""
    return info(-1, ledger_id, entry_id, *fields)


def info(cursor_ledger: int, ledger_id: int, entry_id: int, *fields: bytes) -> bytes:
    return number(1, cursor_ledger) + number(2, ledger_id) + number(3, entry_id) + b"".join(fields)


def position(ledger_id: int, entry_id: int, *fields: bytes) -> bytes:
    return place(ledger_id, entry_id) + b"".join(fields)


def refused(record: bytes, entry: bytes = b"") -> InvalidManagedCursor:
    with pytest.raises(InvalidManagedCursor) as caught:
        import_managed_cursor(record, entry)
    assert (caught.value.kind, caught.value.reason) == (Kind.INVALID, "INVALID_MANAGED_CURSOR")
    return caught.value


# ---- records and entries of the cursor ledger


def test_a_cleanly_closed_cursor_is_imported() -> None:
    record = bytes.fromhex((DATA / "closed.hex").read_text())
    assert import_managed_cursor(record, b"") == Imported(
        mark_delete=Position(5, 3),
        mark_delete_properties={"p": "7"},
        properties={"k": "v"},
        ranges=(Range(Position(5, 6), 8),),
        batches=(BatchAck(Position(5, 9), 64, (2, 3, 4, *range(10, 64)), is_guess=True),),
        successions=(),
        stale=False,
    )


def test_the_entry_of_the_cursor_ledger_replaces_the_record() -> None:
    record = info(
        77, 5, 3, text(5, long("old", 1)), text(9, string("old", "x")),
        text(4, run((5, 4), (5, 6))), text(7, batch(5, 9, 1)), text(8, string("own", "1")),
    )  # fmt: skip
    imported = import_managed_cursor(record, position(6, 0, text(4, long("new", 2))))
    assert imported == Imported(Position(6, 0), {"new": "2"}, {"own": "1"}, (), (), (), stale=False)


def test_the_entry_of_the_cursor_ledger_may_be_behind_the_record() -> None:
    """A reset moves a cursor back, and writes that to its ledger alone."""
    imported = import_managed_cursor(info(77, 9, 3), position(2, 1))
    assert imported.mark_delete == Position(2, 1)


def test_a_lost_cursor_ledger_leaves_the_older_position_and_properties() -> None:
    """Pulsar keeps the position, and drops the properties."""
    record = info(77, 5, 3, text(5, long("p", 7)), text(4, run((5, 4), (5, 6))))
    imported = import_managed_cursor(record, b"")
    assert imported.stale
    assert (imported.mark_delete, imported.mark_delete_properties) == (Position(5, 3), {"p": "7"})
    assert imported.ranges == (Range(Position(5, 5), 6),)


def test_an_entry_of_another_ledger_than_the_records_is_refused() -> None:
    assert refused(closed(5, 3), position(5, 2)).field == "position_info"


@pytest.mark.parametrize("record", [number(1, 77), number(1, -1)])
def test_a_missing_position_is_refused(record: bytes) -> None:
    """Pulsar would read the record as 0:0."""
    refused(record)


def test_a_record_needs_no_position_when_the_cursor_ledger_has_one() -> None:
    imported = import_managed_cursor(number(1, 77), position(5, 2))
    assert imported.mark_delete == Position(5, 2)


# ---- properties


NEW_FIRST = (text(9, string("a", "3:1")), text(5, long("a", 2)), text(5, long("b", 9)))
BOTH_IN_ENTRY = (text(9, string("a", "3:1")), text(4, long("a", 2)), text(4, long("b", 9)))


@pytest.mark.parametrize(
    ("record", "entry"),
    [(closed(5, 3, *NEW_FIRST), b""), (info(77, 1, 0), position(5, 3, *BOTH_IN_ENTRY))],
)
def test_the_new_form_replaces_the_legacy_one(record: bytes, entry: bytes) -> None:
    assert import_managed_cursor(record, entry).mark_delete_properties == {"a": "3:1"}


@pytest.mark.parametrize("value", [0, 1, -1, -(2**63), 2**63 - 1])
def test_the_legacy_form_is_read_as_decimals(value: int) -> None:
    imported = import_managed_cursor(closed(5, 3, text(5, long("p", value))), b"")
    assert imported.mark_delete_properties == {"p": str(value)}


@pytest.mark.parametrize(
    "fields",
    [
        (text(9, string("a", "1")), text(9, string("a", "2"))),
        (text(5, long("a", 1)), text(5, long("a", 2))),
        (text(8, string("a", "1")), text(8, string("a", "2"))),
    ],
)
def test_a_property_with_two_values_is_refused(fields: tuple[bytes, ...]) -> None:
    assert refused(closed(5, 3, *fields)).details == {"property": "a"}


# ---- the mark-delete position


@pytest.mark.parametrize(
    ("ledger_id", "entry_id", "mark_delete", "successions"),
    [
        (1, 0, Position(1, 0), ()),
        (-1, -1, None, ()),
        (1, -1, None, ()),  # ledger ids start at 1
        (5, -1, (4, SEQUENCE_ID_MAX), (Succession(Position(4, 2**63 - 1), Position(5, 0)),)),
        (2**63 - 1, 2**63 - 1, Position(2**63 - 1, 2**63 - 1), ()),
    ],
)
def test_positions_are_imported(
    ledger_id: int,
    entry_id: int,
    mark_delete: Position | None,
    successions: tuple[Succession, ...],
) -> None:
    imported = import_managed_cursor(closed(ledger_id, entry_id), b"")
    assert (imported.mark_delete, imported.successions) == (mark_delete, successions)


@pytest.mark.parametrize("place_", [(0, 3), (0, -1), (-1, 0), (-2, -1), (5, -2), (-(2**63), 1)])
def test_invalid_positions_are_refused(place_: tuple[int, int]) -> None:
    refused(closed(*place_))


# ---- entries


@pytest.mark.parametrize(
    ("runs", "mark_delete", "ranges"),
    [
        ([((5, 6), (5, 8))], (5, 3), [Range(Position(5, 7), 8)]),
        ([((6, -1), (6, 0))], (5, 3), [Range(Position(6, 0), 0)]),
        ([((7, 1), (7, 2)), ((5, 6), (5, 8))], (5, 3),
         [Range(Position(5, 7), 8), Range(Position(7, 2), 2)]),
        ([((5, 6), (5, 8)), ((5, 8), (5, 9)), ((5, 5), (5, 7))], (5, 3),
         [Range(Position(5, 6), 9)]),
        ([((5, 7), (5, 7))], (5, 3), []),  # empty
        ([((2, 6), (2, 8)), ((5, 1), (5, 2))], (5, 3), []),  # stale: before the position
        ([((5, 1), (5, 6)), ((5, 7), (5, 7))], (5, 6), []),  # adjacent to the position
        ([((5, 3), (5, 4)), ((5, 4), (5, 6)), ((5, 9), (5, 9))], (5, 6), []),
        # Across the end of a ledger, from the position on: where the ledger ends does not matter.
        ([((5, 3), (7, 4)), ((7, 6), (7, 7))], (7, 4), [Range(Position(7, 7), 7)]),
        ([((2, 3), (4, 4))], (5, 3), []),
        ([((5, 3), (7, -1))], (6, SEQUENCE_ID_MAX), []),
    ],
)  # fmt: skip
def test_ranges_are_imported(
    runs: list[tuple[tuple[int, int], tuple[int, int]]],
    mark_delete: tuple[int, int],
    ranges: list[Range],
) -> None:
    """The lower end of a range is exclusive, the upper one inclusive. Ranges adjacent to the
    mark-delete position, 5:3, move it."""
    record = closed(5, 3, *(text(4, run(lower, upper)) for lower, upper in runs))
    entry = position(5, 3, *(text(3, run(lower, upper)) for lower, upper in runs))
    for imported in (
        import_managed_cursor(record, b""),
        import_managed_cursor(number(1, 77), entry),
    ):
        assert imported.mark_delete == mark_delete
        assert list(imported.ranges) == ranges


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ((5, 6), (7, 4)),  # the end of ledger 5 is unknown
        ((6, -1), (7, 0)),
        ((6, 2), (7, -1)),
        ((5, 6), (5, 5)),
        ((6, 6), (5, 7)),
        ((5, -2), (5, 5)),
        ((-1, 6), (5, 5)),
    ],
)
def test_incomplete_ranges_are_refused(lower: tuple[int, int], upper: tuple[int, int]) -> None:
    refused(closed(5, 3, text(4, run(lower, upper))))


@pytest.mark.parametrize("packed", [False, True])
def test_bitmaps_are_imported(packed: bool) -> None:
    ledger_5 = number(1, 5) + words(0b1111_0000, -(2**63), 0b101, packed=packed)
    ledger_6 = number(1, 6) + words(0b1, packed=packed)
    imported = import_managed_cursor(
        number(1, 77), position(5, 5, text(6, ledger_6), text(6, ledger_5))
    )
    assert imported.mark_delete == Position(5, 7)  # 4 to 7 are adjacent
    assert imported.ranges == (
        Range(Position(5, 127), 128),  # across words
        Range(Position(5, 130), 130),
        Range(Position(6, 0), 0),
    )


def test_a_bitmap_with_pulsars_largest_number_of_holes_is_imported() -> None:
    bitmap = number(1, 5) + words(*[0x5555_5555_5555_5555] * 6_250)
    imported = import_managed_cursor(number(1, 77), position(4, 9, text(6, bitmap)))
    assert len(imported.ranges) == 200_000
    assert imported.ranges[-1] == Range(Position(5, 399_998), 399_998)


def test_ranges_take_precedence_over_bitmaps() -> None:
    bitmap = number(1, 5) + words(1 << 30)
    entry = position(5, 3, text(3, run((5, 6), (5, 8))), text(6, bitmap))
    assert import_managed_cursor(number(1, 77), entry).ranges == (Range(Position(5, 7), 8),)


@pytest.mark.parametrize(
    "bitmaps",
    [
        [number(1, 5) + words(8), number(1, 5) + words(16)],
        [number(1, -1) + words(8)],
        [words(8)],
    ],
)
def test_invalid_bitmaps_are_refused(bitmaps: list[bytes]) -> None:
    refused(number(1, 77), position(5, 0, *(text(6, bitmap) for bitmap in bitmaps)))


# ---- batches


@pytest.mark.parametrize(
    ("values", "size", "waiting"),
    [
        ((0b1,), 64, {0}),
        ((-1,), 64, set(range(64))),
        ((0b11_1110_0011,), 64, {0, 1, 5, 6, 7, 8, 9}),
        ((0, 1), 128, {64}),
        ((1, 0), 128, {0}),  # Pulsar omits the 0
        ((*[0] * 156, 0x8000), 10_000, {9_999}),  # the largest batch
    ],
)  # fmt: skip
def test_the_set_bits_of_a_batch_are_its_unacknowledged_messages(
    values: tuple[int, ...], size: int, waiting: set[int]
) -> None:
    """Through both stores."""
    record = closed(5, 3, text(7, batch(5, 9, *values)))
    entry = position(5, 3, text(5, batch(5, 9, *values)))
    for imported in (
        import_managed_cursor(record, b""),
        import_managed_cursor(number(1, 77), entry),
    ):
        (ack,) = imported.batches
        assert (ack.position, ack.size) == (Position(5, 9), size)
        assert set(range(size)) - set(ack.indexes) == waiting


@pytest.mark.parametrize(
    "fields",
    [
        [text(7, batch(5, 9))],  # no words: Pulsar ignores it
        [text(7, batch(5, 9, 0))],
        [text(7, batch(5, 3, 1))],  # the mark-delete position
        [text(7, batch(4, 9, 1))],
        [text(7, batch(5, 9, 1)), text(4, run((5, 8), (5, 9)))],
        [text(7, batch(5, 9, 1)), text(4, run((5, 4), (5, 6))), text(4, run((5, 7), (5, 11)))],
    ],
)
def test_a_batch_without_effect_is_left_out(fields: list[bytes]) -> None:
    assert import_managed_cursor(closed(5, 3, *fields), b"").batches == ()


def test_batches_are_imported_beside_ranges() -> None:
    fields = [text(7, batch(5, each, 1)) for each in (12, 7, 10)]
    fields += [text(4, run((5, 7), (5, 9))), text(4, run((5, 10), (5, 11)))]
    imported = import_managed_cursor(closed(5, 3, *fields), b"")
    assert [each.position.entry_id for each in imported.batches] == [7, 10, 12]


@pytest.mark.parametrize(
    "fields",
    [
        [batch(5, -1, 1)],
        [batch(0, 4, 1)],
        [batch(5, 9, 1), batch(5, 9, 1)],
        [batch(5, 9, *[0] * 156, 1 << 16)],  # message 10,000
        [batch(5, 9, 1) + number(1000, 0)],
        [batch(5, 9, 2) + number(1000, 1)],
        [batch(5, 9, 1) + number(1000, 10_001)],
        [words(1)],
        [text(1, number(1, 5)) + words(1)],
    ],
)
def test_invalid_batches_are_refused(fields: list[bytes]) -> None:
    refused(closed(5, 3, *(text(7, field) for field in fields)))


# ---- bytes


@pytest.mark.parametrize(
    ("record", "entry"),
    [
        (b"", b""),
        (number(2, 5) + number(3, 3), b""),  # no cursorsLedgerId
        (number(1, -2) + place(5, 3), b""),
        (number(1, -1) + number(2, 5), b""),
        (number(1, -1) + number(3, 5), b""),
        (closed(5, 3)[:-1], b""),
        (closed(5, 3, text(4, text(1, place(5, 4)))), b""),
        (closed(5, 3, text(5, text(1, "p"))), b""),
        (closed(5, 3, text(5, number(2, 1))), b""),
        (closed(5, 3, text(8, text(1, "p"))), b""),
        (closed(5, 3, text(9, text(2, "v"))), b""),
        (closed(5, 3, text(9, text(1, b"\xff") + text(2, "v"))), b""),
        (number(1, 77), number(1, 5)),
        (number(1, 77), number(2, 5)),
        (number(1, 77), b"\xff"),
        (b"cursorsLedgerId: -1\nmarkDeleteLedgerId: 5\nmarkDeleteEntryId: 3\n", b""),
    ],
)
def test_malformed_records_are_refused(record: bytes, entry: bytes) -> None:
    refused(record, entry)


def test_a_compressed_record_is_refused_as_compressed() -> None:
    assert "compressed" in refused(bytes.fromhex("4778 00000004 0801 1064 ffff")).message


def test_unknown_fields_are_skipped() -> None:
    unknown = number(6, 1_700_000_000_000) + text(200, b"x")
    record = closed(5, 3, text(4, run((5, 6), (5, 8)) + number(99, 1)), unknown)
    assert import_managed_cursor(record, b"").ranges == (Range(Position(5, 7), 8),)


@pytest.mark.parametrize(
    ("record", "entry", "number_"),
    [
        # A branch of Pulsar uses fields 9 and 10 for numbers: no properties.
        (closed(5, 3, number(9, 4), number(10, 5)), b"", 9),
        (closed(5, 3, number(4, 4)), b"", 4),
        (closed(5, 3, text(5, text(1, "p") + text(2, "7"))), b"", 2),
        (number(1, 77), position(5, 3, number(6, 4)), 6),
    ],
)  # fmt: skip
def test_a_field_of_a_changed_type_is_refused(record: bytes, entry: bytes, number_: int) -> None:
    """An unknown version is refused, and no part of it is dropped."""
    assert refused(record, entry).details["number"] == number_


@given(record=st.binary(max_size=60), entry=st.binary(max_size=60))
@example(record=closed(5, 3), entry=b"\x00")
def test_arbitrary_bytes_are_imported_or_refused(record: bytes, entry: bytes) -> None:
    for each in (record, closed(5, 3) + record):
        with suppress(InvalidManagedCursor):
            import_managed_cursor(each, entry)


FIELDS = st.recursive(
    st.builds(number, st.integers(1, 10), st.integers(-2, 9) | st.integers(-(2**63), 2**63 - 1))
    | st.builds(text, st.integers(1, 10), st.binary(max_size=6)),
    lambda inner: st.builds(text, st.integers(1, 9), st.lists(inner, max_size=4).map(b"".join)),
    max_leaves=12,
)


@given(record=st.lists(FIELDS).map(b"".join), entry=st.lists(FIELDS).map(b"".join))
def test_arbitrary_fields_are_imported_or_refused(record: bytes, entry: bytes) -> None:
    for first, second in ((closed(5, 3) + record, b""), (info(7, 5, 3), position(5, 3) + entry)):
        with suppress(InvalidManagedCursor):
            imported = import_managed_cursor(first, second)
            export_managed_cursor(head_of(imported), imported.ranges, imported.batches)


# ---- export


def head(mark_delete: Position | None, **properties: str) -> Head:
    return Head(
        TopicName("t", "n", "l"), "c", 0, mark_delete=mark_delete, mark_delete_properties=properties
    )


def head_of(imported: Imported) -> Head:
    written = head(imported.mark_delete, **imported.mark_delete_properties)
    written.properties = imported.properties
    return written


def test_a_record_is_exported() -> None:
    written = head(Position(5, 3), p="7")
    written.properties = {"k": "v"}
    exported = export_managed_cursor(
        written, [Range(Position(5, 6), 8)], [BatchAck(Position(5, 9), 10, (2, 3, 4))]
    )
    assert exported == closed(
        5, 3, text(4, run((5, 5), (5, 8))), text(5, long("p", 7)),
        text(7, batch(5, 9, 0b11_1110_0011) + number(1000, 10)),
        text(8, string("k", "v")), text(9, string("p", "7")),
    )  # fmt: skip


def test_words_are_written_unpacked_without_trailing_zeros() -> None:
    """Pulsar's proto2 does not pack them."""
    ack = BatchAck(Position(5, 9), 200, tuple(range(66, 200)))
    exported = export_managed_cursor(head(Position(5, 3)), [], [ack])
    assert batch(5, 9, -1, 0b11) + number(1000, 200) in exported


@pytest.mark.parametrize(
    ("mark_delete", "written"),
    [
        (None, (-1, -1)),
        (Position(1, 0), (1, 0)),
        (Position(4, SEQUENCE_ID_MAX), (5, -1)),
        (Position(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX), (SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)),
    ],
)
def test_a_position_is_exported(mark_delete: Position | None, written: tuple[int, int]) -> None:
    assert export_managed_cursor(head(mark_delete), [], []) == closed(*written)


@pytest.mark.parametrize(
    ("value", "is_number"),
    [
        ("0", True),
        ("-1", True),
        (str(2**63 - 1), True),
        (str(-(2**63)), True),
        (str(2**63), False),
        (str(-(2**63) - 1), False),
        ("-0", False),
        ("+1", False),
        ("007", False),
        ("1 ", False),
        ("1\n", False),
        ("", False),
        ("٣", False),
        ("3:1", False),
        ("9" * 5_000, False),
    ],
)
def test_the_legacy_form_is_written_when_all_values_fit(value: str, is_number: bool) -> None:
    exported = export_managed_cursor(head(Position(5, 3), a="1", b=value), [], [])
    new = text(9, string("a", "1")) + text(9, string("b", value))
    legacy = text(5, long("a", 1)) + text(5, long("b", int(value))) if is_number else b""
    assert exported == closed(5, 3, legacy, new)


def test_internal_properties_do_not_prevent_the_legacy_form() -> None:
    """A snapshot of deduplication returns to Pulsar, which knows only its numbers."""
    ours = "#seqgate.internal.dedup"
    exported = export_managed_cursor(head(Position(5, 3), p="7", **{ours: "{}"}), [], [])
    new = text(9, string(ours, "{}")) + text(9, string("p", "7"))
    assert exported == closed(5, 3, text(5, long("p", 7)), new)


def test_a_legacy_record_is_exported_in_both_forms() -> None:
    legacy = text(5, long("p", 7))
    imported = import_managed_cursor(closed(5, 3, legacy), b"")
    assert export_managed_cursor(head_of(imported), [], []) == closed(
        5, 3, legacy, text(9, string("p", "7"))
    )


# ---- export and import


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
PROPERTIES = st.dictionaries(NAMES, NAMES | st.integers().map(str), max_size=4)
MARK_DELETE = st.none() | st.builds(
    Position,
    st.integers(1, 3) | st.just(SEQUENCE_ID_MAX),
    st.integers(0, 9) | st.sampled_from([SEQUENCE_ID_MAX - 1, SEQUENCE_ID_MAX]),
)


@st.composite
def beyond(draw: st.DrawFn) -> tuple[list[Range], list[BatchAck]]:
    """Ranges and batches of ledgers 4 and 5, in order and not adjacent."""
    ranges, batches = list[Range](), list[BatchAck]()
    for ledger_id in (4, 5):
        entry_id = draw(st.integers(0, 3))
        for length in draw(st.lists(st.integers(0, 70), max_size=6)):
            first = Position(ledger_id, entry_id)
            if length:
                ranges.append(Range(first, entry_id + length - 1))
            else:
                size = draw(st.integers(1, 200) | st.just(10_000))
                waiting = draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size))
                indexes = tuple(index for index in range(size) if index not in waiting)
                batches.append(BatchAck(first, size, indexes))
            entry_id += length + draw(st.integers(1, 3))
    return ranges, batches


@given(mark_delete=MARK_DELETE, attached=PROPERTIES, own=PROPERTIES, apart=beyond(), data=st.data())
def test_an_exported_record_is_imported_unchanged(
    mark_delete: Position | None,
    attached: dict[str, str],
    own: dict[str, str],
    apart: tuple[list[Range], list[BatchAck]],
    data: st.DataObject,
) -> None:
    """Right after the end of ledger 3, 4:0 would move the mark-delete position."""
    ranges, batches = apart if mark_delete is None or mark_delete < (3, 2**63 - 1) else ([], [])
    written = Head(
        TopicName("t", "n", "l"), "c", 0, mark_delete, mark_delete_properties=attached,
        properties=own,
    )  # fmt: skip
    imported = import_managed_cursor(export_managed_cursor(written, ranges, batches), b"")
    assert imported._replace(successions=()) == Imported(
        mark_delete, attached, own, tuple(ranges), tuple(batches), (), stale=False
    )


@given(entries=st.sets(st.integers(0, 300), min_size=1))
def test_a_bitmap_equals_its_runs(entries: set[int]) -> None:
    values = [0] * 5
    for entry_id in entries:
        values[entry_id // 64] |= 1 << entry_id % 64
    in_words = position(4, 9, text(6, number(1, 5) + words(*values)))
    in_runs = position(4, 9, *(text(3, run((5, each - 1), (5, each))) for each in entries))
    assert import_managed_cursor(number(1, 77), in_words) == import_managed_cursor(
        number(1, 77), in_runs
    )
