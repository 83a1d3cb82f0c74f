"""Fill a topic from Parquet files, kill the job twice, and plot what a reader of the topic saw.

    python examples/spark_backfill.py localhost:7702 backfill orders.parquet /tmp/staging plot.svg

The job is killed while it stages its rows, and again while it sends them; started again, it goes
on. Each row is stored once. The files need a column `payload`.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Callable
from pathlib import Path

from plots import Point, plot

from seqgate.client import connect
from seqgate.spark import local_session, register

JOB = "backfill"
POINTS = 200  # of the plot


async def follow(ledger: str, topic: str, seen: list[Point]) -> None:
    """Note how many messages a reader has, and when."""
    async with connect(ledger) as client, client.reader(topic) as reader:
        async for _ in reader:
            seen.append((time.monotonic(), len(seen)))


def write(ledger: str, topic: str, files: str, staging: str) -> None:
    """The job."""
    spark = local_session(JOB)
    register(spark)
    writer = spark.read.parquet(files).write.format("seqgate").mode("append")
    writer.options(ledger=ledger, topic=topic, job=JOB, staging=staging).save()
    spark.stop()


async def start(*arguments: str) -> Process:
    command = (sys.executable, __file__, "--write", *arguments)
    return await create_subprocess_exec(*command, stdout=DEVNULL, start_new_session=True)


async def kill_when(state: Callable[[], bool], *arguments: str) -> bool:
    """Run the job until it is in this state. Returns False if it ended before."""
    job = await start(*arguments)
    while job.returncode is None and not state():  # noqa: ASYNC110 - files tell no one
        await asyncio.sleep(0.01)
    if job.returncode is not None:
        return False
    os.killpg(job.pid, signal.SIGKILL)  # Java and its workers, too
    await job.wait()
    return True


async def backfill(ledger: str, topic: str, files: str, staging: Path, picture: Path) -> None:
    arguments = (ledger, topic, files, str(staging))
    async with connect(ledger) as client, client.producer(topic, name="first"):
        pass  # the topic exists, so it can be followed
    seen = [(time.monotonic(), 0.0)]
    states = {
        "killed while staging": lambda: any(staging.glob(f"{JOB}/rows-*")),
        "killed while sending": lambda: len(seen) > 1,
    }
    marks: dict[float, str] = {}
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow(ledger, topic, seen))
        for what, state in states.items():
            if await kill_when(state, *arguments):
                marks[time.monotonic()] = what
        job = await start(*arguments)
        if await job.wait():
            raise SystemExit("the job failed")
        following.cancel()
    async with connect(ledger) as client, client.reader(topic, follow=False) as reader:
        ids = [message.sequence_id async for message in reader]
    thinned = seen[:: max(1, len(seen) // POINTS)] + seen[-1:]
    plot(picture, f"Messages of {topic}", {"stored": thinned}, marks)
    twice = len(ids) - len(set(ids))
    sys.stdout.write(f"{len(marks)} kills, {len(ids)} messages, {twice} of them twice\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="run the job alone, without kills")
    parser.add_argument("ledger")
    parser.add_argument("topic")
    parser.add_argument("files", help="a folder of Parquet files")
    parser.add_argument("staging", type=Path, help="the absolute path of a folder")
    parser.add_argument("plot", type=Path, nargs="?", default=Path("backfill.svg"))
    given = parser.parse_args()
    if given.write:
        write(given.ledger, given.topic, given.files, str(given.staging))
    else:
        asyncio.run(backfill(given.ledger, given.topic, given.files, given.staging, given.plot))


if __name__ == "__main__":
    main()
