"""A streaming query that a test kills: messages as Parquet files, or in another topic, each once.

python -m tests.spark.streaming_application LEDGER TOPICS FOLDER [TOPIC]
"""

import sys
from pathlib import Path

from seqgate.spark import register
from tests.support.spark_classes import java_options, spark_session

JOB = "copy"


def main(ledger: str, topics: str, folder: Path, into: str = "") -> None:
    settings = {"spark.master": "local[2]", "spark.driver.memory": "512m"}
    with spark_session("streaming", *java_options(), **settings) as spark:
        register(spark)
        reader = spark.readStream.format("seqgate").option("ledger", ledger)
        reader = reader.option("topics", topics).option("from", "earliest")
        messages = reader.option("maxMessagesPerTrigger", "10000").load()
        if into:
            writer = messages.select("payload").writeStream.format("seqgate")
            writer = writer.options(ledger=ledger, topic=into, job=JOB, staging=str(folder))
        else:
            writer = messages.writeStream.format("parquet").option("path", str(folder / "rows"))
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
