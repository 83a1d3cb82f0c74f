"""Run many histories, one worker per processor.

    python -m tests.simulation.system --histories 1000 --first-seed 1 --workers 2

OUT/finished.jsonl gets a line per finished history, so an interrupted run resumes where it stopped.
A violation is written to OUT/violations/SEED.txt with all that is needed to replay it, and ends the
run with status 1 unless --go-on is given. `--seed N` plays one history and prints its last events;
`--report` plays none and summarizes those played.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HASH_SEED: Final = "0"
"""Fixes the order of sets of strings, in every process."""

RECYCLE: Final = 5_000
"""Histories that a worker plays before a new process replaces it: starting one costs as much as
some histories."""

TOLD: Final = 1_000
"""Histories between two lines of progress."""

LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The limit of a history's line in OUT/finished.jsonl."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if nothing was found or, with --defect, if it was."""
    options = _parser().parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        words = sys.argv[1:] if arguments is None else list(arguments)
        command = [sys.executable, "-m", "tests.simulation.system", *words]
        os.execve(sys.executable, command, environment)  # restart with the hash seed set
    if options.seed is not None:
        return _one(options.seed, options.defect)
    if options.worker:
        return _work(options.defect)
    if options.report:
        return _report(options)
    return asyncio.run(_many(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.system")
    parser.add_argument("--histories", type=int, default=1_000, metavar="N")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S")
    parser.add_argument("--seconds", type=float, metavar="T", help="stop after T seconds")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("build/simulation"))
    parser.add_argument("--defect", metavar="ID", help="plant this defect; succeed if it is found")
    parser.add_argument("--go-on", action="store_true", help="continue after a violation")
    parser.add_argument("--seed", type=int, metavar="N", help="play one history, print its end")
    parser.add_argument("--report", action="store_true", help="summarize OUT, and play nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def again(seed: int, defect: str | None = None) -> str:
    """The command that replays a history."""
    command = f"PYTHONHASHSEED={HASH_SEED} python -m tests.simulation.system --seed {seed}"
    return command if defect is None else f"{command} --defect {defect}"


# ---- one history


def _one(seed: int, defect: str | None) -> int:
    from tests.simulation.system.history import play

    with _mistake(defect):
        outcome = play(seed)
    assert outcome.swarm is not None
    sys.stdout.write("\n".join([*outcome.tail, "", outcome.swarm.describe(), *outcome.violations]))
    sys.stdout.write(f"\n{outcome.digest} {outcome.virtual_s:.1f} s, {outcome.handles} handles\n")
    sys.stdout.write(f"{dict(sorted(outcome.counts.items()))}\n")
    return 1 if outcome.violations else 0


def _mistake(defect: str | None) -> Any:
    from tests.simulation.system.mistakes import mistake

    return mistake(defect)


def _work(defect: str | None) -> int:
    """Play the seeds on standard input, one a line."""
    from tests.simulation.system.history import play

    with _mistake(defect):
        for line in sys.stdin:
            began_s = time.process_time()
            outcome = play(int(line))
            assert outcome.swarm is not None
            finished = {
                "seed": outcome.seed,
                "violations": outcome.violations,
                "counts": outcome.counts,
                "size": outcome.swarm.size,
                "features": sorted(outcome.swarm.features),
                "faults": sorted(outcome.swarm.faults),
                "tiny": outcome.swarm.tiny,
                "virtual_s": round(outcome.virtual_s, 1),
                "cpu_s": round(time.process_time() - began_s, 3),
                "digest": outcome.digest,
            }
            if outcome.violations:
                finished["tail"] = list(outcome.tail)
                finished["swarm"] = outcome.swarm.describe()
            sys.stdout.write(json.dumps(finished) + "\n")
            sys.stdout.flush()
    return 0


# ---- many


@dataclass
class Figures:
    """Totals over all histories."""

    histories: int = 0
    violations: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    met: dict[str, Counter[str]] = field(
        default_factory=lambda: {each: Counter() for each in ("features", "faults", "tiny")}
    )

    @classmethod
    def of(cls, record: Path) -> tuple["Figures", set[int]]:
        """The totals of a record, and its seeds."""
        figures, seeds = cls(), set()
        if record.exists():
            for line in record.read_text().splitlines():
                finished = json.loads(line)
                seeds.add(finished["seed"])
                figures.add(finished)
        return figures, seeds

    def add(self, finished: Mapping[str, Any]) -> None:
        """Add a history."""
        self.histories += 1
        self.violations += bool(finished["violations"])
        self.virtual_s += finished["virtual_s"]
        self.cpu_s += finished["cpu_s"]
        self.counts.update(finished["counts"])
        self.sizes[finished["size"]] += 1
        for title, counted in self.met.items():
            counted.update(finished[title])

    def in_short(self) -> str:
        """A one-line summary."""
        return (
            f"{self.histories:,} histories, {self.violations} with violations; "
            f"{self.cpu_s / max(self.histories, 1):.3f} s of a processor each, "
            f"{self.virtual_s / 3600:.1f} hours of virtual time"
        )

    def lines(self) -> Iterator[str]:
        """The full summary."""
        yield self.in_short()
        faults = {name: n for name, n in self.counts.items() if name.startswith("fault: ")}
        for title, counts in (
            ("what happened", {k: v for k, v in self.counts.items() if k not in faults}),
            ("faults", _by_kind(faults)),
            ("histories by size", self.sizes),
            ("histories with features", self.met["features"]),
            ("histories with faults", self.met["faults"]),
            ("histories with tiny limits", self.met["tiny"]),
        ):
            told = ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()))
            yield f"{title}: {told}"


def _by_kind(faults: Mapping[str, int]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name, n in faults.items():
        words = name.removeprefix("fault: ").split()
        kinds[" ".join(word for word in words if not _is_particular(word))] += n
    return kinds


def _record(options: argparse.Namespace) -> Path:
    suffix = f"-{options.defect}" if options.defect else ""
    folder: Path = options.out
    return folder / f"finished{suffix}.jsonl"


def _report(options: argparse.Namespace) -> int:
    figures, _ = Figures.of(_record(options))
    for text in figures.lines():
        sys.stdout.write(text + "\n")
    return 1 if figures.violations else 0


def _is_particular(word: str) -> bool:
    """True for a process's name or a number."""
    return "-" in word or "." in word or word in ("administrator", "reader")


async def _many(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    record = _record(options)
    figures, done = (Figures(), set()) if options.defect else Figures.of(record)
    seeds = (
        seed
        for seed in range(options.first_seed, options.first_seed + options.histories)
        if seed not in done
    )
    began_s = time.monotonic()
    found: list[Mapping[str, Any]] = []
    with record.open("w" if options.defect else "a") as out:

        def note(finished: dict[str, Any]) -> None:
            tail, swarm = finished.pop("tail", ()), finished.pop("swarm", "")
            figures.add(finished)
            out.write(json.dumps(finished) + "\n")
            out.flush()
            if figures.histories % TOLD == 0:
                sys.stdout.write(f"{figures.in_short()}\n")
                sys.stdout.flush()
            if finished["violations"]:
                found.append(finished)
                _write_violation(options, finished, swarm, tail, time.monotonic() - began_s)

        def is_over() -> bool:
            late = options.seconds is not None and time.monotonic() - began_s > options.seconds
            return late or bool(found and not options.go_on)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(options.workers):
                tasks.create_task(_worker(options, seeds, note, is_over))
    for text in figures.lines():
        sys.stdout.write(text + "\n")
    if options.defect:
        return 0 if found else 1
    return 1 if figures.violations else 0


async def _worker(
    options: argparse.Namespace, seeds: Iterator[int], note: Any, is_over: Any
) -> None:
    command = [sys.executable, "-m", "tests.simulation.system", "--worker"]
    if options.defect:
        command += ["--defect", options.defect]
    seed = next(seeds, None)
    while seed is not None and not is_over():
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(RECYCLE):
            process.stdin.write(f"{seed}\n".encode())
            line = await process.stdout.readline()
            if not line:
                note({"seed": seed, "violations": [f"the worker died on seed {seed}"], "counts": {},
                      "size": "unknown", "features": [], "faults": [], "tiny": [],
                      "virtual_s": 0.0, "cpu_s": 0.0, "digest": ""})  # fmt: skip
            else:
                note(json.loads(line))
            seed = next(seeds, None)
            if seed is None or is_over() or not line:
                break
        process.stdin.close()
        await process.wait()


def _write_violation(
    options: argparse.Namespace,
    finished: Mapping[str, Any],
    swarm: str,
    tail: Sequence[str],
    after_s: float,
) -> None:
    seed = finished["seed"]
    command = again(seed, options.defect)
    folder = options.out / "violations"
    folder.mkdir(exist_ok=True)
    lines = [*finished["violations"], "", swarm, "", f"again: {command}", "", *tail, ""]
    suffix = f"-{options.defect}" if options.defect else ""
    (folder / f"{seed}{suffix}.txt").write_text("\n".join(lines))
    sys.stdout.write(
        f"seed {seed}, after {after_s:.0f} s: {finished['violations'][0]}\n  {command}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
