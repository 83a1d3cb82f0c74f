"""Spark's classes, archived once for each virtual environment: a JVM that maps the archive is up in
half the time, and the tests start about twenty.

    python -m tests.support.spark_classes    create the archive unless it exists

Without it, or with a Java that it does not fit, a JVM loads its classes from the jar files.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
    if not is_archived():
        return [*QUICK]
    joined = ":".join(map(str, ARCHIVES))
    return [*QUICK, "-Xlog:disable", f"-XX:SharedArchiveFile={joined}"]


def is_archived() -> bool:
    """Whether the archive is complete."""
    return all(each.exists() for each in ARCHIVES)


def create() -> None:
    """Archive Java's own classes, and then those that a small job loads."""
    java, spark = ARCHIVES
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    executable = find_java(os.environ).home / "bin" / "java"
    dump = [str(executable), *QUICK, "-Xshare:dump", f"-XX:SharedArchiveFile={java}"]
    subprocess.run(dump, check=True, capture_output=True)
    unfinished = spark.with_suffix(".unfinished")
    options = [
        *QUICK,
        "-Xlog:disable",
        f"-XX:SharedArchiveFile={java}",
        f"-XX:ArchiveClassesAtExit={unfinished}",
    ]
    _run_job(" ".join(options))
    unfinished.rename(spark)


def _run_job(java_options: str) -> None:
    settings = {
        "spark.master": "local[1]",
        "spark.driver.extraJavaOptions": java_options,
        "spark.sql.shuffle.partitions": "1",
    }
    session: SparkSession = local_session("classes", **settings)
    gateway: Any = session.sparkContext._gateway
    numbers = session.createDataFrame(
        [(each, f"a{each % 3}") for each in range(10)], "n int, k string"
    )
    counted = numbers.groupBy("k").count().orderBy("k")
    assert counted.mapInArrow(_same, counted.schema).join(numbers, "k").count() == 10
    with tempfile.TemporaryDirectory() as folder:
        numbers.write.mode("overwrite").parquet(folder)
        assert session.read.parquet(folder).count() == 10
    session.stop()
    gateway.shutdown()
    with gateway.proc as process:  # ends with its standard input
        process.stdin.close()


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    if not is_archived():
        create()
