"""The page of the Python API, from the source: everything in __all__ of the packages for users."""

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import griffe

from tools.site.reference.tables import cell

ROOT: Final = Path(__file__).resolve().parents[3]

MODULES: Final = ("client", "errors", "spark", "telemetry")

HEAD: Final = """\
# Python

Everything that applications import. Names that are not here may change in any release.
"""

SECTIONS: Final = {"Attributes:": "", "Args:": "", "Raises:": "**Raises**\n\n"}
ITEM: Final = re.compile(r"^ *(\w+):(?= )", re.MULTILINE)

INDENT: Final = "    "


def page() -> str:
    package = load()
    return "\n".join([HEAD, *(part for each in modules(package) for part in _module(each))])


def modules(package: Any) -> Iterator[Any]:
    """What applications import, and the public modules of the client."""
    for name in MODULES:
        yield package[name]
        if name == "client":
            yield from (each for inner, each in package[name].modules.items() if inner[0] != "_")


@cache
def load() -> Any:
    """The package, as its source has it; reading it takes seconds."""
    return griffe.load("seqgate", search_paths=[ROOT], resolve_aliases=True)


def names(module: Any) -> list[str]:
    """What a module offers: __all__, or its public classes."""
    if module.exports:
        return [str(getattr(each, "name", each)) for each in module.exports]
    return [
        name
        for name, each in module.members.items()
        if not each.is_alias and each.is_class and name[0] != "_"
    ]


def _module(module: Any) -> Iterator[str]:
    yield f"## {module.path}\n"
    yield _docstring(module)
    for name in names(module):
        yield from _entry(_target(module[name]), name)


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _entry(found: Any, name: str) -> Iterator[str]:
    yield f"### {name}\n"
    if found.is_class:
        yield from _class(found)
    elif found.is_function:
        yield _code(_signature(found, name))
        yield _docstring(found)
    else:
        yield _code(f"{name}{_annotation(found)} = {found.value}")
        yield _docstring(found)


def _class(found: Any) -> Iterator[str]:
    parts = _parts(found)
    own = {each.name for each in parts}
    bases = ", ".join(str(each) for each in found.bases if str(each) not in own)
    constructor = found.members.get("__init__")
    shown = f"class {found.name}({bases})" if bases else f"class {found.name}"
    if constructor is not None and not bases and found.name not in _made(found.package):
        shown = f"class {_signature(constructor, found.name)}"
    yield _code(shown)
    yield _docstring(found)
    members = [
        each
        for part in (*parts, found)
        for name, each in part.members.items()
        if name[0] != "_" and not each.is_alias
    ]
    fields = [each for each in members if each.is_attribute and "property" not in each.labels]
    told = set(ITEM.findall(_plain(found)))
    rest = [each for each in fields if each.docstring or each.name not in told]
    if rest:
        yield "\n".join(map(_field, rest)) + "\n"
    for each in members:
        if each.is_function:
            yield f"#### {found.name}.{each.name}\n"
            yield _code(_signature(each, each.name))
            yield _docstring(each)
        elif each.is_attribute and "property" in each.labels:
            yield f"#### {found.name}.{each.name}\n"
            yield _code(f"{each.name}{_annotation(each)}")
            yield _docstring(each)


def _parts(found: Any) -> list[Any]:
    """The classes that a class is composed of, such as LetterCalls of Admin: applications see their
    methods only."""
    return [each for each in found.resolved_bases if each.name.endswith("Calls")]


@cache
def _made(package: Any) -> frozenset[str]:
    """The classes whose objects functions and methods return."""
    found = [_target(module[name]) for module in modules(package) for name in names(module)]
    owners = [part for each in found if each.is_class for part in (each, *_parts(each))]
    methods = [each for owner in owners for each in owner.functions.values()]
    functions = [each for each in found if each.is_function]
    return frozenset(str(each.returns) for each in (*functions, *methods))


def _field(found: Any) -> str:
    value = "" if found.value is None else f" = {found.value}"
    if value.startswith(" = pb."):  # a number on the wire
        value = ""
    text = "".join(f" — {cell(each)}" for each in [_plain(found)] if each)
    return f"- `{cell(f'{found.name}{_annotation(found)}{value}')}`{text}"


def _annotation(found: Any) -> str:
    return "" if found.annotation is None else f": {found.annotation}"


def _signature(function: Any, name: str) -> str:
    kinds = griffe.ParameterKind
    parts: list[str] = []
    given = [each for each in function.parameters if each.name not in ("self", "cls")]
    for index, each in enumerate(given):
        if each.kind is kinds.keyword_only and not any(
            other.kind in (kinds.keyword_only, kinds.var_positional) for other in given[:index]
        ):
            parts.append("*")
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(each.kind, "")
        default = "" if each.default is None or stars else f" = {each.default}"
        parts.append(f"{stars}{each.name}{_annotation(each)}{default}")
    result = "" if function.returns is None else f" -> {function.returns}"
    if name[0].isupper():
        result = ""
    start = "async def " if "async" in function.labels else "def "
    start = "" if name[0].isupper() else start
    line = f"{start}{name}({', '.join(parts)}){result}"
    if len(line) <= 90:
        return line
    inside = "".join(f"{INDENT}{each},\n" for each in parts)
    return f"{start}{name}(\n{inside}){result}"


def _code(text: str) -> str:
    return f"```{{ .python .signature }}\n{text}\n```\n"


def _plain(found: Any) -> str:
    return str(found.docstring.value) if found.docstring else ""


def _docstring(found: Any) -> str:
    """A docstring as paragraphs, with its sections as lists. Other indented lines are code or
    drawn, and stay as they are."""
    blocks: list[str] = []
    for block in re.split(r"\n\n(?! )", _plain(found)):
        first, _, rest = block.partition("\n")
        if first in SECTIONS:
            blocks.append(SECTIONS[first] + _items(textwrap.dedent(rest)))
        else:
            blocks += _prose(block)
    return "\n\n".join(filter(None, blocks)) + "\n"


def _items(text: str) -> str:
    items = re.split(r"\n(?! )", text)
    return "\n".join("- " + ITEM.sub(r"`\1`:", cell(each), count=1) for each in items)


def _prose(block: str) -> Iterator[str]:
    for is_drawn, lines in groupby(block.splitlines(), lambda line: line[:2] in ("", "  ")):
        text = "\n".join(lines).strip("\n")
        if is_drawn and text:
            yield f"```text\n{textwrap.dedent(text)}\n```"
        else:
            yield text
