"""Rereads files when they change.

Certificates, keys, tokens and policies are replaced while a process runs. A file is checked when
its content is needed, at most once a second. A change is also noticed when a symbolic link to it is
replaced, as Kubernetes does in a mounted volume. Files that become unreadable or invalid change
nothing: the last valid content stays in force.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

T = TypeVar("T")

LOOK_INTERVAL_S: Final = 1.0
"""The shortest interval between two checks."""

OnChange = Callable[[str], None]
"""Called on each change, with the reason why the files are unusable; empty: they are usable."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """See the module. Safe for threads."""

    def __init__(
        self,
        files: Sequence[Path],
        read: Callable[[], T],
        on_change: OnChange,
        *,
        interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Read the files. Raises the OSError or ValueError with which `read` reports unusable
        files. `interval_s` is the shortest interval between two checks."""
        self._files = tuple(files)
        self._read = read
        self._on_change = on_change
        self._interval_s = interval_s
        self._seen = self._stamp()
        self._value = read()
        self._next_look_s = time.monotonic() + interval_s
        self._lock = threading.Lock()

    def get(self) -> T:
        """The content of the files: the same object until it changes."""
        if time.monotonic() >= self._next_look_s and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._next_look_s = time.monotonic() + self._interval_s
                self._lock.release()
        return self._value

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            self._seen = stamp
            self._on_change(str(error) or type(error).__name__)
            return
        if self._stamp() != stamp:
            return  # replaced during the read: the next check reads them again
        self._seen = stamp
        self._value = value
        self._on_change("")

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
