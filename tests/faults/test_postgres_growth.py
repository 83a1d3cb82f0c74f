"""Tables that grow and are trimmed all the time stay small, on a server with stock settings."""

import asyncio
import time

import pytest

from seqgate.services.ledger.adapters.postgres import PostgresLedgerStore, open_postgres_store
from seqgate.services.runtime.postgres import Server
from seqgate.types import Position, TopicName
from tests.support.depth import deep
from tests.support.entries import single
from tests.support.postgres_server import PostgresServer, admin, empty_database

TOPICS = [TopicName.parse(f"public/default/growing-{number}") for number in range(8)]
BLOCK = [single(0, payload=b"\xa5" * 1_000)] * 100
KEPT_BLOCKS = 40
"""Of each topic: 32 MB in all."""

SECONDS = deep(quick=60, full=600)
WARM_UP_S = 30
BLOCKS_A_SECOND = 25
"""Of each topic: 20 MB in all."""

GROWTH_MAX = 3.0
"""The most bytes of all tables, in bytes of the log."""

SIZE = """SELECT sum(pg_total_relation_size(relid))::bigint FROM pg_stat_user_tables
    WHERE relname IN ('block', 'producer_block', 'topic')"""


@pytest.mark.deep
@pytest.mark.timeout(1_800)
async def test_tables_stay_below_three_times_what_lives_in_them(postgres: PostgresServer) -> None:
    url = await empty_database(postgres, "growth")
    async with open_postgres_store(Server(url), migrates=True) as store, admin(url) as connection:
        until_s = time.monotonic() + SECONDS
        writing = [asyncio.create_task(write(store, topic, until_s)) for topic in TOPICS]
        worst = 0.0
        began_s = time.monotonic()
        while not all(each.done() for each in writing):
            await asyncio.wait(writing, timeout=2)
            if time.monotonic() - began_s > WARM_UP_S:
                live_bytes = sum(
                    [each.size_bytes for each in await store.topics(prefix="", after="", limit=100)]
                )
                worst = max(worst, await connection.fetchval(SIZE) / live_bytes)
        blocks = sum([await each for each in writing])
        assert worst < GROWTH_MAX, f"{worst:.2f} after {blocks} blocks"
    await empty_database(postgres, "growth")


async def write(store: PostgresLedgerStore, topic: TopicName, until_s: float) -> int:
    """Append and trim until then. Returns the number of blocks."""
    state = await store.take(topic, create=True)
    tail, blocks = state.tail, 0
    began_s = time.monotonic()
    while time.monotonic() < until_s:
        await asyncio.sleep(began_s + blocks / BLOCKS_A_SECOND - time.monotonic())
        await store.append(topic, state.ledger_id, tail, BLOCK, 1)
        blocks += 1
        tail = Position(state.ledger_id, blocks * len(BLOCK) - 1)
        if blocks > KEPT_BLOCKS and not blocks % 10:
            first = Position(state.ledger_id, (blocks - KEPT_BLOCKS) * len(BLOCK))
            await store.trim(topic, first, ledger_id=state.ledger_id)
    return blocks
