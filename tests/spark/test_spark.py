"""The data source, the rebuild and the audit, over the logs of real services."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import apsw
import duckdb
import pyarrow.parquet
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Batching, connect
from seqgate.jobs.audit.__main__ import main as audit
from seqgate.jobs.rebuild.__main__ import main as rebuild
from seqgate.jobs.rebuild.loading import _live_marks
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.deduplication import NEVER
from seqgate.spark._columns import COLUMNS
from seqgate.times import timestamp
from seqgate.types import Position
from tests.spark.conftest import World
from tests.spark.logs import Log, fill
from tests.support.depth import some_of
from tests.support.entries import large, single

pytestmark = pytest.mark.timeout(600)  # Spark starts slowly


def output(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The records that a command printed with --json. Logs of what fills the store are none."""
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def note(err: str, reason: str) -> str:
    """The message of the only note with this reason on standard error."""
    lines = [json.loads(each) for each in err.splitlines()]
    (found,) = [each["note"] for each in lines if each.get("note", {}).get("reason") == reason]
    return str(found["message"])


def outcomes(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["topic"]: line["outcome"] for line in lines if line["kind"] == "topic"}


async def live(world: World, topic: str) -> dict[str, Marks]:
    """Deduplication's marks of the producers that have stored something."""
    producers = await world.services.producers(topic)
    marks = {name: _live_marks(each) for name, each in producers.items()}
    return {name: each for name, each in marks.items() if each.persisted != NEVER}


def expected(log: Log) -> dict[str, Marks]:
    return {name: each for name, each in log.marks.items() if each.persisted != NEVER}


async def forget(world: World, topic: str, *, snapshot: bool) -> None:
    """Delete a topic's deduplication state: with its snapshot, or only in Redis."""
    if snapshot:
        await world.services.dedup.ForgetTopic(
            writer_pb2.ForgetTopicRequest(topic=topic, incarnation=2**62)
        )
        return
    async with Redis.from_url(world.services.stack.redis_url) as redis:
        async for key in redis.scan_iter(match=f"*{topic}*"):
            await redis.delete(key)


# ---- rebuild


async def test_every_lost_topic_is_restored_as_by_folding_each_entry(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rebuild([*world.addresses, "--json"], spark) == 0
    lines = output(capsys)
    loaded = {each["topic"]: each for each in lines if each["kind"] == "topic"}
    assert {each: loaded[each]["outcome"] for each in world.logs} == dict.fromkeys(
        world.logs, "loaded"
    )
    for topic in [each for each in world.logs if not each.startswith("small/")]:
        assert await live(world, topic) == expected(world.logs[topic]), topic
    for topic, log in world.logs.items():
        assert loaded[topic]["entries"] == len(list(log.stored)), topic
    assert lines[-1]["entries"] == sum(each["entries"] for each in loaded.values())

    assert rebuild([*world.addresses, "--diff", "--from", "earliest", "--json"], spark) == 0
    assert set(outcomes(output(capsys)).values()) == {"equal"}


async def test_a_rebuild_starts_at_the_snapshot_and_loads_once(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = "live/spark/snapshot"
    stack = world.services.stack
    async with connect(stack.address("ledger")) as client:
        async with client.producer(topic, name="before") as producer:
            for _ in range(20):
                await producer.send(b"x")
        await world.services.settled(topic)
        await world.services.dedup.TakeSnapshot(dedup_pb2.TakeSnapshotRequest(topic=topic))
        async with client.producer(topic, name="after", batching=Batching()) as producer:
            await producer.send(b"y")
    await world.services.settled(topic)
    before = await live(world, topic)
    await forget(world, topic, snapshot=False)

    assert rebuild([*world.addresses, "--dry-run", "--json", topic], spark) == 0
    (plan,) = output(capsys)
    assert (plan["kind"], plan["entries"]) == ("plan", 1)
    assert await live(world, topic) == {}

    assert rebuild([*world.addresses, "--json", topic], spark) == 0
    assert outcomes(output(capsys)) == {topic: "loaded"}
    assert await live(world, topic) == before
    assert rebuild([*world.addresses, "--json", topic], spark) == 0
    assert outcomes(output(capsys)) == {topic: "current"}


async def test_a_difference_is_found_and_can_be_replaced(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = "wrong/spark/log"
    log = Log([[[single(each, "right"), *large(each, f"u{each}", 3, "wrong")] for each in (5, 6)]])
    await fill(world.services.stack.folder, {topic: log})
    header = writer_pb2.LoadHeader(
        topic=topic, incarnation=1, through=common_pb2.Position(ledger_id=1, entry_id=7)
    )
    planted = [
        writer_pb2.ProducerState(name="right", highest_sequence_id=6, last_active=timestamp(1)),
        writer_pb2.ProducerState(name="wrong", highest_sequence_id=7, last_active=timestamp(1)),
        writer_pb2.ProducerState(name="invented", highest_sequence_id=1, last_active=timestamp(1)),
    ]
    await world.services.dedup.LoadState(
        iter([writer_pb2.LoadStateRequest(header=header, producers=planted)])
    )
    compare = [*world.addresses, "--diff", "--from", "earliest", "--json", topic]
    assert rebuild(compare, spark) == 1
    (found,) = [line for line in output(capsys) if line["kind"] == "topic"]
    assert found["differences"] == [
        {"producer": "invented", "rebuilt": "", "live": "1"},
        {"producer": "wrong", "rebuilt": "6", "live": "7"},
    ]
    repair = [*world.addresses, "--replace", "--from", "earliest", topic]
    assert rebuild(repair, spark) == 0
    assert rebuild(compare, spark) == 0
    assert await live(world, topic) == expected(log)


async def test_producers_forgotten_for_inactivity_are_no_difference(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = "forgotten/spark/log"
    await fill(world.services.stack.folder, {topic: Log([[[single(1, "old"), single(2, "new")]]])})
    header = writer_pb2.LoadHeader(
        topic=topic, incarnation=1, through=common_pb2.Position(ledger_id=1, entry_id=1)
    )
    new = writer_pb2.ProducerState(
        name="new", highest_sequence_id=2, last_active=timestamp(time.time_ns() // 1_000_000)
    )
    await world.services.dedup.LoadState(
        iter([writer_pb2.LoadStateRequest(header=header, producers=[new])])
    )
    assert rebuild([*world.addresses, "--diff", "--from", "earliest", "--json", topic], spark) == 0
    (found,) = [line for line in output(capsys) if line["kind"] == "topic"]
    assert (found["outcome"], found["forgotten"]) == ("equal", 1)


async def test_a_topic_written_meanwhile_is_still_compared(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = "live/spark/written"
    async with (
        connect(world.services.stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        await producer.send(b"x")
        compare = [*world.addresses, "--diff", "--from", "earliest", "--json", topic]
        comparing = asyncio.create_task(asyncio.to_thread(rebuild, compare, spark))
        while not comparing.done():
            await producer.send(b"x")
        assert await comparing == 0
    assert outcomes(output(capsys)) == {topic: "equal"}


async def test_concurrent_rebuilds_do_not_interfere(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = [f"mixed/spark/log-{n}" for n in range(4)]
    for topic in topics:
        await forget(world, topic, snapshot=True)
    arguments = [*world.addresses, "--json", "mixed/*"]
    runs = (asyncio.to_thread(rebuild, arguments, spark) for _ in range(2))
    assert await asyncio.gather(*runs) == [0, 0]
    assert set(outcomes(output(capsys))) == set(topics)
    for topic in topics:
        assert await live(world, topic) == expected(world.logs[topic])


async def test_damage_affects_one_topic_and_can_be_skipped(
    world: World,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    log = tmp_path / "spark.log"
    monkeypatch.setenv("SEQGATE_SPARK_LOG", str(log))
    damaged, whole = "damaged/spark/log", "damaged/spark/other"
    blocks = [[single(first + each) for each in range(10)] for first in (0, 10, 20)]
    folder = world.services.stack.folder
    await fill(folder, {damaged: Log([blocks]), whole: Log([blocks])})
    database = apsw.Connection(str(folder / "ledger" / "ledger.db"))
    database.execute(
        """UPDATE block SET entries = zeroblob(length(entries)) WHERE first_entry = 10
            AND topic = (SELECT id FROM topic WHERE name = ?)""",
        (damaged,),
    )
    database.close()
    capsys.readouterr()

    assert rebuild([*world.addresses, "--json", "damaged/*"], spark) == 1
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert outcomes(lines) == {damaged: "failed", whole: "loaded"}
    (failed,) = [line for line in lines if line.get("topic") == damaged]
    assert failed["reason"] == "ENTRY_CORRUPT"
    assert failed["details"]["entry_id"] == "19"
    assert f"{damaged} FAILED: ENTRY_CORRUPT" in note(captured.err, "TOPIC_FAILED")
    assert await live(world, damaged) == {}
    with pytest.raises(PySparkException, match=f"{damaged}, 1:10 to 1:19: .*checksum"):
        world.entries(spark, damaged).count()
    assert audit(["--ledger", world.services.stack.address("ledger"), damaged], spark) == 1
    error = capsys.readouterr().err
    assert "nothing is proven" in error
    assert str(log) in error
    assert "checksum" in log.read_text()

    assert rebuild([*world.addresses, "--json", "--skip-corrupt", damaged], spark) == 1
    captured = capsys.readouterr()
    (loaded, _) = [json.loads(line) for line in captured.out.splitlines()]
    assert (loaded["outcome"], loaded["skipped"], loaded["entries"]) == ("loaded", 10, 20)
    assert "10 damaged entries were SKIPPED" in note(captured.err, "ENTRIES_SKIPPED")
    assert await live(world, damaged) == {"p": Marks(29, 29)}


# ---- the data source


def rows_of(log: Log, topic: str) -> list[tuple[Any, ...]]:
    return [
        (
            topic,
            *position,
            append_ms,
            entry.producer,
            entry.lowest,
            entry.highest,
            entry.messages,
            len(entry.payload),
            entry.marker,
            *(entry.chunk or (None,) * 4),
            entry.aborts or None,
        )
        for position, append_ms, entry in log.stored
    ]


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_each_row_is_an_entry(world: World, spark: SparkSession) -> None:
    topic = "careless/spark/log-0"
    frame = world.entries(spark, topic, entriesPerPartition="500")
    assert frame.columns == list(COLUMNS)
    assert rows(frame) == rows_of(world.logs[topic], topic)
    entries = len(rows_of(world.logs[topic], topic))
    assert frame.rdd.getNumPartitions() == -(-entries // 500)


def test_only_selected_columns_are_read(world: World, spark: SparkSession) -> None:
    topic = "mixed/spark/log-1"
    frame = world.entries(spark, topic, "highest_sequence_id bigint, producer string")
    assert rows(frame) == sorted(
        (entry.highest, entry.producer) for _, _, entry in world.logs[topic].stored
    )


def test_patterns_name_many_topics_and_small_ones_share_a_task(
    world: World, spark: SparkSession
) -> None:
    frame = world.entries(spark, "small/spark/*-4?, mixed/spark/log-1", "topic string")
    names = {f"small/spark/log-{n}" for n in range(40, 50)}
    assert {row.topic for row in frame.distinct().collect()} == names | {"mixed/spark/log-1"}
    assert frame.rdd.getNumPartitions() == 1


FILTERS = [  # Spark might push down some of these, and plans a frame only once
    "topic = 'mixed/spark/log-2'",
    "topic in ('mixed/spark/log-0', 'mixed/spark/log-3') and ledger_id = 2",
    "ledger_id > 1 and entry_id <= 40",
    "ledger_id >= 2 and ledger_id < 4 and entry_id > 7 and not marker",
    "entry_id = 3",
    "entry_id < 0",
    "topic = 'mixed/spark/log-2' or ledger_id = 1",
    "producer like 'producer 1%' and entry_id >= 20",
    "topic = 'mixed/spark/log-1' and topic = 'mixed/spark/log-2'",
]


def test_filters_select_matching_rows(world: World, spark: SparkSession) -> None:
    frame = world.entries(spark, "mixed/*", entriesPerPartition="700")
    everything = frame.toArrow()
    for each in some_of(FILTERS, every=4):
        wanted = duckdb.sql(f"SELECT * FROM everything WHERE {each}")
        assert wanted is not None
        assert rows(frame.where(each)) == sorted(wanted.fetchall()), each
    assert frame.count() == everything.num_rows


def test_from_and_to_bound_the_read(world: World, spark: SparkSession) -> None:
    topic = "mixed/spark/log-0"
    options = {"from": "1:5", "to": "3:2"}
    frame = world.entries(spark, topic, "ledger_id bigint, entry_id bigint", **options)
    assert rows(frame) == [
        position
        for position, _, _ in world.logs[topic].stored
        if Position(1, 5) <= position <= Position(3, 2)
    ]


async def test_trimmed_entries_are_skipped_only_on_request(
    world: World, spark: SparkSession
) -> None:
    topic = "live/spark/trimmed"
    async with (
        connect(world.services.stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        for _ in range(6):
            await producer.send(b"x")
    before = common_pb2.Position(ledger_id=1, entry_id=3)
    await world.services.ledger.TrimTopic(ledger_pb2.TrimTopicRequest(topic=topic, before=before))

    def ids(**options: str) -> list[int]:
        frame = world.entries(spark, topic, "entry_id bigint", **options)
        return [each for (each,) in rows(frame)]

    with pytest.raises(PySparkException, match=r"MessagesTrimmedError.*1:1 to 1:2"):
        ids(**{"from": "1:1"})
    assert ids(**{"from": "1:1", "trimmed": "skip"}) == [3, 4, 5]
    assert ids(**{"from": "1:3"}) == ids() == [3, 4, 5]
    assert ids(**{"from": "1:4"}) == [4, 5]


async def test_metadata_is_read_when_selected(world: World, spark: SparkSession) -> None:
    topic = "live/spark/metadata"
    async with (
        connect(world.services.stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        await producer.send(b"x", key="k", properties={"a": "1", "b": ""}, event_time_ms=7)
        await producer.send(b"y")
    schema = """sequence_id bigint, event_time bigint, partition_key string, compression string,
        properties map<string,string>"""
    assert [tuple(row) for row in world.entries(spark, topic, schema).collect()] == [
        (0, 7, "k", "NONE", {"a": "1", "b": ""}),
        (1, None, None, "NONE", {}),
    ]


@pytest.mark.parametrize(
    ("options", "schema", "complaint"),
    [
        ({"topics": ""}, "", "tenant/namespace/name"),
        ({"entriesPerPartition": "0"}, "", "entriesPerPartition"),
        ({"from": "1"}, "", "LEDGER:ENTRY"),
        ({"to": "soon"}, "", "ISO 8601"),
        ({"timeout": "soon"}, "", "timeout"),
        ({"trimmed": "perhaps"}, "", "fail or skip"),
        ({}, "nothing string", "unknown column nothing"),
        ({}, "ledger_id int", "ledger_id"),
        ({"topics": "not/there/yet"}, "", "not/there/yet"),
    ],
)
def test_invalid_options_are_refused_with_a_message(
    world: World, spark: SparkSession, options: dict[str, str], schema: str, complaint: str
) -> None:
    options = {"topics": "mixed/*", **options}
    with pytest.raises(PySparkException, match=complaint):
        world.entries(spark, schema=schema, **options).collect()


def test_another_engine_finds_the_same_last_ids_in_the_same_columns(
    world: World, spark: SparkSession
) -> None:
    topics = [topic for topic in world.logs if not topic.startswith("careless/")]
    entries = world.entries(spark, "mixed/*, wide/*, small/*").toArrow()
    relation = duckdb.sql(
        """SELECT topic, producer, arg_max(highest_sequence_id, (ledger_id, entry_id))
            FROM entries WHERE NOT marker GROUP BY ALL"""
    )
    assert relation is not None
    found = relation.fetchall()
    del entries
    wanted = {
        (topic, producer, marks.persisted)
        for topic in topics
        for producer, marks in expected(world.logs[topic]).items()
    }
    assert wanted == set(found)


# ---- audit


def test_logs_that_were_deduplicated_pass_the_audit(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = ["--ledger", world.services.stack.address("ledger")]
    assert audit([*ledger, "mixed/*", "wide/*", "small/*"], spark) == 0
    assert "none is stored twice" in capsys.readouterr().out


def stored_twice(log: Log) -> set[tuple[str, Position]]:
    """Each entry that completes a message which an earlier entry had completed."""
    seen: dict[tuple[str, int], Position] = {}
    reached: dict[str, Any] = {}
    twice = set()
    for position, _, entry in log.stored:
        if entry.marker:
            continue
        if entry.chunk is not None:
            at, before = reached.get(entry.producer, (None, None))
            follows = at == entry.lowest and before == entry.chunk._replace(
                chunk_id=entry.chunk.chunk_id - 1
            )
            reached[entry.producer] = None, None
            if entry.chunk.chunk_id and not follows:
                continue
            reached[entry.producer] = entry.lowest, entry.chunk
            if not entry.chunk.is_last:
                continue
        reached.pop(entry.producer, None)
        for sequence_id in entry.sequence_ids:
            if seen.setdefault((entry.producer, sequence_id), position) != position:
                twice.add((entry.producer, position))
    return twice


def test_every_duplicate_message_is_found(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--ledger", world.services.stack.address("ledger"), "careless/*"]
    assert audit([*arguments, "--json", "--parquet", str(tmp_path)], spark) == 1
    *lines, summary = output(capsys)
    found: dict[str, set[tuple[str, Position]]] = {}
    for line in lines:
        each = line["finding"]
        if each["kind"] == "twice":
            place = each["producer"], Position(each["ledger_id"], each["entry_id"])
            found.setdefault(each["topic"], set()).add(place)
    wanted = {topic: stored_twice(log) for topic, log in world.logs.items() if "careless" in topic}
    assert found == wanted
    assert summary["findings"] == len(lines)
    assert pyarrow.parquet.read_table(tmp_path / "findings.parquet").num_rows == len(lines)
    assert pyarrow.parquet.read_table(tmp_path / "topics.parquet").num_rows == len(wanted)


async def test_duplicates_stored_with_deduplication_off_are_found(
    world: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = "off/spark/log"
    off = dedup_pb2.PolicyValues(enabled=False)
    await world.services.dedup.SetPolicy(dedup_pb2.SetPolicyRequest(topic=topic, values=off))
    async with connect(world.services.stack.address("ledger")) as client:
        for _ in range(2):
            async with client.producer(topic, name="p") as producer:
                for sequence_id in (1, 2):
                    await producer.send(b"x", sequence_id=sequence_id)
    assert audit(["--ledger", world.services.stack.address("ledger"), topic], spark) == 1
    assert "2 findings" in capsys.readouterr().out

    on = dedup_pb2.PolicyValues(enabled=True)
    await world.services.dedup.SetPolicy(dedup_pb2.SetPolicyRequest(topic=topic, values=on))
    async with (
        connect(world.services.stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        await producer.send(b"x", sequence_id=3)
    await world.services.settled(topic)
    assert rebuild([*world.addresses, "--diff", "--from", "earliest", topic], spark) == 0
