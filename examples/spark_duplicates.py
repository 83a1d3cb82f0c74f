"""Plot the duplicates of each producer over time, from logs without deduplication.

    python examples/spark_duplicates.py localhost:7702 'public/plain/*' duplicates.svg

A message is a duplicate if its producer stored the same sequence id in the topic before. Only ids
and times are read: no payload leaves the ledger.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from plots import Point, plot
from pyspark.sql import DataFrame

from seqgate.spark import local_session, register

COLUMNS = """topic string, ledger_id bigint, entry_id bigint, batch_index int,
    append_time timestamp, producer string, sequence_id bigint"""

DUPLICATES = """
    SELECT producer, unix_seconds(append_time) DIV {seconds} * {seconds} AS at, count(*) AS count
    FROM (
        SELECT *, row_number() OVER (
            PARTITION BY topic, producer, sequence_id ORDER BY ledger_id, entry_id, batch_index
        ) AS copy
        FROM {messages}
    )
    WHERE copy > 1 GROUP BY producer, at ORDER BY producer, at"""


def duplicates(messages: DataFrame, seconds: int) -> dict[str, list[Point]]:
    """For each producer, how many were stored again in each `seconds`."""
    found: defaultdict[str, list[Point]] = defaultdict(list)
    counted = messages.sparkSession.sql(DUPLICATES, seconds=seconds, messages=messages)
    for row in counted.collect():
        found[row["producer"]].append((row["at"], row["count"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ledger")
    parser.add_argument("topics", help="names and patterns, separated by commas")
    parser.add_argument("plot", type=Path)
    parser.add_argument("--seconds", type=int, default=60, help="of each point (default: 60)")
    given = parser.parse_args()
    spark = local_session("duplicates")
    register(spark)
    reader = spark.read.format("seqgate").options(ledger=given.ledger, topics=given.topics)
    found = duplicates(reader.schema(COLUMNS).load(), given.seconds)
    spark.stop()
    plot(given.plot, f"Duplicates in {given.seconds} s, by producer", found, {})
    for producer, points in found.items():
        sys.stdout.write(f"{producer}: {sum(count for _, count in points)} duplicates\n")


if __name__ == "__main__":
    main()
