"""Commands that are jobs with Spark: `seqgate dedup rebuild|diff`, `seqgate topic audit`."""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.client import Client
from seqgate.dev.stack import Stack
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.times import timestamp
from seqgate.types import TopicName
from tests.cli.command_line import CommandLine, Ended
from tests.simulation.defects import find
from tests.support.jobs import PATIENCE_S, quick_spark
from tests.support.nursery import SEQGATE
from tests.support.stubs import dedup_stub
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # Spark starts slowly

MESSAGES = 3

END = Position(ledger_id=1, entry_id=MESSAGES - 1)


@pytest.fixture
def jobs(seqgate: CommandLine, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command that starts Spark."""
    quick = seqgate.with_(**quick_spark(tmp_path))

    async def run(*arguments: str) -> Ended:
        return await quick(*arguments, patience_s=PATIENCE_S)

    return run


@pytest.fixture
def jobs_in(seqgate: CommandLine, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command that starts Spark, in a folder."""
    environment = {**seqgate.environment, **quick_spark(tmp_path)}

    async def run(folder: Path, *arguments: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            SEQGATE, *arguments, env=environment, cwd=folder, stdout=DEVNULL, stderr=PIPE
        )
        async with asyncio.timeout(PATIENCE_S):
            _, errors = await process.communicate()
        return process.returncode, errors.decode()

    return run


async def stored(client: Client, stack: Stack, *topics: str) -> None:
    """Publish to topics, and return once everything is confirmed."""
    for topic in topics:
        async with client.producer(topic, name="p") as producer:
            for number in range(MESSAGES):
                await producer.send(b"message", sequence_id=10 * number)
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        dedup: Any = dedup_stub(channel)

        async def confirmed() -> bool:
            asked = [dedup.GetTopicStatus(pb.GetTopicStatusRequest(topic=each)) for each in topics]
            return all([(await each).confirmed == END for each in asked])

        await eventually(confirmed)


async def plant(stack: Stack, topic: str, highest: int) -> None:
    """Load a state that differs from the log."""
    header = writer_pb2.LoadHeader(topic=topic, incarnation=1, through=END, replace=True)
    wrong = writer_pb2.ProducerState(
        name="p", highest_sequence_id=highest, last_active=timestamp(1)
    )
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        dedup: Any = dedup_stub(channel)
        request = writer_pb2.LoadStateRequest(header=header, producers=[wrong])
        assert (await dedup.LoadState(iter([request]))).loaded


async def test_a_dry_run_needs_no_spark(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str
) -> None:
    await stored(client, stack, topic)
    async with Redis.from_url(stack.redis_url) as redis:
        await redis.delete(topic_key(TopicName.parse(topic)))
    nowhere = seqgate.with_(PATH="", JAVA_HOME="")

    told, planned = await asyncio.gather(
        nowhere("dedup", "rebuild", "--dry-run", topic),
        nowhere("dedup", "rebuild", "--dry-run", "--from-earliest", topic, "-o", "json"),
    )

    assert (told.code, told.err) == (0, "")
    assert told.out == f"{topic}: 3 entries after the beginning, through 1:2\n"
    assert planned.record == {
        "kind": "plan",
        "topic": topic,
        "base": None,
        "through": "1:2",
        "entries": 3,
    }


async def test_diff_reports_a_difference_and_fails_while_the_audit_passes(
    jobs: Any, client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    right, wrong = f"{topic}-right", f"{topic}-wrong"
    await stored(client, stack, right, wrong)
    await plant(stack, wrong, 7)

    found = tmp_path / "found"
    ended, audited = await asyncio.gather(
        jobs("dedup", "diff", right, wrong),
        jobs("topic", "audit", right, wrong, "--parquet", str(found), "-o", "json"),
    )

    assert ended.code == 1, ended
    assert f"{right}: equal, 1 producers, 3 entries" in ended.out.splitlines()
    assert f"{wrong}: different, 1 producers, 3 entries, 1 producers differ" in ended.out
    assert "  p: 20 by the log, 7 in place" in ended.out.splitlines()
    assert audited.code == 0, audited
    assert audited.record == {
        "kind": "summary",
        "topics": 2,
        "producers": 2,
        "entries": 6,
        "messages": 6,
        "findings": 0,
    }
    assert {each.name for each in found.iterdir()} == {"findings.parquet", "topics.parquet"}


@pytest.mark.deep
async def test_diff_without_differences_succeeds(
    jobs: Any, client: Client, stack: Stack, topic: str
) -> None:
    await stored(client, stack, topic)

    compared = await jobs("dedup", "diff", topic, "-o", "json")

    assert compared.code == 0, compared
    assert [each.get("outcome") for each in compared.records] == ["equal", None]


@pytest.mark.parametrize("command", [("dedup", "rebuild"), ("dedup", "diff"), ("topic", "audit")])
def test_a_job_without_spark_names_the_extra_to_install(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def found(name: str) -> Any:
        return None if name == "pyspark" else find_spec(name)

    monkeypatch.setattr("seqgate.cli._jobs.find_spec", found)

    ended = inside(*command, "-o", "json")

    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == "JOBS_MISSING"
    assert "seqgate[spark]" in ended.error["message"]


def foreign_modules(folder: Path) -> Path:
    """Create modules with the names of ours, which record in a file that they were imported.
    Returns its path."""
    met = folder / "met"
    for name in ("tools", "services", "seqgate", "pyspark"):
        (folder / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            text = f"open({str(met)!r}, 'a').write({name!r})\nraise ImportError({name!r})\n"
            (folder / name / file).write_text(text)
    return met


async def test_a_job_imports_nothing_from_the_current_folder(
    jobs_in: Callable[..., Any], client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    """Nor do Spark's workers: modules there would run with the operator's settings."""
    await stored(client, stack, topic)
    foreign = tmp_path / "foreign"
    met = foreign_modules(foreign)

    code, errors = await jobs_in(foreign, "dedup", "rebuild", "--replace", topic)

    assert (code, met.exists()) == (0, False), errors


def started_among_foreign_modules(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[int, bool]:
    """The exit code of a job that finds no service, and whether it imported a foreign module."""
    met = foreign_modules(folder)
    monkeypatch.chdir(folder)
    ended = inside("dedup", "rebuild", "--ledger", "127.0.0.1:1", "--timeout", "1", "t")
    return ended.code, met.exists()


def test_a_job_starts_the_installed_module_from_any_folder(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert started_among_foreign_modules(inside, monkeypatch, tmp_path / "foreign") == (3, False)


@pytest.mark.deep
def test_a_job_taken_from_the_current_folder_is_detected(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find("C4").apply(monkeypatch)
    assert started_among_foreign_modules(inside, monkeypatch, tmp_path / "foreign") == (1, True)


async def test_missing_topics_are_reported_without_spark(seqgate: CommandLine, topic: str) -> None:
    nowhere = seqgate.with_(PATH="", JAVA_HOME="")

    rebuilt, compared, audited, misnamed = await asyncio.gather(
        nowhere("dedup", "rebuild", topic),
        nowhere("dedup", "diff", topic),
        nowhere("topic", "audit", topic),
        nowhere("dedup", "rebuild", "a/b"),
    )

    for ended in (rebuilt, compared, audited):
        assert (ended.code, ended.out) == (1, "")
        assert ended.err == f"topic {topic} not found\n"
    assert (misnamed.code, misnamed.out) == (2, "")
    assert "INVALID_TOPIC_NAME" in misnamed.err
