"""What some files say, read again when they change.

Certificates, keys and tokens are renewed while a process runs. A file is looked at when what it
says is needed, at most once a second; one that is replaced, as Kubernetes replaces what it mounts,
is noticed too. Files that cannot be used change nothing: what they said before stays in force.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

T = TypeVar("T")

LOOK_INTERVAL_S: Final = 1.0
"""How often files are looked at, at most."""

Told = Callable[[str], None]
"""Is told why the files cannot be used, once for each change of theirs; "": they can again."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """See the module. It may be asked from any thread."""

    def __init__(
        self,
        files: Sequence[Path],
        read: Callable[[], T],
        told: Told,
        *,
        interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Read the files.

        Args:
            files: what `read` reads.
            read: raises OSError or ValueError when the files cannot be used.
            told: of every change.
            interval_s: how often the files are looked at, at most.

        Raises:
            OSError, ValueError: they cannot be used.
        """
        self._files = tuple(files)
        self._read = read
        self._told = told
        self._interval_s = interval_s
        self._seen = self._stamp()
        self._value = read()
        self._next_look_s = time.monotonic() + interval_s
        self._lock = threading.Lock()

    def get(self) -> T:
        """What the files say; the same object until they say something else."""
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
            self._told(str(error) or type(error).__name__)
            return
        if self._stamp() != stamp:
            return  # they are being replaced just now: the next look reads them
        self._seen = stamp
        self._value = value
        self._told("")

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
