"""Seeds every source of randomness."""

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
    """Inside the context, os.urandom (hence uuid4 and secrets), the functions of `random` and every
    Random without a seed draw from the loop's seed. They do not draw from `loop.random` itself, so
    an additional uuid changes no later fault."""
    source = random.Random(f"chance of {loop.seed}")

    class Seeded(random.Random):
        """A Random whose default seed comes from the source."""

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
        # Modules that imported the class, before or meanwhile, get the real one back.
        stack.callback(_replace, Seeded, random.Random)
        _replace(random.Random, Seeded)
        patch(random, "Random", Seeded)
        yield


def _replace(one: type, other: type) -> None:
    """In our modules that imported class `one`, put `other` in its place."""
    for module in _ours(len(sys.modules)):
        if getattr(module, "Random", None) is one:
            module.Random = other


@functools.lru_cache(maxsize=1)
def _ours(modules: int) -> list[Any]:
    """Loaded modules of our packages."""
    del modules  # the cache key: search again once more modules are loaded
    return [module for name, module in sys.modules.copy().items() if name.partition(".")[0] in OURS]
