"""Every command and program of the documentation works, or its page says why no test runs it."""

import asyncio
import itertools
import json
import os
import re
import signal
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
from tests.support.page_programs import (
    BLOCK,
    Program,
    elsewhere,
    lacking,
    of_page,
    programs,
    unlabelled,
)
from tools.site import navigation
from tools.site.reference import command_line
from tools.site.tree import ROOT, sources


def rank(page: str) -> tuple[int, str]:
    """Where a page is in the navigation; those that are not there come last."""
    return (ORDER.index(page) if page in ORDER else len(ORDER)), page


ORDER = list(navigation.pages())

PAGES = [
    "README.md",
    *(
        file.relative_to(ROOT).as_posix()
        for file, page in sorted(
            sources().items(), key=lambda each: rank(each[1].removesuffix(".md"))
        )
    ),
]
"""In the order of the site's navigation; the README is first."""

INLINE = re.compile(r"`(seqgate [^`]+)`")
"""A command within a sentence."""

TOPIC = re.compile(
    r"""(?x) (?:
        (?:producer|consumer|reader)\(\s*"
        | option\("topic",\s*"
        | seqgate\ (?:publish|read|consume|dedup\ (?:explain|snapshot|status|diff)
            | dead-letter\ \w+ | message\ \w+ | redrive\ \w+ | subscription\ filter\ \w+
            | subscription\ (?!filter)[\w-]+ | topic\ \w+)\ '?
        | examples/\w+\.py\ (?:127\.0\.0\.1:\d+\ )+
        | node\ \S+\.mjs\ \S+\ (?=public/)
    ) (?: ([a-z][\w/-]*) )
    | "(public/default/[\w-]+)" """
)
"""Where a program names a topic."""

WITH_SPARK = "docs/guides/spark.md"
"""tests/spark runs its programs."""

RUN = [
    page
    for page in PAGES
    if page != WITH_SPARK and any(not each.why for each in of_page(ROOT / page))
]

DEV = "seqgate dev --data data\n"
"""What runs while readers follow a page. tests/cli/test_dev.py runs the command; here are the same
services, which start at less cost."""

CHECKOUT = ("LICENSE", "README.md", "examples", "pyproject.toml", "seqgate", "services")
"""What programs of pages need of a checkout, in which readers type them."""

WITHIN_S = 300.0
"""Limit of a program, in seconds: a dozen commands on a busy machine."""

pytestmark = pytest.mark.timeout(1200)

TWICE = 2


class Terminal:
    """A reader's terminal, in a checkout, whose services listen on ports of their own."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self._folder = folder
        self._addresses = {default: stack.address(name) for name, default in SERVICES.items()}
        scripts = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            **{f"SEQGATE_{name.upper()}": stack.address(name) for name in SERVICES},
            "PATH": f"{scripts}:{os.environ['PATH']}",
        }
        for name in CHECKOUT:
            (folder / name).symlink_to(ROOT / name)

    async def run(self, program: Program) -> tuple[int, str]:
        """Returns the exit status, and what it printed."""
        code = elsewhere(program.code, self._addresses)
        is_python = program.language == "python"
        process = await asyncio.create_subprocess_exec(
            *bound_to_us([sys.executable, "-"] if is_python else ["bash", "-eu", "-s"]),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=self._folder,
            env=self._environment,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, _ = await process.communicate(code.encode())
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = await process.communicate()
            return -signal.SIGKILL, f"{out.decode()}\nIt does not end within {WITHIN_S} s."
        assert process.returncode is not None
        return process.returncode, out.decode()


@pytest_asyncio.fixture(scope="module")
async def terminal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Terminal]:
    """For all pages: each has topics and files of its own."""
    async with Stack(tmp_path_factory.mktemp("data")) as stack:
        yield Terminal(tmp_path_factory.mktemp("checkout"), stack)


@pytest.mark.parametrize("page", RUN)
async def test_the_programs_of_a_page_work_in_its_order_and_twice(
    page: str, terminal: Terminal
) -> None:
    for _ in range(TWICE):
        for program in of_page(ROOT / page):
            if program.endless:
                assert program.code == DEV
            elif not program.why:
                status, printed = await terminal.run(program)
                assert status == 0, f"{page}:{program.line}\n{printed}"
                missing = lacking(program, printed)
                assert not missing, f"{page}:{program.line} does not print: {missing}\n{printed}"


async def test_the_publisher_of_the_start_page_is_killed_in_the_middle(terminal: Terminal) -> None:
    """Some messages are stored before, others after. The topic is another: the page's has all."""
    code = "".join(each.code for each in of_page(ROOT / "docs/start.md")[2:5])
    assert code.count("kill -9") == 1
    assert code.count("seqgate publish purchases") == 2
    program = Program(0, "sh", code.replace("purchases", "killed"), (), "")
    status, printed = await terminal.run(program)
    assert status == 0, printed
    (summary,) = (each for each in printed.splitlines() if each.startswith("checkout "))
    _, sent, stored, duplicates, failed = summary.split()
    assert (int(sent), int(failed)) == (20_000, 0)
    assert 0 < int(stored) < 20_000, printed
    assert int(stored) + int(duplicates) == 20_000


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


def test_the_commands_and_options_that_pages_name_exist() -> None:
    root = typer.main.get_command(_main.app)
    known = dict(command_line.commands(root, "seqgate"))
    for page in PAGES:
        if page.startswith(("CHANGELOG", "docs/decisions")):
            continue
        text = (ROOT / page).read_text()
        lines = [line for each in programs(text) for line in each.code.splitlines()]
        for words in map(str.split, [*lines, *INLINE.findall(text)]):
            if words[:1] == ["seqgate"] and words[1:] != ["..."]:
                paths = [" ".join(words[:count]) for count in (4, 3, 2)]
                path = next((each for each in paths if each in known), None)
                assert path is not None, f"{page}: {' '.join(words)}"
                options = {"--help", *(name for each in known[path].params for name in each.opts)}
                flags = {each for each in words if re.fullmatch("--[a-z-]+", each)}
                assert flags <= options, f"{page}: {' '.join(words)}"


def test_every_page_and_example_has_topics_of_its_own() -> None:
    """What one page leaves in a topic would meet the programs of another."""
    named = {
        page: {
            (found[1] or found[2]).removeprefix("public/default/")
            for program in of_page(ROOT / page)
            for found in TOPIC.finditer(program.code)
        }
        for page in PAGES
    }
    assert named["README.md"] == {"orders"}
    assert named["docs/guides/spark.md"] == {"spark-orders"}
    assert {"node-greetings", "shop-log"} == named["examples/node/README.md"]
    assert sum(map(len, named.values())) > 12
    for (one, topics), (other, others) in itertools.combinations(named.items(), 2):
        assert not topics & others, f"{one} and {other}"


def test_what_is_wrong_with_a_page_is_found() -> None:
    assert unlabelled("```\nmake demo\n```\n\n    npm install\n") == ["make demo", "npm install"]
    skipped = "<!-- not run: for a reason -->\n```sh\na\n```\n"
    first, second = programs(f"{skipped}\n```python\nb\n```\n\n```text\nx … 1\n```\n")
    assert (first.why, first.prints, first.line) == ("for a reason", (), 1)
    assert (second.why, second.prints, second.line) == ("", ("x … 1",), 6)
    assert lacking(second, "a\nx  y  1\n") == ""
    assert lacking(second, "a\n") == "x … 1"
