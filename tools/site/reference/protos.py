"""The page of protos, from their descriptors, with the comments of protos/."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from tools.dev.protos import protoc
from tools.site.reference.tables import escaped, table

SUFFIX: Final = ".md"  # apart: tools/dev/documents.py looks for names from this folder

HEAD: Final = f"""\
# Protos

The API, for clients in any language. A refusal is a gRPC status with a `google.rpc.ErrorInfo`:
[Errors](../errors{SUFFIX}) has every reason. The packages `seqgate.api.internal` are for calls
between services, and no part of the API.
"""

PREFIX: Final = ".seqgate.api."

PACKAGE, MESSAGE, ENUM, SERVICE = 2, 4, 5, 6  # numbers of FileDescriptorProto's fields
FIELD, NESTED, NESTED_ENUM, VALUE, METHOD = 2, 3, 4, 2, 2

SCALARS: Final = {
    value.number: value.name.removeprefix("TYPE_").lower()
    for value in FieldDescriptorProto.DESCRIPTOR.enum_types_by_name["Type"].values
}


class _File(NamedTuple):
    proto: FileDescriptorProto
    comments: Mapping[tuple[int, ...], str]

    def comment(self, *path: int) -> str:
        return self.comments.get(path, "")


def files() -> list[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "protos.binpb"
        protoc(f"--descriptor_set_out={out}", "--include_source_info")
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def page() -> str:
    found = sorted(files(), key=lambda each: ("internal" in each.package, not each.service))
    return "\n".join([HEAD, *(part for each in found for part in _file(each))])


def _file(proto: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(each.path): each.leading_comments or each.trailing_comments
        for each in proto.source_code_info.location
    }
    file = _File(proto, comments)
    yield f"## {proto.name}\n\n{_text(file.comment(PACKAGE))}\n"
    for index, service in enumerate(proto.service):
        yield from _service(file, service, (SERVICE, index))
    for index, message in enumerate(proto.message_type):
        yield from _message(file, message, message.name, (MESSAGE, index))
    for index, enum in enumerate(proto.enum_type):
        yield from _enum(file, enum, enum.name, (ENUM, index))


def _service(file: _File, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### service {service.name}\n\n{_text(file.comment(*path))}\n"
    for index, method in enumerate(service.method):
        comment = _text(file.comment(*path, METHOD, index))
        yield f"#### rpc {service.name}.{method.name}\n\n{_call(method)}\n\n{comment}\n"


def _call(method: MethodDescriptorProto) -> str:
    given = ("stream " if method.client_streaming else "") + _link(method.input_type)
    result = ("stream " if method.server_streaming else "") + _link(method.output_type)
    return f"{given} → {result}"


def _message(
    file: _File, message: DescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[str]:
    if message.options.map_entry:
        return
    anchor = _anchor(f".{file.proto.package}.{name}")
    yield f"### message {name} {{ #{anchor} }}\n\n{_text(file.comment(*path))}\n"
    maps = {f"{each.name}": each for each in message.nested_type if each.options.map_entry}
    rows = []
    for index, field in enumerate(message.field):
        comment = _line(file.comment(*path, FIELD, index))
        if field.HasField("oneof_index") and not field.proto3_optional:
            comment = f"(one of `{message.oneof_decl[field.oneof_index].name}`) {comment}"
        rows.append((f"`{field.name}` = {field.number}", _type(field, maps), comment))
    if rows:
        yield table(("field", "type", "meaning"), rows)
    for index, nested in enumerate(message.nested_type):
        yield from _message(file, nested, f"{name}.{nested.name}", (*path, NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield from _enum(file, enum, f"{name}.{enum.name}", (*path, NESTED_ENUM, index))


def _enum(
    file: _File, enum: EnumDescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[str]:
    yield (
        f"### enum {name} {{ #{_anchor(f'.{file.proto.package}.{name}')} }}\n\n"
        f"{_text(file.comment(*path))}\n"
    )
    rows = [
        (f"`{value.name}` = {value.number}", _line(file.comment(*path, VALUE, index)))
        for index, value in enumerate(enum.value)
    ]
    yield table(("value", "meaning"), rows)


def _type(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    entry: Any = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_type(each, {}) for each in entry.field)
        return f"map of {key} to {value}"
    name = _link(field.type_name) if field.type_name else SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(name: str) -> str:
    """The name of a type, which leads to it if it is one of ours."""
    if not name.startswith(PREFIX):
        return f"`{name.lstrip('.')}`"
    short = re.sub(r"^[a-z0-9_.]*\.v\d+\.", "", name.lstrip("."))
    return f"[`{short}`](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return name.lstrip(".").replace(".", "-").lower()


def _text(comment: str) -> str:
    """A comment as paragraphs and lists."""
    paragraphs: list[str] = []
    for block in comment.strip("\n").split("\n\n"):
        lines = [each.removeprefix(" ") for each in block.splitlines()]
        paragraphs += (
            _as_drawn(lines)
            if any(each.startswith("  ") for each in lines)
            else [escaped("\n".join(lines))]
        )
    return "\n\n".join(paragraphs)


def _as_drawn(lines: Sequence[str]) -> list[str]:
    """Indented lines are a picture or a table: they stay as they are."""
    return ["```text\n" + "\n".join(lines) + "\n```"]


def _line(comment: str) -> str:
    return escaped(" ".join(comment.split()))
