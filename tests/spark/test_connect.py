"""The data source and the sink in a session of Spark Connect."""

import asyncio
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from pathlib import Path

import pytest

from seqgate.dev.ports import free_ports
from tests.spark.conftest import World

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]  # a server of Spark Connect starts slowly

ROWS = 1_000
TOPIC = "connect/spark/rows"


async def test_a_session_of_spark_connect_writes_reads_and_streams(
    world: World, tmp_path: Path
) -> None:
    (port,) = map(str, free_ports(1))
    ledger = world.services.stack.address("ledger")
    command = (sys.executable, "-m", "tests.spark.connect_server", port)
    server = await create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert await server.stdout.readline() == b"up\n"
        arguments = (port, ledger, TOPIC, str(tmp_path), str(ROWS))
        client = await create_subprocess_exec(
            *(sys.executable, "-m", "tests.spark.connect_client", *arguments),
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await client.communicate()
        assert client.returncode == 0, output.decode()
    finally:
        server.stdin.close()
        await server.wait()
    written = await world.services.read(TOPIC, metadata_only=True)
    assert sum(each.metadata.num_messages_in_batch or 1 for each in written) == ROWS
