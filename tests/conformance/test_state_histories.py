"""Redis's scripts and the pure functions agree."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import pytest
from redis.exceptions import ResponseError

from seqgate.services.dedup.adapters import redis as adapter
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.adapters.redis import RedisStateStore, script_text
from tests.support.depth import times
from tests.support.histories import Call, history_of, play
from tests.support.redis_server import RedisServer

HISTORIES = times(quick=200, full=4_000)
HISTORIES_FAR = times(quick=15, full=100)
MUTANT_HISTORIES = 20_000
TELLING = {
    "tonumber(term) == topic.term and": 1_701,
    "chunk <= stored_chunk": 1_399,
    "ahead(keep, p.persisted)": 768,
    "layout == before_layout and": 746,
    "layout ~= persisted_layout or": 739,
    "chunk > persisted_chunk": 550,
    "id_of(p.pushed) > keep": 253,
    "chunk == before_chunk + 1": 222,
    "#pushed <= ID then return true": 222,
    "chunk == reached_chunk + 1": 220,
    "#persisted <= ID then return false": 135,
    'lowest == pushed_id and "N" or "P"': 135,
    "id_of(persisted) ~= id_of(entry) or": 125,
    "lowest > pushed then": 120,
    "lowest > pushed_id": 105,
    "math.max(1, topic.remaining)": 94,
}
"""For mutants that few histories reveal, one that does, where the search begins."""

IN_FLIGHT = 'if pushed ~= persisted then return "I" end\n  '


class Judge:
    """Replays a history on Redis and on the model."""

    def __init__(self, runner: asyncio.Runner, store: RedisStateStore) -> None:
        self._runner = runner
        self._store = store

    def answers(self, history: list[Call]) -> tuple[list[object], list[object]]:
        return self._runner.run(self._answers(history))

    def agrees(self, history: list[Call]) -> bool:
        try:
            lua, python = self.answers(history)
        except (AssertionError, ResponseError):  # an answer that cannot be parsed
            return False
        return lua == python

    def shrink(self, history: list[Call]) -> list[Call]:
        """A shorter history on which the two differ, found by dropping calls."""
        for i in reversed(range(len(history))):
            shorter = history[:i] + history[i + 1 :]
            if not self.agrees(shorter):
                history = shorter
        return history

    async def _answers(self, history: list[Call]) -> tuple[list[object], list[object]]:
        return await play(self._store, history), await play(MemoryStateStore(), history)


@contextmanager
def judging_at(url: str) -> Iterator[Callable[[], Judge]]:
    with asyncio.Runner() as runner:
        connection = connect_redis(url, timeout_s=30, connections_max=1)
        client = runner.run(connection.__aenter__())
        yield lambda: Judge(runner, RedisStateStore(client, leap=lambda: 0))
        runner.run(connection.__aexit__(None, None, None))


@pytest.fixture
def judge(redis: RedisServer) -> Iterator[Callable[[], Judge]]:
    """Makes judges; each loads the scripts when it is made."""
    with judging_at(redis.url) as judge:
        yield judge


@pytest.mark.parametrize("group", ["sentinels", "cluster"])
def test_lua_and_python_agree_behind_sentinels_and_in_a_cluster(
    request: pytest.FixtureRequest, group: str, seed: int
) -> None:
    """The scripts are the same: only the connection may differ."""
    with judging_at(request.getfixturevalue(group).url) as judge:
        judging = judge()
        for each in range(seed, seed + HISTORIES_FAR):
            lua, python = judging.answers(history_of(each))
            assert lua == python, f"history_of({each})"


def test_lua_and_python_agree_on_every_history(judge: Callable[[], Judge], seed: int) -> None:
    judging = judge()
    for each in range(seed, seed + HISTORIES):
        history = history_of(each)
        if not judging.agrees(history):
            history = judging.shrink(history)
            lua, python = judging.answers(history)
            assert lua == python, f"history_of({each}), shrunk to {history}"


# Mutants: each comparison of the scripts, changed slightly. The suite above must notice every one.
COMPARISONS = [
    # topic.lua, the gate
    ("topic.confirmed < after", "topic.confirmed <= after"),
    ("topic.confirmed < through", "topic.confirmed <= through"),
    ("topic.confirmed < call.position", "false"),
    ("call.position < topic.confirmed", "false"),
    ("topic.incarnation < call.incarnation", "topic.incarnation <= call.incarnation"),
    ("topic.incarnation > call.incarnation", "false"),
    ("topic.epoch > call.epoch", "topic.epoch >= call.epoch"),
    ("topic.epoch < call.epoch", "false"),
    ("tonumber(term) ~= topic.term", "false"),
    # topic.lua, the fold
    ("chunk + 1 == tonumber", "chunk + 2 == tonumber"),
    ("layout == before_layout and", ""),
    ("chunk == before_chunk + 1", "chunk > before_chunk"),
    ("chunk > 0 then", "chunk > 1 then"),
    ("id_of(persisted) ~= id_of(entry) or", ""),
    ("return is_last(chunk, layout) and id_of(entry) or entry", "return entry"),
    ("pushed == persisted or not ahead(pushed, mark)", "not ahead(pushed, mark)"),
    ("pushed == persisted or not ahead(pushed, mark)", "pushed == persisted"),
    ("entries[2] > p.active", "entries[2] < p.active"),
    ("pushed_id ~= persisted_id then", "false then"),
    ("return pushed_id > persisted_id", "return pushed_id < persisted_id"),
    (
        "return pushed_id > persisted_id",
        "return (tonumber(pushed_id) or -1) > (tonumber(persisted_id) or -1)",
    ),
    ("#persisted <= ID then return false", "#persisted <= ID then return true"),
    ("#pushed <= ID then return true", "#pushed <= ID then return false"),
    ("layout ~= persisted_layout or", ""),
    ("chunk > persisted_chunk", "chunk < persisted_chunk"),
    # admit.lua, messages
    ("call.revision ~= topic.revision", "call.revision > topic.revision"),
    ("if unknown > 0 then", "if unknown >= 0 then"),
    ("tracked + unknown > call.max_producers", "tracked + unknown >= call.max_producers"),
    ("highest <= persisted", "highest < persisted"),
    ("highest <= persisted", "tonumber(highest) <= (tonumber(persisted) or -1)"),
    ("highest < id_of(persisted)", "highest <= id_of(persisted)"),
    ("highest < id_of(persisted)", "tonumber(highest) < tonumber(id_of(persisted))"),
    ("lowest > pushed_id", "lowest >= pushed_id"),
    ("lowest > pushed_id", "highest > pushed_id"),
    ("lowest > pushed_id", "tonumber(lowest) > (tonumber(pushed_id) or -1)"),
    (IN_FLIGHT + "return lowest == pushed_id", "return lowest == pushed_id"),
    ('lowest == pushed_id and "N" or "P"', '"N"'),
    ('lowest == pushed_id and "N" or "P"', '"P"'),
    ('pushed ~= persisted and "I" or "P"', '"I"'),
    ('pushed ~= persisted and "I" or "P"', '"P"'),
    ("lowest > pushed then", "lowest >= pushed then"),
    ("lowest > pushed then", "highest > pushed then"),
    ("lowest > pushed then", "tonumber(lowest) > (tonumber(pushed) or -1) then"),
    ("return pushed > persisted", "return pushed < persisted"),
    # admit.lua, chunks
    ("id < persisted_id", "id <= persisted_id"),
    ("id < persisted_id", "tonumber(id) < (tonumber(persisted_id) or -1)"),
    ("(id == persisted_id and #persisted <= ID)", "false"),
    ("layout == stored_layout and", ""),
    ("chunk <= stored_chunk", "chunk < stored_chunk"),
    ("chunk <= stored_chunk", "tostring(chunk) <= tostring(stored_chunk)"),
    ("if id > pushed_id", "if id >= pushed_id"),
    ("if id > pushed_id", "if tonumber(id) > (tonumber(pushed_id) or -1)"),
    ('chunk == 0 and "N" or "G"', '"N"'),
    ('chunk == 0 and "N" or "G"', '"G"'),
    ("id < pushed_id or", ""),
    ("if layout == reached_layout", "if true"),
    ("chunk <= reached_chunk", "chunk < reached_chunk"),
    ("chunk <= reached_chunk", "tostring(chunk) <= tostring(reached_chunk)"),
    ("chunk == reached_chunk + 1", "true"),
    (IN_FLIGHT + "return chunk", "return chunk"),
    ('chunk == 0 and "N" or "C"', '"N"'),
    ('chunk == 0 and "N" or "C"', '"C"'),
    # admit.lua, effects of a verdict
    ('held and verdict ~= "D"', "false"),
    ('held and verdict ~= "D"', "held"),
    ('elseif verdict ~= "D"', "elseif true"),
    ("#p.pushed > ID and not", "not"),
    ("chunk and continues(p.pushed, highest)", "chunk"),
    ("chunk and continues(p.pushed, highest)", "false"),
    ("chunk and is_last(chunk_of(highest)) and lowest", "chunk and lowest"),
    ("chunk and is_last(chunk_of(highest)) and lowest", "false"),
    ("call.now_ms > p.active", "call.now_ms < p.active"),
    # the other scripts
    ("id_of(p.pushed) > keep", "p.pushed > keep"),
    ("id_of(p.pushed) > keep", "id_of(p.pushed) >= keep"),
    ("id_of(p.pushed) > keep", "(tonumber(id_of(p.pushed)) or -1) > (tonumber(keep) or -1)"),
    ("ahead(keep, p.persisted)", "keep > id_of(p.persisted)"),
    ("ahead(keep, p.persisted)", "true"),
    ("if not p.known then producers[name]", "if false then producers[name]"),
    ("tonumber(active) == each[2]", "tonumber(active) <= each[2]"),
    ("tonumber(term) == topic.term and", ""),
    ("and not in_flight", ""),
    ("now_ms - slack_ms > tonumber(active)", "now_ms >= 0"),
    ("incarnation > ARGV[1]", "incarnation >= ARGV[1]"),
    # topic.lua, the remaining entries
    ("math.max(1, topic.remaining)", "topic.remaining"),
    ("math.max(1, topic.remaining)", "1"),
    ("if topic.remaining > 0 then", "if false then"),
    ("topic.confirmed_entries - topic.saved_entries", "topic.confirmed_entries"),
    # load.lua and record_snapshot.lua
    ("topic.incarnation > call.incarnation then return answer", "false then return answer"),
    ("topic.incarnation < call.incarnation then\n  topic = new", "false then\n  topic = new"),
    ("not call.replacing and", ""),
    ("topic.confirmed >= call.through", "topic.confirmed > call.through"),
    ('redis.call("DEL", KEY)\nlocal producers', "local producers"),
    ("topic.confirmed, topic.remaining = call.through, 0", "topic.confirmed = call.through"),
    ("if call.taken_ms then", "if false then"),
    ("call.through, topic.confirmed_entries, call.taken_ms", "call.through, 0, call.taken_ms"),
    ("withdraw_all()\nwrite_producers", "write_producers"),
    ("topic.incarnation == incarnation and", ""),
    ("position >= topic.saved", "position > topic.saved"),
    ("position >= topic.saved", "true"),
]


@pytest.mark.deep
@pytest.mark.parametrize(("right", "wrong"), COMPARISONS)
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
    first = TELLING.get(right, seed)
    histories = chain((first,), range(seed, seed + MUTANT_HISTORIES))
    told = next((each for each in histories if not judging.agrees(history_of(each))), None)
    assert told is not None, f"nothing told {wrong!r} from {right!r}"
