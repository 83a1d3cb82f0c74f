"""A process killed amid its changes leaves each cursor as one of the changes left it."""

import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random

import pytest

from seqgate.services.cursor.adapters.postgres import open_postgres_store
from seqgate.services.cursor.adapters.sqlite import open_sqlite_store
from seqgate.services.cursor.adapters.tables import TableCursorStore
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import Batch
from seqgate.services.runtime.postgres import Server
from seqgate.types import Position, TopicName
from tests.support.depth import times
from tests.support.postgres_server import empty_database

TOPIC = TopicName.parse("test/faults/cursors")
CURSORS = 5
KILLS = 4

PROGRAM = """
import asyncio, structlog, sys
from tests.faults.test_cursor_store import CURSORS, TOPIC, move, opened

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def keep_moving(store, name):
    await store.create(TOPIC, name, mark_delete=None, properties={})
    while True:
        revision = await store.change(TOPIC, name, move)
        print(name, revision, flush=True)

async def main():
    async with opened(sys.argv[1]) as store, asyncio.TaskGroup() as tasks:
        for i in range(CURSORS):
            tasks.create_task(keep_moving(store, str(i)))

asyncio.run(main())
"""


def opened(place: str) -> AbstractAsyncContextManager[TableCursorStore]:
    """The store at a path, or in the database at a URL."""
    if place.startswith("postgresql:"):
        return open_postgres_store(Server(place, writers=CURSORS, readers=1), migrates=True)
    return open_sqlite_store(Path(place))


def move(state: CursorState, _: int) -> int:
    """Change every part of a cursor to values derived from its revision."""
    revision = state.head.revision + 1
    state.head.revision = revision
    state.head.mark_delete = Position(revision, 0)
    state.head.mark_delete_properties = {"revision": str(revision) * 500}
    state.holes.drop_through(None)
    for number in range(revision % 50 + 1):
        state.holes.put_page(revision, number, revision)
        state.holes.put_batch(Position(revision, number), Batch(100, revision % 100))
    return revision


def version_of(state: CursorState) -> int:
    """The revision of a cursor, after checking that every part belongs to it."""
    revision = state.head.revision
    if revision == 0:
        return 0
    numbers = range(revision % 50 + 1)
    assert state.head.mark_delete == Position(revision, 0)
    assert state.head.mark_delete_properties == {"revision": str(revision) * 500}
    assert list(state.holes.pages(None)) == [(revision, number, revision) for number in numbers]
    batches = [(Position(revision, number), Batch(100, revision % 100)) for number in numbers]
    assert list(state.holes.batches(None)) == batches
    return revision


def run_until_killed(root: Path, place: str, lines: int) -> dict[str, int]:
    """Kill a process that moves cursors. Returns the moves that it reported as durable."""
    told: dict[str, int] = {}
    program = [sys.executable, "-c", PROGRAM, place]
    with subprocess.Popen(program, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(lines):
            name, revision = process.stdout.readline().split()
            told[name] = int(revision)
        process.kill()
        for line in process.stdout:
            if line.endswith("\n"):
                name, revision = line.split()
                told[name] = int(revision)
    return told


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_killed_process_leaves_committed_cursors(
    request: pytest.FixtureRequest, root: Path, tmp_path: Path, seed: int, kind: str
) -> None:
    random = Random(seed)
    place = str(tmp_path / "cursor.db")
    if kind == "postgres":
        place = await empty_database(request.getfixturevalue("postgres"), "cursor_tests")
    told = {str(i): 0 for i in range(CURSORS)}
    for _ in range(KILLS if kind == "sqlite" else times(quick=2, full=10)):
        told |= run_until_killed(root, place, random.randint(CURSORS, 200))
        async with opened(place) as store:
            found = {name: await store.look(TOPIC, name, version_of) for name in told}
        assert all(found[name] >= told[name] for name in told), (found, told)
