"""Spark's classes, archived once for each virtual environment: a JVM that maps the archive is up in
half the time, and the tests start about twenty.

    python -m tests.support.spark_classes    create the archive

Without it, or with a Java that it does not fit, a JVM loads its classes from the jar files.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession

from seqgate.spark import local_session
from seqgate.spark._java import find_java

FOLDER: Final = Path(sys.prefix) / "spark-classes"

ARCHIVES: Final = (FOLDER / "java.jsa", FOLDER / "spark.jsa")
"""Java's own classes, and those of Spark on top of them."""

QUICK: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Compile little, and collect garbage on one core."""


def java_options() -> list[str]:
    """Arguments with which a JVM starts quickly. It logs nothing: a warning about an archive that
    does not fit would go to standard output."""
    if not all(each.exists() for each in ARCHIVES):
        return [*QUICK]
    joined = ":".join(map(str, ARCHIVES))
    return [*QUICK, "-Xlog:disable", f"-XX:SharedArchiveFile={joined}"]


def create() -> None:
    """Archive Java's own classes, and then those that a small job loads."""
    java, spark = ARCHIVES
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    executable = find_java(os.environ).home / "bin" / "java"
    dump = [str(executable), *QUICK, "-Xshare:dump", f"-XX:SharedArchiveFile={java}"]
    subprocess.run(dump, check=True, capture_output=True)
    unfinished = spark.with_suffix(".unfinished")
    base, top = f"-XX:SharedArchiveFile={java}", f"-XX:ArchiveClassesAtExit={unfinished}"
    with spark_session("classes", *QUICK, "-Xlog:disable", base, top) as session:
        _run_job(session)
    unfinished.rename(spark)


@contextmanager
def spark_session(name: str, *java_options: str, **settings: str) -> Iterator[SparkSession]:
    """A session with a small shuffle, whose JVM ends with the context."""
    session = local_session(
        name,
        **settings,
        **{
            "spark.driver.extraJavaOptions": " ".join(java_options),
            "spark.sql.shuffle.partitions": "2",
        },
    )
    gateway: Any = session.sparkContext._gateway
    yield session
    session.stop()
    gateway.shutdown()
    with gateway.proc as java:  # ends with its standard input
        java.stdin.close()


def _run_job(session: SparkSession) -> None:
    numbers = session.createDataFrame(
        [(each, f"a{each % 3}") for each in range(10)], "n int, k string"
    )
    counted = numbers.groupBy("k").count().orderBy("k")
    assert counted.mapInArrow(_same, counted.schema).join(numbers, "k").count() == 10
    with tempfile.TemporaryDirectory() as folder:
        numbers.write.mode("overwrite").parquet(folder)
        assert session.read.parquet(folder).count() == 10


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    create()
