"""Copy a stopped installation's stores from SQLite to PostgreSQL, and compare both ends.

python -m seqgate.jobs.copy --from sqlite:PATH [--from sqlite:PATH] --to postgresql://... [--json]

PATH is the ledger's or the cursor service's database. The services must be stopped until the copy
is whole; then they are started with postgres_url. A copy that was interrupted is continued by the
same command.

Exit status: 0: both ends are the same; 1: they are not, or a store cannot be copied; 2: invalid
arguments; 3: a database cannot be reached.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import asyncpg
import structlog
from rich.console import Console
from rich.table import Table

from seqgate.cli._failure import INTERRUPTED, REFUSED, UNAVAILABLE
from seqgate.jobs.copy.copying import CopyError, Copying, Plan, Report, Show, open_source
from seqgate.services.cursor.adapters import sqlite as cursors
from seqgate.services.errors import DomainError
from seqgate.services.ledger.adapters import sqlite as logs
from seqgate.services.ledger.adapters.postgres import open_postgres_store as open_logs
from seqgate.services.runtime.postgres import Server, addresses_of

SQLITE: Final = "sqlite:"

LOGS: Final = Plan(
    "ledger",
    logs.APPLICATION_ID,
    logs.LAYOUT,
    {
        "block": ("id",),
        "producer_block": ("topic", "producer", "highest", "block"),
        "producer_trimmed": ("topic", "producer"),
        "producer_instance": ("topic", "producer"),
        "topic_trimmed": ("topic",),
        "topic_clock": ("topic",),
        "leaving": ("name",),
        "tombstone": ("name",),
        "topic": ("id",),
    },
)
CURSORS: Final = Plan(
    "cursor",
    cursors.APPLICATION_ID,
    cursors.LAYOUT,
    {
        "page": ("cursor", "ledger_id", "number"),
        "batch": ("cursor", "ledger_id", "entry_id"),
        "attempt": ("cursor", "ledger_id", "entry_id"),
        "properties": ("cursor", "digest"),
        "succession": ("topic", "last_ledger", "last_entry"),
        "spent": ("topic",),
        "cursor": ("id",),
    },
)
OPENING: Final = {"ledger": open_logs}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the process's arguments. Returns its exit status."""
    given = _parser().parse_args(arguments)
    show = progress(Console(stderr=True))
    try:
        reports = [
            report for path in given.sources for report in asyncio.run(copy(path, given.to, show))
        ]
    except CopyError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except (DomainError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        sys.stderr.write(f"the database cannot be reached, or failed: {error}\n")
        return UNAVAILABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    _print(reports, as_json=given.json)
    return 0


def progress(console: Console) -> Show:
    """Shows progress on a terminal."""

    def show(table: str, rows: int) -> None:
        if console.is_terminal:
            console.print(f"{table}: {rows:,} rows", end="\r")

    return show


async def copy(path: Path, url: str, show: Show) -> list[Report]:
    """Copy one store. Raises CopyError, and what asyncpg raises."""
    source, plan = open_source(path, (LOGS, CURSORS))
    try:
        async with OPENING[plan.service](Server(url), migrates=True):
            pass  # brings the tables to this version's layout
        target = await asyncpg.connect(url)
        try:
            return await Copying(source, target, plan, show).run(f"{SQLITE}{path}")
        finally:
            await target.close()
    finally:
        source.close()


def _print(reports: Sequence[Report], *, as_json: bool) -> None:
    if as_json:
        for each in reports:
            print(json.dumps(each._asdict()))
        return
    table = Table("TABLE", "COPIED", "SAME ON BOTH ENDS")
    for each in reports:
        table.add_row(each.table, f"{each.copied:,}", f"{each.rows:,}")
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seqgate.jobs.copy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        required=True,
        type=_source,
        metavar="sqlite:PATH",
    )
    parser.add_argument("--to", required=True, type=_target, metavar="postgresql://...")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser


def _source(text: str) -> Path:
    if not text.startswith(SQLITE):
        raise argparse.ArgumentTypeError("must be sqlite:PATH")
    return Path(text.removeprefix(SQLITE)).resolve()


def _target(text: str) -> str:
    try:
        addresses_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.exit(main())
