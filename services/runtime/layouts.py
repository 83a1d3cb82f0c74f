"""The layout of a PostgreSQL database: numbered SQL files, each applied once and in order.

The first line of a file names the oldest version of Seqgate that can use the layout it leads to:

    -- usable from: 0.1.0

so that two versions work on one database while an upgrade rolls through. A version refuses a layout
that it does not know, unless that one names it, or an older one.
"""

import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from seqgate.services.errors import StoreUnavailable
from seqgate.services.runtime.transactions import Database, Transaction

log = structlog.get_logger()

_NAME: Final = re.compile(r"(\d{4})_\w+\.sql")
_HEADER: Final = re.compile(r"-- usable from: (\d+(?:\.\d+)*)\n")

_TABLE: Final = """CREATE TABLE IF NOT EXISTS seqgate_layout (
    service     text NOT NULL,
    number      bigint NOT NULL,
    name        text NOT NULL,
    usable_from text NOT NULL,      -- the oldest version of Seqgate that can use it
    PRIMARY KEY (service, number)
)"""
_LOCK: Final = "LOCK TABLE seqgate_layout IN EXCLUSIVE MODE"
_IS_THERE: Final = "SELECT to_regclass('seqgate_layout') IS NOT NULL"
_APPLIED: Final = """SELECT number, name, usable_from FROM seqgate_layout
    WHERE service = ? ORDER BY number"""
_RECORD: Final = "INSERT INTO seqgate_layout VALUES (?, ?, ?, ?)"


class Step(NamedTuple):
    """A change of the layout; `sql` is empty if it was read from the database."""

    number: int
    name: str
    usable_from: str
    sql: str = ""


def steps_in(folder: Path) -> list[Step]:
    """The steps in a folder, in order."""
    found = []
    for file in sorted(folder.glob("*.sql")):
        text = file.read_text()
        name, header = _NAME.fullmatch(file.name), _HEADER.match(text)
        assert name is not None, f"{file.name} is not named like 0001_logs.sql"
        assert header is not None, f"{file.name} does not begin with '-- usable from: '"
        found.append(Step(int(name[1]), file.stem, header[1], text))
    assert [each.number for each in found] == list(range(1, len(found) + 1)), folder
    return found


def missing(known: list[Step], applied: Iterable[Step], running: str) -> list[Step]:
    """The steps that are yet to be applied, for a running version of Seqgate.

    Raises:
        StoreUnavailable: this version cannot use the layout.
    """
    left = {each.number: each for each in known}
    for each in applied:
        if left.pop(each.number, None) is None and _parts(each.usable_from) > _parts(running):
            raise StoreUnavailable(
                f"the database's layout asks for Seqgate {each.usable_from} or later",
                layout=each.name,
                version=running,
            )
    return list(left.values())


async def prepare(
    database: Database, service: str, folder: Path, *, migrates: bool, running: str = ""
) -> list[Step]:
    """Bring a service's tables to the layout of this version. Returns the steps that were applied.

    Raises:
        StoreUnavailable: this version cannot use the layout; or steps are missing, and `migrates`
            is false.
    """
    known, running = steps_in(folder), running or version("seqgate")
    applied = await database.read(lambda db: _applied(db, service))
    due = missing(known, applied, running)
    if due and not migrates:
        raise StoreUnavailable(
            f"the database lacks the layout {due[-1].name}: apply it with "
            f"`python -m seqgate.services.{service} --migrate`, or set postgres_migrates",
            layout=due[-1].name,
        )
    for step in due:
        if await database.write(lambda db, step=step: _apply(db, service, step)):  # type: ignore[misc]
            log.info("layout applied", service=service, layout=step.name)
    return due


def _applied(db: Transaction, service: str) -> list[Step]:
    ((is_there,),) = db.rows(_IS_THERE)
    if not is_there:
        return []
    return [Step(*row) for row in db.rows(_APPLIED, service)]


def _apply(db: Transaction, service: str, step: Step) -> bool:
    """Apply a step. Returns whether it was this transaction that did."""
    db.change(_TABLE)
    db.change(_LOCK)
    if step.number in {each.number for each in _applied(db, service)}:
        return False
    db.change(step.sql)
    db.change(_RECORD, service, step.number, step.name, step.usable_from)
    return True


def _parts(version_text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version_text))
