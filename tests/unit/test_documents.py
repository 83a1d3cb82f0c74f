"""tools/dev/documents.py: names and links that lead nowhere are found."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.dev import documents

MD = ".md"
"""Split, so that the names in this file are not checked."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout without faults."""
    write(tmp_path, f"README{MD}", f"# Top\n\n[guide](docs/guide{MD}#two-words)\n")
    write(
        tmp_path, f"docs/guide{MD}", "# Two words\n\n`services/a.py:run`, `a.py`, `services/*.py`\n"
    )
    write(
        tmp_path,
        "services/a.py",
        f'"""See guide{MD} and docs/guide{MD}."""\nasync def run(): ...\n',
    )
    write(tmp_path, f"docs/decisions/README{MD}", f"- [one](one{MD})\n")
    write(tmp_path, f"docs/decisions/one{MD}", "# One\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_repository_has_no_faults() -> None:
    assert documents.faults() == []


def test_a_checkout_without_faults_passes(checkout: Path) -> None:
    assert documents.faults(checkout) == []


def test_pages_that_are_generated_may_be_missing(checkout: Path) -> None:
    write(checkout, f"docs/guides/one{MD}", f"[cli](../reference/cli{MD}#topic)\n")
    assert documents.faults(checkout) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("services/b.py", f"# see gone{MD}", f"services/b.py: gone{MD} does not exist"),
        ("deploy/b.yaml", f"# docs/gone{MD}", f"deploy/b.yaml: docs/gone{MD} does not exist"),
        ("Makefile", f"# ../docs/guide{MD}", f"Makefile: ../docs/guide{MD} does not exist"),
        (
            "deploy/b.yaml",
            f"runbook: docs/guide{MD}#three",
            f"deploy/b.yaml: docs/guide{MD} has no heading #three",
        ),
        (f"b{MD}", "[x](services/gone.py)", f"b{MD}: the link to services/gone.py leads nowhere"),
        (
            f"docs/b{MD}",
            f"[x](guide{MD}#three)",
            f"docs/b{MD}: the link to guide{MD}#three leads to no heading",
        ),
        (f"b{MD}", "[x](#three)", f"b{MD}: the link to #three leads to no heading"),
        (f"b{MD}", "`services/gone.py`", f"b{MD}: services/gone.py does not exist"),
        (f"b{MD}", "`services/*/gone.py`", f"b{MD}: services/*/gone.py does not exist"),
        (f"b{MD}", "`services/a.py:walk`", f"b{MD}: services/a.py has no walk"),
        (f"b{MD}", "`gone.py`", f"b{MD}: gone.py does not exist"),
        (
            f"docs/decisions/two{MD}",
            "# Two",
            f"docs/decisions/README{MD}: does not list two{MD}",
        ),
    ],
)
def test_a_fault_is_found(checkout: Path, file: str, text: str, fault: str) -> None:
    write(checkout, file, text)
    assert fault in documents.faults(checkout)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (f"b{MD}", f"[x](https://example.com/gone{MD}) https://example.com/gone{MD}#here"),
        (f"b{MD}", "`tenant/namespace/name`, `services/<name>/config.py`"),
        (f"CHANGELOG{MD}", "`services/gone.py`"),
        ("build/b.py", f"# gone{MD}"),
        (".venv/b.py", f"# gone{MD}"),
        ("deploy/b.yaml", f"# docs/guide{MD}#two-words"),
    ],
)
def test_other_names_pass(checkout: Path, file: str, text: str) -> None:
    write(checkout, file, text)
    assert documents.faults(checkout) == []


@pytest.mark.deep  # make lint runs it too
def test_the_command_exits_with_0_without_faults_and_2_on_wrong_usage(root: Path) -> None:
    command = [sys.executable, "-m", "tools.dev.documents"]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    wrong = subprocess.run([*command, "--other"], cwd=root, check=False, capture_output=True)
    assert wrong.returncode == 2


def test_make_lint_runs_the_check(root: Path) -> None:
    assert "-m tools.dev.documents\n" in (root / "Makefile").read_text()
