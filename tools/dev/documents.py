"""Check that documents, and the code they name, exist.

python -m tools.dev.documents    exit 1 if a name or a link leads nowhere

    any text file    every name that ends in .md exists: from the file's folder, one of its parents,
                     or docs
    documents        every relative link exists, and so does the heading after its #; make docs
                     checks links to the pages that it generates, docs/reference
                     code in backticks exists: a path (`services/ledger/core/writer.py`,
                     `services/*/rights.py`), a function (`seqgate/client/_outbox.py:receive`), or
                     a module (`test_crash_points.py`). The changelog may name removed code.
    docs/decisions   README.md lists every decision
"""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tools.dev.command import carry_out

ROOT: Final = Path(__file__).resolve().parents[2]

SKIPPED: Final = frozenset({"build", "data", "dist", "node_modules", "venv", "__pycache__"})
"""Folders of generated files, or without our text. Hidden ones are skipped too."""

TEXT: Final = frozenset(
    {"", ".env", ".lua", ".md", ".mjs", ".proto", ".py", ".pyi", ".sh", ".toml", ".yaml"}
)
"""Suffixes of the files searched for names of documents; "" is a Makefile or a Dockerfile."""

GENERATED: Final = "docs/reference"
"""The folder of pages that `make docs` writes, and whose links it checks."""

HISTORY: Final = "CHANGELOG.md"

NAMED: Final = re.compile(r"(?<![\w/.:-])(?:\.\./)*[\w][\w./-]*\.md\b(?:#[\w-]+)?")
LINK: Final = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
MODULE: Final = re.compile(r"`(\w+\.py)`")
PATH: Final = re.compile(r"`([\w.*-]+/[\w./*-]*)(?::(\w+))?`")
HEADING: Final = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def faults(root: Path = ROOT) -> list[str]:
    """Every name and link that leads nowhere, as "file: fault"."""
    found = []
    checked = list(files(root))
    modules = {each.name for each in checked}
    for file in checked:
        text = file.read_text(encoding="utf-8", errors="ignore")
        of_file = [*_missing_documents(root, file, text)]
        if file.suffix == ".md":
            of_file += _broken_links(root, file, text)
            if file.name != HISTORY:
                of_file += _missing_code(root, text)
                of_file += [
                    f"{each} does not exist" for each in MODULE.findall(text) if each not in modules
                ]
        found += [f"{file.relative_to(root)}: {each}" for each in sorted(set(of_file))]
    return found + _unlisted_decisions(root)


def files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in SKIPPED and each[0] != ".")
        for name in sorted(names):
            if Path(name).suffix in TEXT and name[0] != ".":
                yield Path(folder, name)


def _missing_documents(root: Path, file: Path, text: str) -> Iterator[str]:
    for match in NAMED.finditer(text):
        name, _, anchor = match[0].partition("#")
        bases = [file.parent]
        if not name.startswith("../"):
            bases += [each for each in file.parents if each.is_relative_to(root)] + [root / "docs"]
        document = next((each / name for each in bases if (each / name).is_file()), None)
        if document is None:
            if not _is_generated(root, file.parent / name):
                yield f"{name} does not exist"
        elif anchor and anchor not in anchors(document):
            yield f"{name} has no heading #{anchor}"


def _broken_links(root: Path, file: Path, text: str) -> Iterator[str]:
    for match in LINK.finditer(text):
        name, _, anchor = match[1].partition("#")
        target = file.parent / name if name else file
        if _is_generated(root, target):
            continue
        if not target.exists():
            yield f"the link to {name} leads nowhere"
        elif anchor and anchor not in anchors(target):
            yield f"the link to {match[1]} leads to no heading"


def _is_generated(root: Path, document: Path) -> bool:
    return Path(os.path.normpath(document)).is_relative_to(root / GENERATED)


def _missing_code(root: Path, text: str) -> Iterator[str]:
    tops = {each.name for each in root.iterdir() if each.is_dir() and each.name not in SKIPPED}
    for path, function in PATH.findall(text):
        if path.partition("/")[0] not in tops:
            continue
        matching = [root / path] if "*" not in path else list(root.glob(path))
        if not any(each.exists() for each in matching):
            yield f"{path} does not exist"
        elif function and not any(_defines(each, function) for each in matching):
            yield f"{path} has no {function}"


def _defines(file: Path, name: str) -> bool:
    return re.search(rf"^ *(?:async +)?(?:def|class) {name}\b", file.read_text(), re.M) is not None


def _unlisted_decisions(root: Path) -> list[str]:
    folder = root / "docs" / "decisions"
    index = folder / "README.md"
    if not index.exists():
        return []
    listed = {match[1] for match in LINK.finditer(index.read_text())}
    decisions = {each.name for each in folder.glob("*.md")} - {index.name}
    return [
        f"docs/decisions/README.md: does not list {each}" for each in sorted(decisions - listed)
    ]


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = HEADING.findall(document.read_text())
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": faults}))
