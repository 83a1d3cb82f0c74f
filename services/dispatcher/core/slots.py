"""What places a message: its sticky key, the key's hash, and the hash's slot.

    entry ──▶ sticky key ──▶ hash, 31 bits ──▶ slot on a ring      1 to 65535
              (bytes)                     └──▶ slot in ranges      0 to 65535, and never 0

These are Pulsar's, so that a key comes to the same place as there. The two kinds of slots differ by
more than an offset: a key has one in each, and they have nothing to do with each other. Slot 0 is
"no slot" in Pulsar; what would come there comes to 1.
"""

import re
from binascii import a2b_base64
from typing import Final

import mmh3

RING_SLOT_FIRST: Final = 1
"""The lowest slot of a ring."""

RING_SLOTS: Final = 65_535
"""How many slots a ring has."""

RANGE_SLOTS: Final = 65_536
"""How many slots there are to divide into ranges, with slot 0, which no key has."""

SLOT_MAX: Final = 65_535
"""The highest slot, in a ring and in ranges."""

NO_KEY: Final = b"NONE_KEY"
"""The sticky key of an entry that says neither a key nor who sent it."""

_HASH_BITS: Final = 0x7FFF_FFFF

_BASE64: Final = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?")


def sticky_key(
    ordering_key: bytes | None,
    partition_key: str | None,
    *,
    base64_encoded: bool,
    producer: str | None,
    sequence_id: int | None,
) -> bytes:
    """The bytes that say which entries belong together: the ordering key, else the partition key,
    else a key of the entry's own. What is there decides, be it empty; None: it is not there.

    A partition key that is said to be base64 and is not counts as the text that it is.
    """
    if ordering_key is not None:
        return ordering_key
    if partition_key is not None:
        return _partition_key_bytes(partition_key, base64_encoded=base64_encoded)
    if producer is not None and sequence_id is not None:
        return f"{producer}-{sequence_id}".encode()
    return NO_KEY


def hash31(key: bytes) -> int:
    """MurmurHash3 (x86, 32 bits, seed 0) without its highest bit."""
    return mmh3.hash(key, 0, signed=False) & _HASH_BITS


def ring_slot(key: bytes, slots: int = RING_SLOTS) -> int:
    """A key's slot on a ring of `slots` slots: 1 to slots."""
    return RING_SLOT_FIRST + hash31(key) % slots


def range_slot(key: bytes, slots: int = RANGE_SLOTS) -> int:
    """A key's slot where `slots` slots, of which the lowest is never used, are divided into ranges:
    1 to slots - 1."""
    return hash31(key) % slots or 1


def _partition_key_bytes(text: str, *, base64_encoded: bool) -> bytes:
    # Java's decoder wants no padding, or all of it, and nothing that is not of the alphabet; it
    # does not look at bits that are left over.
    if base64_encoded and _BASE64.fullmatch(text):
        digits = text.rstrip("=")
        return a2b_base64(digits + "=" * (-len(digits) % 4))
    return text.encode()
