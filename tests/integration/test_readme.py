"""The examples of the README work as written."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

from seqgate.dev.stack import SERVICES, Stack
from tests.cli.command_line import CommandLine
from tests.support.nursery import Nursery


def blocks(root: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_the_example_and_the_commands_run(stack: Stack, root: Path, nursery: Nursery) -> None:
    (example,) = blocks(root, "python")
    ledger, dispatcher = stack.address("ledger"), stack.address("dispatcher")
    example = example.replace("127.0.0.1:7702", ledger).replace("127.0.0.1:7704", dispatcher)
    printed = await run(sys.executable, "-c", example)
    assert "checkout 1001 b'2 apples'" in printed
    addresses = {f"SEQGATE_{each.upper()}": stack.address(each) for each in SERVICES}
    seqgate = CommandLine(nursery, {**os.environ, **addresses})
    commands = [line for line in blocks(root, "sh")[-1].splitlines() if line]
    assert len(commands) == 8
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "seqgate"
        ended = await seqgate(*arguments)
        assert (ended.code, bool(ended.out)) == (0, True), command


def test_the_targets_and_files_named_by_the_readme_exist(root: Path) -> None:
    text = (root / "README.md").read_text()
    makefile = (root / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", text):
        assert f"\n{target}:" in makefile
    for named in re.findall(
        r"\]\((?!http)([^)]+)\)|\b((?:deploy/k8s|deploy/docker|services)/[\w./-]+)", text
    ):
        assert (root / "".join(named)).exists()
