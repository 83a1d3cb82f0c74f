"""The README's commands, run on local stores: a backup, and its restoration."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from redis.asyncio import Redis

from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from tests.deploy.manifests import K8S

STORES = ("ledger", "cursor")
EXEC = re.compile(r"^kubectl -n seqgate exec (\S+) -- (.+)$", re.MULTILINE)


def commands(heading: str) -> list[tuple[str, list[str]]]:
    """The commands of a README chapter, with their pods."""
    text = (K8S / "README.md").read_text()
    (chapter,) = (each for each in text.split("\n## ") if each.startswith(heading))
    return [(pod, shlex.split(command)) for pod, command in EXEC.findall(chapter)]


async def execute(stack: Stack, pod: str, command: list[str]) -> None:
    if command == ["valkey-cli", "FLUSHALL"]:
        async with Redis.from_url(stack.redis_url) as redis:
            await redis.flushall()
        return
    (store,) = (each for each in STORES if pod.startswith(f"seqgate-{each}-"))
    data = str(stack.folder / store)
    here = [sys.executable if each == "python" else each for each in command]
    here = [each.replace("/data", data) for each in here]
    subprocess.run(here, check=True)


async def publish(client: Client, first: int, last: int) -> list[bool]:
    """Publish these; returns whether each was a duplicate."""
    async with client.producer("orders", name="p") as producer:
        return [
            (await producer.send(b"%d" % number, sequence_id=number)).duplicate
            for number in range(first, last + 1)
        ]


async def consume(client: Client, count: int) -> list[bytes]:
    taken = []
    async with client.consumer("orders", "s") as consumer:
        for _ in range(count):
            message = await consumer.receive()
            taken.append(message.payload)
            await consumer.ack(message)
    return taken


async def test_a_backup_is_restored_and_later_messages_can_be_published_again(
    tmp_path: Path,
) -> None:
    given = commands("Back up, and restore")
    backup = [each for each in given if each[1][0] == "python"]
    restore = [each for each in given if each[1][0] != "python"]
    assert [len(backup), len(restore)] == [2, 3]
    async with Stack(tmp_path) as stack:
        addresses = stack.address("ledger"), stack.address("dispatcher")
        async with connect(*addresses) as client:
            assert await publish(client, 1, 3) == [False] * 3
            assert await consume(client, 2) == [b"1", b"2"]
            for pod, command in backup:
                await execute(stack, pod, command)
            assert await publish(client, 4, 6) == [False] * 3
            assert await consume(client, 4) == [b"3", b"4", b"5", b"6"]
        stopped = ("dispatcher", "ledger", "dedup", "cursor")
        for service in stopped:
            assert await stack.terminate(service) == 0
        for pod, command in restore:
            await execute(stack, pod, command)
        for service in reversed(stopped):
            await stack.run(service)
        async with connect(*addresses) as client:
            assert await publish(client, 1, 6) == [True] * 3 + [False] * 3
            assert await consume(client, 4) == [b"3", b"4", b"5", b"6"]
            read = [each.payload async for each in client.reader("orders", follow=False)]
            assert read == [b"%d" % number for number in range(1, 7)]


def test_files_named_by_the_readme_exist(root: Path) -> None:
    text = (K8S / "README.md").read_text()
    named = r"(?<![\w/])(?:deploy/k8s|rebuild|components|overlays|base)/[\w/.-]*\w"
    for folder in re.findall(named, text):
        place = root / folder if folder.startswith("deploy") else K8S / folder
        assert place.exists(), folder
    for row in re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE):
        assert (K8S / "components" / row).is_dir()
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    assert listed == {each.name for each in (K8S / "components").iterdir()}
