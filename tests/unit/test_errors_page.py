"""docs/errors.md: every reason that anybody can be given is there, with words."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.errors import DomainError, Kind
from tools.dev import errors


def sections() -> dict[str, str]:
    """Each reason's part of the page."""
    _, *parts = re.split(r"^### ", errors.PAGE.read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts}


def rows() -> set[str]:
    """The reasons that no service gives."""
    return set(re.findall(r"^\| `([A-Z_]+)` \|", errors.PAGE.read_text(), re.MULTILINE))


def test_nothing_is_undocumented_and_the_page_is_what_the_code_says() -> None:
    assert errors.faults() == []
    assert errors.PAGE.read_text() == errors.page()


def test_every_reason_that_a_service_can_raise_is_there() -> None:
    """Found by looking at the code, not at its classes."""
    named = {
        reason
        for file in (errors.ROOT / "services").rglob("*.py")
        for reason in re.findall(r'^    reason = "([A-Z_]+)"$', file.read_text(), re.MULTILINE)
    }
    assert len(named) > 80
    assert sections().keys() == named | {"INTERNAL"}


def test_every_reason_that_clients_and_jobs_give_is_there() -> None:
    given = {
        reason
        for folder in ("seqgate", "tools")
        for file in (errors.ROOT / folder).rglob("*.py")
        for reason in re.findall(r'reason=\s*"([A-Z_]+)"', file.read_text())
        + re.findall(r'default_reason = "([A-Z_]+)"', file.read_text())
    }
    assert len(given) > 25
    assert given <= sections().keys() | rows()


def test_every_reason_that_a_proto_promises_is_there() -> None:
    promised = {
        reason
        for file in (errors.ROOT / "protos").rglob("*.proto")
        for reason in re.findall(
            r"\breasons?\s+([A-Z]{2,}_[A-Z_]+[A-Z]|FENCED|RECOVERING|DRAINING)",
            re.sub(r"\s*//\s*", " ", file.read_text()),
        )
    }
    assert len(promised) > 30
    assert promised <= sections().keys()


def test_a_reason_says_its_code_its_details_and_what_to_do() -> None:
    found = sections()["NOT_OWNER"]
    assert "`FAILED_PRECONDITION`, in use; `InUseError`" in found
    assert "Ask the instance that `owner` names" in found
    assert "**Details:**" in found
    assert "`owner`" in found.partition("**Details:**")[2]
    assert "`RetryInfo` may say when" in sections()["CURSORS_UNAVAILABLE"]
    for text in sections().values():
        assert re.search(r"\*\*What to do:\*\* \w", text)
        assert re.search(r"\*\*Try again\?\*\* \w", text)


def test_a_refusal_without_words_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(DomainError):
        kind = Kind.INVALID
        reason = "SILENT_ONE"

    Silent.__module__ = "services.ledger.core.silent"
    try:
        found = errors.faults()
    finally:
        Silent.__module__ = "tests"
    assert any("SILENT_ONE of ledger: its class has no docstring" in each for each in found)
    assert any("SILENT_ONE: seqgate/errors.py has no class" in each for each in found)
    assert errors.faults() == []
    monkeypatch.setattr(errors, "WORDS", {"INTERNAL": "x"})
    assert "CHANGED: no docstring, nor words" in errors.faults()


def test_a_stale_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "PAGE", tmp_path / "docs" / "errors.md")
    assert errors.check() == 1
    assert "run make errors" in capsys.readouterr().out
    assert (errors.write(), errors.check()) == (0, 0)


def test_the_command_line_checks(root: Path) -> None:
    command = [sys.executable, "-m", "tools.dev.errors"]
    done = subprocess.run([*command, "--check"], cwd=root, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    wrong = subprocess.run([*command, "--other"], cwd=root, check=False, capture_output=True)
    assert wrong.returncode == 2


def test_the_readme_leads_to_it(root: Path) -> None:
    assert "(docs/errors.md)" in (root / "README.md").read_text()
