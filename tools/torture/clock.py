"""A service with its own clock.

    python -m tools.torture.clock FILE seqgate.services.ledger

runs the module unchanged, with `time.time` and `time.time_ns` shifted by the offset in FILE. FILE
is mapped into memory, so a change takes effect immediately. Monotonic clocks are not shifted, as on
a machine whose clock is set.
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
    """Set a process's clock to this offset from the machine's, in seconds."""
    with file.open("r+b" if file.exists() else "w+b") as target:
        target.write(_SHIFT.pack(round(seconds * 1e9)))


class Clock:
    """The machine's clock, shifted by the offset in a file."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as source:
            self._map = mmap.mmap(source.fileno(), _SHIFT.size)
        self._machines_ns = time.time_ns

    def time_ns(self) -> int:
        (shift_ns,) = _SHIFT.unpack_from(self._map)
        return self._machines_ns() + int(shift_ns)

    def time(self) -> float:
        return self.time_ns() / 1e9


def main() -> None:
    file, module = sys.argv[1:]
    clock = Clock(Path(file))
    time.time, time.time_ns = clock.time, clock.time_ns
    del sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
