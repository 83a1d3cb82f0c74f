"""What an application saw, one JSON object a line, written before anything else happens.

A line is one write to a file that is appended to, so a SIGKILL loses none that was written, and
cuts off the last one at most. Times are of the machine's monotonic clock, which all processes
share: they say what was before what.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

Line = dict[str, Any]
"""`t`: when, in nanoseconds; `e`: what; and what belongs to it."""

SUFFIX: Final = ".jsonl"


class Journal:
    """One role's."""

    def __init__(self, folder: Path, role: str) -> None:
        self.path = path = folder / f"{role}{SUFFIX}"
        if path.exists():  # what a crash cut off is no line
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **fields: object) -> None:
        """Write a line."""
        line = {"t": time.monotonic_ns(), "e": event, **fields}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def lines(path: Path) -> Iterator[Line]:
    """What a journal holds, without what a crash cut off."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def journals(folder: Path) -> dict[str, Path]:
    """All of them, by role."""
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
