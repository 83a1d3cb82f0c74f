"""Prove from the log that nothing is stored twice.

python -m seqgate.jobs.audit [TOPIC ...] [--parquet DIR] [--json]

Topics are names and patterns (* and ?); default: all topics. In log order, each producer's ids must
only grow, and the chunks of a large message must follow each other: then no (producer, sequence id)
and no (producer, sequence id, attempt, chunk) is stored twice. Chunks of an aborted attempt are not
duplicates. Entries written with deduplication off are reported where they break these rules.

Progress goes to standard error. What Spark writes goes to a file, which is deleted unless the job
fails, or --log-file or SEQGATE_SPARK_LOG names one.

Exit status: 0: no findings; 1: findings, or a log cannot be read; 2: invalid arguments; 3: a
service is unreachable.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet
from opentelemetry import trace
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from seqgate.api.ledger.v1.ledger_pb2 import Topic
from seqgate.cli._failure import INTERRUPTED, REFUSED, exit_code, reason_of
from seqgate.cli._output import Format, Output
from seqgate.cli._progress import Progress
from seqgate.cli._settings import resolve
from seqgate.errors import SeqgateError
from seqgate.jobs.audit.scan import FOUND, TOTALS, Audited, Logs, audit, entries_read
from seqgate.jobs.spark_log import FAILURES, SparkJobFailed, SparkLog, add_log_file, gist, spark_log
from seqgate.spark import local_session
from seqgate.spark._columns import connected
from seqgate.spark._partitions import list_topics
from seqgate.spark._traced import executor_settings, job
from seqgate.telemetry import spans

TIMEOUT_S: Final = 60
"""How long the ledger may be unreachable."""

SHOWN_MAX: Final = 50
"""The most findings in a table."""

WIDTH: Final = 160


def main(arguments: Sequence[str] | None = None, spark: SparkSession | None = None) -> int:
    """Run the command, by default with the process's arguments. Returns its exit status."""
    given = _parser().parse_args(arguments)
    output = Output(Format.JSON if given.json else Format.TABLE)
    try:
        settings = resolve(os.environ, ledger=given.ledger)
        ledger, wanted = settings.ledger.value, given.topics or ["*"]
        with (
            spans.part("list"),
            connected(ledger) as stub,
        ):  # invalid arguments are reported without Spark
            topics = list_topics(stub, wanted, given.timeout)
        entries = sum(each.entries for each in topics)
        logs = Logs(ledger, ",".join(wanted), given.timeout, entries)
        with spark_log(given.log_file) as log:
            audited = _audited(topics, logs, log, spark)
    except SeqgateError as error:
        output.error(error)
        spans.fail(trace.get_current_span(), reason_of(error), str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    if given.parquet is not None:
        _write(given.parquet, audited)
    if given.json:
        _print_json(audited)
    else:
        _print(audited)
    return REFUSED if audited.found else 0


def _audited(
    topics: Sequence[Topic], logs: Logs, log: SparkLog, spark: SparkSession | None
) -> Audited:
    """Audit topics, and show the progress. Raises SparkJobFailed: a log cannot be read."""
    session: SparkSession | None = None
    group = f"seqgate audit {uuid4()}"

    def look(progress: Progress) -> None:
        if session is not None:
            progress.set(entries=entries_read(session, group))

    with Progress("audit", poll=look, topics=len(topics), entries=logs.entries) as progress:
        session = spark or local_session("seqgate audit", log.path, **executor_settings(os.environ))
        try:
            audited = audit(session, logs, group)
        except FAILURES as error:
            raise SparkJobFailed(
                f"nothing is proven, since a log cannot be read: {gist(error)}",
                details=log.failed(error),
            ) from error
        session = None
        progress.set(topics=len(topics), entries=sum(each["entries"] for each in audited.totals))
    return audited


def _write(folder: Path, audited: Audited) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, schema in (
        ("findings", audited.found, FOUND),
        ("topics", audited.totals, TOTALS),
    ):
        table = pa.Table.from_pylist(rows, schema)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")


def _summary(audited: Audited) -> dict[str, int]:
    counted = {
        name: sum(each[name] for each in audited.totals)
        for name in ("producers", "entries", "messages")
    }
    findings = len(audited.found) + audited.untold
    return {"topics": len(audited.totals), **counted, "findings": findings}


def _print_json(audited: Audited) -> None:
    for each in audited.found:
        sys.stdout.write(json.dumps({"kind": "finding", "finding": each}) + "\n")
    sys.stdout.write(json.dumps({"kind": "summary", **_summary(audited)}) + "\n")


def _print(audited: Audited) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, soft_wrap=True)
    summary = _summary(audited)
    if audited.found:
        table = Table(
            "TOPIC", "PRODUCER", "FINDING", "SEQUENCE ID", "AT", "COLLIDES WITH", box=None
        )
        for each in audited.found[:SHOWN_MAX]:
            more = f" and {each['ids'] - 1} more" if each["ids"] > 1 else ""
            chunk = "" if each["chunk_id"] is None else f" chunk {each['chunk_id']}"
            table.add_row(
                each["topic"],
                each["producer"],
                each["kind"],
                f"{each['sequence_id']}{chunk}{more}",
                f"{each['ledger_id']}:{each['entry_id']}",
                f"{each['earlier_ledger_id']}:{each['earlier_entry_id']}",
            )
        console.print(table)
        if summary["findings"] > SHOWN_MAX:
            console.print(f"... and {summary['findings'] - SHOWN_MAX:,} more")
    console.print(
        f"{summary['topics']:,} topics, {summary['producers']:,} producers, "
        f"{summary['entries']:,} entries, {summary['messages']:,} messages: "
        + (
            f"{summary['findings']:,} findings"
            if audited.found
            else "proven that none is stored twice, and that ids of each producer only grow"
        ),
        highlight=False,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seqgate.jobs.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help="names and patterns")
    parser.add_argument("--ledger", metavar="HOST:PORT", help="the ledger service")
    parser.add_argument(
        "--parquet", type=Path, metavar="DIR", help="also write the findings here, as Parquet"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    add_log_file(parser)
    parser.add_argument(
        "--timeout",
        type=int,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="how long the ledger may be unreachable; default: %(default)s",
    )
    return parser


if __name__ == "__main__":
    sys.exit(job("seqgate-audit", "audit", main))
