"""Mistakes that were made once, to be made again on purpose: whoever looks for mistakes must find
each of them.

A defect is a function that is given something to patch with, as pytest's `monkeypatch`, and makes
things as they were. Each area has a module; `find` imports them all.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple


class Defect(NamedTuple):
    """One of them: its id, what happens with it, and what makes it happen."""

    id: str
    what: str
    apply: Callable[[Any], None]


DEFECTS: dict[str, Defect] = {}


def defect(id_: str, what: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers a defect under an id that no other one has."""

    def register(apply: Callable[[Any], None]) -> Callable[[Any], None]:
        assert id_ not in DEFECTS, id_
        DEFECTS[id_] = Defect(id_, what, apply)
        return apply

    return register


def find(id_: str) -> Defect:
    """The defect of this id.

    Raises:
        KeyError: there is none.
    """
    return all_defects()[id_]


def all_defects() -> dict[str, Defect]:
    """All of them, by id."""
    for module in iter_modules(__path__):
        if module.name != "__main__":
            import_module(f"{__name__}.{module.name}")
    return DEFECTS
