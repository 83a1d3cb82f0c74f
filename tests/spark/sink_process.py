"""The driver's part of a write, in a process that a test kills: it stages rows as two tasks would,
and commits.

    python -m tests.spark.sink_process LEDGER TOPIC JOB STAGING ROWS
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from seqgate.spark._sink import SeqgateWriter, WriteOptions

PAYLOAD_BYTES = 1_000


def rows(first: int, last: int) -> Iterator[pa.RecordBatch]:
    """The rows of these numbers, as `sink_rows` makes them in Spark."""
    payloads = [f"{number:0{PAYLOAD_BYTES}}".encode() for number in range(first, last)]
    keys = [f"key-{number % 7}" for number in range(first, last)]
    yield pa.record_batch([pa.array(payloads), pa.array(keys)], names=["payload", "key"])


def main(ledger: str, topic: str, job: str, staging: str, count: str) -> None:
    options = WriteOptions.parse({"ledger": ledger, "topic": topic, "job": job, "staging": staging})
    schema = pa.schema([("payload", pa.binary()), ("key", pa.string())])
    writer = SeqgateWriter(options, schema)
    half, end = int(count) // 2, int(count)
    tasks = [writer.write(rows(0, half)), replace(writer.write(rows(half, end)), partition=1)]
    writer.commit(tasks)


if __name__ == "__main__":
    main(*sys.argv[1:])
