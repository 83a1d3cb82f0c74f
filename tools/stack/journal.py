"""Journals of processes: one JSON object per line, written immediately.

A line is a single appending write, so a SIGKILL loses no written line and truncates at most the
last one. Times come from the machine's monotonic clock, which all processes share, so lines of
different journals can be ordered.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

Line = dict[str, Any]
"""`t`: the time in nanoseconds; `e`: the event; and its fields."""

SUFFIX: Final = ".jsonl"


class Journal:
    """A role's journal, continued after a crash."""

    def __init__(self, folder: Path, role: str) -> None:
        self.path = path = path_of(folder, role)
        if path.exists():  # drop a line that a crash truncated
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **fields: object) -> None:
        line = {"t": time.monotonic_ns(), "e": event, **fields}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def path_of(folder: Path, role: str) -> Path:
    return folder / f"{role}{SUFFIX}"


def lines(path: Path) -> Iterator[Line]:
    """The lines of a journal, without one that a crash truncated."""
    return Tail(path).read()


class Tail:
    """Reads a journal from its start, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[Line]:
        """The lines written since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    yield json.loads(line)


def journals(folder: Path) -> dict[str, Path]:
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
