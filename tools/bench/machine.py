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
    """Processor seconds of a process, all threads, user and system."""
    return sum(map(int, _stat(Path(f"/proc/{pid}/stat"))[11:13])) / _TICKS_A_SECOND


def family_cpu_s(pid: int) -> float:
    """Processor seconds of a process and all that it started, ended ones included."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = _stat(stat)
        except OSError:
            continue  # it has ended
        member = int(stat.parent.name)
        parents.setdefault(int(fields[1]), []).append(member)
        ticks[member] = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    family = [pid]
    for member in family:
        family += parents.get(member, [])
    return sum(ticks.get(member, 0) for member in family) / _TICKS_A_SECOND


def _stat(file: Path) -> list[str]:
    """The fields behind the name, which is in parentheses and may hold anything."""
    return file.read_text().rpartition(")")[2].split()


def busy_s() -> float:
    """Processor seconds of the whole machine, what its host took from it included."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, first[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / _TICKS_A_SECOND


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")
