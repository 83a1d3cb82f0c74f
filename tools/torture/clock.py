"""A service whose clock can be set, and nobody else's.

    python -m tools.torture.clock FILE seqgate.services.ledger

runs the module as it is. `time.time` and `time.time_ns` are ahead of the machine's by what FILE
says, which is mapped into memory: a change counts at once. What is monotonic stays so, as it does
on a machine whose clock is set.
"""

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path
from typing import Final

_SHIFT: Final = struct.Struct("<q")


def shift_clock(file: Path, seconds: float) -> None:
    """Set a process's clock: by so many seconds from the machine's, negative for back."""
    with file.open("r+b" if file.exists() else "w+b") as target:
        target.write(_SHIFT.pack(round(seconds * 1e9)))


class Clock:
    """The machine's clock, shifted by what a file says."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as source:
            self._map = mmap.mmap(source.fileno(), _SHIFT.size)
        self._machines_ns = time.time_ns

    def time_ns(self) -> int:
        """As time.time_ns."""
        (shift_ns,) = _SHIFT.unpack_from(self._map)
        return self._machines_ns() + int(shift_ns)

    def time(self) -> float:
        """As time.time."""
        return self.time_ns() / 1e9


def main() -> None:
    file, module = sys.argv[1:]
    clock = Clock(Path(file))
    time.time, time.time_ns = clock.time, clock.time_ns
    del sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
