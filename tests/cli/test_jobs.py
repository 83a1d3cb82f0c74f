"""Commands that are jobs with Spark: `seqgate dedup rebuild|diff`, `seqgate topic audit`."""

import asyncio
import fcntl
import json
import os
import pty
import struct
import termios
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.client import Client
from seqgate.dev.child import tell
from seqgate.dev.stack import Stack
from seqgate.extras import pip_install
from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.times import timestamp
from seqgate.types import TopicName
from tests.cli.command_line import CommandLine, Ended, is_wait
from tests.simulation.defects import find
from tests.support.depth import some_of
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

    async def run(folder: Path, *arguments: str) -> Ended:
        process = await asyncio.create_subprocess_exec(
            SEQGATE, *arguments, env=environment, cwd=folder, stdout=PIPE, stderr=PIPE
        )
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

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


async def test_diff_reports_a_difference_and_imports_nothing_from_the_current_folder(
    jobs_in: Callable[..., Any], client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    """Nor do Spark's workers: modules there would run with the operator's settings."""
    right, wrong = f"{topic}-right", f"{topic}-wrong"
    await stored(client, stack, right, wrong)
    await plant(stack, wrong, 7)
    foreign, log = tmp_path / "foreign", tmp_path / "spark.log"
    met = foreign_modules(foreign)

    ended = await jobs_in(foreign, "dedup", "diff", right, wrong, "--log-file", str(log))

    assert (ended.code, met.exists()) == (1, False), ended
    check_progress(ended, "diff", topics=2, entries=6)
    assert "log level" in log.read_text()
    assert not list(tmp_path.glob("seqgate-spark-*.log"))
    assert f"{right}: equal, 1 producers, 3 entries" in ended.out.splitlines()
    assert f"{wrong}: different, 1 producers, 3 entries, 1 producers differ" in ended.out
    assert "  p: 20 by the log, 7 in place" in ended.out.splitlines()


@pytest.mark.deep
async def test_an_audit_of_topics_without_findings_passes(
    jobs: Any, client: Client, stack: Stack, topic: str
) -> None:
    await stored(client, stack, topic, f"{topic}-other")

    ended = await jobs("topic", "audit", topic, f"{topic}-other", "-o", "json")

    assert ended.code == 0, ended
    check_progress(ended, "audit", topics=2, entries=6)
    assert ended.record == {
        "kind": "summary",
        "topics": 2,
        "producers": 2,
        "entries": 6,
        "messages": 6,
        "findings": 0,
    }


def check_progress(ended: Ended, command: str, *, topics: int, entries: int) -> None:
    last = progress(ended.err)[-1]
    assert (last["command"], last["topics"], last["of_topics"]) == (command, topics, topics)
    assert (last["entries"], last["of_entries"], last["done"]) == (entries, entries, True)


def progress(err: str) -> list[Any]:
    """The lines about progress, of which standard error consists."""
    lines = (line for line in err.splitlines() if not is_wait(line))
    return [json.loads(line)["progress"] for line in lines]


@dataclass(frozen=True, slots=True)
class Shown:
    """A command that ended: what its terminal got, and its standard output if that was a pipe."""

    code: int
    terminal: str
    out: str


async def on_terminal(seqgate: CommandLine, *arguments: str, stdout: bool) -> Shown:
    """Run a command whose standard error, and with `stdout` its output, is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    process = await asyncio.create_subprocess_exec(
        SEQGATE,
        *arguments,
        stdin=DEVNULL,
        stdout=theirs if stdout else PIPE,
        stderr=theirs,
        env={**seqgate.environment, "TERM": "xterm"},
    )
    os.close(theirs)
    seen: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the last process has closed the terminal
            while chunk := os.read(ours, 65_536):
                seen.append(chunk)

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        async with asyncio.timeout(PATIENCE_S):
            out, _ = await process.communicate()
            await reading
    finally:
        tell(process, SIGKILL)
        await process.wait()
        await reading
        os.close(ours)
    assert process.returncode is not None
    return Shown(process.returncode, b"".join(seen).decode(), (out or b"").decode())


async def test_a_terminal_shows_a_live_line_and_the_result(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    await stored(client, stack, topic)
    found = tmp_path / "found"
    quick = seqgate.with_(**quick_spark(tmp_path))

    shown = await on_terminal(quick, "topic", "audit", topic, "--parquet", str(found), stdout=True)

    check_terminal(shown, "audit")
    assert "1 topics, 1 producers, 3 entries, 3 messages: proven" in shown.terminal
    assert {each.name for each in found.iterdir()} == {"findings.parquet", "topics.parquet"}


@pytest.mark.deep
async def test_the_result_is_where_standard_output_is(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    await stored(client, stack, topic)
    quick = seqgate.with_(**quick_spark(tmp_path))
    result = f"{topic}: equal, 1 producers, 3 entries"

    shown = await on_terminal(quick, "dedup", "diff", topic, stdout=False)

    check_terminal(shown, "diff")
    assert shown.out.startswith(f"{result}\n")
    assert result not in shown.terminal


def check_terminal(shown: Shown, command: str) -> None:
    assert shown.code == 0, shown
    assert command in shown.terminal
    assert "1 of 1 topics, 3 of 3 entries, " in shown.terminal
    for noise in ("progress", "WARN", "log4j", "incubator"):
        assert noise not in shown.terminal


async def test_a_job_whose_spark_fails_names_the_log(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    await stored(client, stack, topic)
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text('JAVA_VERSION="21"\n')
    java = home / "bin" / "java"
    java.write_text("#!/bin/sh\necho what Java says >&2\nexit 1\n")
    java.chmod(0o755)
    broken = seqgate.with_(JAVA_HOME=str(home), TMPDIR=str(tmp_path))

    for command in some_of([("topic", "audit"), ("dedup", "diff")], every=2):
        ended = await broken(*command, topic, "-o", "json", patience_s=PATIENCE_S)

        *before, last = ended.err.splitlines()
        assert (ended.code, ended.out) == (1, "")
        assert not progress("\n".join(before))[-1]["done"]
        error = json.loads(last)["error"]
        assert error["reason"] == "JAVA_ENDED"
        log = Path(error["details"]["log"])
        assert log.parent == tmp_path
        assert "what Java says" in log.read_text()
        assert "exited before Spark was up (attempt 3)" in log.read_text()


@pytest.mark.deep
async def test_a_job_whose_tasks_fail_names_the_log(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str, tmp_path: Path
) -> None:
    await stored(client, stack, topic)
    broken = seqgate.with_(**quick_spark(tmp_path), PYSPARK_PYTHON="/bin/false")

    audited, compared = await asyncio.gather(
        broken("topic", "audit", topic, "-o", "json", patience_s=PATIENCE_S),
        broken("dedup", "diff", topic, "-o", "json", patience_s=PATIENCE_S),
    )

    assert (audited.code, audited.out, compared.code) == (1, "", 1)
    error = json.loads(audited.err.splitlines()[-1])["error"]
    (failed,) = [each for each in compared.records if each["kind"] == "topic"]
    assert error["reason"] == failed["reason"] == "SPARK_JOB_FAILED"
    assert error["message"].startswith("nothing is proven, since a log cannot be read: ")
    for each in (error, failed):
        log = Path(each["details"]["log"])
        assert log.parent == tmp_path
        assert "Exception" in log.read_text()
    for line in (*audited.err.splitlines(), *compared.err.splitlines()):
        assert json.loads(line).keys() <= {"progress", "note", "error"}


async def test_a_log_that_cannot_be_written_is_one_error(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str
) -> None:
    await stored(client, stack, topic)
    nowhere = seqgate.with_(SEQGATE_SPARK_LOG="/nowhere/spark.log")
    ended = await nowhere("topic", "audit", topic, "-o", "json")
    assert (ended.code, ended.out, ended.error["reason"]) == (2, "", "INVALID_SETTINGS")
    assert "/nowhere/spark.log" in ended.error["message"]


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
    assert pip_install("spark") in ended.error["message"]


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
        nowhere("topic", "audit", topic, "-o", "json"),
        nowhere("dedup", "rebuild", "a/b"),
    )

    for ended in (rebuilt, compared):
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"seqgate: topic {topic} not found (TOPIC_NOT_FOUND)\n")
    assert (audited.code, audited.out, audited.error) == (
        1,
        "",
        {
            "reason": "TOPIC_NOT_FOUND",
            "message": f"topic {topic} not found",
            "details": {"topic": topic},
        },
    )
    assert (misnamed.code, misnamed.out) == (2, "")
    assert "INVALID_TOPIC_NAME" in misnamed.err
