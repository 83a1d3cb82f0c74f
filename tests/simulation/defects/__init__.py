"""Past defects, put back on purpose, and some that never were: the tests must find each of them.

A defect is a function that patches the code to behave as it did, given an object like pytest's
`monkeypatch`. Each area has a module; `find` imports them all.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple


class Defect(NamedTuple):
    """A defect: its id, its effect, and the function that puts it back."""

    id: str
    what: str
    apply: Callable[[Any], None]


DEFECTS: dict[str, Defect] = {}


def defect(id_: str, what: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a defect under a unique id."""

    def register(apply: Callable[[Any], None]) -> Callable[[Any], None]:
        assert id_ not in DEFECTS, id_
        DEFECTS[id_] = Defect(id_, what, apply)
        return apply

    return register


def find(id_: str) -> Defect:
    """The defect of this id.

    Raises:
        KeyError: the id is unknown.
    """
    return all_defects()[id_]


def all_defects() -> dict[str, Defect]:
    """All defects, by id."""
    for module in iter_modules(__path__):
        if module.name != "__main__":
            import_module(f"{__name__}.{module.name}")
    return DEFECTS
