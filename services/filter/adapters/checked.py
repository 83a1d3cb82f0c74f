"""Reads cel.expr.CheckedExpr, the form in which CEL's implementations exchange checked expressions.

Only the needed part of its definition is repeated here (field names, numbers and types of
cel/expr/checked.proto and syntax.proto): the engine's Python package does not include it.
"""

from typing import Any, Final

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

from seqgate.services.filter.core.faults import Fault, InvalidExpression
from seqgate.services.filter.core.syntax import (
    Call,
    Constant,
    ListOf,
    Loop,
    MapOf,
    Node,
    Select,
    Variable,
)

_FIELDS: Final = {
    "Constant": "null_value:1:int64 bool_value:2:bool int64_value:3:int64 uint64_value:4:uint64 "
    "double_value:5:double string_value:6:string bytes_value:7:bytes",
    "Expr": "id:2:int64 const_expr:3:Constant ident_expr:4:Ident select_expr:5:Select "
    "call_expr:6:Call list_expr:7:CreateList struct_expr:8:CreateStruct "
    "comprehension_expr:9:Comprehension",
    "Ident": "name:1:string",
    "Select": "operand:1:Expr field:2:string test_only:3:bool",
    "Call": "target:1:Expr function:2:string args:3*Expr",
    "CreateList": "elements:1*Expr optional_indices:2*int32",
    "CreateStruct": "message_name:1:string entries:2*Entry",
    "Entry": "id:1:int64 field_key:2:string map_key:3:Expr value:4:Expr optional_entry:5:bool",
    "Comprehension": "iter_var:1:string iter_range:2:Expr accu_var:3:string accu_init:4:Expr "
    "loop_condition:5:Expr loop_step:6:Expr result:7:Expr iter_var2:8:string",
    "Position": "key:1:int64 value:2:int32",
    "SourceInfo": "positions:4*Position",
    "CheckedExpr": "expr:4:Expr source_info:5:SourceInfo",
}
_KINDS: Final = {"Constant": "_value", "Expr": "_expr"}
"""Messages with a oneof, and the suffix of its fields' names."""


def _message_class(name: str) -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "int64": field.TYPE_INT64,
        "int32": field.TYPE_INT32,
        "uint64": field.TYPE_UINT64,
        "double": field.TYPE_DOUBLE,
        "bool": field.TYPE_BOOL,
        "string": field.TYPE_STRING,
        "bytes": field.TYPE_BYTES,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="checked.proto", package="cel.expr", syntax="proto3"
    )
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        ending = _KINDS.get(message_name)
        if ending:
            message.oneof_decl.add(name="kind")
        for each in fields.split():
            repeated = "*" in each
            field_name, number, type_ = each.replace("*", ":").split(":")
            added = message.field.add(
                name=field_name,
                number=int(number),
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            )
            if type_ in scalars:
                added.type = scalars[type_]
            else:
                added.type, added.type_name = field.TYPE_MESSAGE, f".cel.expr.{type_}"
            if ending and field_name.endswith(ending):
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"cel.expr.{name}"))


_CheckedExpr: Final = _message_class("CheckedExpr")


class Checked:
    """A checked expression, whose parts can be made into separate expressions."""

    def __init__(self, serialized: bytes) -> None:
        packed = any_pb2.Any.FromString(serialized)
        self._type_url = packed.type_url
        self._message = _CheckedExpr.FromString(packed.value)

    def tree(self, text: str) -> Node:
        """The core's tree of the expression. Raises InvalidExpression for a construct that filters
        do not support."""
        places = {each.key: each.value for each in self._message.source_info.positions}
        return _Tree(text, places).of(self._message.expr)

    def part(self, id_: int) -> bytes:
        """A part as a separate expression, serialized."""
        return self._with(self._find(id_))

    def parts(self, ids: list[int]) -> bytes:
        """A list of its parts, serialized. A call of `matches` is applied to an empty text: only
        its pattern is checked."""
        whole = type(self._message.expr)()
        whole.id = 0
        whole.list_expr.SetInParent()
        for id_ in ids:
            part = whole.list_expr.elements.add()
            part.CopyFrom(self._find(id_))
            if part.call_expr.function == "matches":
                call = part.call_expr
                asked = call.target if call.HasField("target") else call.args[0]
                asked.Clear()
                asked.const_expr.string_value = ""
        return self._with(whole)

    def _with(self, expression: Any) -> bytes:
        made = _CheckedExpr()
        made.CopyFrom(self._message)
        made.ClearField("source_info")
        made.expr.CopyFrom(expression)
        return any_pb2.Any(
            type_url=self._type_url, value=made.SerializeToString()
        ).SerializeToString()

    def _find(self, id_: int) -> Any:
        waiting = [self._message.expr]
        while waiting:
            expression = waiting.pop()
            if expression.id == id_:
                return expression
            waiting.extend(_parts(expression))
        raise LookupError(id_)


def _parts(expression: Any) -> list[Any]:
    match expression.WhichOneof("kind"):
        case "select_expr":
            return [expression.select_expr.operand]
        case "call_expr":
            call = expression.call_expr
            return [*([call.target] if call.HasField("target") else []), *call.args]
        case "list_expr":
            return list(expression.list_expr.elements)
        case "struct_expr":
            entries = expression.struct_expr.entries
            return [part for each in entries for part in (each.map_key, each.value)]
        case "comprehension_expr":
            loop = expression.comprehension_expr
            return [
                loop.iter_range,
                loop.accu_init,
                loop.loop_condition,
                loop.loop_step,
                loop.result,
            ]
        case _:
            return []


class _Tree:
    def __init__(self, text: str, places: dict[int, int]) -> None:
        self._text = text
        self._places = places

    def of(self, given: Any) -> Node:
        id_, at = given.id, self._places.get(given.id)
        match given.WhichOneof("kind"):
            case "const_expr":
                kind = given.const_expr.WhichOneof("kind")
                value = None if kind == "null_value" else getattr(given.const_expr, kind)
                return Constant(id_, at, value)
            case "ident_expr":
                return Variable(id_, at, given.ident_expr.name)
            case "select_expr":
                select = given.select_expr
                return Select(id_, at, self.of(select.operand), select.field, select.test_only)
            case "call_expr":
                return Call(id_, at, given.call_expr.function, self._all(_parts(given)))
            case "list_expr" if not given.list_expr.optional_indices:
                return ListOf(id_, at, self._all(_parts(given)))
            case "struct_expr" if self._is_map(given.struct_expr):
                entries = given.struct_expr.entries
                return MapOf(
                    id_, at, tuple((self.of(each.map_key), self.of(each.value)) for each in entries)
                )
            case "comprehension_expr" if not given.comprehension_expr.iter_var2:
                loop = given.comprehension_expr
                over, start, condition, step, result = self._all(_parts(given))
                return Loop(
                    id_, at, over, loop.iter_var, loop.accu_var, start, condition, step, result
                )
            case kind:
                message = f"not supported in filters ({kind or 'empty expression'})"
                raise InvalidExpression.of([Fault.at(self._text, at or 0, message)])

    def _all(self, given: list[Any]) -> tuple[Node, ...]:
        return tuple(map(self.of, given))

    @staticmethod
    def _is_map(struct: Any) -> bool:
        return not struct.message_name and all(
            each.HasField("map_key") and not each.optional_entry for each in struct.entries
        )
