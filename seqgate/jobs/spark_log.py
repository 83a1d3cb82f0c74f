"""The file that Spark's own output goes to: the JVM's, its workers', and pyspark's.

Nothing in it is of use unless the job fails; the error then names the file. After success it is
deleted, unless it was asked for. Under spark-submit, Spark's output is the caller's.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from seqgate.cli._failure import InvalidSettings
from seqgate.errors import SeqgateError

VARIABLE: Final = "SEQGATE_SPARK_LOG"

SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which has started Java."""

LOGGERS: Final = ("py4j", "pyspark", "seqgate.spark")


FAILURES: Final = (PySparkException, Py4JError)
"""What a failed job of Spark raises; the latter if Spark does not know the exception in Java."""


class SparkJobFailed(SeqgateError):
    """The Spark job that reads logs failed: `log` is the file with what Spark wrote."""

    default_reason = "SPARK_JOB_FAILED"


class SparkLog:
    """
    Attributes:
        path: the file; None: standard error.
        kept: whether it outlives the job.
    """

    def __init__(self, path: Path | None, *, kept: bool) -> None:
        self.path = path
        self.kept = kept

    def failed(self, error: Exception) -> Mapping[str, str]:
        """Add an error of Spark, in full. Returns details that name the file, which is kept."""
        if self.path is None:
            sys.stderr.write(f"{error}\n")
            return {}
        with self.path.open("a", encoding="utf-8") as log:
            log.write(f"{error}\n")
        return self.details()

    def details(self) -> Mapping[str, str]:
        """Details of an error that name the file, which is then kept; none if it is empty."""
        if self.path is None or not self.path.stat().st_size:
            return {}
        self.kept = True
        return {"log": str(self.path)}


def gist(error: Exception) -> str:
    """The first line of a long report of Spark, and that of the task's exception."""
    lines = [line.strip() for line in str(error).partition("SQLSTATE")[0].splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]  # of Java's stack
    first, *more = lines or ["no reason was given"]
    return f"{first} {more[-1]}" if more else first


def add_log_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help=f"append what Spark writes to this file, and keep it; default: {VARIABLE}, or a "
        "temporary file that is kept if the job fails",
    )


@contextmanager
def spark_log(file: Path | None) -> Iterator[SparkLog]:
    """Open the log: this file, the one that VARIABLE names, or a temporary one; under spark-submit
    standard error. An error that leaves the context names it.

    Raises:
        InvalidSettings: the file cannot be written.
    """
    given = file or Path(os.environ.get(VARIABLE, ""))
    is_given = given != Path()
    if not is_given and SUBMITTED in os.environ:
        yield SparkLog(None, kept=True)
        return
    try:
        if is_given:
            path = given.absolute()
            path.open("ab").close()
        else:
            descriptor, name = tempfile.mkstemp(prefix="seqgate-spark-", suffix=".log")
            os.close(descriptor)
            path = Path(name)
    except OSError as error:
        raise InvalidSettings(f"{VARIABLE}: {given}: {error.strerror}") from error
    log = SparkLog(path, kept=is_given)
    try:
        with _logged(path):
            yield log
    except SeqgateError as error:
        error.details = {**error.details, **log.details()}
        raise
    finally:
        if not log.kept:
            path.unlink(missing_ok=True)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write what pyspark logs to the file, and nowhere else."""
    handler = logging.FileHandler(path)
    loggers = [logging.getLogger(each) for each in LOGGERS]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
            each.propagate = True
        handler.close()
