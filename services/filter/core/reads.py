"""The fields of an entry that an expression reads. No others can change its verdict, so no others
are inspected, or are part of the key under which a verdict is cached."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

from seqgate.services.filter.core.syntax import (
    Call,
    Constant,
    Loop,
    Node,
    Select,
    Variable,
    children,
)

PROPERTIES: Final = "properties"
SUBSCRIPTION: Final = "subscription"

VARIABLES: Final = (
    PROPERTIES,
    "key",
    "producer",
    "sequence_id",
    "publish_time_ms",
    "num_messages",
    "topic",
    SUBSCRIPTION,
)


@dataclass(frozen=True, slots=True)
class Reads:
    """The inputs that are read.

    Attributes:
        variables: a part of VARIABLES.
        properties: the names looked up in the variable `properties`; None: any, or all.
        subscription: the same for the variable `subscription`.
    """

    variables: frozenset[str] = frozenset()
    properties: frozenset[str] | None = field(default=frozenset())
    subscription: frozenset[str] | None = field(default=frozenset())

    @classmethod
    def of(cls, root: Node) -> Self:
        found = _Found()
        found.visit(root, frozenset())
        return cls(
            frozenset(found.variables),
            *(
                None if found.names[name] is None else frozenset(found.names[name] or ())
                for name in (PROPERTIES, SUBSCRIPTION)
            ),
        )

    @classmethod
    def together(cls, all_: Iterable["Reads"]) -> Self:
        variables: frozenset[str] = frozenset()
        properties: frozenset[str] | None = frozenset()
        subscription: frozenset[str] | None = frozenset()
        for each in all_:
            variables |= each.variables
            properties = _either(properties, each.properties)
            subscription = _either(subscription, each.subscription)
        return cls(variables, properties, subscription)


def _either(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return None if one is None or other is None else one | other


class _Found:
    """The reads found so far; a map used as a whole has no names."""

    def __init__(self) -> None:
        self.variables: set[str] = set()
        self.names: dict[str, set[str] | None] = {PROPERTIES: set(), SUBSCRIPTION: set()}

    def visit(self, node: Node, bound: frozenset[str]) -> None:
        """Add a node's reads; `bound` are the names bound by the loops around it."""
        looked_up = _look_up(node)
        if looked_up is not None and looked_up[0].name not in bound:
            variable, name = looked_up
            self.variables.add(variable.name)
            names = self.names[variable.name]
            if names is not None:
                names.add(name)
            return
        if isinstance(node, Variable) and node.name not in bound:
            self.variables.add(node.name)
            if node.name in self.names:
                self.names[node.name] = None
        if isinstance(node, Loop):
            self.visit(node.over, bound)
            self.visit(node.start, bound)
            inside = bound | {node.variable, node.accumulator}
            for each in (node.condition, node.step, node.result):
                self.visit(each, inside)
            return
        for child in children(node):
            self.visit(child, bound)


def _look_up(node: Node) -> tuple[Variable, str] | None:
    """The map and the name, if the node looks up one property by a literal name."""
    match node:
        case Select(operand=Variable() as variable, field=name):
            pass
        case Call(function="_[_]", arguments=(Variable() as variable, Constant(value=str(name)))):
            pass
        case Call(function="@in", arguments=(Constant(value=str(name)), Variable() as variable)):
            pass
        case _:
            return None
    return (variable, name) if variable.name in (PROPERTIES, SUBSCRIPTION) else None
