"""A streaming query that a test kills: messages as Parquet files, each once.

python -m tests.spark.streaming_application LEDGER TOPICS FOLDER
"""

import sys
from pathlib import Path

from seqgate.spark import register
from tests.support.spark_classes import java_options, spark_session


def main(ledger: str, topics: str, folder: Path) -> None:
    settings = {"spark.master": "local[2]", "spark.driver.memory": "512m"}
    with spark_session("streaming", *java_options(), **settings) as spark:
        register(spark)
        reader = spark.readStream.format("seqgate").option("ledger", ledger)
        reader = reader.option("topics", topics).option("from", "earliest")
        messages = reader.option("maxMessagesPerTrigger", "10000").load()
        writer = messages.writeStream.format("parquet").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        writer.start(str(folder / "rows")).awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
