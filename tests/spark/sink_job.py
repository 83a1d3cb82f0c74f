"""A write of a cluster of two executors, as a process that a test kills: a plan that gives the same
rows in another order and in other partitions each time, slowly, and runs slow tasks twice.

    python -m tests.spark.sink_job LEDGER TOPIC JOB STAGING ROWS
"""

import sys
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from seqgate.spark import local_session, register

CLUSTER = {
    "spark.master": "local-cluster[2,1,512]",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.adaptive.enabled": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.minTaskRuntime": "50ms",
    "spark.speculation.multiplier": "1.05",
    "spark.speculation.quantile": "0.3",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(0.05)
        yield batch


def write(spark: SparkSession, ledger: str, topic: str, job: str, staging: str, rows: int) -> None:
    numbers = spark.range(0, rows, 1, 4).selectExpr(
        "lpad(cast(id as string), 100, '0') as payload",
        "concat('key-', cast(id % 7 as string)) as key",
        "rand() as place",
    )
    shuffled = numbers.repartition(8, "place").sortWithinPartitions("place").drop("place")
    slow = shuffled.mapInArrow(slowly, shuffled.schema)
    options = {"ledger": ledger, "topic": topic, "job": job, "staging": staging}
    slow.write.format("seqgate").options(**options).mode("append").save()


def main(ledger: str, topic: str, job: str, staging: str, rows: str) -> None:
    spark = local_session("sink", **CLUSTER)
    register(spark)
    write(spark, ledger, topic, job, staging, int(rows))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
