"""The stored form of bits, of a page or of a batch."""

import zlib
from typing import Final

import google_crc32c

_RAW: Final = b"\0"
_ZLIB: Final = b"\1"
_CHECKSUM_BYTES: Final = 4
_LEVEL: Final = 1  # higher levels shrink neither alternating nor random bits further


def packed(bits: int) -> bytes:
    """The stored form of bits:

    CRC-32C of the rest (4 bytes, little endian) | 0: raw, 1: zlib | little-endian bytes
    """
    raw = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    small = zlib.compress(raw, _LEVEL)
    rest = _ZLIB + small if len(small) < len(raw) else _RAW + raw
    return _checksum(rest) + rest


def unpacked(stored: bytes) -> int | None:
    """The bits of a stored form; None: it is damaged."""
    checksum, rest = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    if not rest or checksum != _checksum(rest):
        return None
    raw = zlib.decompress(rest[1:]) if rest[:1] == _ZLIB else rest[1:]
    return int.from_bytes(raw, "little")


def _checksum(rest: bytes) -> bytes:
    crc: int = google_crc32c.value(rest)
    return crc.to_bytes(_CHECKSUM_BYTES, "little")
