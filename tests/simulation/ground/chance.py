"""What is left to chance comes from the seed."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tests.simulation.ground.clock import OURS

if TYPE_CHECKING:
    from tests.simulation.ground.loop import VirtualLoop


@contextmanager
def seeded_chance(loop: VirtualLoop) -> Iterator[None]:
    """Meanwhile os.urandom (so uuid4 and secrets), `random`'s functions and every Random without a
    seed draw from the loop's seed; not from `loop.random` itself, so that one more uuid changes no
    fault that comes later."""
    source = random.Random(f"chance of {loop.seed}")

    class Seeded(random.Random):
        """Seeded from the source, unless it is given a seed."""

        def __init__(self, x: Any = None) -> None:
            super().__init__(source.getrandbits(64) if x is None else x)

    with ExitStack() as stack:

        def patch(holder: Any, name: str, value: Any) -> None:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)

        stack.callback(random.setstate, random.getstate())
        random.seed(source.getrandbits(64))
        patch(os, "urandom", source.randbytes)
        patch(random, "_urandom", source.randbytes)
        # Whoever has taken the class, or takes it meanwhile, is given back the real one.
        stack.callback(_replace, Seeded, random.Random)
        _replace(random.Random, Seeded)
        patch(random, "Random", Seeded)
        yield


def _replace(one: type, other: type) -> None:
    """Modules of ours that have imported one class have the other instead."""
    for module in _ours(len(sys.modules)):
        if getattr(module, "Random", None) is one:
            module.Random = other


@functools.lru_cache(maxsize=1)
def _ours(modules: int) -> list[Any]:
    """Our modules."""
    del modules  # how many there are: when more are loaded, it is looked again
    return [module for name, module in sys.modules.copy().items() if name.partition(".")[0] in OURS]
