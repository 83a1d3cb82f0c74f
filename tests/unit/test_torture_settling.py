"""After the faults: slow subscriptions differ from stuck ones."""

from seqgate.types import Position
from tests.simulation.ground import run, virtual_loop
from tools.torture.evidence import Progress
from tools.torture.settling import STANDS_STILL_S, all_acknowledged

SLOW, STUCK = ("t", "slow"), ("t", "stuck")
ENTRIES = 100


def test_a_moving_subscription_is_slow_and_a_standing_one_is_stuck() -> None:
    settled: list[tuple[str, str]] = []

    async def last(topic: str) -> Position:
        return Position(1, ENTRIES)

    async def progress(topic: str, name: str) -> Progress:
        moved = int(virtual_loop().time() / (STANDS_STILL_S - 1)) if name == "slow" else 0
        return Progress(Position(1, moved))

    async def wait() -> float:
        assert await all_acknowledged(
            [SLOW, STUCK], last, progress, lambda *where: settled.append(where)
        ) == [STUCK]
        return virtual_loop().time()

    took_s = run(wait, seed=0)
    assert settled == [SLOW]
    assert ENTRIES * (STANDS_STILL_S - 1) <= took_s < (ENTRIES + 2) * STANDS_STILL_S
