"""backup.sh and restore.sh, run on local stores."""

import re
from pathlib import Path

from redis.asyncio import Redis

from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from tests.deploy.manifests import K8S
from tests.deploy.test_operations import Cluster


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
    cluster = Cluster(tmp_path / "cluster")
    backup = str(tmp_path / "backup")
    async with Stack(tmp_path / "stack") as stack:
        cluster.write(cluster.state | {"data": str(stack.folder)})
        addresses = stack.address("ledger"), stack.address("dispatcher")
        async with connect(*addresses) as client:
            assert await publish(client, 1, 3) == [False] * 3
            assert await consume(client, 2) == [b"1", b"2"]
            copied = cluster.run("backup.sh", backup)
            assert copied.returncode == 0, copied.stderr
            assert await publish(client, 4, 6) == [False] * 3
            assert await consume(client, 4) == [b"3", b"4", b"5", b"6"]
        stopped = ("dispatcher", "ledger", "dedup", "cursor")
        for service in stopped:
            assert await stack.terminate(service) == 0
        restored = cluster.run("restore.sh", "--yes", backup)
        assert restored.returncode == 0, restored.stderr
        assert cluster.state["flushed"]
        async with Redis.from_url(stack.redis_url) as redis:
            await redis.flushall()
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
