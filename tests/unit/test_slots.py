"""Sticky keys, their hashes and their slots, against known vectors."""

import base64
import binascii
from contextlib import suppress

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.keys import NO_KEY, sticky_key
from seqgate.services.dispatcher.core.selectors import (
    RANGE_SLOTS,
    RING_SLOTS,
    hash31,
    range_slot,
    ring_slot,
)


def key_of(
    ordering_key: bytes | None,
    partition_key: str | None,
    *,
    base64_encoded: bool,
    producer: str | None,
    sequence_id: int | None,
) -> bytes:
    metadata = EntryMetadata(
        ordering_key=ordering_key,
        partition_key=partition_key,
        partition_key_b64_encoded=base64_encoded,
        producer_name=producer,
        sequence_id=sequence_id,
    )
    return sticky_key(metadata)


# The key, its whole hash, 31 bits of it, its slot on a ring, its slot in ranges.
VECTORS = [
    (b"", 0x00000000, 0, 1, 1),
    (b"a", 0x3C2569B2, 1009084850, 42456, 27058),
    (b"b", 0x95DE7E03, 366902787, 37858, 32259),
    (b"A", 0x54DCF7CE, 1423767502, 19628, 63438),
    (b"abc", 0xB3DD93FA, 870159354, 51160, 37882),
    (b"abcd", 0x43ED676A, 1139631978, 43864, 26474),
    (b"abcde", 0xE89B9AF6, 1755028214, 915, 39670),
    (b"test", 0xBA6BD213, 980144659, 3200, 53779),
    (b"hello", 0x248BFA47, 613153351, 7892, 64071),
    (b"hello, world", 0x149BBB7F, 345750399, 53275, 47999),
    (b"The quick brown fox jumps over the lazy dog", 0x2E4FF723, 776992547, 9588, 63267),
    (b"key-0", 0xE337F8BF, 1664612543, 23544, 63679),
    (b"key-1", 0x98B115A0, 414258592, 11858, 5536),
    (b"key-2", 0xF3F8550C, 1945654540, 51461, 21772),
    (b"key1", 0x9B970125, 462881061, 7357, 293),
    (b"key2", 0x737139B4, 1936800180, 44326, 14772),
    (b"0", 0xD271C07F, 1383186559, 4850, 49279),
    (b"1", 0x9416AC93, 337030291, 49322, 44179),
    (b"9", 0x248BE6A1, 613148321, 2862, 59041),
    (b"10", 0x86E4093F, 115607871, 4132, 2367),
    (b"100", 0xCE91997F, 1318164863, 59409, 39295),
    (b"slowKey", 0x9B347271, 456422001, 36262, 29297),
    (b"anyKey", 0xDEA4C2CA, 1587856074, 8560, 49866),
    (b"order-12345", 0x6A6661C6, 1785094598, 52269, 25030),
    (b"NONE_KEY", 0x9E15BEA3, 504741539, 56505, 48803),
    ("ü".encode(), 0x7840E6AA, 2017519274, 24300, 59050),
    ("日本語".encode(), 0xA5A47297, 631534231, 38972, 29335),
    (bytes.fromhex("00"), 0x514E28B7, 1364076727, 31238, 10423),
    (bytes.fromhex("ff"), 0xFD6CF10D, 2104291597, 28283, 61709),
    (bytes.fromhex("ffffffff"), 0x76293B50, 1982413648, 45434, 15184),
    (bytes.fromhex("00000000"), 0x2362F9DE, 593689054, 7490, 63966),
    (bytes(range(16)), 0x191573DD, 420836317, 36083, 29661),
]


@pytest.mark.parametrize(("key", "whole", "masked", "ring", "ranges"), VECTORS)
def test_keys_have_pulsars_slots(
    key: bytes, whole: int, masked: int, ring: int, ranges: int
) -> None:
    assert mmh3.hash(key, 0, signed=False) == whole
    assert hash31(key) == masked
    assert ring_slot(key) == ring
    assert range_slot(key) == ranges


@pytest.mark.parametrize(
    ("producer", "sequence_id", "whole", "ring", "ranges"),
    [
        ("prod-a", 0, 0x441D1CDA, 24824, 7386),
        ("prod-a", 1, 0x0CB3EFCE, 64642, 61390),
        ("standalone-0-0", 42, 0x2F55AE29, 56703, 44585),
    ],
)
def test_an_entry_without_a_key_is_its_own_key(
    producer: str, sequence_id: int, whole: int, ring: int, ranges: int
) -> None:
    key = key_of(None, None, base64_encoded=False, producer=producer, sequence_id=sequence_id)

    assert key == f"{producer}-{sequence_id}".encode()
    assert mmh3.hash(key, 0, signed=False) == whole
    assert (ring_slot(key), range_slot(key)) == (ring, ranges)


@pytest.mark.parametrize(
    ("encoded", "key", "whole", "ring"),
    [(True, bytes(range(4)), 0xF4C0EC39, 24827), (False, b"AAECAw==", 0x9173FC06, 3451)],
)
def test_the_decoded_bytes_of_a_base64_key_are_hashed(
    encoded: bool, key: bytes, whole: int, ring: int
) -> None:
    found = key_of(None, "AAECAw==", base64_encoded=encoded, producer="p", sequence_id=1)
    assert found == key
    assert mmh3.hash(found, 0, signed=False) == whole
    assert ring_slot(found) == ring


@pytest.mark.parametrize(
    ("number", "hash_in_ranges", "slot"),
    [
        (30884, 0, 1),  # slot 0 is never used
        (78688, 0, 1),
        (274341, 0, 1),
        (289230, 0, 1),
        (30098, 1, 1),
        (64020, 1, 1),
    ],
)
def test_no_key_has_slot_0_in_ranges(number: int, hash_in_ranges: int, slot: int) -> None:
    key = f"key-{number}".encode()
    assert hash31(key) % RANGE_SLOTS == hash_in_ranges
    assert range_slot(key) == slot


@pytest.mark.parametrize(("number", "slot"), [(4415, 1), (37297, 1), (6364, 65535), (79201, 65535)])
def test_the_first_and_the_last_slot_of_a_ring_have_keys(number: int, slot: int) -> None:
    assert ring_slot(f"key-{number}".encode()) == slot


@pytest.mark.parametrize(
    ("one", "other", "slot"),
    [(107, 411, 52221), (12, 540, 25709), (18, 783, 25742), (330, 792, 53683)],
)
def test_different_keys_may_share_a_slot_of_a_ring(one: int, other: int, slot: int) -> None:
    assert ring_slot(f"key-{one}".encode()) == ring_slot(f"key-{other}".encode()) == slot


@pytest.mark.parametrize(
    ("one", "other", "slot"),
    [(358, 522, 25429), (547, 585, 43812), (166, 620, 32427), (0, 1174, 63679)],
)
def test_different_keys_may_share_a_slot_of_ranges(one: int, other: int, slot: int) -> None:
    assert range_slot(f"key-{one}".encode()) == range_slot(f"key-{other}".encode()) == slot


def test_of_2000_keys_25_share_a_slot_of_a_ring() -> None:
    assert 2000 - len({ring_slot(f"key-{number}".encode()) for number in range(2000)}) == 25


@given(st.binary(max_size=40), st.integers(2, RANGE_SLOTS))
def test_every_slot_can_be_owned(key: bytes, slots: int) -> None:
    assert 1 <= ring_slot(key) <= RING_SLOTS
    assert 1 <= ring_slot(key, slots) <= slots
    assert 1 <= range_slot(key) <= RANGE_SLOTS - 1
    assert 1 <= range_slot(key, slots) <= slots - 1


# The ordering key, the partition key, the producer, the sequence id, and the resulting key.
@pytest.mark.parametrize(
    ("ordering_key", "partition_key", "producer", "sequence_id", "key"),
    [
        (b"o", "p", "producer", 1, b"o"),
        (b"", "p", "producer", 1, b""),  # present and empty: a key
        (b"\xff\x00", None, None, None, b"\xff\x00"),
        (None, "p", "producer", 1, b"p"),
        (None, "", "producer", 1, b""),
        (None, "日本語", None, None, "日本語".encode()),
        (None, None, "producer", 1, b"producer-1"),
        (None, None, "ü", 2**63 - 1, "ü-9223372036854775807".encode()),
        (None, None, "producer", 0, b"producer-0"),
        (None, None, "", 0, b"-0"),
        (None, None, "producer", None, NO_KEY),
        (None, None, None, 1, NO_KEY),
        (None, None, None, None, NO_KEY),
    ],
)
def test_the_first_field_present_is_the_key(
    ordering_key: bytes | None,
    partition_key: str | None,
    producer: str | None,
    sequence_id: int | None,
    key: bytes,
) -> None:
    found = key_of(
        ordering_key,
        partition_key,
        base64_encoded=False,
        producer=producer,
        sequence_id=sequence_id,
    )
    assert found == key


def test_an_empty_ordering_key_has_slot_1() -> None:
    key = key_of(b"", "p", base64_encoded=False, producer="p", sequence_id=7)
    assert (ring_slot(key), range_slot(key)) == (1, 1)


def test_an_ordering_key_is_never_base64() -> None:
    key = key_of(b"AAECAw==", "AAEC", base64_encoded=True, producer=None, sequence_id=None)
    assert key == b"AAECAw=="


def partition_key(text: str) -> bytes:
    return key_of(None, text, base64_encoded=True, producer="p", sequence_id=1)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", b""),
        ("AAECAw==", b"\x00\x01\x02\x03"),
        ("AAECAw", b"\x00\x01\x02\x03"),  # Java's decoder needs no padding
        ("AAE=", b"\x00\x01"),
        ("AAE", b"\x00\x01"),
        ("AB==", b"\x00"),  # and ignores the remaining bits
        ("+/+/", b"\xfb\xff\xbf"),
    ],
)
def test_base64_is_decoded_like_java(text: str, key: bytes) -> None:
    assert partition_key(text) == key


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "AAAAA",
        "=",
        "==",
        "AA=",
        "A===",
        "AA===",
        "AAE==",
        "AAAA=",
        "AAAA==",
        "AA==AAAA",
        "AAEC\n",
        "AA EC",
        "-_-_",
        "AAE!",
        "key-1",
        "日本語",
        "\uff21\uff21\uff21\uff21",  # letters of another alphabet
        "AA=\n=",
    ],
)
def test_text_that_is_not_base64_is_used_as_the_key(text: str) -> None:
    assert partition_key(text) == text.encode()


@given(st.binary(max_size=50))
def test_encoded_keys_are_decoded(key: bytes) -> None:
    text = base64.b64encode(key).decode()
    assert partition_key(text) == key
    assert partition_key(text.rstrip("=")) == key


@given(st.text("AQgw+/=- \n", max_size=12))
def test_any_text_is_a_valid_key(text: str) -> None:
    digits = text.rstrip("=")
    padded = digits + "=" * (-len(digits) % 4)
    expected = text.encode()
    if text in (digits, padded):
        with suppress(binascii.Error):
            expected = base64.b64decode(padded, validate=True)
    assert partition_key(text) == expected
