"""The engine: CEL's C++ implementation, as the package cel-expr-python wraps it.

It returns an error as a value, whose plain form is a text: a result that is neither a bool nor a
duration is an error.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import repeat
from typing import Any, Final

from cel_expr_python import cel

from seqgate.services.filter.adapters.checked import Checked
from seqgate.services.filter.core.explain import SHOWN_CHARACTERS_MAX
from seqgate.services.filter.core.faults import Fault, InvalidExpression
from seqgate.services.filter.core.program import Failure, FailureReason, Shown, Type, Values
from seqgate.services.filter.core.reads import PROPERTIES, SUBSCRIPTION
from seqgate.services.filter.core.syntax import Call, Loop, Node, Variable, children, walk

FAULTS_MAX: Final = 20
"""The most faults reported of an expression."""

MESSAGE_CHARACTERS_MAX: Final = 300
"""The longest message of a fault, in characters."""

SIZE_FACTOR: Final = 24
"""The memory of a program, as a multiple of its serialized form: message, tree and plan."""

ARENA_EVALUATIONS: Final = 64
"""The evaluations that share one arena, which is cheaper than an arena for each."""

_MAKERS: Final = frozenset({"_+_", "string", "bytes"})
"""Functions that make texts and lists, which may be large. An expression with one of them, or with
a loop, shares no arena."""

_STRINGS: Final = cel.Type.Map(cel.Type.STRING, cel.Type.STRING)
_VARIABLES: Final = {
    PROPERTIES: _STRINGS,
    SUBSCRIPTION: _STRINGS,
    "key": cel.Type.STRING,
    "producer": cel.Type.STRING,
    "topic": cel.Type.STRING,
    "sequence_id": cel.Type.INT,
    "publish_time_ms": cel.Type.INT,
    "num_messages": cel.Type.INT,
}
_TYPES: Final = {"BOOL": Type.BOOL, "DURATION": Type.DURATION}
_FAULT: Final = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): ")
_CODE: Final = re.compile(r"^[A-Z_]+: |\s*\[[A-Z_]+\]\s*$")
_ABSENT: Final = "NOT_FOUND"


class CelEngine:
    """See `ports.Engine`."""

    def __init__(self) -> None:
        self._environment = cel.NewEnv(variables=_VARIABLES)
        self._arenas = _shared_arenas()

    def compile(self, text: str) -> "CelProgram":
        try:
            expression = self._environment.compile(text)
        except RuntimeError as error:
            raise InvalidExpression.of(list(_faults(text, str(error)))[:FAULTS_MAX]) from error
        name = expression.return_type().name()
        if name not in _TYPES:
            message = f"a filter must return bool or duration, not {_shown_type(name)}"
            raise InvalidExpression.of([Fault.at(text, 0, message)])
        return CelProgram(self._environment, expression, text, _TYPES[name], self._arenas)


def _shared_arenas() -> Iterator[Any]:
    """Yields an arena ARENA_EVALUATIONS times, then the next one."""
    while True:
        arena = cel.Arena()
        for _ in range(ARENA_EVALUATIONS):
            yield arena


class CelProgram:
    """See `core.program.Compiled`."""

    def __init__(
        self,
        environment: cel.Env,
        expression: cel.Expression,
        text: str,
        type_: Type,
        arenas: Iterator[Any],
    ) -> None:
        serialized = expression.serialize()
        self._environment = environment
        self._expression = expression
        self._checked = Checked(serialized)
        self._text = text
        self.type = type_
        self.tree = self._checked.tree(text)
        makes_much = _makes_much(self.tree)
        self._next_arena = (repeat(None) if makes_much else arenas).__next__
        self._evaluate = expression.eval
        self.size_bytes = SIZE_FACTOR * len(serialized) + len(text)

    def check_constants(self) -> None:
        nodes = list(_constant_parts(self.tree))
        if not nodes or not self._failing([node.id for node in nodes]):
            return
        for node in nodes:
            message = self._failing([node.id])
            if message:
                raise InvalidExpression.of([Fault.at(self._text, node.at or 0, message)])

    def evaluate(self, values: Values) -> bool | int | Failure:
        try:
            # By position, which is quicker: no activation, the values, no functions, the arena.
            value = self._evaluate(None, values, None, self._next_arena()).value()
        except RuntimeError as error:
            return _failure(str(error))
        if value is True or value is False:
            return value
        if isinstance(value, timedelta):
            return (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
        return _failure(str(value))

    def show(self, node: Node, values: Values) -> Shown:
        part = self._environment.deserialize(self._checked.part(node.id))
        name = _shown_type(part.return_type().name())
        try:
            value = part.eval(data=values)
        except RuntimeError as error:
            return Shown(name, _failure(str(error)).message, is_failure=True)
        plain = value.plain_value()
        if value.type() == cel.Type.ERROR:
            return Shown(name, _failure(str(plain)).message, is_failure=True)
        return Shown(name, _shown(plain)[:SHOWN_CHARACTERS_MAX], is_failure=False)

    def _failing(self, ids: list[int]) -> str:
        """Why a list of parts cannot be evaluated; empty: it can."""
        value = self._environment.deserialize(self._checked.parts(ids)).eval(data={})
        return "" if value.type() != cel.Type.ERROR else _failure(str(value.plain_value())).message


def _constant_parts(root: Node) -> Iterable[Node]:
    """The largest calls without variables, and every `matches`, whose pattern may be malformed."""
    if isinstance(root, Call) and (root.function == "matches" or not _depends(root)):
        yield root
        return
    for child in children(root):
        yield from _constant_parts(child)


def _makes_much(root: Node) -> bool:
    return any(
        isinstance(each, Loop) or (isinstance(each, Call) and each.function in _MAKERS)
        for each in walk(root)
    )


def _depends(node: Node) -> bool:
    return any(isinstance(each, Variable | Loop) for each in walk(node))


def _faults(text: str, message: str) -> Iterable[Fault]:
    """The faults in the engine's message, without the lines of the text that it quotes."""
    pieces = _FAULT.split(message)
    if len(pieces) == 1:
        yield Fault.at(text, 0, _sentence(message))
    for line, column, said in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        yield Fault.in_line(text, int(line), int(column), _sentence(said.split("\n |")[0]))


def _sentence(message: str) -> str:
    said = " ".join(_CODE.sub("", _CODE.sub("", message)).split())
    return said[:MESSAGE_CHARACTERS_MAX]


def _failure(message: str) -> Failure:
    reason = (
        FailureReason.PROPERTY_ABSENT
        if message.startswith(_ABSENT)
        else FailureReason.EVALUATION_FAILED
    )
    return Failure(reason, _sentence(message))


def _shown_type(name: str) -> str:
    return name.lower()


def _shown(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case timedelta():
            return f"{value.total_seconds():g}s"
        case bytes() | bytearray():
            return repr(bytes(value))
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case dict():  # in no order
            pairs = sorted(f"{_shown(key)}: {_shown(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case _:
            return str(value)
