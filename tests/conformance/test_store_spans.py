"""Spans of stores' calls to their databases."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import apsw
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, StatusCode

from seqgate.dev.ports import free_ports
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.ports import StateUnavailable
from seqgate.services.deduplication import Claim, Confirmation, ProducerClaims, Writer
from seqgate.services.errors import Fenced, StoreFull, StoreUnavailable
from seqgate.services.runtime.sqlite import Connections, connections
from seqgate.telemetry import names, spans
from seqgate.types import Position, TopicName
from tests.support.recorded import Recorded
from tests.support.redis_groups import Cluster
from tests.support.redis_server import RedisServer

TOPIC = TopicName.parse("secret-tenant/spans/topic")
END = Position(1, 0)
WRITER = Writer(1, 1, END)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(ALWAYS_ON)
    monkeypatch.setattr(spans, "_TRACER", recorded.tracer)
    return recorded


@pytest.fixture(params=["redis", "cluster"])
def group(request: pytest.FixtureRequest) -> Iterator[RedisServer | Cluster]:
    group: RedisServer | Cluster = request.getfixturevalue(request.param)
    group.flush()
    yield group
    group.flush()


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Connections]:
    def prepare(connection: apsw.Connection) -> None:
        connection.execute("CREATE TABLE t (n INTEGER)")

    async with connections(tmp_path / "db", readers=1, prepare=prepare) as opened:
        yield opened


def insert(connection: apsw.Connection) -> None:
    connection.execute("INSERT INTO t VALUES (1)")


def count(connection: apsw.Connection) -> int:
    ((counted,),) = connection.execute("SELECT count(*) FROM t")
    assert isinstance(counted, int)
    return counted


def below(recorded: Recorded, whole: str) -> list[ReadableSpan]:
    """All spans but one, after checking that they are its children."""
    children = [span for span in recorded.spans if span.name != whole]
    parent = recorded.one(whole).context
    assert all(each.parent == parent for each in children)
    assert all(each.kind is SpanKind.CLIENT for each in children)
    return children


def said(span: ReadableSpan) -> Mapping[str, object]:
    return dict(span.attributes or {})


# ---- Redis


async def calls(store: RedisStateStore) -> None:
    """Some commands and scripts."""
    await store.confirm(TOPIC, WRITER, Confirmation(None, END, (), 1))
    claims = [ProducerClaims("secret-producer", (Claim(7, 7, None),))]
    await store.admit(TOPIC, WRITER, None, claims, now_ms=1, max_producers=9)
    await store.producer(TOPIC, "secret-producer")
    await store.producers(TOPIC, size=10, token="")
    await store.summary(TOPIC)
    await store.now_ms()
    await store.now_ms()
    assert [each async for each in store.topics()] == [TOPIC]


async def test_each_command_has_a_span_without_keys_and_values(
    group: RedisServer | Cluster, recorded: Recorded
) -> None:
    async with connect_redis(group.url, timeout_s=30, connections_max=8) as client:
        with recorded.tracer.start_as_current_span("whole"):
            await calls(RedisStateStore(client))
    commands = below(recorded, "whole")
    assert [each.name for each in commands] == [
        "EVALSHA confirm",
        "EVALSHA admit",
        "HMGET",
        "HGET",
        "HSCAN",
        "EVALSHA summary",
        "TIME",
    ]
    for each in commands:
        operation = each.name.partition(" ")[0]
        assert said(each) == {names.DB_SYSTEM_NAME: "redis", names.DB_OPERATION_NAME: operation}
    assert not any("secret" in each.to_json() for each in recorded.spans)


async def test_redis_calls_without_a_current_span_have_none(
    redis: RedisServer, recorded: Recorded
) -> None:
    redis.flush()
    async with connect_redis(redis.url, timeout_s=30, connections_max=8) as client:
        await calls(RedisStateStore(client))
    redis.flush()
    assert recorded.spans == []


async def test_an_unresponsive_redis_fails_its_spans(recorded: Recorded) -> None:
    (port,) = free_ports(1)
    async with connect_redis(f"redis://127.0.0.1:{port}", timeout_s=5, connections_max=1) as client:
        store = RedisStateStore(client)
        with recorded.tracer.start_as_current_span("whole"):
            with pytest.raises(StateUnavailable):
                await store.check()
            with pytest.raises(StateUnavailable):
                await store.forget_topic(TOPIC, None)
    failed = below(recorded, "whole")
    assert [each.name for each in failed] == ["PING", "EVALSHA forget_topic"]
    for each in failed:
        assert said(each)[names.ERROR_TYPE] == StateUnavailable.reason
        assert each.status.status_code is StatusCode.ERROR


# ---- SQLite


async def test_writes_and_reads_have_spans(database: Connections, recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("whole"):
        await asyncio.gather(database.write(insert), database.write(insert))
        assert await database.read(count) == 2
    children = below(recorded, "whole")
    assert [each.name for each in children] == ["COMMIT", "COMMIT", "SELECT"]
    for each in children:
        assert said(each) == {names.DB_SYSTEM_NAME: "sqlite", names.DB_OPERATION_NAME: each.name}


async def test_sqlite_calls_without_a_current_span_have_none(
    database: Connections, recorded: Recorded
) -> None:
    await database.write(insert)
    assert await database.read(count) == 1
    assert recorded.spans == []


async def test_a_database_failure_fails_its_span_and_a_refusal_does_not(
    database: Connections, recorded: Recorded
) -> None:
    def refuse(_: apsw.Connection) -> None:
        raise Fenced("a newer writer has the topic", epoch=2)

    def fill(_: apsw.Connection) -> None:
        raise apsw.FullError

    def fail(connection: apsw.Connection) -> None:
        connection.execute("no sql")

    with recorded.tracer.start_as_current_span("whole"):
        with pytest.raises(Fenced):
            await database.write(refuse)
        with pytest.raises(StoreFull):
            await database.write(fill)
        with pytest.raises(StoreUnavailable):
            await database.read(fail)
    refused, written, read = below(recorded, "whole")
    assert refused.status.status_code is StatusCode.UNSET
    assert names.ERROR_TYPE not in said(refused)
    assert said(written)[names.ERROR_TYPE] == StoreFull.reason
    assert said(read)[names.ERROR_TYPE] == StoreUnavailable.reason
