"""What a client of Spark Connect does, which has no Java: it writes rows, and reads them whole and
as a stream.

python -m tests.spark.connect_client PORT LEDGER TOPIC FOLDER ROWS
"""

import sys

from pyspark.sql import SparkSession

from seqgate.spark import register


def main(port: str, ledger: str, topic: str, folder: str, rows: str) -> None:
    spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
    register(spark)

    numbers = spark.range(int(rows)).selectExpr("cast(id as string) payload")
    writer = numbers.write.format("seqgate").option("ledger", ledger).option("topic", topic)
    for _ in range(2):  # stored once
        writer.option("job", "job").option("staging", f"{folder}/staging").mode("append").save()

    options = {"ledger": ledger, "topics": topic, "from": "earliest"}
    messages = spark.read.format("seqgate").options(**options).load()
    assert sorted(int(row.payload) for row in messages.collect()) == list(range(int(rows)))

    stream = spark.readStream.format("seqgate").options(**options).load()
    query = stream.writeStream.format("parquet").trigger(availableNow=True)
    query = query.option("checkpointLocation", f"{folder}/checkpoint")
    query.start(f"{folder}/rows").awaitTermination()
    assert spark.read.parquet(f"{folder}/rows").count() == int(rows)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
