"""Runs code with one of the defects of tests/simulation/defects."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any, Final

MISSING: Final = object()


class Patch:
    """Replaces attributes, like pytest's monkeypatch."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, holder: Any, name: Any, value: Any = MISSING) -> None:
        """Replace an attribute until the stack closes. `holder` may be "module.attribute"."""
        if value is MISSING:
            path, _, attribute = holder.rpartition(".")
            holder, name, value = resolve_name(path), attribute, name
        held = vars(holder).get(name, getattr(holder, name))
        self._stack.callback(setattr, holder, name, held)
        setattr(holder, name, value)


@contextmanager
def mistake(defect: str | None) -> Iterator[None]:
    """Inside the context, the code has this defect; None for no defect."""
    with ExitStack() as stack:
        if defect is not None:
            from tests.simulation.defects import find

            find(defect).apply(Patch(stack))
        yield
