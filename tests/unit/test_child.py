"""A signal for a child that ends at the same moment."""

import asyncio
import time
from signal import SIGCONT

from tools.stack.child import tell

CHILDREN = 100
TELLING_S = 0.005
"""Longer than such a child lives."""


async def test_a_child_that_ends_while_it_is_told_something_keeps_its_exit_status() -> None:
    for _ in range(CHILDREN):
        child = await asyncio.create_subprocess_exec("true")
        end = time.monotonic() + TELLING_S
        while time.monotonic() < end:  # the loop stands still, as in the middle of other work
            tell(child, SIGCONT)
        assert await child.wait() == 0
