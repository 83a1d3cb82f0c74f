"""Messages as a stream: offsets, limits, late topics, trimmed and deleted ones, and restarts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Batching, Chunking, Client, connect
from seqgate.errors import MessagesTrimmedError, NotFoundError
from seqgate.spark._messages import GAP_COLUMN, MESSAGE_COLUMNS
from seqgate.spark._options import InvalidOptionError
from seqgate.spark._source import SeqgateDataSource
from seqgate.spark._stream import StreamReader
from tests.spark.conftest import World
from tests.spark.test_messages import everything

pytestmark = pytest.mark.timeout(600)  # Spark starts slowly


class Query(NamedTuple):
    """A query that is started again and again, and the files it writes."""

    world: World
    spark: SparkSession
    folder: Path

    def run(self, topics: str, **options: str) -> list[int]:
        """Read what there is now. Returns the rows of each trigger that had any."""
        options = {"from": "earliest", **options}
        reader = self.spark.readStream.format("seqgate").options(**options).option("topics", topics)
        reader = reader.option("ledger", self.world.services.stack.address("ledger"))
        writer = reader.load().writeStream.format("parquet").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        query = writer.start(str(self.folder / "rows"))
        query.awaitTermination()
        return [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far, in the order of their logs."""
        found = self.spark.read.parquet(str(self.folder / "rows")).toArrow().to_pylist()
        return sorted(found, key=lambda each: (each["topic"], each["ledger_id"], each["entry_id"]))


@pytest.fixture
def query(world: World, spark: SparkSession, tmp_path: Path) -> Query:
    return Query(world, spark, tmp_path)


def stream_reader(
    world: World, topics: str, columns: Sequence[str] = ("message_id",), **options: str
) -> StreamReader:
    """What Spark uses in the driver."""
    given = {"ledger": world.services.stack.address("ledger"), "topics": topics, **options}
    source = SeqgateDataSource(given)
    types = MESSAGE_COLUMNS | GAP_COLUMN
    schema = pa.schema([(name, types[name]) for name in columns])
    return source.streamReader(from_arrow_schema(schema))


async def send(client: Client, topic: str, count: int, **options: Any) -> None:
    async with client.producer(topic, **options) as producer:
        await producer.send_many([str(each).encode() for each in range(count)])


async def trim(world: World, topic: str, entry_id: int) -> None:
    before = common_pb2.Position(ledger_id=1, entry_id=entry_id)
    await world.services.settled(topic)  # trims wait for deduplication
    request = ledger_pb2.TrimTopicRequest(topic=topic, before=before)
    answer = await world.services.ledger.TrimTopic(request)
    assert not answer.held_back_by


async def test_a_stream_reads_each_message_once_across_restarts_limits_and_late_topics(
    world: World, query: Query
) -> None:
    names = [f"stream/spark/{each}" for each in ("a", "b", "late", "named")]
    topics = "stream/spark/?, stream/spark/late, stream/spark/nam*"
    async with connect(world.services.stack.address("ledger")) as client:
        await send(client, names[0], 40, name="p")
        await send(client, names[1], 25, name="q", batching=Batching(messages_max=4))
        triggers = query.run(topics, maxMessagesPerTrigger="25")
        assert sum(triggers) == 65
        assert max(triggers) <= 25 + 3  # a batch of four is not cut

        async with client.producer(names[2], name="r", chunking=Chunking(50)) as producer:
            for each in range(5):
                await producer.send(bytes([each]) * 120)
        await send(client, names[3], 5, name="s")
        await send(client, names[0], 7, name="again")
        assert sum(query.run(topics, maxMessagesPerTrigger="9")) == 17
        assert query.run(topics) == []

        wanted = [each for topic in names for each in await everything(client, topic)]
    assert [(each["message_id"], each["payload"]) for each in query.rows()] == [
        (str(each.id), each.payload) for each in wanted
    ]


async def test_a_stream_starts_at_the_end_an_id_or_a_time(world: World) -> None:
    topic = "stream/spark/start"
    async with connect(world.services.stack.address("ledger")) as client:
        await send(client, topic, 5, name="p")
    starts = {
        "latest": {topic: "1:4"},
        "earliest": {},
        "1:2": {topic: "1:1"},
        "2100-01-01": {topic: "1:4"},
    }
    for start, offset in starts.items():
        assert stream_reader(world, topic, **{"from": start}).initialOffset() == offset, start
    reader = stream_reader(world, topic, **{"from": "2000-01-01T00:00:00Z"})
    begin = reader.initialOffset()
    assert reader.latestOffset(begin, ReadAllAvailable()) == {topic: "1:4"}
    (share,) = reader.partitions(begin, {topic: "1:4"})
    assert sum(batch.num_rows for batch in reader.read(share)) == 5


async def test_topics_share_a_triggers_messages_in_turn(world: World) -> None:
    names = [f"stream/shared/{each}" for each in "abc"]
    async with connect(world.services.stack.address("ledger")) as client:
        for name in names:
            await send(client, name, 9, name="p")
    reader = stream_reader(world, "stream/shared/*", maxMessagesPerTrigger="6")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(6)
    assert reader.latestOffset({}, limit) == dict.fromkeys(names, "1:1")
    one = ReadMaxRows(1)
    offset: dict[str, str] = {}
    for _ in names:
        offset = reader.latestOffset(offset, one)
    assert offset == dict.fromkeys(names, "1:0")
    reader.prepareForTriggerAvailableNow()
    async with connect(world.services.stack.address("ledger")) as client:
        await send(client, names[0], 1, name="late")
    assert reader.latestOffset(offset, ReadAllAvailable()) == dict.fromkeys(names, "1:8")


async def test_what_was_trimmed_meanwhile_is_an_error_or_a_row(world: World) -> None:
    topic = "stream/spark/trimmed"
    begin, end = {topic: "1:2"}, {topic: "1:7"}
    async with connect(world.services.stack.address("ledger")) as client:
        await send(client, topic, 8, name="p")
        await trim(world, topic, 6)

    def read(**options: str) -> list[dict[str, Any]]:
        reader = stream_reader(world, topic, ("entry_id", "gap"), **options)
        shares = reader.partitions(begin, end)
        batches = [batch for share in shares for batch in reader.read(share)]
        found: list[dict[str, Any]] = pa.Table.from_batches(batches).to_pylist()
        return found

    with pytest.raises(MessagesTrimmedError, match="1:3 to 1:5"):
        read()
    rows = [{"entry_id": each, "gap": None} for each in (6, 7)]
    assert read(trimmed="skip") == rows
    assert read(trimmed="report") == [{"entry_id": 5, "gap": "1:3 to 1:5"}, *rows]
    await trim(world, topic, 8)
    assert read(trimmed="report") == [{"entry_id": 7, "gap": "1:3 to 1:7"}]


async def test_a_deleted_topic_is_an_error_unless_gaps_are_accepted(world: World) -> None:
    topics = "deleted/spark/*"
    async with connect(world.services.stack.address("ledger")) as client:
        await send(client, "deleted/spark/a", 3, name="p")
        await send(client, "deleted/spark/b", 3, name="p")
        read = stream_reader(world, topics).latestOffset({}, ReadAllAvailable())
        assert read == {"deleted/spark/a": "1:2", "deleted/spark/b": "1:2"}
        request = ledger_pb2.DeleteTopicRequest(topic="deleted/spark/a")
        await world.services.ledger.DeleteTopic(request)
        await send(client, "deleted/spark/b", 2, name="q")
    with pytest.raises(NotFoundError, match="deleted/spark/a was deleted"):
        stream_reader(world, topics).latestOffset(read, ReadAllAvailable())
    tolerant = stream_reader(world, topics, trimmed="skip")
    ahead = tolerant.latestOffset(read, ReadAllAvailable())
    assert ahead == read | {"deleted/spark/b": "1:4"}
    assert len(tolerant.partitions(read, ahead)) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rows": "entries"}, "messages"),
        ({"to": "latest"}, "omit option to"),
        ({"from": "1:0:-1:3"}, "starts at an entry"),
        ({"maxMessagesPerTrigger": "0"}, "maxMessagesPerTrigger"),
    ],
)
def test_options_that_are_not_a_streams_are_refused(
    world: World, options: Mapping[str, str], complaint: str
) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        stream_reader(world, "stream/spark/*", **options)
