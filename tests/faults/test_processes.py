"""Applications that are killed, and writers that stand still while another takes their topic."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from seqgate.client import MessageId, connect
from tests.faults.world import World
from tests.support.checkers import (
    Acknowledgement,
    Content,
    History,
    Identity,
    Stored,
    log_anomalies,
    report,
)
from tests.support.crash_points import Order
from tests.support.publishing_process import FIRST_ID, POINTS, content
from tests.support.waiting import eventually
from tools.stack.ports import free_ports

COUNT = 400


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.publishing_process"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


def told(folder: Path) -> list[Acknowledgement]:
    found = []
    for text in (folder / "receipts").read_text().splitlines():
        sequence_id, message_id, duplicate = json.loads(text)
        identity = Identity("app", sequence_id)
        found.append(Acknowledgement(identity, MessageId.parse(message_id), duplicate))
    return found


async def test_an_application_dies_at_every_point_and_goes_on_with_other_batches(
    world: World, tmp_path: Path
) -> None:
    """What it sends again overlaps what is stored: batches of another size are cut."""
    ledger, topic = world.stack.address("ledger"), "public/default/killed"
    for batch, point in zip((7, 30, 11, 100, 3, 50), POINTS * 2, strict=True):
        process = await start(ledger, topic, str(tmp_path), str(batch), str(COUNT), point)
        assert await line(process) == point
        process.kill()
        await process.wait()
    process = await start(ledger, topic, str(tmp_path), "17", str(COUNT), "none")
    assert await line(process) == "done"
    assert await process.wait() == 0

    history = History(acknowledged=told(tmp_path))
    for number in range(COUNT):
        history.send(Identity("app", FIRST_ID + number), Content(content(number)))
    async with connect(ledger) as client:
        log = [
            Stored(
                message.id,
                Identity(message.producer_name, message.sequence_id),
                Content(message.payload, message.key),
            )
            async for message in client.reader(topic, follow=False)
        ]
    anomalies = log_anomalies(history, log)
    assert not anomalies, report(anomalies)
    assert len(log) == COUNT


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.parametrize(
    "point", ["admit.before", "admit.after", "append.before", "receipts.before", "confirm.before"]
)
async def test_a_writer_that_stood_still_stores_nothing_more(
    tmp_path: Path, seed: int, point: str
) -> None:
    """Two ledger processes on one store, as after a failover that the first one slept through. It
    wakes up where it was."""
    first = World(tmp_path)
    (port,) = free_ports(1)
    async with first.stack:
        pid = first.pid("ledger")
        application = first.application(seed)
        await application.publish(20)
        first.order("ledger", Order(point, 0, number=signal.SIGSTOP))
        publishing = asyncio.create_task(application.publish(200))
        await eventually(lambda: is_stopped(pid))
        try:
            second = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.ledger"),
                env={
                    **os.environ,
                    **first.stack.settings,
                    "SEQGATE_LEDGER_LISTEN": f"127.0.0.1:{port}",
                },
                stderr=asyncio.subprocess.DEVNULL,
            )
            await application.moved_to(f"127.0.0.1:{port}").publish(40)
        finally:
            os.kill(pid, signal.SIGCONT)
        # It is fenced; its producers connect again, and take the topic back through it.
        await publishing
        await application.publish(20)
        await application.check_log()
        await application.check_state()
        second.terminate()
        assert await second.wait() == 0
