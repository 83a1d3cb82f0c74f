"""Processes with children, as /proc shows them: to stop or kill a whole server at once."""

import os
import time
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Final

PATIENCE_S: Final = 120.0
"""How long a process may take to stand still: it finishes what it waits for on a disk."""

POLL_S: Final = 0.005

DEAD: Final = ("Z", "X", "")
"""States of a process that ended; "" if there is none."""

STANDING: Final = ("T", "t", *DEAD)
"""States of a process that does nothing until it gets a signal."""


def state(pid: int) -> str:
    """The state of a process, a letter of /proc/PID/stat; "" if there is none."""
    return "".join(_stat(pid)[:1])


def is_alive(pid: int) -> bool:
    return state(pid) not in DEAD


def children(pid: int) -> list[int]:
    """The ids of a process's children."""
    every = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal())
    return [each for each in every if _stat(each)[1:2] == [str(pid)]]


def pause(pid: int) -> list[int]:
    """Stop a process and its children with SIGSTOP. They stand still on return.

    Returns:
        The children's ids.

    Raises:
        TimeoutError: one of them did not stand still in time.
    """
    _stop([pid])
    found = children(pid)  # it starts no more of them
    _stop(found)
    return found


def resume(pid: int) -> None:
    """Let a paused process and its children go on."""
    for each in (*children(pid), pid):
        _signal(each, Signals.SIGCONT)


def kill(pid: int) -> None:
    """Kill a process and its children with SIGKILL. The children are gone on return; the caller
    waits for its own child.

    Raises:
        TimeoutError: one of them did not end in time.
    """
    found = pause(pid)
    for each in (*found, pid):
        _signal(each, Signals.SIGKILL)
    _wait(found, DEAD)


def _stop(pids: list[int]) -> None:
    for each in pids:
        _signal(each, Signals.SIGSTOP)
    _wait(pids, STANDING)


def _wait(pids: list[int], states: tuple[str, ...]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while any(state(each) not in states for each in pids):
        if time.monotonic() > until_s:
            raise TimeoutError(f"processes {pids} are not in one of the states {states}")
        time.sleep(POLL_S)


def _signal(pid: int, number: Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
