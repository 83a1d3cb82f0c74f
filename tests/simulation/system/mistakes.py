"""Deliberate mistakes: one of tests/simulation/defects, for a while."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any, Final

MISSING: Final = object()


class Patch:
    """Puts values in the place of others, like pytest's monkeypatch."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, holder: Any, name: Any, value: Any = MISSING) -> None:
        """Until the end. The holder may be named with the attribute: "package.module.attribute"."""
        if value is MISSING:
            path, _, attribute = holder.rpartition(".")
            holder, name, value = resolve_name(path), attribute, name
        held = vars(holder).get(name, getattr(holder, name))
        self._stack.callback(setattr, holder, name, held)
        setattr(holder, name, value)


@contextmanager
def mistake(defect: str | None) -> Iterator[None]:
    """Meanwhile the code has this defect; None: none."""
    with ExitStack() as stack:
        if defect is not None:
            from tests.simulation.defects import find

            find(defect).apply(Patch(stack))
        yield
