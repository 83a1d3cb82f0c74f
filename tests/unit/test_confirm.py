"""The question before a loss: at a terminal, without one, and answered by --yes."""

import asyncio
import os
import pty
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from seqgate.cli._confirm import ConfirmationRequired, NotConfirmed, confirm
from seqgate.cli._failure import REFUSED, WRONG, exit_code, reason_of

LOST = "orders has 3 messages, which are deleted for good."


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileIO]:
    """The other end of a terminal that is standard input."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb", buffering=0) as keys, os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        yield keys


@pytest.mark.parametrize("typed", [b"y\n", b"yes\n", b" YES \n", b"Y\n"])
async def test_yes_at_the_terminal_confirms(
    keyboard: FileIO, typed: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard.write(typed)
    await confirm(LOST, yes=False)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{LOST} Continue? [y/N] ")


@pytest.mark.parametrize("typed", [b"\n", b"n\n", b"no\n", b"yess\n", b"\xff\n", b"\x04"])
async def test_any_other_answer_at_the_terminal_is_a_refusal(
    keyboard: FileIO, typed: bytes
) -> None:
    keyboard.write(typed)
    with pytest.raises(NotConfirmed, match="nothing was changed") as refused:
        await confirm(LOST, yes=False)
    assert exit_code(refused.value) == REFUSED
    assert reason_of(refused.value) == "NOT_CONFIRMED"


async def test_a_terminal_that_is_closed_is_a_refusal(keyboard: FileIO) -> None:
    asking = asyncio.create_task(confirm(LOST, yes=False))
    await asyncio.sleep(0)
    keyboard.close()
    with pytest.raises(NotConfirmed):
        await asking


async def test_the_event_loop_goes_on_while_nobody_answers(keyboard: FileIO) -> None:
    asking = asyncio.create_task(confirm(LOST, yes=False))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asking.done()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("is_closed", [False, True])
async def test_without_a_terminal_the_command_line_must_confirm(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", None if is_closed else nothing)
        with pytest.raises(ConfirmationRequired, match=f"^{LOST} .* add --yes") as refused:
            await confirm(LOST, yes=False)
        await confirm(LOST, yes=True)
    assert exit_code(refused.value) == WRONG
    assert reason_of(refused.value) == "CONFIRMATION_REQUIRED"


async def test_yes_on_the_command_line_asks_nothing(
    keyboard: FileIO, capsys: pytest.CaptureFixture[str]
) -> None:
    await confirm(LOST, yes=True)
    assert capsys.readouterr().err == ""
