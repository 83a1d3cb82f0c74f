"""The depth of tests that prove by repetition.

SEQGATE_TEST_DEPTH is "full", or a factor of the full depth, like 0.1 or 20. Without it, tests run
at the depth of everyday runs. `make test-deep` sets it to "full".
"""

import os
from collections.abc import Sequence
from math import ceil
from typing import Final, TypeVar

T = TypeVar("T")

SETTING: Final = "SEQGATE_TEST_DEPTH"

FULL: Final = "full"


def _depth() -> float | None:
    given = os.environ.get(SETTING, "")
    if not given:
        return None
    depth = 1.0 if given == FULL else float(given)
    if depth <= 0:
        raise ValueError(f"{SETTING} is above 0, or {FULL!r}")
    return depth


def is_deep() -> bool:
    """True if SEQGATE_TEST_DEPTH is set."""
    return _depth() is not None


def deep(*, quick: T, full: T) -> T:
    """Choose `full` if SEQGATE_TEST_DEPTH is set, else `quick`."""
    return full if is_deep() else quick


def times(*, quick: int, full: int) -> int:
    """The number of repetitions."""
    depth = _depth()
    return quick if depth is None else ceil(depth * full)


def some_of(cases: Sequence[T], *, every: int) -> Sequence[T]:
    """All cases if SEQGATE_TEST_DEPTH is set; else one of every `every` neighbours, picked by
    SEQGATE_TEST_SEED."""
    first = int(os.environ.get("SEQGATE_TEST_SEED", "0")) % every
    return cases if is_deep() else cases[first::every]
