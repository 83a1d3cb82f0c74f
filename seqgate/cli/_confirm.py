"""Asks before a command loses something for good: the one question, and the option that answers it.

async def rm(run: Run, topic: Topic, *, yes: Yes = False) -> None:
    await confirm(f"{topic} has 1,200 messages, which are deleted for good.", yes=yes)
    ...  # confirmed
"""

import asyncio
import os
import sys
from typing import Annotated, Final

from seqgate.cli._declared import flag
from seqgate.cli._failure import WrongUsage
from seqgate.cli._output import shown
from seqgate.errors import SeqgateError

Yes = Annotated[bool, flag("Do not ask for confirmation.", "--yes", "-y")]

_AGREED: Final = frozenset({"y", "yes"})


class NotConfirmed(SeqgateError):
    """The answer to the question was not yes."""

    default_reason = "NOT_CONFIRMED"


class ConfirmationRequired(WrongUsage):
    """There is no terminal to ask at, and the command line has no --yes."""

    default_reason = "CONFIRMATION_REQUIRED"


async def confirm(lost: str, *, yes: bool) -> None:
    """Return once the user agrees: by `yes`, or at the terminal. Call it before anything changes.

    The question is on standard error, so that the output stays the command's own.

    Args:
        lost: a sentence with the count of what is lost, and its full stop.

    Raises:
        NotConfirmed: the answer was not yes, or the terminal was closed.
        ConfirmationRequired: standard input is not a terminal, and `yes` is False.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfirmationRequired(f"{lost} To confirm it without a terminal, add --yes.")
    sys.stderr.write(f"{shown(lost)} Continue? [y/N] ")
    sys.stderr.flush()
    if (await _line(sys.stdin.fileno())).strip().lower() not in _AGREED:
        raise NotConfirmed("not confirmed: nothing was changed")


async def _line(terminal: int) -> str:
    """The next line that is typed; empty if the terminal is closed. The event loop goes on, so that
    Ctrl-C interrupts at once and connections answer pings."""
    loop = asyncio.get_running_loop()
    typed = asyncio.Event()
    loop.add_reader(terminal, typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(terminal)
    try:
        return os.read(terminal, 1024).decode(errors="replace")
    except OSError:  # its other end is gone
        return ""
