"""Every command that a page or a message prints to install something works where it is printed.

Seqgate is on no package index: pip installs it from a checkout (`.`), with extras that it declares,
and everything else by names that a lock of this repository pins.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest

from seqgate.extras import pip_install
from tools.dev.documents import HISTORY, ROOT, files
from tools.dev.locks import LOCKS, canonical, parse

LINE = re.compile(
    r"\b(?:(?P<tool>pip|uv pip|pipx|npm|apt-get|apt)\d* (?:install|add|i)\b|seqgate\[)"
    r"(?P<rest>(?:\\\n|[^`\x22\n&|;)])*)"
)
"""A command that installs, or a name of this project as an index would have it."""

PACKAGE = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?(?P<version>(?:[<>=!~].*)?)")

OURS = re.compile(r"\.(?:\[(?P<extras>[\w,-]+)\])?")

DEBIAN = frozenset({"chromium", "default-jre-headless", "postgresql", "procps"})

WITH_VALUE = frozenset({"--prefix", "--requirement", "--target", "-r"})

JUDGED = frozenset(
    {"README.md", "docs", "deploy", "examples", "protos", "seqgate", "services", "tools"}
)
"""What users read, and what prints messages. Tests and scripts of tools have commands of their
own."""


def extras() -> set[str]:
    return {
        *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    }


def pinned() -> set[str]:
    return {each.name for lock in LOCKS for each in parse(lock.read_text()).packages}


def fault(line: str, folder: Path) -> str:
    """What is wrong with a command, typed at a place like the folder; "": nothing."""
    tool, _, rest = line.partition(" ")
    if not rest or tool.startswith("seqgate["):
        return "no index has seqgate"
    try:
        words = shlex.split(rest.replace("\\\n", " "))[1:]
    except ValueError:
        return "not a command of a shell"
    named = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and before not in WITH_VALUE
    ]
    judge = {"pip": fault_of_pip, "npm": fault_of_npm, "apt-get": fault_of_debian}.get(tool)
    if judge is None:
        return f"{tool} is not what the other pages use"
    if tool == "npm" and not named and not (folder / "package.json").exists():
        return "the folder has no package.json"
    if tool != "npm" and not named and "-r" not in words:
        return "it installs nothing"
    return next(filter(None, map(judge, named)), "")


def fault_of_pip(word: str) -> str:
    own = OURS.fullmatch(word)
    if own is not None:
        unknown = {*(own["extras"] or "").split(",")} - {""} - extras()
        return f"there is no extra {', '.join(sorted(unknown))}" if unknown else ""
    package = PACKAGE.fullmatch(word)
    if package is None:
        return f"{word} is not installable"
    if canonical(package["name"]) == "seqgate":
        return "no index has seqgate"
    return "" if canonical(package["name"]) in pinned() else f"no lock pins {word}"


def fault_of_npm(word: str) -> str:
    return "" if re.fullmatch(r"@?[\w./-]+@\d+\.\d+\.\d+", word) else f"{word} has no version"


def fault_of_debian(word: str) -> str:
    return "" if word in DEBIAN else f"{word} is not a package that the tests install"


def printed() -> list[tuple[Path, str]]:
    """The commands of everything that users read, and the files."""
    found = []
    for file in files(ROOT):
        top = file.relative_to(ROOT).parts[0]
        if top in JUDGED and file.name != HISTORY and (top, file.suffix) != ("tools", ".sh"):
            text = file.read_text(errors="ignore")
            found += [(file, line[0].rstrip("\\ \n")) for line in LINE.finditer(text)]
    return found


def test_every_command_that_pages_and_code_have_to_install_works_as_printed() -> None:
    lines = printed()
    assert len(lines) > 10
    found = [
        f"{file.relative_to(ROOT)}: {line}: {fault(line, file.parent)}" for file, line in lines
    ]
    assert [each for each in found if not each.endswith(": ")] == []


def test_no_message_has_a_command_of_its_own_to_install_a_python_package() -> None:
    own = {
        str(file.relative_to(ROOT)): line
        for file, line in printed()
        if file.suffix == ".py" and not file.is_relative_to(ROOT / "tools")  # which write pages
    }
    assert {file: line for file, line in own.items() if "pip install" in line} == {}


@pytest.mark.parametrize("extra", sorted(extras() - {"dev"}))
def test_a_message_names_the_packages_of_an_extra(extra: str) -> None:
    command = pip_install(extra)
    assert fault(command, ROOT) == ""
    assert extra in metadata("seqgate").get_all("Provides-Extra", [])


def test_where_seqgate_is_not_installed_a_message_names_its_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert pip_install("cli") == "pip install '.[cli]'"


def test_pip_takes_what_messages_print() -> None:
    """What they name is installed here: nothing is downloaded."""
    needed = {"cli", "console", "demo", "java", "otel", "server", "services", "spark"}
    words = [word for extra in needed for word in shlex.split(pip_install(extra))[2:]]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run"]
    done = subprocess.run([*pip, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied" in done.stdout
    assert "Would install" not in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pip install '.[server]'", ""),
        ("pip install .", ""),
        ("pip install '.[sever]'", "there is no extra sever"),
        ("pip install './seqgate[server]'", "./seqgate[server] is not installable"),
        ("pip install 'seqgate[cli]'", "no index has seqgate"),
        ("pip install seqgate", "no index has seqgate"),
        ("seqgate[spark]", "no index has seqgate"),
        ("pip install --upgrade", "it installs nothing"),
        ("pip install 'unheard>=1'", "no lock pins unheard>=1"),
        ("pip install 'unclosed", "not a command of a shell"),
        ("uv pip install .", "uv is not what the other pages use"),
        ("npm install left-pad", "left-pad has no version"),
        ("npm install", "the folder has no package.json"),
        ("apt-get install nonesuch", "nonesuch is not a package that the tests install"),
    ],
)
def test_what_is_wrong_with_a_command_is_found(line: str, expected: str) -> None:
    assert fault(line, ROOT) == expected
