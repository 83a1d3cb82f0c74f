"""seqgate context add, use, rm; and shell completion."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command_line import CommandLine, Ended

Inside = Callable[..., Ended]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "config.toml"


@pytest.fixture
def seqgate_context(inside: Inside, config: Path) -> Inside:
    """Runs a command with that config file, which need not exist."""

    def run(*arguments: str, **variables: str) -> Ended:
        config.parent.mkdir(exist_ok=True)
        config.touch()
        return inside("context", *arguments, SEQGATE_CONFIG=str(config), **variables)

    return run


def listed(run: Inside) -> dict[str, bool]:
    """The contexts, and whether each is the current one."""
    return {each["context"]: each["current"] for each in run("ls", "-o", "json").records}


def test_the_first_context_is_the_current_one(
    seqgate_context: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    added = seqgate_context(
        *("add", "prod", "--ledger", "ledger:1", "--ca-file", "ca.pem", "-o", "json"),
        SEQGATE_DEDUP="not:1",
    )
    assert added.record == {
        "context": "prod",
        "current": True,
        "ledger": "ledger:1",
        "ca_file": str(tmp_path / "ca.pem"),
    }
    assert seqgate_context("add", "dev", "--ledger", "dev:1", "--filter", "dev:5").code == 0
    assert listed(seqgate_context) == {"prod": True, "dev": False}
    shown = seqgate_context("show", "-o", "json").record
    assert shown["ledger"] == {"value": "ledger:1", "source": "context prod"}
    assert shown["dedup"]["source"] == "default"


def test_a_context_is_chosen_and_removed(seqgate_context: Inside) -> None:
    for name in ("a", "b.c d"):
        seqgate_context("add", name, "--ledger", f"{name[0]}:1")
    assert seqgate_context("use", "b.c d", "-o", "json").record["current"]
    assert listed(seqgate_context) == {"a": False, "b.c d": True}
    assert seqgate_context("rm", "b.c d", "-o", "json").record["removed"]
    assert listed(seqgate_context) == {"a": False}
    assert seqgate_context("show", "-o", "json").record["context"] is None
    assert seqgate_context("use", "a").code == 0
    assert listed(seqgate_context) == {"a": True}


def test_comments_and_permissions_are_kept(seqgate_context: Inside, config: Path) -> None:
    config.parent.mkdir()
    config.write_text('# ours\n\n[contexts.a] # the first\nledger = "a:1"\n')
    config.chmod(0o640)
    link = config.with_name("link")
    config.rename(link)
    config.symlink_to(link)
    assert seqgate_context("use", "a").code == 0
    assert seqgate_context("add", "b", "--ledger", "b:1").code == 0
    text = link.read_text()
    assert "# ours" in text
    assert "# the first" in text
    assert 'current = "a"' in text
    assert config.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) == 0o640
    assert {each.name for each in config.parent.iterdir()} == {"config.toml", "link"}


def test_a_file_that_is_not_there_is_made_in_the_usual_place(
    inside: Inside, tmp_path: Path
) -> None:
    assert inside("context", "add", "a", "--ledger", "a:1").code == 0
    path = tmp_path / ".config" / "seqgate" / "config.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (["add", "a"], "WRONG_USAGE", "give the addresses of the context"),
        (["add", "", "--ledger", "a:1"], "WRONG_USAGE", "a context needs a name"),
        (["add", "old", "--ledger", "a:1"], "WRONG_USAGE", "context 'old' exists"),
        (["add", "a", "--ledger", "a"], "INVALID_SETTINGS", "'a' is not HOST:PORT"),
        (["use", "none"], "INVALID_SETTINGS", "context 'none' not found"),
        (["rm", "none"], "INVALID_SETTINGS", "context 'none' not found"),
    ],
)
def test_wrong_usage_changes_nothing(
    seqgate_context: Inside, config: Path, arguments: list[str], reason: str, message: str
) -> None:
    seqgate_context("add", "old", "--ledger", "old:1")
    before = config.read_text()
    ended = seqgate_context(*arguments, "-o", "json")
    assert (ended.code, ended.error["reason"]) == (2, reason)
    assert message in ended.error["message"]
    assert config.read_text() == before


def test_a_folder_that_cannot_be_written_is_named(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = inside(
        *("context", "add", "a", "--ledger", "a:1", "-o", "json"),
        XDG_CONFIG_HOME=str(tmp_path / "file"),
    )
    assert (ended.code, ended.error["reason"]) == (2, "INVALID_SETTINGS")
    assert str(tmp_path / "file") in ended.error["message"]


async def test_a_shell_completes_commands(bare: CommandLine) -> None:
    completing = bare.with_(
        _SEQGATE_COMPLETE="complete_bash", COMP_WORDS="seqgate subscription r", COMP_CWORD="2"
    )
    ended = await completing()
    assert ended.out.split() == ["rm", "reset", "replay", "report", "release-key"]
    shown = await bare.with_(SHELL="/bin/bash")("--show-completion", "bash")
    assert "seqgate" in shown.out + shown.err
