"""The upper bound of an expression's cost, for any entry.

The unit is a step: one operation of the engine, or the bytes that it processes in the same time.
The bound follows from the largest possible entry. A function without a price is refused, so that
functions of a newer engine are not free.

A loop iterates over the elements of a list or a map whose texts total at most the length of the
whole. The cost of a body grows at least as fast as its text (all prices are sums and products of
sizes), so it is highest when as few elements as possible have all of the text. That is how a loop
over `properties` is priced, and why `properties.exists(k, properties[k] == 'x')` is cheap.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from seqgate.services.filter.core.faults import Fault, InvalidExpression
from seqgate.services.filter.core.reads import PROPERTIES, SUBSCRIPTION
from seqgate.services.filter.core.regex import program_size
from seqgate.services.filter.core.syntax import (
    Call,
    Constant,
    ListOf,
    Loop,
    MapOf,
    Node,
    Select,
    Variable,
    depth,
    loops,
)

COST_MAX: Final = 500_000
"""The most that an expression may cost, in steps, at the largest entry. A step takes some 50
nanoseconds, so this is 25 milliseconds."""

ITERATIONS_MAX: Final = 10_000
"""How many elements the loops of an expression may visit together; the engine's own limit."""

DEPTH_MAX: Final = 64
"""The deepest nesting of sub-expressions, macros expanded. The engine's parser stops earlier: at
32, by its own count."""

LOOPS_MAX: Final = 3
"""The deepest nesting of macros."""

REGEX_SIZE_MAX: Final = 2_000
"""The largest program of a regular expression, in instructions."""

PROPERTIES_MAX: Final = 128
"""The most properties of an entry (entry.proto)."""

TEXT_BYTES_MAX: Final = 32 * 1024
"""The limit of the texts that a chain reads of an entry, in total bytes of UTF-8. Fields that it
does not read may be longer."""

SUBSCRIPTION_PROPERTIES_MAX: Final = 2_000
SUBSCRIPTION_BYTES_MAX: Final = 64 * 1024
"""The most properties of a subscription that expressions may read, and their total bytes."""

BYTES_A_STEP: Final = 64
"""The bytes compared or copied in a step."""

NUMBER_BYTES_MAX: Final = 400
"""The longest text of a number or a time, in bytes."""

REGEX_STEPS: Final = 100
REGEX_STEPS_AN_INSTRUCTION: Final = 10
"""The cost of compiling a regular expression: the engine does so each time."""

REGEX_BYTES_A_STEP: Final = 8
"""The bytes that an instruction of a regular expression reads in a step, at worst: when each byte
leads RE2 into a new state."""

LOOK_UP_STEPS: Final = 10
"""The cost of looking up a key of a map, or of a loop's step to the next element."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The largest size of a value.

    Attributes:
        size: bytes of text, including all that it contains.
        count: elements of a list, or keys of a map.
        inner: the largest element; of a map, the largest key or value.
        drawn: the map of which it is known to be a key; empty: none.
    """

    size: float = 0
    count: int = 0
    inner: "Shape | None" = None
    is_map: bool = False
    drawn: str = ""

    @property
    def weight(self) -> float:
        """The number of values that it holds, itself included."""
        return 1 + self.count * (self.inner.weight if self.inner else 0)


NOTHING: Final = Shape()
NUMBER: Final = Shape()
TEXT: Final = Shape(TEXT_BYTES_MAX)


def _map_of(count: int, size: int) -> Shape:
    return Shape(size, count, Shape(size), is_map=True)


SHAPES: Final[Mapping[str, Shape]] = {
    PROPERTIES: _map_of(PROPERTIES_MAX, TEXT_BYTES_MAX),
    SUBSCRIPTION: _map_of(SUBSCRIPTION_PROPERTIES_MAX, SUBSCRIPTION_BYTES_MAX),
    "key": TEXT,
    "producer": TEXT,
    "topic": TEXT,
    "sequence_id": NUMBER,
    "publish_time_ms": NUMBER,
    "num_messages": NUMBER,
}


class Cost(NamedTuple):
    steps: int
    iterations: int


class Bound(NamedTuple):
    """The cost of a sub-expression, and the largest size of its value."""

    steps: float
    iterations: float
    shape: Shape


Scope = Mapping[str, Shape]


def cost_of(text: str, root: Node) -> Cost:
    """Raises InvalidExpression if the expression exceeds a limit, or calls a function without a
    price."""
    if depth(root) > DEPTH_MAX:
        raise _invalid(text, root, f"expression nested too deeply (limit {DEPTH_MAX})")
    if loops(root) > LOOPS_MAX:
        raise _invalid(text, root, f"macros nested too deeply (limit {LOOPS_MAX})")
    bound = _Pricing(text).of(root, SHAPES)
    if bound.iterations > ITERATIONS_MAX:
        raise _invalid(
            text,
            root,
            f"macros may visit {math.ceil(bound.iterations):,} elements (limit {ITERATIONS_MAX:,})",
        )
    if bound.steps > COST_MAX:
        raise _invalid(
            text,
            root,
            f"expression may cost {math.ceil(bound.steps):,} steps for the largest entry "
            f"(limit {COST_MAX:,})",
        )
    return Cost(math.ceil(bound.steps), math.ceil(bound.iterations))


def _invalid(text: str, node: Node, message: str) -> InvalidExpression:
    return InvalidExpression.of([Fault.at(text, node.at or 0, message)])


class _Pricing:
    def __init__(self, text: str) -> None:
        self._text = text

    def of(self, node: Node, scope: Scope) -> Bound:
        match node:
            case Constant():
                return Bound(1, 0, _constant(node))
            case Variable():
                return Bound(1, 0, self._named(node, scope))
            case Select():
                bound = self.of(node.operand, scope)
                return bound._replace(
                    steps=bound.steps + LOOK_UP_STEPS + _scan(len(node.field)),
                    shape=bound.shape.inner or NOTHING,
                )
            case ListOf():
                return self._list(node.elements, scope)
            case MapOf():
                entries = self._list([each for entry in node.entries for each in entry], scope)
                shape = entries.shape
                return entries._replace(
                    shape=Shape(shape.size, len(node.entries), shape.inner, is_map=True)
                )
            case Call():
                return self._call(node, scope)
            case Loop():
                return self._loop(node, scope)
            case _:
                raise _invalid(self._text, node, "not supported in filters")

    def _named(self, node: Variable, scope: Scope) -> Shape:
        shape = scope.get(node.name)
        if shape is None:
            raise _invalid(self._text, node, f"unknown name {node.name!r}")
        return shape

    def _list(self, elements: Sequence[Node], scope: Scope) -> Bound:
        bounds = [self.of(each, scope) for each in elements]
        shapes = [each.shape for each in bounds]
        return Bound(
            1 + sum(each.steps for each in bounds),
            sum(each.iterations for each in bounds),
            Shape(sum(each.size for each in shapes), len(shapes), _largest(shapes)),
        )

    def _call(self, node: Call, scope: Scope) -> Bound:
        bounds = [self.of(each, scope) for each in node.arguments]
        shapes = [each.shape for each in bounds]
        if node.function == "matches":
            steps, shape = self._matches(node, shapes), NOTHING
        elif node.function == "_[_]":
            steps, shape = LOOK_UP_STEPS + _scan(shapes[1].size), _found(node, shapes)
        elif (price := PRICES.get((node.function, len(shapes)))) is not None:
            steps, shape = price(shapes)
        else:
            raise _invalid(
                self._text,
                node,
                f"{node.function!r} is not supported in filters with these arguments",
            )
        return Bound(
            steps + sum(each.steps for each in bounds),
            sum(each.iterations for each in bounds),
            shape,
        )

    def _matches(self, node: Call, shapes: Sequence[Shape]) -> float:
        pattern = node.arguments[-1]
        if not isinstance(pattern, Constant) or not isinstance(pattern.value, str):
            raise _invalid(self._text, pattern, "the regular expression must be a literal")
        try:
            size = program_size(pattern.value)
        except ValueError as error:
            raise _invalid(self._text, pattern, str(error)) from error
        if size > REGEX_SIZE_MAX:
            raise _invalid(
                self._text,
                pattern,
                f"regular expression needs {size:,} instructions (limit {REGEX_SIZE_MAX:,})",
            )
        compiling = REGEX_STEPS + REGEX_STEPS_AN_INSTRUCTION * size
        return compiling + shapes[0].size * size / REGEX_BYTES_A_STEP

    def _loop(self, node: Loop, scope: Scope) -> Bound:
        if node.variable in scope:  # a key would be taken for one of another map
            message = f"{node.variable!r} is already defined here: rename the variable"
            raise _invalid(self._text, node, message)
        over, start = self.of(node.over, scope), self.of(node.start, scope)
        whole = over.shape
        element = whole.inner or NOTHING
        drawn = node.over.name if isinstance(node.over, Variable) else element.drawn
        laden = min(whole.count, math.ceil(whole.size / element.size)) if element.size else 0
        steps, iterations = over.steps + start.steps, over.iterations + start.iterations
        growth: list[tuple[int, Shape]] = []
        for times, size in ((laden, element.size), (whole.count - laden, 0.0)):
            if times == 0:
                continue
            inside = dict(scope)
            inside[node.variable] = _sized(element, size, drawn)
            inside[node.accumulator] = start.shape
            condition, step = self.of(node.condition, inside), self.of(node.step, inside)
            steps += times * (condition.steps + step.steps + LOOK_UP_STEPS)
            iterations += times * (condition.iterations + step.iterations + 1)
            growth.append((times, step.shape))
        grown = _grown(start.shape, growth)
        steps += grown.count * whole.count  # appending to a list copies it
        steps += _scan(grown.size) * whole.count
        result = self.of(node.result, {**scope, node.accumulator: grown})
        return Bound(steps + result.steps, iterations + result.iterations, result.shape)


def _sized(element: Shape, size: float, drawn: str) -> Shape:
    """The element with this much text."""
    return Shape(size, element.count, element.inner, is_map=element.is_map, drawn=drawn)


def _grown(start: Shape, growth: Sequence[tuple[int, Shape]]) -> Shape:
    """The result of a loop whose step yields this from an empty accumulator."""
    return Shape(
        start.size + sum(times * each.size for times, each in growth),
        start.count + sum(times * each.count for times, each in growth),
        _largest([each.inner for _, each in growth if each.inner is not None]),
    )


def _found(node: Call, shapes: Sequence[Shape]) -> Shape:
    """The value of a key. The value of a key drawn from the same map belongs to the same element,
    and is priced at the key's size."""
    place = node.arguments[0]
    inner = shapes[0].inner or NOTHING
    if isinstance(place, Variable) and shapes[1].drawn == place.name:
        return _sized(inner, shapes[1].size, "")
    return inner


def _constant(node: Constant) -> Shape:
    value = node.value
    return Shape(len(value) * 4) if isinstance(value, str | bytes) else NUMBER


def _largest(shapes: Sequence[Shape]) -> Shape | None:
    if not shapes:
        return None
    inner = [each.inner for each in shapes if each.inner is not None]
    return Shape(
        max(each.size for each in shapes),
        max(each.count for each in shapes),
        _largest(inner),
        is_map=any(each.is_map for each in shapes),
        drawn=shapes[0].drawn if len({each.drawn for each in shapes}) == 1 else "",
    )


def _scan(size: float) -> float:
    return size / BYTES_A_STEP


Price = Callable[[Sequence[Shape]], tuple[float, Shape]]


def _flat(steps: int) -> Price:
    return lambda _: (steps, NUMBER)


def _compared(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    one, other = shapes
    return _comparing(one, other), NUMBER


def _comparing(one: Shape, other: Shape) -> float:
    return _scan(min(one.size, other.size)) + 2 * min(one.weight, other.weight)


def _either(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    return 1, _largest(shapes[1:]) or NOTHING


def _joined(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    one, other = shapes
    inner = _largest([each for each in (one.inner, other.inner) if each is not None])
    shape = Shape(one.size + other.size, one.count + other.count, inner)
    return 1 + _scan(shape.size) + shape.count, shape


def _within(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    element, whole = shapes
    if whole.is_map:
        return LOOK_UP_STEPS + _scan(element.size), NUMBER
    return 1 + whole.count * (1 + _comparing(element, whole.inner or NOTHING)), NUMBER


def _measured(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    return 1 + _scan(shapes[0].size), NUMBER


def _at_an_end(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    return 1 + _scan(min(each.size for each in shapes)), NUMBER


def _contained(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    whole, part = shapes
    return 1 + _scan(whole.size) * (1 + part.size / 4), NUMBER


def _converted(shapes: Sequence[Shape]) -> tuple[float, Shape]:
    return 2 + _scan(shapes[0].size), Shape(max(shapes[0].size, NUMBER_BYTES_MAX))


_TIMES: Final = (
    *("getFullYear", "getMonth", "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear"),
    *("getHours", "getMinutes", "getSeconds", "getMilliseconds"),
)
"""Parts of a time in UTC. Another zone would be looked up in files, so it has no price."""

PRICES: Final[Mapping[tuple[str, int], Price]] = {
    **{(name, 2): _flat(1) for name in ("_&&_", "_||_", "_-_", "_*_", "_/_", "_%_")},
    **{(name, 1): _flat(1) for name in ("!_", "-_", "@not_strictly_false")},
    **{(name, 2): _compared for name in ("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_")},
    ("_?_:_", 3): _either,
    ("_+_", 2): _joined,
    ("@in", 2): _within,
    ("size", 1): _measured,
    ("startsWith", 2): _at_an_end,
    ("endsWith", 2): _at_an_end,
    ("contains", 2): _contained,
    **{
        (name, 1): _converted
        for name in ("int", "uint", "double", "bool", "string", "bytes", "timestamp", "duration")
    },
    **{(name, 1): _flat(5) for name in _TIMES},
}
"""The cost of a function by its number of arguments, and the largest size of its value; except
`matches` and `_[_]`."""
