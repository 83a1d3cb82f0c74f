"""Raises an exception between any two lines of a thread, as a signal's handler may."""

import gc
import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.support.depth import is_deep

PACKAGE: Final = str(Path(__file__).parents[2] / "seqgate")


EVERY: Final = 7
"""One of so many lines, in everyday runs."""


class Interrupt(BaseException):
    """What a signal's handler raises."""


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Call a function, and raise Interrupt in this thread before a line of the package's code, or
    of what that calls. Returns whether there was such a line: False if the call ended before."""
    lines = 0

    def begin(frame: FrameType, event: str, argument: object) -> Any:
        return step if is_ours(frame) else None

    def step(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines > at:
                raise Interrupt
        return step

    def is_ours(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not interrupted.__code__:
            if frame.f_code.co_filename.startswith(PACKAGE):
                return True
            frame = frame.f_back
        return False

    before = sys.gettrace()
    collects = gc.isenabled()
    gc.disable()  # what it calls has lines too
    sys.settrace(begin)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return False


def at_each_line(scenario: Callable[[int], bool]) -> int:
    """Run a scenario interrupted at one line after another, until it says that it ended before: at
    all of them in deep runs, otherwise at one of seven, by SEQGATE_TEST_SEED. Returns how many
    lines there are, at most."""
    first = int(os.environ.get("SEQGATE_TEST_SEED", "0")) % EVERY
    for at in count(0 if is_deep() else first, 1 if is_deep() else EVERY):
        if not scenario(at):
            return at
    raise AssertionError("unreachable")
