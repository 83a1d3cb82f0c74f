"""tools/dev/command.py: the command lines of the checks that `make lint` runs."""

import sys

import pytest

from tools.dev.command import carry_out


@pytest.mark.parametrize(
    ("arguments", "status", "output"),
    [([], 0, ""), (["--check"], 1, "a: fault\n"), (["--other"], 2, ""), (["--check", "b"], 2, "")],
)
def test_arguments_select_the_action(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    output: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    assert carry_out("usage", {"": list, "--check": lambda: ["a: fault"]}) == status
    written = capsys.readouterr()
    assert (written.out, written.err) == (output, "usage\n" if status == 2 else "")
