"""The value of every sub-expression for one entry."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from seqgate.services.filter.core.program import Program, Shown, Values
from seqgate.services.filter.core.spans import Span, spans_of
from seqgate.services.filter.core.syntax import Constant, Loop, Node, children

STEPS_MAX: Final = 200
"""The most sub-expressions shown, outer ones first."""

SHOWN_CHARACTERS_MAX: Final = 1_000
"""The longest shown value, in characters."""


@dataclass(frozen=True, slots=True)
class Step:
    """A sub-expression; `depth` is the number of sub-expressions that contain it."""

    span: Span
    depth: int
    value: Shown


def steps_of(program: Program, values: Values) -> Iterator[Step]:
    """The sub-expressions in the order of the text, outer ones before their parts.

    Literals are left out, since they show their own value; so is the body of a macro, which has a
    value for each element.
    """
    root = program.compiled.tree
    spans = spans_of(program.text, root)
    for node, depth in _outer_first(root)[:STEPS_MAX]:
        span = spans.get(node.id)
        if span is not None:
            yield Step(span, depth, program.compiled.show(node, values))


def _outer_first(root: Node) -> list[tuple[Node, int]]:
    """The nodes to show, with their depths. If there are too many, the outer levels are kept."""
    levels: list[list[tuple[Node, int]]] = []

    def visit(node: Node, depth: int) -> None:
        if isinstance(node, Constant):
            return
        if depth == len(levels):
            levels.append([])
        levels[depth].append((node, depth))
        for child in (node.over,) if isinstance(node, Loop) else children(node):
            visit(child, depth + 1)

    visit(root, 0)
    kept = {node.id for node, _ in [each for level in levels for each in level][:STEPS_MAX]}
    found: list[tuple[Node, int]] = []

    def collect(node: Node, depth: int) -> None:
        if node.id in kept:
            found.append((node, depth))
        for child in (node.over,) if isinstance(node, Loop) else children(node):
            collect(child, depth + 1)

    collect(root, 0)
    return found
