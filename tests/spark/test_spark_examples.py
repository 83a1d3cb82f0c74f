"""The examples with Spark do what they say, and plot it."""

import os
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from seqgate.client import SubscriptionOptions, connect
from tests.integration.services import Services, running

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]  # each starts Spark anew

POLICIES = """
[namespace."public/plain"]
enabled = false
"""
ROWS = 5_000


@pytest_asyncio.fixture(scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running(tmp_path_factory.mktemp("examples"), policies=POLICIES) as services:
        yield services


async def output(root: Path, example: str, *arguments: str) -> str:
    process = await create_subprocess_exec(
        *(sys.executable, str(root / "examples" / example), *arguments),
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode().strip()


def texts(plot: Path) -> list[str]:
    return [each.text or "" for each in ET.parse(plot).iter("{http://www.w3.org/2000/svg}text")]


async def test_duplicates_are_plotted_by_producer(
    root: Path, services: Services, tmp_path: Path
) -> None:
    topic, plot = "public/plain/duplicates", tmp_path / "plot.svg"
    ledger = services.stack.address("ledger")
    async with connect(ledger) as client:
        for name, count in (("twice", 10), ("twice", 10), ("once", 5)):
            async with client.producer(topic, name=name) as producer:
                for sequence_id in range(count):
                    await producer.send(b"x", sequence_id=sequence_id)
    said = await output(root, "spark_duplicates.py", ledger, "public/plain/*", str(plot))
    assert said == "twice: 10 duplicates"
    assert "twice" in texts(plot)
    assert "once" not in texts(plot)


async def test_what_waits_behind_a_held_key_is_plotted(
    root: Path, services: Services, tmp_path: Path
) -> None:
    topic, plot = "public/default/held", tmp_path / "plot.svg"
    ledger, dispatcher = map(services.stack.address, ("ledger", "dispatcher"))
    async with connect(ledger, dispatcher=dispatcher) as client:
        async with client.producer(topic, name="p") as producer:
            for at in range(9):
                await producer.send(b"x", key="fast" if at % 3 else "slow")
        options = SubscriptionOptions(max_in_flight_per_key=1)
        async with client.consumer(topic, "s", start="earliest", options=options) as consumer:
            for _ in range(7):  # the first of "slow", and all of "fast"
                message = await consumer.receive()
                if message.key == "fast":
                    await consumer.ack(message)
            arguments = (ledger, dispatcher, topic, "s", str(plot))
            said = await output(root, "spark_held_keys.py", *arguments)
    assert said == "slow: 3 messages"
    assert "slow" in texts(plot)


async def test_a_backfill_that_is_killed_twice_stores_each_row_once(
    root: Path, services: Services, tmp_path: Path
) -> None:
    files, plot = tmp_path / "rows.parquet", tmp_path / "plot.svg"
    pq.write_table(pa.table({"payload": [f"row {each}" for each in range(ROWS)]}), files)
    arguments = ("public/default/backfill", str(files), str(tmp_path / "staging"), str(plot))
    ledger = services.stack.address("ledger")
    said = await output(root, "spark_backfill.py", ledger, *arguments)
    kills, _, stored = said.partition(" kills, ")
    assert int(kills) >= 1  # sending may end before it is noticed
    assert stored == f"{ROWS} messages, 0 of them twice"
    assert "killed while staging" in texts(plot)
