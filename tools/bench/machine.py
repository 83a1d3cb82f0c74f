"""What the figures were measured on, and how much its processes compute."""

import os
import platform
from pathlib import Path
from typing import Final

import apsw
import grpc

_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


def description() -> dict[str, object]:
    """What a reader of the figures must know; nothing that says whose machine it is."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "sqlite": apsw.sqlite_lib_version(),
    }


def cpu_s(pid: int) -> float:
    """For how many seconds a process has computed, all of its threads, in the kernel or not."""
    # The second field is the name in parentheses, which may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return (user_ticks + system_ticks) / _TICKS_A_SECOND


def busy_s() -> float:
    """For how many seconds the machine has computed, all cores together, for whomever; what its
    host took from it included."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, first[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / _TICKS_A_SECOND


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
