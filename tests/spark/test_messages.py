"""Messages as a data source, compared with those that a reader returns."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.cli._settings import SERVICES
from seqgate.client import Batching, Chunking, Client, Compression, Message, connect
from seqgate.services.ledger.core.entry import Entry
from seqgate.spark._messages import MESSAGE_COLUMNS
from seqgate.times import TIME_MAX_MS
from seqgate.types import Chunk
from tests.spark.conftest import World
from tests.spark.logs import Log, fill
from tests.support.depth import deep, some_of
from tests.support.extremes import FIELDS, FIRST_ID, store_extremes
from tests.support.page_programs import elsewhere, of_page
from tests.support.publisher import publishing, single

pytestmark = pytest.mark.timeout(600)  # Spark starts slowly

TOPIC = "messages/spark/mixed"
ROUNDS = deep(quick=3, full=100)
CHUNK_BYTES = 300


async def publish(client: Client, topic: str, random: Random, rounds: int = ROUNDS) -> None:
    """Publish single messages, batches with gaps in their ids, and large messages, compressed and
    not, whose chunks lie among each other."""
    batching = Batching(messages_max=7, delay_s=0.05)
    chunking = Chunking(CHUNK_BYTES)
    async with (
        client.producer(topic, name="single", compression=Compression.ZLIB) as single,
        client.producer(topic, name="batch ü", batching=batching) as batch,
        client.producer(topic, name="large", chunking=chunking) as large,
        client.producer(topic, name="huge", chunking=chunking) as huge,
    ):
        for number in range(rounds):
            sends = [
                single.send(
                    b"x" * random.randint(0, 90),
                    key=random.choice([None, "k", b"\xff"]),
                    properties={"n": str(number)},
                    event_time_ms=random.choice([None, 1_700_000_000_123]),
                ),
                large.send(random.randbytes(random.randint(2, 4) * CHUNK_BYTES)),
                huge.send(random.randbytes(random.randint(5, 9) * CHUNK_BYTES), key="huge"),
            ]
            sends += [
                batch.send(
                    str(each).encode(),
                    sequence_id=number * 1_000 + each + random.randint(0, 2),
                    key=f"key-{each}",
                    properties={"each": str(each)},
                )
                for each in range(0, 40, 3)
            ]
            await asyncio.gather(*sends)


async def everything(client: Client, topic: str) -> list[Message]:
    """What a reader returns."""
    async with client.reader(topic, start="earliest", follow=False) as reader:
        return [message async for message in reader]


def moment(time_ms: int | None) -> datetime | None:
    if time_ms is None:
        return None
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


def row_of(message: Message) -> dict[str, Any]:
    index = message.id.batch_index
    return {
        "topic": message.topic,
        "message_id": str(message.id),
        "ledger_id": message.id.ledger_id,
        "entry_id": message.id.entry_id,
        "batch_index": None if index < 0 else index,
        "append_time": moment(message.append_time_ms),
        "publish_time": moment(message.publish_time_ms),
        "event_time": moment(message.event_time_ms),
        "producer": message.producer_name,
        "sequence_id": message.sequence_id,
        "key": message.key,
        "has_bytes_key": message.has_bytes_key,
        "ordering_key": message.ordering_key,
        "properties": sorted(message.properties.items()),
        "payload": message.payload,
    }


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows, in the order of the log."""
    found: list[dict[str, Any]] = frame.toArrow().to_pylist()
    for each in found:
        if each.get("properties") is not None:
            each["properties"] = sorted(each["properties"])
    return found


@pytest_asyncio.fixture(scope="module")
async def log(world: World, seed: int) -> list[Message]:
    """The messages of TOPIC."""
    async with connect(world.services.stack.address("ledger")) as client:
        await publish(client, TOPIC, Random(seed))
        return await everything(client, TOPIC)


@pytest.mark.parametrize("entries", deep(quick=["3"], full=["1", "3", "1000000"]))
def test_each_message_is_read_once_and_whole_however_ranges_cut_the_log(
    world: World, spark: SparkSession, log: list[Message], entries: str
) -> None:
    """A range of one entry cuts every large message between all its chunks."""
    frame = world.messages(spark, TOPIC, entriesPerPartition=entries, bytesPerPartition="4000")
    assert frame.columns == list(MESSAGE_COLUMNS)
    assert rows(frame) == [row_of(each) for each in log]
    assert frame.rdd.getNumPartitions() > 1


@pytest.mark.parametrize(
    "names",
    [
        ("message_id", "sequence_id", "producer", "publish_time"),
        ("key", "message_id", "properties", "event_time", "has_bytes_key"),
        ("topic",),
    ],
)
def test_selected_columns_are_those_of_the_whole_rows(
    world: World, spark: SparkSession, log: list[Message], names: Sequence[str]
) -> None:
    """They come from metadata, or from opened batches, where whole rows come from payloads."""
    types = dict(world.messages(spark, TOPIC).dtypes)
    schema = ", ".join(f"{name} {types[name]}" for name in names)
    frame = world.messages(spark, TOPIC, schema, entriesPerPartition="25")
    assert rows(frame) == [{name: row_of(each)[name] for name in names} for each in log]


def test_ids_and_times_bound_the_messages(
    world: World, spark: SparkSession, log: list[Message]
) -> None:
    ids = [each.id for each in log]
    inside = next(each for each in log if each.id.batch_index == 2).id
    later = [each for each in log if each.id.batch_index == 1][-1].id
    large = [each for each in log if each.producer_name == "huge"][2].id
    when = log[len(log) // 2].append_time_ms
    text = datetime.fromtimestamp(when / 1000, UTC).isoformat(timespec="milliseconds")

    def found(**options: str) -> list[str]:
        frame = world.messages(spark, TOPIC, "message_id string", **options)
        return [each["message_id"] for each in rows(frame)]

    def wanted(first: Any = ids[0], last: Any = ids[-1]) -> list[str]:
        return [str(each) for each in ids if first <= each <= last]

    assert found(**{"from": str(inside), "to": str(later)}) == wanted(inside, later)
    assert found(**{"from": str(large)}) == wanted(large)
    assert found(to=str(large)) == wanted(last=large)
    stored_later = [str(each.id) for each in log if each.append_time_ms >= when]
    assert found(**{"from": text}) == stored_later
    assert found(to=text) == [str(each) for each in ids if str(each) not in stored_later]
    assert found(**{"from": "latest"}) == found(to="earliest") == []
    assert found(**{"from": "2100-01-01"}) == []


def test_filters_of_one_frame_do_not_change_each_other(
    world: World, spark: SparkSession, log: list[Message]
) -> None:
    """Spark plans a frame's scan once: a filter pushed into it would hold for all that use it."""
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        frame = world.messages(spark, TOPIC, "topic string, ledger_id bigint, entry_id bigint")
        all_ids = [each.id.entry_id for each in log]
        low, high = frame.where("entry_id < 20"), frame.where("entry_id >= 20")
        assert low.count() == sum(each < 20 for each in all_ids)
        assert high.count() == sum(each >= 20 for each in all_ids)
        assert frame.count() == low.union(high).count() == len(all_ids)
        joined = low.distinct().join(frame.where("entry_id > 10").distinct(), "entry_id")
        assert joined.count() == len({each for each in all_ids if 10 < each < 20})
    finally:
        spark.conf.unset(setting)


async def test_trimmed_messages_are_an_error_a_row_or_skipped(
    world: World, spark: SparkSession
) -> None:
    topic = "messages/spark/trimmed"
    async with (
        connect(world.services.stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        for _ in range(6):
            await producer.send(b"x")
    before = common_pb2.Position(ledger_id=1, entry_id=3)
    await world.services.ledger.TrimTopic(ledger_pb2.TrimTopicRequest(topic=topic, before=before))

    def read(**options: str) -> DataFrame:
        return world.messages(spark, topic, **options).select("entry_id")

    with pytest.raises(PySparkException, match=r"MessagesTrimmedError.*1:1 to 1:2"):
        read(**{"from": "1:1"}).collect()
    assert [each.entry_id for each in read(**{"from": "1:1", "trimmed": "skip"}).collect()] == [
        *(3, 4, 5)
    ]
    frame = world.messages(spark, topic, **{"from": "1:1", "trimmed": "report"})
    (gap, *others) = rows(frame)
    assert (gap["gap"], gap["topic"], gap["entry_id"]) == ("1:1 to 1:2", topic, 2)
    assert gap["payload"] is None
    assert [(each["entry_id"], each["gap"]) for each in others] == [(n, None) for n in (3, 4, 5)]
    assert [each.entry_id for each in read().collect()] == [3, 4, 5]


async def test_what_lies_between_chunks_changes_nothing_for_spark(
    world: World, spark: SparkSession
) -> None:
    """Without deduplication, by a producer without a client library, in ranges of any size."""
    topic = "messages/spark/between"
    off = dedup_pb2.SetPolicyRequest(topic=topic, values=dedup_pb2.PolicyValues(enabled=False))
    await world.services.dedup.SetPolicy(off)
    requests = count(1)

    def chunk(sequence_id: int, uuid: str, number: int, chunks: int) -> ledger_pb2.Publication:
        return single(
            next(requests),
            sequence_id,
            b"%s%d" % (uuid.encode(), number),
            resume=True,
            uuid=uuid,
            chunk_id=number,
            num_chunks_from_msg=chunks,
            total_chunk_msg_size=2 * chunks,
        )

    async with publishing(world.services.ledger, topic, "p") as publisher:
        for each in (
            *(chunk(5, "a", 0, 3), chunk(6, "b", 0, 2), chunk(5, "a", 1, 3), chunk(6, "b", 1, 2)),
            *(chunk(5, "a", 2, 3), chunk(5, "a", 0, 3), single(next(requests), 7, b"7")),
            *(chunk(5, "a", 1, 3), chunk(5, "a", 0, 3), chunk(5, "a", 0, 3)),
            *(chunk(5, "a", 1, 3), chunk(5, "a", 2, 3)),
        ):
            await publisher.store(each)
    for entries in ("1", "1000"):
        options = {"entriesPerPartition": entries}
        whole = rows(world.messages(spark, topic, **options))
        assert [each["payload"] for each in whole] == [b"b0b1", b"7", b"a0a1a2"]
        ids = world.messages(spark, topic, "message_id string", **options)
        assert [each["message_id"] for each in rows(ids)] == [each["message_id"] for each in whole]


def entry(sequence_id: int, chunk: Chunk | None = None, **metadata: Any) -> Entry:
    own = EntryMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1, **metadata)
    return Entry(
        "p", sequence_id, sequence_id, None, (), False, own.SerializeToString(), b"x", chunk
    )


async def test_what_cannot_be_read_is_named_with_its_topic_and_position(
    world: World, spark: SparkSession
) -> None:
    size = 2**30
    huge = [
        entry(
            1,
            Chunk("u", each, 2, size),
            uuid="u",
            chunk_id=each,
            num_chunks_from_msg=2,
            total_chunk_msg_size=size,
        )
        for each in range(2)
    ]
    logs = {
        "unreadable/spark/message": Log([[[entry(0), entry(1, payload_crc32c=1)]]]),
        "unreadable/spark/huge": Log([[[entry(0), *huge]]]),
    }
    await fill(world.services.stack.folder, logs)
    for topic, error in (
        (
            "unreadable/spark/message",
            "CorruptMessageError: unreadable/spark/message, 1:1: the payload",
        ),
        (
            "unreadable/spark/huge",
            "MessageTooLargeError: unreadable/spark/huge, 1:2: a message of 1,073,741,824 bytes",
        ),
    ):
        frame = world.messages(spark, topic)
        with pytest.raises(PySparkException, match=error):
            frame.collect()
        whole = world.messages(spark, topic, to="1:0")
        assert [each["entry_id"] for each in rows(whole)] == [0]


@pytest.mark.parametrize(
    ("options", "schema", "complaint"),
    some_of(
        [
            ({"rows": "cells"}, "", "messages or entries"),
            ({"bytesPerPartition": "0"}, "", "bytesPerPartition"),
            ({"from": "yesterday"}, "", "ISO 8601"),
            ({"trimmed": "report"}, "payload binary", "needs the column gap"),
            ({}, "payload string", "payload must be binary"),
            ({}, "chunk_id int", "unknown column chunk_id"),
            ({"topics": "not/there/yet"}, "", "not/there/yet"),
        ],
        every=3,
    ),
)
def test_invalid_options_are_refused_with_a_message(
    world: World, spark: SparkSession, options: dict[str, str], schema: str, complaint: str
) -> None:
    options = {"topics": TOPIC, **options}
    with pytest.raises(PySparkException, match=complaint):
        world.messages(spark, schema=schema, **options).collect()


async def test_the_programs_of_the_documentation_work(
    root: Path,
    world: World,
    spark: SparkSession,
    log: list[Message],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert spark is SparkSession.getActiveSession()  # the program's own, too
    addresses = {SERVICES["ledger"]: world.services.stack.address("ledger")}
    names: dict[str, Any] = {}
    programs = [each for each in of_page(root / "docs/guides/spark.md") if not each.why]
    for program in programs:
        code = elsewhere(program.code, addresses).replace("public/default/*", TOPIC)
        code = code.replace('"orders/', f'"{tmp_path}/').replace(
            "/tmp/seqgate-staging", f"{tmp_path}"
        )
        exec(compile(code, "the page", "exec"), names)
    assert log[0].producer_name in capsys.readouterr().out
    assert spark.read.parquet(f"{tmp_path}/rows").count() == len(log)
    written = await world.services.read("public/default/spark-orders", metadata_only=True)
    assert sum(each.metadata.num_messages_in_batch or 1 for each in written) == 1_000


async def test_times_after_the_year_9999_are_null_and_numbers_where_a_bigint_holds_them(
    world: World, spark: SparkSession
) -> None:
    topic = "live/spark/extremes"
    await store_extremes(world.services.ledger, topic)
    of_messages = world.messages(spark, topic).select("sequence_id", "publish_time", "event_time")
    schema = "sequence_id bigint, publish_time bigint, event_time bigint"
    of_entries = world.entries(spark, topic, schema)
    for index, (message, entry, fields) in enumerate(
        zip(rows(of_messages), rows(of_entries), FIELDS.values(), strict=True)
    ):
        assert message["sequence_id"] == entry["sequence_id"] == FIRST_ID + index
        for name in ("publish_time", "event_time"):
            time_ms = fields[name]
            assert message[name] == (moment(time_ms) if time_ms <= TIME_MAX_MS else None)
            assert entry[name] == (time_ms if time_ms < 2**63 else None)
