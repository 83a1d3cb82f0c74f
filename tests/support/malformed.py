"""Random messages: anything that a descriptor allows, valid or not."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

DEPTH_MAX: Final = 5
"""The deepest nesting of messages."""

REPEATED_MAX: Final = 3
"""The most values of a list or a map."""

TEXTS: Final = st.one_of(
    st.sampled_from(
        [
            "public/default/malformed",
            "public/default/other",
            "public/default/",
            "public//x",
            "../../etc/passwd",
            "persistent://public/default/malformed",
            "seqgate.dedup",
            "sub",
            "p",
            "",
            "a" * 256,
            "\x00",
            "\u202e",
            "properties.region == 'eu'",
        ]
    ),
    st.text(max_size=20),
)

_NUMBERS: Final[Mapping[int, tuple[int, int]]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def numbers(lowest: int, highest: int) -> st.SearchStrategy[int]:
    """Small numbers, and those at the bounds."""
    edges = [each for each in (lowest, highest, -1, 0, 1, 2**31, 2**53 + 1) if each >= lowest]
    return st.one_of(
        st.sampled_from([each for each in edges if each <= highest]), st.integers(0, 100)
    )


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of a type, with at most one field of each oneof."""
    return st.builds(_made, st.just(descriptor), _fields(descriptor, depth))


@cache
def _fields(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    choices: dict[str, list[FieldDescriptor]] = {}
    for field in descriptor.fields:
        oneof = field.containing_oneof
        choices.setdefault(field.name if oneof is None else oneof.name, []).append(field)
    parts = [
        st.one_of(
            st.just({}),
            *(
                st.builds(lambda value, name=field.name: {name: value}, _values(field, depth))
                for field in fields
                if depth < DEPTH_MAX or field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE
            ),
        )
        for fields in choices.values()
    ]
    return st.tuples(*parts).map(
        lambda some: {name: v for each in some for name, v in each.items()}
    )


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return st.dictionaries(_one(key, depth), _one(value, depth), max_size=REPEATED_MAX)
    if field.is_repeated:
        return st.lists(_one(field, depth), max_size=REPEATED_MAX)
    return _one(field, depth)


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            message = field.message_type
            assert message is not None
            return st.deferred(lambda: messages(message, depth + 1))
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return st.sampled_from([*(v.number for v in field.enum_type.values), 99])
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=20)
        case FieldDescriptor.CPPTYPE_STRING:
            return TEXTS
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case number:
            return numbers(*_NUMBERS[number])


def _made(descriptor: Descriptor, fields: Mapping[str, Any]) -> Message:
    made: Message = GetMessageClass(descriptor)(**fields)
    return made
