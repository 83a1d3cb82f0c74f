"""The programs of the documentation's pages.

A block of `sh` or `python` is run by a test, or the comment before it tells why not:

    <!-- not run: it needs a cluster -->

A block of a command that does not end runs beside those after it:

    <!-- runs until Ctrl-C -->

A `text` block that directly follows a program is what it prints, at least: its lines in this order,
with … for anything.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

PROGRAMS: Final = frozenset({"bash", "console", "python", "sh", "shell"})

COMMANDS: Final = re.compile(
    r"\$ |(apt-get|bash|curl|docker|echo|kubectl|make|node|npm|openssl|pip|podman|python3?|seqgate)"
    r"\b"
)
"""How a command begins: a block of commands is one of `sh`."""

BLOCK: Final = re.compile(
    r"^(?:<!-- (?:not run: (?P<why>[^\n]+)|(?P<endless>runs until Ctrl-C)) -->\n)?"
    r"(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


class Program(NamedTuple):
    """A program of a page.

    Attributes:
        line: where its block begins, from 1.
        prints: lines of its output.
        why: why no test runs it; "": one does.
        endless: whether it runs until it is interrupted.
    """

    line: int
    language: str
    code: str
    prints: tuple[str, ...]
    why: str
    endless: bool = False


def programs(text: str) -> Iterator[Program]:
    blocks = list(BLOCK.finditer(text))
    for block, following in zip_longest(blocks, blocks[1:]):
        if block["language"] in PROGRAMS:
            prints: tuple[str, ...] = ()
            between = text[block.end() : following.start()] if following else "no block"
            if not between.strip() and following["language"] == "text":
                prints = tuple(following["code"].splitlines())
            line = text.count("\n", 0, block.start()) + 1
            why, endless = block["why"] or "", block["endless"] is not None
            yield Program(line, block["language"], block["code"], prints, why, endless)


def unlabelled(text: str) -> list[str]:
    """The first lines of blocks that are commands, and of indented ones, without a language."""
    found = [
        block["code"].partition("\n")[0]
        for block in BLOCK.finditer(text)
        if block["language"] not in PROGRAMS and COMMANDS.match(block["code"])
    ]
    outside = BLOCK.sub("", text)
    return found + [
        line.strip()
        for before, line in zip(["", *outside.splitlines()], outside.splitlines(), strict=False)
        if not before.strip() and line.startswith("    ") and COMMANDS.match(line.strip())
    ]


def lacking(program: Program, printed: str) -> str:
    """The first line that the program did not print, after those before it; "": none."""
    lines = iter(printed.splitlines())
    for expected in program.prints:
        parts = [re.escape(" ".join(part.split())) for part in expected.split("…")]
        pattern = re.compile(" ?.*".join(parts))
        if not any(pattern.search(" ".join(line.split())) for line in lines):
            return expected
    return ""


def elsewhere(code: str, addresses: Mapping[str, str]) -> str:
    """A program that connects to a test's services instead of those on the default ports."""
    for default, address in addresses.items():
        code = code.replace(default, address)
    return code


def of_page(file: Path) -> list[Program]:
    return list(programs(file.read_text()))
