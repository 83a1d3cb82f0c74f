"""P1 to P7, budgets and liveness over many histories of the whole system: see
tests/simulation/system."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.system.__main__ import HASH_SEED, again
from tests.simulation.system.history import play
from tests.simulation.system.swarm import draw
from tests.support.depth import deep, times

ROOT = Path(__file__).parents[2]
BLOCKS = deep(quick=1, full=6)
HISTORIES = times(quick=20, full=30_000) // BLOCKS
"""Histories of each block."""

BEFORE = times(quick=3, full=200)
"""Histories played before one is replayed in the same process."""

SHOWN = 60
"""Last events shown on failure."""

BLOCK_TIMEOUT_S = 7_200


@pytest.mark.timeout(BLOCK_TIMEOUT_S)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_nothing_is_lost_duplicated_or_stuck_under_faults(seed: int, block: int) -> None:
    first = seed + block * HISTORIES
    for finished in played(range(first, first + HISTORIES)):
        if finished["violations"]:
            shown = [*finished["violations"], finished["swarm"], again(finished["seed"])]
            pytest.fail("\n".join([*shown, *finished["tail"][-SHOWN:]]))


def test_a_seed_replays_its_history_exactly(seed: int) -> None:
    rich = next(each for each in range(seed, seed + 1_000) if draw(each).faults)
    one, other = play(rich), play(rich)
    assert (one.digest, one.handles) == (other.digest, other.handles)


def test_a_replayed_seed_is_independent_of_earlier_runs(seed: int) -> None:
    alone = next(played([seed]))
    (*_, after) = played([*range(seed + 1, seed + 1 + BEFORE), seed])
    assert after["digest"] == alone["digest"]


ENDLESS = """
from seqgate.services.dispatcher.core.delivering import Delivering
from tests.simulation.system import history
from tests.simulation.system.swarm import draw

def serve(self, now_ms):
    while True:
        pass

Delivering.serve, history.PROCESSOR_MAX_S = serve, 0.5
seed = next(each for each in range(100) if draw(each).subscriptions)
print(history.play(seed).violations[-1])
"""
"""Run in its own process, since an interrupted history leaves its patches behind."""


def test_a_history_that_does_not_end_is_a_violation() -> None:
    told = subprocess.run(
        [sys.executable, "-c", ENDLESS], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert "ENDLESS: " in told
    assert "serve" in told


def played(seeds: Iterable[int], defect: str | None = None) -> Iterator[dict[str, Any]]:
    """Play histories in a worker process with the hash seed of every replay, with a deliberate
    defect or without, and yield their results."""
    with_defect = [] if defect is None else ["--defect", defect]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.simulation.system", "--worker", *with_defect],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for each in seeds:
            worker.stdin.write(f"{each}\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            assert line, f"the worker ended: {again(each)}"
            yield json.loads(line)
        worker.stdin.close()
