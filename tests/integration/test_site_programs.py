"""Every command and program of the documentation works, or its page says why no test runs it."""

import asyncio
import json
import os
import re
import sys
import tomllib
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import typer

from seqgate.cli import _main
from seqgate.cli._settings import SERVICES
from seqgate.dev.child import bound_to_us
from seqgate.dev.stack import Stack
from tests.support.page_programs import BLOCK, elsewhere, lacking, of_page, programs, unlabelled
from tools.site.reference import command_line
from tools.site.tree import ROOT, sources

PAGES = [file.relative_to(ROOT).as_posix() for file in sources()]

WITH_SPARK = "docs/guides/spark.md"
"""tests/spark runs its programs."""

RUN = [
    page
    for page in PAGES
    if page != WITH_SPARK and any(not each.why for each in of_page(ROOT / page))
]

WITHIN_S = 60.0
"""Limit of a program, in seconds."""


@pytest_asyncio.fixture(scope="module")
async def fresh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack for the pages alone: they name topics as readers would, each its own."""
    async with Stack(tmp_path_factory.mktemp("pages")) as stack:
        yield stack


@pytest.mark.parametrize("page", RUN)
async def test_the_programs_of_a_page_work(page: str, fresh: Stack, tmp_path: Path) -> None:
    addresses = {default: fresh.address(name) for name, default in SERVICES.items()}
    environment = {f"SEQGATE_{name.upper()}": fresh.address(name) for name in SERVICES}
    scripts = Path(sys.executable).parent
    for program in of_page(ROOT / page):
        if program.why:
            continue
        code = elsewhere(program.code, addresses)
        command = [sys.executable, "-"] if program.language == "python" else ["bash", "-eu", "-s"]
        process = await asyncio.create_subprocess_exec(
            *bound_to_us(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=tmp_path,
            env={**os.environ, **environment, "PATH": f"{scripts}:{os.environ['PATH']}"},
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, _ = await process.communicate(code.encode())
        finally:
            if process.returncode is None:
                process.kill()
        printed = out.decode()
        assert process.returncode == 0, f"{page}:{program.line}\n{printed}"
        missing = lacking(program, printed)
        assert not missing, f"{page}:{program.line} does not print: {missing}\n{printed}"


@pytest.mark.parametrize("page", PAGES)
def test_a_program_that_is_not_run_says_why_and_commands_are_labelled(page: str) -> None:
    text = (ROOT / page).read_text()
    assert unlabelled(text) == []
    for program in programs(text):
        assert not program.why or len(program.why.split()) >= 3
    for block in BLOCK.finditer(text):
        if block["language"] == "toml":
            tomllib.loads(block["code"])
        if block["language"] == "json":
            json.loads(block["code"])


def test_the_commands_and_the_extras_that_pages_name_exist() -> None:
    root = typer.main.get_command(_main.app)
    known = {path for path, _ in command_line.commands(root, "seqgate")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    for page in PAGES:
        if page.startswith(("CHANGELOG", "docs/decisions")):
            continue
        text = (ROOT / page).read_text()
        assert set(re.findall(r"seqgate\[(\w+)\]", text)) <= extras, page
        for program in programs(text):
            for words in map(str.split, program.code.splitlines()):
                if words[:1] == ["seqgate"]:
                    named = {" ".join(words[:count]) for count in (2, 3, 4)}
                    assert known & named, f"{page}: {' '.join(words)}"


def test_what_is_wrong_with_a_page_is_found() -> None:
    assert unlabelled("```\nmake demo\n```\n\n    npm install\n") == ["make demo", "npm install"]
    skipped = "<!-- not run: for a reason -->\n```sh\na\n```\n"
    first, second = programs(f"{skipped}\n```python\nb\n```\n\n```text\nx … 1\n```\n")
    assert (first.why, first.prints, first.line) == ("for a reason", (), 1)
    assert (second.why, second.prints, second.line) == ("", ("x … 1",), 6)
    assert lacking(second, "a\nx  y  1\n") == ""
    assert lacking(second, "a\n") == "x … 1"
