"""docs/errors.md has each reason, with its meaning and a remedy of its own."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from seqgate.cli._main import app
from seqgate.services.errors import DomainError, Kind
from tools.dev import errors
from tools.dev.remedies import REMEDIES


def sections(part: int = 0) -> dict[str, str]:
    """The section of each reason: of the services (0), or of the client, the command line and
    jobs."""
    _, *parts = re.split(r"^## ", errors.PAGE.read_text(), flags=re.MULTILINE)
    _, *found = re.split(r"^### ", parts[part], flags=re.MULTILINE)
    return {each.partition("\n")[0]: each for each in found}


def test_every_reason_is_documented_and_the_page_is_current() -> None:
    assert errors.faults() == []
    assert errors.PAGE.read_text() == errors.page()


def test_the_page_has_every_reason_of_the_services() -> None:
    """Found by searching the code, not its classes."""
    named = {
        reason
        for file in (errors.ROOT / "services").rglob("*.py")
        for reason in re.findall(r'^    reason = "([A-Z_]+)"$', file.read_text(), re.MULTILINE)
    }
    assert len(named) > 80
    assert sections().keys() == named | {"INTERNAL"}


def test_the_page_has_every_reason_of_clients_and_jobs() -> None:
    given = {
        reason
        for folder in ("seqgate", "tools")
        for file in (errors.ROOT / folder).rglob("*.py")
        for reason in re.findall(r'reason=\s*"([A-Z_]+)"', file.read_text())
        + re.findall(r'default_reason = "([A-Z_]+)"', file.read_text())
    }
    assert len(given) > 25
    assert given <= sections().keys() | sections(1).keys()


def test_the_page_has_every_reason_of_the_protos() -> None:
    promised = {
        reason
        for file in (errors.ROOT / "protos" / "seqgate").rglob("*.proto")
        for reason in re.findall(
            r"\breasons?\s+([A-Z]{2,}_[A-Z_]+[A-Z]|FENCED|RECOVERING|DRAINING)",
            re.sub(r"\s*//\s*", " ", file.read_text()),
        )
    }
    assert len(promised) > 30
    assert promised <= sections().keys()


def test_a_reason_has_its_code_details_and_remedy() -> None:
    found = sections()["NOT_OWNER"]
    assert "`FAILED_PRECONDITION`, in use; `InUseError`" in found
    assert "Connect to the instance that `owner` names" in found
    assert "**Details:**" in found
    assert "`owner`" in found.partition("**Details:**")[2]
    assert "`RetryInfo` may give the delay" in sections()["CURSORS_UNAVAILABLE"]
    for text in sections().values():
        assert re.search(r"\*\*Retry:\*\* \w", text)
    for text in (*sections().values(), *sections(1).values()):
        assert re.search(r"\*\*What to do:\*\* \w", text)


REMEDY = "Set `topic` and open it again."


@pytest.mark.parametrize(
    ("remedies", "fault"),
    [
        ({"A": ""}, "A: no remedy"),
        ({"A": "Correct the request."}, "A: a generic remedy"),
        ({"A": "try again LATER"}, "A: a generic remedy"),
        ({"A": "See the log."}, "A: a generic remedy"),
        ({"A": REMEDY, "B": REMEDY.lower()}, "B: shares its remedy"),
        ({"A": "Raise the limit `no_such_setting_s`."}, "A: its remedy names no_such_setting_s"),
        ({"A": "Set `options.no_such_field` to 1."}, "A: its remedy names options.no_such_field"),
    ],
)
def test_a_remedy_that_is_generic_shared_or_wrong_is_a_fault(
    remedies: dict[str, str], fault: str
) -> None:
    assert any(each.startswith(fault) for each in errors.remedy_faults(remedies))
    assert errors.remedy_faults({"A": REMEDY}) == []


def test_a_reason_without_a_remedy_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "REMEDIES", dict(REMEDIES) | {"DRAINING": ""})
    assert errors.faults() == ["DRAINING: no remedy"]


def test_commands_that_remedies_name_exist() -> None:
    named = {
        tuple(command.split())
        for text in REMEDIES.values()
        for command in re.findall(r"`seqgate((?: [a-z][a-z-]*)+)", text)
    }
    assert len(named) > 15
    for words in named:
        found: Any = typer.main.get_command(app)
        for word in words:
            found = found.commands[word]


def test_a_refusal_without_a_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(DomainError):
        kind = Kind.INVALID
        reason = "SILENT_ONE"

    Silent.__module__ = "seqgate.services.ledger.core.silent"
    try:
        found = errors.faults()
    finally:
        Silent.__module__ = "tests"
    assert any("SILENT_ONE of ledger: its class has no docstring" in each for each in found)
    assert any("SILENT_ONE: seqgate/errors.py has no class" in each for each in found)
    assert errors.faults() == []
    monkeypatch.setattr(errors, "WORDS", {"INTERNAL": "x"})
    assert "CHANGED: no docstring, nor words" in errors.faults()


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "PAGE", tmp_path / "docs" / "errors.md")
    assert errors.check() == ["docs/errors.md is stale: run make errors"]
    assert (errors.write(), errors.check()) == ([], [])


@pytest.mark.deep  # make lint runs it too
def test_the_command_exits_with_0_without_faults_and_2_on_wrong_usage(root: Path) -> None:
    command = [sys.executable, "-m", "tools.dev.errors"]
    done = subprocess.run([*command, "--check"], cwd=root, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    wrong = subprocess.run([*command, "--other"], cwd=root, check=False, capture_output=True)
    assert wrong.returncode == 2


def test_the_readme_links_to_the_page(root: Path) -> None:
    assert "(docs/errors.md)" in (root / "README.md").read_text()
