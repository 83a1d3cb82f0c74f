"""Redis's scripts and the pure functions are the same functions."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from services.dedup.adapters import redis as adapter
from services.dedup.adapters.memory import MemoryStateStore
from services.dedup.adapters.redis import RedisStateStore, connect_redis, script_text
from tests.support.histories import Call, history_of, play
from tests.support.redis_server import RedisServer

HISTORIES = 6_000
MUTANT_HISTORIES = 20_000


class Judge:
    """Plays a history on Redis and on the model."""

    def __init__(self, runner: asyncio.Runner, store: RedisStateStore) -> None:
        self._runner = runner
        self._store = store

    def answers(self, history: list[Call]) -> tuple[list[object], list[object]]:
        return self._runner.run(self._answers(history))

    def agrees(self, history: list[Call]) -> bool:
        lua, python = self.answers(history)
        return lua == python

    def shrink(self, history: list[Call]) -> list[Call]:
        """A shorter history that still tells the two apart: drop calls while it does."""
        for i in reversed(range(len(history))):
            shorter = history[:i] + history[i + 1 :]
            if not self.agrees(shorter):
                history = shorter
        return history

    async def _answers(self, history: list[Call]) -> tuple[list[object], list[object]]:
        return await play(self._store, history), await play(MemoryStateStore(), history)


@pytest.fixture
def judge(redis: RedisServer) -> Iterator[Callable[[], Judge]]:
    """Makes judges; each reads the scripts when it is made."""
    with asyncio.Runner() as runner:
        connection = connect_redis(redis.url, timeout_s=30, connections_max=1)
        client = runner.run(connection.__aenter__())
        yield lambda: Judge(runner, RedisStateStore(client))
        runner.run(connection.__aexit__(None, None, None))


def test_lua_and_python_agree_on_every_history(judge: Callable[[], Judge], seed: int) -> None:
    judging = judge()
    for each in range(seed, seed + HISTORIES):
        history = history_of(each)
        if not judging.agrees(history):
            history = judging.shrink(history)
            lua, python = judging.answers(history)
            assert lua == python, f"history_of({each}), shrunk to {history}"


# Each comparison of the scripts, made a little wrong: the suite above must not be blind to any.
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("highest <= persisted", "highest < persisted"),
        ("lowest > pushed", "lowest >= pushed"),
        ("lowest > pushed", "highest > pushed"),
        ("pushed > persisted then", "pushed >= persisted then"),
        ("highest <= persisted", "tonumber(highest) <= (tonumber(persisted) or -1)"),
        ("lowest > pushed", "tonumber(lowest) > (tonumber(pushed) or -1)"),
        ("elseif held then", "elseif false then"),
        ("topic.confirmed < after", "topic.confirmed <= after"),
        ("topic.confirmed < through", "topic.confirmed <= through"),
        ("topic.confirmed < call.position", "false"),
        ("call.position < topic.confirmed", "false"),
        ("topic.incarnation < call.incarnation", "topic.incarnation <= call.incarnation"),
        ("topic.incarnation > call.incarnation", "false"),
        ("topic.epoch > call.epoch", "topic.epoch >= call.epoch"),
        ("topic.epoch < call.epoch", "false"),
        ("call.revision ~= topic.revision", "call.revision > topic.revision"),
        ("tracked + unknown > call.max_producers", "tracked + unknown >= call.max_producers"),
        ("tonumber(term) ~= topic.term", "false"),
        ("p.pushed < highest then p.pushed", "p.pushed > highest then p.pushed"),
        ("keep < p.pushed", "keep <= p.persisted"),
        ("tonumber(active) == each[2]", "tonumber(active) <= each[2]"),
        ("and not in_flight", ""),
        ("now_ms > tonumber(active)", "now_ms >= 0"),
        ("incarnation > ARGV[1]", "incarnation >= ARGV[1]"),
    ],
)
def test_a_wrong_comparison_is_found(
    judge: Callable[[], Judge],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    right: str,
    wrong: str,
) -> None:
    mutated = []

    def mutant(name: str) -> str:
        text = script_text(name)
        if right in text:
            mutated.append(name)
        return text.replace(right, wrong)

    monkeypatch.setattr(adapter, "script_text", mutant)
    judging = judge()
    assert mutated, f"no script compares {right!r}"
    assert any(
        not judging.agrees(history_of(each)) for each in range(seed, seed + MUTANT_HISTORIES)
    ), f"nothing told {wrong!r} from {right!r}"
