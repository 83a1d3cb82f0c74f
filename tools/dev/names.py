"""Check that stubs are typed, and that a class name stands for one thing in each service.

python -m tools.dev.names    exit 1 if a stub is annotated as Any, or a class name is used twice

    stubs      no variable, attribute or parameter in seqgate, services or tools that holds a gRPC
               stub is annotated as Any: it takes a `...ServiceStub(channel)`, or is called `stub`
               or `..._stub`. Generated code is not checked.
    classes    no two modules of a room define classes of the same name.
               Rooms are the folders of services and tools, and four of seqgate.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.dev.command import carry_out
from tools.dev.documents import ROOT, files

CHECKED: Final = ("seqgate", "services", "tools")

GENERATED: Final = ("seqgate", "api")

ROOMS: Final = frozenset(
    {"seqgate/client", "seqgate/client/blocking", "seqgate/cli", "seqgate/spark"}
)
"""Rooms besides the folders of services and tools."""


def faults(root: Path = ROOT) -> list[str]:
    """Every untyped stub and every class name with two meanings, as "place: fault"."""
    found = []
    classes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, module in _modules(root):
        found += [f"{name}:{each}" for each in _untyped_stubs(module)]
        room = _room(name)
        for node in ast.walk(module) if room else ():
            if isinstance(node, ast.ClassDef):
                classes[room, node.name].add(name)
    for (room, name), names in sorted(classes.items()):
        if len(names) > 1:
            both = " and ".join(sorted(names))
            found.append(f"{room}: {both} define a class {name}; rename one")
    return found


def _modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """The checked modules with their paths. Links are not followed, so each module appears once."""
    for top in CHECKED:
        for file in files(root / top):
            path = file.relative_to(root)
            if file.suffix == ".py" and path.parts[:2] != GENERATED:
                yield path.as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def _room(name: str) -> str:
    """The room of a module; empty if it is in none."""
    top, *folders, _ = name.split("/")
    if "/".join([top, *folders]) in ROOMS:
        return "/".join([top, *folders])
    room = "/".join([top, *folders[:1]])
    return room if folders and (top in {"services", "tools"} or room in ROOMS) else ""


def _untyped_stubs(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                is_stub = _is_stub(_last(target)) or _makes_stub(value)
                name = ast.unparse(target)
            case ast.arg(arg=name, annotation=annotation):
                is_stub = _is_stub(name)
            case _:
                continue
        if is_stub and _is_any(annotation):
            yield f"{node.lineno}: the stub {name} is annotated as Any; name its type"


def _is_stub(name: str) -> bool:
    return name == "stub" or name.endswith("_stub")


def _makes_stub(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and _last(value.func).endswith("Stub")


def _is_any(annotation: ast.expr | None) -> bool:
    match annotation:
        case ast.Constant(value=str(text)):
            return _is_any(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, right=right):
            return _is_any(left) or _is_any(right)
        case None:
            return False
    return _last(annotation) == "Any"


def _last(expression: ast.expr) -> str:
    """The last part of a dotted name; empty for any other expression."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": faults}))
