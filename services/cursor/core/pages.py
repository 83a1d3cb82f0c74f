"""Sets of small numbers as ints: bit i is set if i is in the set.

Python counts, joins and searches an int of 65,536 bits in about a microsecond, whatever its value.
Changing or testing single bits is expensive, since each time copies the int: so many runs are
combined as bytes, and split as text.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

_ONES: Final = re.compile("1+")


def first(count: int) -> int:
    return (1 << count) - 1


def union(runs: Sequence[tuple[int, int]]) -> int:
    """The numbers of runs, given as first and last in ascending order, without overlaps.

    A run is a difference: the bit above its last number minus the bit of its first.
    """
    size = runs[-1][1] // 8 + 2
    above, lowest = bytearray(size), bytearray(size)
    for start, end in runs:
        lowest[start >> 3] |= 1 << (start & 7)
        above[end + 1 >> 3] |= 1 << (end + 1 & 7)
    return int.from_bytes(above, "little") - int.from_bytes(lowest, "little")


def ones_from(bits: int, start: int) -> int:
    """The number of consecutive members of the set, from `start` on."""
    ahead = bits >> start
    return (~ahead & (ahead + 1)).bit_length() - 1


def runs(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of a set, as first and last number, ascending."""
    for match in _ONES.finditer(f"{bits:b}"[::-1]):
        start, end = match.span()
        yield start, end - 1
