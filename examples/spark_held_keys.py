"""Plot what waits behind the keys that hold a subscription up.

    python examples/spark_held_keys.py localhost:7702 localhost:7704 orders billing keys.svg

The dispatcher reports the keys that wait, and where each stopped; from there on, Spark counts the
messages of these keys, by when they were stored.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import grpc
from plots import Point, plot
from pyspark.sql import DataFrame

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.spark import local_session, register

COLUMNS = "ledger_id bigint, entry_id bigint, append_time timestamp, key string"

WAITING = """
    SELECT key, unix_millis(append_time) / 1000 AS at FROM {messages} JOIN {held} USING (key)
    WHERE (ledger_id, entry_id) >= (from_ledger, from_entry)
    ORDER BY ledger_id, entry_id"""

Held = dict[str, tuple[int, int]]
"""Keys, and the position of the first message of each that waits or is in flight."""


def held_keys(dispatcher: str, topic: str, subscription: str) -> Held:
    request = dispatcher_pb2.ReportRequest(topic=topic, subscription=subscription)
    with grpc.insecure_channel(dispatcher) as channel:
        report = DispatcherServiceStub(channel).Report(request)
    return {
        each.key.decode(): (each.oldest.ledger_id, each.oldest.entry_id)
        for each in report.keys
        if each.HasField("oldest")
    }


def waiting(messages: DataFrame, held: Held) -> Mapping[str, list[Point]]:
    """For each key, how many of its messages waited, and since when."""
    rows = [(key, *position) for key, position in held.items()]
    keys = messages.sparkSession.createDataFrame(
        rows, "key string, from_ledger bigint, from_entry bigint"
    )
    found: defaultdict[str, list[Point]] = defaultdict(list)
    for row in messages.sparkSession.sql(WAITING, messages=messages, held=keys).collect():
        line = found[row["key"]]
        line.append((float(row["at"]), len(line) + 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ledger")
    parser.add_argument("dispatcher")
    parser.add_argument("topic", help="tenant/namespace/name")
    parser.add_argument("subscription")
    parser.add_argument("plot", type=Path)
    given = parser.parse_args()
    held = held_keys(given.dispatcher, given.topic, given.subscription)
    if not held:
        sys.stdout.write("no key waits\n")
        return
    spark = local_session("held keys")
    register(spark)
    first = "{}:{}".format(*min(held.values()))
    reader = spark.read.format("seqgate").options(ledger=given.ledger, topics=given.topic)
    found = waiting(reader.option("from", first).schema(COLUMNS).load(), held)
    spark.stop()
    plot(given.plot, f"Messages behind the keys that {given.subscription} waits for", found, {})
    for key, line in sorted(found.items()):
        sys.stdout.write(f"{key}: {len(line)} messages\n")


if __name__ == "__main__":
    main()
