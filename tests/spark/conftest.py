"""Fixtures of the Spark tests: one session, and one stack over logs written into its store."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from random import Random

import pytest
import pytest_asyncio
from pyspark.sql import DataFrame, SparkSession

from seqgate.spark import register
from tests.integration.services import Services, running
from tests.spark.logs import Log, fill, make_log
from tests.support.depth import deep
from tests.support.spark_classes import java_options, spark_session

SMALL_TOPICS = deep(quick=60, full=400)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session that starts and compiles quickly."""
    settings = {"spark.master": "local[2]", "spark.driver.memory": "512m"}
    with spark_session("tests", *java_options(), **settings) as session:
        register(session)
        yield session


@dataclass(frozen=True)
class World:
    """Logs, and services that serve them."""

    services: Services
    logs: dict[str, Log]

    @property
    def addresses(self) -> list[str]:
        """Options for a command line."""
        stack = self.services.stack
        return [
            argument
            for name in ("ledger", "dedup", "cursor")
            for argument in (f"--{name}", stack.address(name))
        ]

    def entries(
        self, spark: SparkSession, topics: str, schema: str = "", **options: str
    ) -> DataFrame:
        """The data source, of entries."""
        return self.messages(spark, topics, schema, rows="entries", **options)

    def messages(
        self, spark: SparkSession, topics: str, schema: str = "", **options: str
    ) -> DataFrame:
        """The data source, of messages."""
        reader = spark.read.format("seqgate").options(**options)
        reader = reader.option("ledger", self.services.stack.address("ledger"))
        reader = reader.option("topics", topics)
        return (reader.schema(schema) if schema else reader).load()


def make_logs(random: Random) -> dict[str, Log]:
    """Few large logs and many small ones."""
    logs = {f"mixed/spark/log-{n}": make_log(random, 20, 30) for n in range(4)}
    logs |= {f"careless/spark/log-{n}": make_log(random, 20, 30, careless=True) for n in range(4)}
    logs["wide/spark/log"] = make_log(random, 5_000, 150)
    logs |= {f"small/spark/log-{n}": make_log(random, 2, 1) for n in range(SMALL_TOPICS)}
    return logs


@pytest_asyncio.fixture(scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory, seed: int) -> AsyncIterator[World]:
    """A stack over many logs without any deduplication state."""
    folder = tmp_path_factory.mktemp("spark")
    logs = make_logs(Random(seed))
    await fill(folder, logs)
    async with running(folder) as services:
        yield World(services, logs)
