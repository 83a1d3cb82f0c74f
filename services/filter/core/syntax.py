"""An expression as a tree, as parsed by the engine that runs it.

Limits, costs and reads are computed from this tree alone, so no part of an expression can be priced
in one way and run in another. Macros (`all`, `exists`, `map`, ...) are loops here, as they are for
the engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Node:
    """A sub-expression; `at` is the place of its own token, in characters from 0; None: none."""

    id: int
    at: int | None


@dataclass(frozen=True, slots=True)
class Constant(Node):
    value: bool | int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class Variable(Node):
    """A variable of VARIABLES (reads.py), or one bound by a loop around it."""

    name: str


@dataclass(frozen=True, slots=True)
class Select(Node):
    """`operand.field`, or `has(operand.field)`."""

    operand: Node
    field: str
    is_test: bool


@dataclass(frozen=True, slots=True)
class Call(Node):
    """A function, a method (its receiver is the first argument), or an operator."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ListOf(Node):
    """`[a, b]`"""

    elements: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MapOf(Node):
    """`{a: b}`"""

    entries: tuple[tuple[Node, Node], ...]


@dataclass(frozen=True, slots=True)
class Loop(Node):
    """An expanded macro: `accumulator` begins as `start` and becomes `step` for each element of
    `over`, which is called `variable`; `result` is its final value."""

    over: Node
    variable: str
    accumulator: str
    start: Node
    condition: Node
    step: Node
    result: Node


def children(node: Node) -> tuple[Node, ...]:
    """The parts of a node, in the order of the text where they have one."""
    match node:
        case Select():
            return (node.operand,)
        case Call():
            return node.arguments
        case ListOf():
            return node.elements
        case MapOf():
            return tuple(chain.from_iterable(node.entries))
        case Loop():
            return node.over, node.start, node.condition, node.step, node.result
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """A node and its descendants."""
    yield node
    for child in children(node):
        yield from walk(child)


def depth(node: Node) -> int:
    """The height of a tree, in nodes."""
    return 1 + max(map(depth, children(node)), default=0)


def loops(node: Node) -> int:
    """The deepest nesting of loops."""
    inner = max(map(loops, children(node)), default=0)
    return inner + isinstance(node, Loop)
