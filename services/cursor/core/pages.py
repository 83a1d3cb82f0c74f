"""A set of small numbers as one int: bit i is set when i is in it.

Python counts, joins and searches an int of 65,536 bits in about a microsecond, whatever is in it.
What it cannot do cheaply is to change one bit, or to look at one after another, for each time it
copies the int: many runs are put together as bytes, and told apart as text.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

_ONES: Final = re.compile("1+")


def first(count: int) -> int:
    """The first so many numbers: 0 to count - 1."""
    return (1 << count) - 1


def union(runs: Sequence[tuple[int, int]]) -> int:
    """The numbers of runs, of which first and last are given; in order, and none twice.

    A run is a difference: its bits are the one above its last less the one of its first.
    """
    size = runs[-1][1] // 8 + 2
    above, lowest = bytearray(size), bytearray(size)
    for start, end in runs:
        lowest[start >> 3] |= 1 << (start & 7)
        above[end + 1 >> 3] |= 1 << (end + 1 & 7)
    return int.from_bytes(above, "little") - int.from_bytes(lowest, "little")


def ones_from(bits: int, start: int) -> int:
    """How many numbers in a row are in the set, from `start` on."""
    ahead = bits >> start
    return (~ahead & (ahead + 1)).bit_length() - 1


def runs(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of a set, first and last number of each, in order."""
    for match in _ONES.finditer(f"{bits:b}"[::-1]):
        start, end = match.span()
        yield start, end - 1
